"""Which parts of meshfuse import which: no circles, and imports point down one order."""

from __future__ import annotations

import ast
import functools
from collections.abc import Iterator, Mapping
from pathlib import Path

import meshfuse

PACKAGE = Path(meshfuse.__file__).parent
# Packages and root modules, from the top down: each imports only what stands behind it here.
ORDER = (
    "__main__", "cli", "__init__", "testing", "thunder", "session", "frontends", "nvfuser_direct",
    "fusion_definition", "preparation", "recorded_calls", "execution", "programs", "automatic_plan",
    "report", "checkpoint", "host_programs", "executor", "compiler",
    "backends", "host_ir", "lowering",
    "plans", "rewrites", "resharding", "propagation", "planner", "placement", "reshard",
    "graph", "definition", "scalars", "ops",
    "runtime", "sharding", "kernels",
    "cluster", "mesh", "mesh_arguments", "default_machine", "costs", "dtypes", "argument_checks", "disk_cache",
    "errors", "gc_pause", "caches", "fast_dataclass", "file_locks", "html_text", "layer_folding", "long_work",
    "number_text", "traversal", "version", "whole_files",
)  # fmt: skip
# Imports that point up, by module. One that is mended must be taken out here.
UPWARD = {
    ("kernels.indices", "sharding"),
    ("reshard.bucketing", "resharding"),
    ("reshard.hoist_reshards", "placement"),
    ("reshard.hoist_reshards", "resharding"),
    ("reshard.order", "placement"),
    ("reshard.order", "propagation"),
    ("reshard.rematerialize", "resharding"),
}


def _modules() -> dict[str, Path]:
    found = {}
    for path in PACKAGE.rglob("*.py"):
        parts = path.relative_to(PACKAGE).with_suffix("").parts
        found[".".join(parts[:-1] if parts[-1] == "__init__" and len(parts) > 1 else parts)] = path
    return found


def _imports(name: str, path: Path, modules: Mapping[str, Path]) -> Iterator[str]:
    """The modules of the package that a module imports, also in functions and under TYPE_CHECKING."""
    inside = [] if name == "__init__" else name.split(".")
    package = inside if path.name == "__init__.py" else inside[:-1]
    for node in ast.walk(ast.parse(path.read_text())):
        if isinstance(node, ast.ImportFrom):
            parts = (node.module or "").split(".") if node.module else []
            if node.level:
                base = [*package[: len(package) - (node.level - 1)], *parts]
            elif parts and parts[0] == "meshfuse":
                base = parts[1:]
            else:
                continue
            for alias in node.names:
                yield next((m for m in (".".join([*base, alias.name]), ".".join(base)) if m in modules), "__init__")


@functools.cache
def _graph() -> dict[str, set[str]]:
    modules = _modules()
    return {name: set(_imports(name, path, modules)) - {name} for name, path in modules.items()}


def _reached(graph: Mapping[str, set[str]], start: str) -> set[str]:
    found: set[str] = set()
    waiting = [start]
    while waiting:
        new = graph[waiting.pop()] - found
        found |= new
        waiting += new
    return found


def _circles(graph: Mapping[str, set[str]]) -> frozenset[frozenset[str]]:
    reached = {name: _reached(graph, name) for name in graph}
    return frozenset(
        frozenset(other for other in reached[name] if name in reached[other])
        for name in graph if name in reached[name]
    )  # fmt: skip


def _room(module: str) -> str:
    return module.partition(".")[0]


def test_no_modules_import_each_other_in_a_circle() -> None:
    assert _circles(_graph()) == frozenset()


def test_every_part_has_its_place_in_the_order() -> None:
    assert sorted(ORDER) == sorted({_room(module) for module in _graph()})


def test_imports_point_down() -> None:
    place = {room: number for number, room in enumerate(ORDER)}
    found = {
        (module, _room(other)) for module, others in _graph().items() for other in others
        if place[_room(other)] < place[_room(module)]
    }  # fmt: skip
    assert sorted(found) == sorted(UPWARD)
