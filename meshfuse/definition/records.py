"""The tensors and ops that a definition consists of, and what follows from them for a tensor's dims."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any, NamedTuple

from ..errors import SourceLine
from ..fast_dataclass import quickly_made
from ..ops.binding import Keys
from ..ops.opdef import Call, OpDef
from ..ops.rules import FactorKind, Rule
from ..ops.values import TensorType


@quickly_made
@dataclass(frozen=True, slots=True)
class TensorDef:
    """A tensor of a definition: its symbolic type and where it came from."""

    type: TensorType
    name: str
    line: SourceLine
    stride_order: tuple[int, ...] | None = None

    @property
    def label(self) -> str:
        """The script's own variable, if its line shows one, with the name: `x (t0)`."""
        return self.line.label(self.name)


class OpForm(NamedTuple):
    """What an op of a definition is, but for which tensors it takes; of equal ones a definition has one object."""

    op: OpDef
    keys: Keys
    types: tuple[TensorType, ...]


@quickly_made
@dataclass(frozen=True, slots=True)
class OpNode:
    """One op of a definition; `inputs` and `outputs` are numbers of tensors.

    Ops of one `form` differ only in which tensors they take.
    """

    op: OpDef
    args: tuple[Any, ...]
    inputs: tuple[int, ...]
    outputs: tuple[int, ...]
    line: SourceLine
    form: OpForm

    @property
    def draws(self) -> bool:
        """Whether the op draws random numbers by the definition's seed."""
        return self.op.draws is not None and self.op.draws(Call(self.op, self.args, ()))


def reduction_flags(tensors: Sequence[TensorDef], tensor: int, producer: OpNode) -> tuple[bool, ...]:
    """For every dim of a tensor's loop domain, True where it is a reduction of the op that makes it.

    An op of one operand keeps its reduced dims in their places; matmul-like ops have theirs at the end.
    """
    kept = (False,) * tensors[tensor].type.ndim
    rule = rule_of(tensors, producer)
    if rule is None:
        return kept
    kept_by_some = {factor for dims in rule.results for dim in dims for factor in dim}
    reduced = {i for i, f in enumerate(rule.factors) if f.kind is FactorKind.REDUCE and i not in kept_by_some}
    if len(rule.operands) != 1:
        return (*kept, *(True,) * len(reduced))
    if len(rule.operands[0]) != len(kept) + len(reduced):
        return kept
    return tuple(bool(reduced.intersection(dim)) for dim in rule.operands[0])


def rule_of(tensors: Sequence[TensorDef], node: OpNode) -> Rule | None:
    """The op's factor rule, with stand-ins for open sizes. None where these do not fit: such ops reduce nothing."""
    types, results = (tuple(_known(tensors[i].type) for i in side) for side in (node.inputs, node.outputs))
    try:
        return node.op.rule(Call(node.op, node.args, types, results))
    except (ValueError, TypeError, LookupError):
        return None


def _known(kind: TensorType) -> TensorType:
    """A type with stand-ins for its open sizes, to ask rules that need sizes."""
    return TensorType(tuple(7 if n < 0 else n for n in kind.shape), kind.dtype)


def memory_order(ndim: int, allocation: tuple[int, ...] | None, producer: OpNode | None) -> tuple[int, ...] | None:
    """nvFuser's stride order of a tensor with this allocation domain, or made by this op; None for row-major."""
    order = None
    if allocation is not None:
        order = tuple(ndim - 1 - allocation.index(d) for d in range(ndim))
    elif producer is not None and "stride_order" in producer.op.places:
        order = tuple(n % ndim for n in producer.args[producer.op.places["stride_order"]])
    return order if order != tuple(reversed(range(ndim))) else None
