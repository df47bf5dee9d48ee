"""Every public name of the real nvfuser_direct: ours has it, or says in a table why not."""

from __future__ import annotations

import ast
import contextlib
import enum
import importlib.util
import inspect
import pkgutil
import re
from collections.abc import Callable, Iterator
from pathlib import Path
from types import ModuleType
from typing import Any

import pytest

import meshfuse.nvfuser_direct as ours
from meshfuse.errors import DefinitionError
from meshfuse.nvfuser_direct.unsupported import ABSENT, REFUSED
from meshfuse.ops import OPS

try:
    import nvfuser_direct as real
except ImportError:  # collected with the main suite, which leaves these tests out
    real = None

pytestmark = pytest.mark.nvfuser

for submodule in pkgutil.iter_modules(real.__path__) if real else ():
    with contextlib.suppress(ImportError):  # nvFuser's own timers need CUPTI
        importlib.import_module(f"nvfuser_direct.{submodule.name}")


def public(owner: Any) -> list[str]:
    """The names that an owner defines; not what its module imports from elsewhere."""
    return [n for n in dir(owner) if not n.startswith("_") and is_nvfusers(getattr(owner, n, None))]


def is_nvfusers(value: Any) -> bool:
    home = value.__name__ if isinstance(value, ModuleType) else getattr(value, "__module__", "nvfuser_direct")
    return home is None or home.startswith(("nvfuser_direct", "pybind11"))


def owners(owner: Any, path: str = "") -> Iterator[tuple[str, Any]]:
    """The package, its submodules and its classes, by their paths."""
    yield path, owner
    for name in public(owner) if isinstance(owner, ModuleType) else ():
        value = getattr(owner, name)
        if isinstance(value, (type, ModuleType)) and value is not real and not name.startswith("_C"):
            yield from owners(value, f"{path}.{name}" if path else name)


def at(path: str) -> Any:
    found: Any = ours
    for part in path.split(".") if path else ():
        found = getattr(found, part)
    return found


def has(owner: Any, name: str) -> bool:
    """Whether the owner, or an instance of it, has the name."""
    if isinstance(owner, type) and issubclass(owner, enum.Enum) and name in ("name", "value"):
        return True
    parameters = getattr(owner, "names", ())
    own = {*getattr(owner, "__dataclass_fields__", ()), *(parameters if isinstance(parameters, tuple) else ())}
    if hasattr(owner, name) or name in own:
        return True
    return owner in INSTANCES and hasattr(owner(), name)


INSTANCES = [
    ours.FusionDefinition, ours.HeuristicParams, ours.PointwiseParams, ours.ReductionParams, ours.MatmulParams,
]  # fmt: skip
OWNERS: dict[str, Any] = dict(owners(real)) if real else {}


def test_the_walk_sees_the_package() -> None:
    assert {"", "multidevice", "multidevice.DeviceMesh", "idm.IdModel", "TensorView", "ops", "ParallelType"} <= {
        *OWNERS
    }
    assert "DEVICE_PROPERTIES" in public(OWNERS["pytorch_utils"])


# keywords

SIGNATURE = re.compile(r"^(?:\d+\. )?\w+\((.*)\) -> ", re.MULTILINE)
# nvFuser's defaults print as `name = value`, and may have commas and newlines in them.
PARAMETER = re.compile(r"(?:^|, )(?!self\b|arg\d+\b)([a-z_]\w*): ")


def keywords(call: Any) -> list[str]:
    """What a call of the real package takes by name, in any of its overloads."""
    texts = SIGNATURE.findall(call.__doc__ or "")
    if texts:
        return [name for text in texts for name in PARAMETER.findall(text)]
    parameters = inspect.signature(call).parameters.values()
    return [p.name for p in parameters if p.name != "self" and p.kind in (p.POSITIONAL_OR_KEYWORD, p.KEYWORD_ONLY)]


def calls(path: str) -> Iterator[tuple[str, Callable[..., Any]]]:
    """The functions of a module, or the methods of a class with its construction."""
    owner = OWNERS[path]
    made = isinstance(owner, type) and not hasattr(owner, "__members__")
    if made and SIGNATURE.search(owner.__init__.__doc__ or ""):
        yield path, owner.__init__
    for name in public(owner):
        value = getattr(owner, name)
        if inspect.isroutine(value) and (SIGNATURE.search(value.__doc__ or "") or inspect.isfunction(value)):
            yield f"{path}.{name}" if path else name, value


def takes(path: str, names: list[str]) -> list[str]:
    """The keywords that our call of this path does not take."""
    owner, _, name = path.rpartition(".")
    if owner == "ops" and name in OPS:
        own = {parameter.name for parameter in OPS[name].params}
        return [n for n in names if n not in own]
    mine = at(path)
    if isinstance(mine, property):  # what it gives is called in the script: tv.dtype()
        return names
    parameters = inspect.signature(mine).parameters
    if any(p.kind is p.VAR_KEYWORD for p in parameters.values()):
        return []
    return [n for n in names if n not in parameters]


def test_keywords_are_read() -> None:
    assert keywords(real.TensorView.split) == ["axis", "factor", "inner_split"]
    assert set(keywords(real.KernelExecutor.compile)) >= {"fusion", "args", "compile_params", "scheduler_type"}
    assert keywords(real.FusionDefinition.validate) == ["inputs", "reference_outputs", "device"]


@pytest.mark.parametrize("path", OWNERS)
def test_arguments_have_the_same_names(path: str) -> None:
    found = {name: takes(name, keywords(call)) for name, call in calls(path) if name not in {*ABSENT, *REFUSED}}
    assert {name: missing for name, missing in found.items() if missing} == {}


@pytest.mark.parametrize("path", OWNERS)
def test_every_name_is_there_or_listed_with_a_reason(path: str) -> None:
    missing = [n for n in public(OWNERS[path]) if not has(at(path), n)]
    wanted = [f"{path}.{n}" if path else n for n in missing]
    assert [n for n in wanted if n not in ABSENT] == []


def test_what_a_definition_has() -> None:
    with real.FusionDefinition() as theirs:
        mine = ours.FusionDefinition()
        for path in ("ops", "sched", "fusion"):
            theirs_has = public(getattr(theirs, path, None)) if hasattr(theirs, path) else []
            assert [n for n in theirs_has if not hasattr(getattr(mine, path), n)] == []


def test_the_tables_name_what_the_real_package_has() -> None:
    for name in (*ABSENT, *REFUSED):
        module, _, last = name.rpartition(".")
        if module == "benchmark_utils":
            assert last in defined_in(module), name
            continue
        found: Any = real
        for part in name.split("."):
            found = getattr(found, part)


def defined_in(module: str) -> set[str]:
    """The functions and classes in a module's text: to import it may need a package that only a GPU has a use for."""
    spec = importlib.util.find_spec(f"{real.__name__}.{module}")
    assert spec is not None and spec.origin is not None
    return {node.name for node in ast.parse(Path(spec.origin).read_text()).body
            if isinstance(node, (ast.FunctionDef, ast.ClassDef))}  # fmt: skip


def refused(name: str) -> None:
    """Use a name of the table."""
    fd = ours.FusionDefinition()
    axis = fd.define_tensor([2, 3]).axis(0)
    owner, _, attribute = name.rpartition(".")
    if owner == "idm":
        getattr(ours.idm, attribute)(fd.fusion)
    elif owner == "IterDomain":
        getattr(axis, attribute)()
    else:
        getattr(getattr(ours, owner), attribute)(None)


@pytest.mark.parametrize("name", REFUSED)
def test_what_is_refused_says_what_to_use(name: str) -> None:
    with pytest.raises(DefinitionError, match=r"[a-z]\. .*(explain|definition\(\))"):
        refused(name)


def test_enumerations_have_the_same_members() -> None:
    for path, theirs in OWNERS.items():
        members = getattr(theirs, "__members__", None)
        if members is not None:
            assert [n for n in members if n not in at(path).__members__] == [], path
