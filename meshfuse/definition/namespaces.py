"""`fd.fusion`, a definition's inputs and outputs, and what help says of the functions of `fd.ops`."""

from __future__ import annotations

import inspect
from collections.abc import Iterable

from ..ops import COMPOSITES, OPS, families
from ..ops.binding import signature
from ..ops.summary import help_text
from ..ops.values import TensorRef
from .applying import find_op, usage
from .recording import Definition
from .tensor_view import TensorView, Val


def help_of(name: str) -> str:
    """A few lines on an op or composite. Raises UnknownOpError, which suggests similar names."""
    if name in OPS or name not in COMPOSITES:
        return help_text(find_op(name))
    call, about = composite_help(name)
    return f"{call}\n\n{about}\n\nWritten in other ops, which print(fd) shows: dims are sharded as theirs."


def composite_help(name: str) -> tuple[str, str]:
    """(how a composite is called, what it does)."""
    function = COMPOSITES[name]
    return usage(name, function), inspect.getdoc(function) or ""


def listing() -> str:
    """A line for each op of the table and each composite, by family: the call, and what it computes."""
    parts = [f"{title}: {about}\n" + _lines((signature(op), op.about) for op in ops)
             for title, (about, ops) in families().items()]  # fmt: skip
    written = (composite_help(name) for name in COMPOSITES if name not in OPS)
    parts.append(
        "composites: Written in other ops.\n" + _lines((call, about.partition("\n")[0]) for call, about in written)
    )
    return "\n\n".join([*parts, "meshfuse ops NAME says how one may be sharded."])


def _lines(ops: Iterable[tuple[str, str]]) -> str:
    return "\n".join(f"  {call}\n      {about}" if len(call) > 40 else f"  {call:40}  {about}" for call, about in ops)


class Fusion:
    """nvFuser's view of a definition as a graph: `fd.fusion.inputs()` and `outputs()`."""

    __slots__ = ("_fd",)

    def __init__(self, fd: Definition):
        self._fd = fd

    def inputs(self) -> list[TensorView | Val]:
        """The inputs in the order of their definition."""
        return [
            TensorView(self._fd, r) if isinstance(r, TensorRef) else Val(self._fd, r) for r in self._fd.recording.inputs
        ]

    def outputs(self) -> list[TensorView]:
        return [TensorView(self._fd, TensorRef(i)) for i in self._fd.recording.outputs]
