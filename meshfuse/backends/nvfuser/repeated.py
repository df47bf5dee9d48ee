"""Repeated elements in nvFuser's definitions: computed once, and repeated where something needs them to be.

nvFuser has an op for it, `expand`. A kernel of it that gives an expanded value to another kernel writes the repeated
elements into memory that holds each of them once, and so over what lies behind (0.2.36; seen on a GPU by
compute-sanitizer). So no definition has an `expand`: a value stays of size 1 where its elements repeat as long as
pointwise ops read it, which broadcast it themselves, and becomes whole by a `where` beside a tensor of its full shape.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

from ...ops.opdef import Call
from ...ops.pointwise import nvfuser_arithmetic, pointwise_rule

Shape = tuple[int, ...]


@dataclass(frozen=True, slots=True)
class Narrow:
    """A TensorView whose shape has 1 in each dim along which the elements of the value that it stands for repeat."""

    view: Any
    shape: Shape


def repeats(call: Call) -> bool:
    """Whether an op only repeats elements."""
    return call.op.repeats is not None


def reads_narrow(call: Call) -> bool:
    """Whether an op broadcasts its operands itself, each to the shape of the result."""
    return call.op.rule is pointwise_rule and call.op.nvfuser in (None, nvfuser_arithmetic)


def repeated(ops: Any, call: Call, operand: Narrow, result: Shape) -> Narrow:
    """What an op that only repeats elements gives: new dims of size 1."""
    ndim, kept = len(result), _places(call)
    view = operand.view if len(kept) == ndim else ops.broadcast(operand.view, [d not in kept for d in range(ndim)])
    return Narrow(view, repeated_shape(call, operand.shape))


def repeated_shape(call: Call, operand: Shape) -> Shape:
    """The shape of what an op that only repeats elements gives, with 1 where it repeats them."""
    sizes = dict(zip(_places(call), operand, strict=True))
    return tuple(sizes.get(d, 1) for d in range(call.results[0].ndim))


def _places(call: Call) -> Sequence[int]:
    assert call.op.repeats is not None
    return call.op.repeats(call)


def narrowest(operands: Sequence[Narrow], ndim: int) -> Shape:
    """The shape of a pointwise op's result between these operands."""
    aligned = [(1,) * (ndim - len(o.shape)) + o.shape for o in operands]
    return tuple(next((n for n in sizes if n != 1), 1) for sizes in zip(*aligned, strict=True))
