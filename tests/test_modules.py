"""Functions import only what is loaded late on purpose, and the runtime no definitions. Circles: test_rooms.py."""

from __future__ import annotations

import ast
import subprocess
import sys
from collections.abc import Iterator
from pathlib import Path

import meshfuse

ROOT = Path(meshfuse.__file__).parent
# A backend is loaded when it is chosen: nvFuser may be missing, and Inductor takes a second.
LATE = {("backends.assignment", "backends.inductor"), ("backends.assignment", "backends.nvfuser.backend")}


# What takes torch, or others, a second to load, and is loaded where it is used: torch's compiler and its exporter, with
# what these use, DTensors and torch's checkpoints.
HEAVY = (
    "torch._dynamo", "torch._inductor", "torch._functorch.aot_autograd", "torch.fx.experimental.symbolic_shapes",
    "torch.distributed.tensor", "torch.distributed.checkpoint", "sympy", "networkx", "transformers", "jax",
)  # fmt: skip
# What loads none of it: all but capturing a model (`mf.parallelize`, `mf.compile`), saving and loading.
LIGHT = (
    "meshfuse.fusion_definition", "meshfuse.compiler", "meshfuse.testing", "meshfuse.nvfuser_direct",
    "meshfuse.runtime.launcher", "meshfuse.checkpoint", "meshfuse.session", "meshfuse.session.forkserver",
    "meshfuse.session.host", "meshfuse.session.remote", "meshfuse.frontends.plans", "meshfuse.frontends.placing",
)  # fmt: skip


def name_of(path: Path) -> str:
    parts = path.relative_to(ROOT).with_suffix("").parts
    return ".".join(parts[:-1] if parts[-1] == "__init__" else parts)


MODULES = {name_of(path): path for path in ROOT.rglob("*.py")}


def targets(module: str, found: ast.ImportFrom) -> set[str]:
    """The modules of meshfuse that a relative import names: themselves, or as the module of a name."""
    package = module.split(".") if MODULES[module].name == "__init__.py" else module.split(".")[:-1]
    base = [*package[: len(package) - found.level + 1], *(found.module or "").split(".")]
    parent = ".".join(filter(None, base))
    names = {f"{parent}.{alias.name}".lstrip(".") for alias in found.names}
    return {name if name in MODULES else parent for name in names} - {""}


def imports(body: list[ast.stmt]) -> Iterator[ast.ImportFrom]:
    """The relative imports of these statements; those for type checkers alone left out."""
    for statement in body:
        if isinstance(statement, ast.If) and ast.unparse(statement.test) == "TYPE_CHECKING":
            continue
        for node in ast.walk(statement):
            if isinstance(node, ast.ImportFrom) and node.level:
                yield node


def test_functions_import_only_what_is_loaded_late_on_purpose() -> None:
    late: set[tuple[str, str]] = set()
    for module, path in MODULES.items():
        functions = [node for node in ast.walk(ast.parse(path.read_text())) if isinstance(node, ast.FunctionDef)]
        inside = [node for function in functions for node in imports(function.body)]
        late |= {(module, target) for node in inside for target in targets(module, node)}
    assert late == LATE and len(MODULES) > 200


def test_the_runtime_knows_ranks_and_meshes_but_no_definition() -> None:
    known = {"runtime", "costs", "default_machine", "errors", "kernels", "mesh", "number_text"}
    for module, path in MODULES.items():
        if module.startswith("runtime."):
            found = {target for node in imports(ast.parse(path.read_text()).body) for target in targets(module, node)}
            assert {target.split(".")[0] for target in found} <= known, module


def test_what_is_loaded_late_is_loaded_by_what_uses_it_alone() -> None:
    look = f"print(*({set(HEAVY)} & sys.modules.keys()))"
    late = "import meshfuse.frontends.capture, meshfuse.checkpoint.api"
    code = f"import sys, {', '.join(LIGHT)}\n{look}\n{late}\n{look}"
    before, after = subprocess.check_output([sys.executable, "-c", code], text=True).splitlines()
    assert not before and {"torch._dynamo", "torch.distributed.checkpoint"} <= set(after.split())
