"""Definitions that are being written: what `ops.add(...)` and `define_tensor(...)` without an `fd` write to."""

from __future__ import annotations

import contextlib
from collections.abc import Callable, Iterable, Iterator, Sequence
from types import TracebackType
from typing import Any, Protocol

from ..compiler import CompiledProgram
from ..definition.applying import find_op
from ..definition.namespaces import Fusion as CoreFusion
from ..definition.recording import Definition
from ..definition.tensor_view import TensorView, Val
from ..errors import caller_line, shown, user_error
from ..execution import Execution
from ..ops import COMPOSITES
from ..ops.registry import names
from .communications import COMMUNICATIONS


class NvfuserDefinition(Definition, Protocol):
    """What other parts of this package need of its FusionDefinition, which is made of them."""

    _execution: Execution
    _aliases: dict[int, int]
    _ran: CompiledProgram | None
    _drawn: tuple[int, int]

    @property
    def fusion(self) -> Any: ...
    @property
    def fec(self) -> Any: ...
    def define_tensor(self, *args: Any, **options: Any) -> TensorView: ...
    def define_scalar(self, *args: Any, **options: Any) -> Val: ...
    def execute(self, *args: Any, **options: Any) -> list[Any]: ...
    def _run(self, values: Sequence[Any], *, scheduled: bool = True) -> list[Any]: ...
    def _program_text(self) -> str: ...
    def _bound_outputs(self, compiled: CompiledProgram) -> list[dict[str, int]]: ...
    def _unsharded(self) -> Any: ...


# The innermost last. Entries are lists of one, so that each guard removes its own.
_open: list[list[NvfuserDefinition]] = []


class FusionGuard:
    """Makes a fusion the one that module-level calls write to: while the guard lives, or inside its `with`."""

    def __init__(self, fusion: CoreFusion):
        self._entry: list[NvfuserDefinition] = []
        self._entry = enter(definition_of(fusion, "FusionGuard"))

    def __enter__(self) -> FusionGuard:
        return self

    def __exit__(self, kind: type | None, error: BaseException | None, trace: TracebackType | None) -> None:
        leave(self._entry)

    def __del__(self) -> None:
        leave(self._entry)


def definition_of(fusion: Any, what: str) -> NvfuserDefinition:
    """The definition of a fusion. Raises DefinitionError for anything else."""
    found: Any = getattr(fusion, "definition", None)
    if not hasattr(found, "fusion"):
        raise user_error(what, shown(fusion), "a fusion", "Pass fd.fusion, or Fusion().", caller_line())
    return found


def enter(definition: NvfuserDefinition) -> list[NvfuserDefinition]:
    """Make a definition the innermost one; returns what `leave` takes."""
    entry = [definition]
    _open.append(entry)
    return entry


def leave(entry: list[NvfuserDefinition]) -> None:
    """Undo an `enter`, unless that has been done."""
    with contextlib.suppress(StopIteration):
        del _open[next(i for i, other in enumerate(_open) if other is entry)]


def active(what: str) -> NvfuserDefinition:
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
        if name not in (*COMPOSITES, *COMMUNICATIONS):
            find_op(name)

        def call(*args: Any, **named: Any) -> Any:
            owner = next(_owners([*args, *named.values()]), None) or active(f"ops.{name}")
            return getattr(owner.ops, name)(*args, **named)

        return call

    def __dir__(self) -> list[str]:
        return sorted([*names(), *COMPOSITES, *COMMUNICATIONS])


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


# Of a class, by name; of the two of a schedule, the older name counts where there is no newer one.
METHODS = (("definition",), ("multidevice_schedule", "multigpu_schedule"))


class Methods:
    """Runs a definition's methods once, unless the script has called them."""

    __slots__ = ("_failed", "_running")

    def __init__(self) -> None:
        self._running = self._failed = ""

    def run(self, fd: NvfuserDefinition) -> None:
        """Run the methods that have not run yet.

        Raises DefinitionError where a method needs what it is to define, or was ended by an error before.
        """
        if self._failed or (self._running and not fd.recording.tensors):
            found = f"its method {self._failed or self._running + ', which asks for a result'}"
            do = "Make a new definition." if self._failed else "Execute the definition outside of it."
            needed = "methods that have come to their ends"
            raise user_error("the definition is not finished", found, needed, do, caller_line())
        if fd.recording.tensors:
            return
        for same in METHODS:
            for name in [name for name in same if callable(getattr(fd, name, None))][:1]:
                self._call(fd, name)

    def _call(self, fd: NvfuserDefinition, name: str) -> None:
        self._running = name
        try:
            getattr(fd, name)()
        except BaseException as error:
            self._failed = f"{name}, ended by {type(error).__name__}"
            raise
        finally:
            self._running = ""
