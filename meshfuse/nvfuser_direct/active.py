"""Definitions that are being written: what `ops.add(...)` and `define_tensor(...)` without an `fd` write to."""

from __future__ import annotations

import contextlib
from collections.abc import Callable, Iterable, Iterator
from types import TracebackType
from typing import TYPE_CHECKING, Any

from ..definition.namespaces import find_op
from ..definition.tensor_view import TensorView, Val
from ..errors import caller_line, shown, user_error
from ..ops import COMPOSITES
from ..ops.registry import names

if TYPE_CHECKING:
    from .definition import Fusion, FusionDefinition

# The innermost last. Entries are lists of one, so that each guard removes its own.
_open: list[list[FusionDefinition]] = []


class FusionGuard:
    """Makes a fusion the one that module-level calls write to: while the guard lives, or inside its `with`."""

    def __init__(self, fusion: Fusion):
        self._entry: list[FusionDefinition] = []
        self._entry = enter(definition_of(fusion, "FusionGuard"))

    def __enter__(self) -> FusionGuard:
        return self

    def __exit__(self, kind: type | None, error: BaseException | None, trace: TracebackType | None) -> None:
        leave(self._entry)

    def __del__(self) -> None:
        leave(self._entry)


def definition_of(fusion: Any, what: str) -> FusionDefinition:
    """The definition of a fusion. Raises DefinitionError for anything else."""
    found: Any = getattr(fusion, "definition", None)
    if not hasattr(found, "fusion"):
        raise user_error(what, shown(fusion), "a fusion", "Pass fd.fusion, or Fusion().", caller_line())
    return found


def enter(definition: FusionDefinition) -> list[FusionDefinition]:
    """Make a definition the innermost one; returns what `leave` takes."""
    entry = [definition]
    _open.append(entry)
    return entry


def leave(entry: list[FusionDefinition]) -> None:
    """Undo an `enter`, unless that has been done."""
    with contextlib.suppress(StopIteration):
        del _open[next(i for i, other in enumerate(_open) if other is entry)]


def active(what: str) -> FusionDefinition:
    """The innermost definition. Raises DefinitionError where there is none."""
    if not _open:
        raise user_error(
            f"{what} outside of a definition", "", "an active fusion",
            "Call it inside 'with FusionDefinition() as fd:', or hold a FusionGuard(fusion).", caller_line(),
        )  # fmt: skip
    return _open[-1][0]


class ActiveOps:
    """`nvfuser_direct.ops`: fd.ops of the definition that the operands belong to, or of the active one."""

    __slots__ = ()

    def __getattr__(self, name: str) -> Callable[..., Any]:
        if name not in COMPOSITES:
            find_op(name)

        def call(*args: Any, **named: Any) -> Any:
            owner = next(_owners([*args, *named.values()]), None) or active(f"ops.{name}")
            return getattr(owner.ops, name)(*args, **named)

        return call

    def __dir__(self) -> list[str]:
        return sorted([*names(), *COMPOSITES])


def _owners(values: Iterable[Any]) -> Iterator[Any]:
    for value in values:
        if isinstance(value, (TensorView, Val)):
            yield value.fd
        elif isinstance(value, (list, tuple)):
            yield from _owners(value)


def define_tensor(*args: Any, **options: Any) -> TensorView:
    """fd.define_tensor of the active definition."""
    return active("define_tensor").define_tensor(*args, **options)


def define_scalar(*args: Any, **options: Any) -> Val:
    """fd.define_scalar of the active definition."""
    return active("define_scalar").define_scalar(*args, **options)
