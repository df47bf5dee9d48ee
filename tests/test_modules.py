"""Modules import one way: in no circle, and inside of functions only what is loaded late on purpose."""

from __future__ import annotations

import ast
import graphlib
from collections.abc import Iterator
from pathlib import Path

import meshfuse

ROOT = Path(meshfuse.__file__).parent
# A backend is loaded when it is chosen: nvFuser may be missing, and Inductor takes a second.
LATE = {("backends.assignment", "backends.inductor"), ("backends.assignment", "backends.nvfuser.backend")}


def name_of(path: Path) -> str:
    parts = path.relative_to(ROOT).with_suffix("").parts
    return ".".join(parts[:-1] if parts[-1] == "__init__" else parts)


MODULES = {name_of(path): path for path in ROOT.rglob("*.py")}


def targets(module: str, found: ast.ImportFrom) -> set[str]:
    """The modules of meshfuse that a relative import names: themselves, or as the home of a name."""
    package = module.split(".") if MODULES[module].name == "__init__.py" else module.split(".")[:-1]
    base = [*package[: len(package) - found.level + 1], *(found.module or "").split(".")]
    home = ".".join(filter(None, base))
    names = {f"{home}.{alias.name}".lstrip(".") for alias in found.names}
    return {name if name in MODULES else home for name in names} - {""}


def imports(body: list[ast.stmt]) -> Iterator[ast.ImportFrom]:
    """The relative imports of these statements; those for type checkers alone left out."""
    for statement in body:
        if isinstance(statement, ast.If) and ast.unparse(statement.test) == "TYPE_CHECKING":
            continue
        for node in ast.walk(statement):
            if isinstance(node, ast.ImportFrom) and node.level:
                yield node


@pytest.mark.slow
def test_modules_import_in_no_circle_and_late_only_what_is_meant_to_be() -> None:
    whole: dict[str, set[str]] = {}
    late: set[tuple[str, str]] = set()
    for module, path in MODULES.items():
        tree = ast.parse(path.read_text())
        functions = [node for node in ast.walk(tree) if isinstance(node, ast.FunctionDef)]
        inside = {id(node): node for function in functions for node in imports(function.body)}
        late |= {(module, target) for node in inside.values() for target in targets(module, node)}
        top = [node for node in imports(tree.body) if id(node) not in inside]
        whole[module] = {target for node in top for target in targets(module, node)}
    assert late == LATE
    assert len(whole) > 200 and sum(map(len, whole.values())) > 1000
    graphlib.TopologicalSorter(whole).prepare()  # CycleError names the circle


def test_the_runtime_knows_ranks_and_meshes_but_no_definition() -> None:
    known = {"runtime", "costs", "errors", "kernels", "mesh", "number_text"}
    for module, path in MODULES.items():
        if module.startswith("runtime."):
            found = {target for node in imports(ast.parse(path.read_text()).body) for target in targets(module, node)}
            assert {target.split(".")[0] for target in found} <= known, module
