"""Which of nvFuser's schedulers some ops ask for: the profiler names kernels by it, and scripts ask for it.

meshfuse's kernels are torch's. The answers follow from the ops alone; sizes do not matter.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

from ..definition.recording import Recording, rule_of
from ..ops.opdef import OpDef
from ..ops.rules import FactorKind, Rule
from .enums import SchedulerType


@dataclass(frozen=True, slots=True)
class ScheduledOp:
    """An op as schedulers see it: tensors that it reads and makes, and which dims of its first operand it reduces."""

    op: OpDef
    inputs: tuple[int, ...]
    outputs: tuple[int, ...]
    reduced: frozenset[int] = frozenset()
    ndim: int = 0

    @classmethod
    def of(cls, op: OpDef, inputs: Sequence[int], outputs: Sequence[int], rule: Rule | None) -> ScheduledOp:
        operand = rule.operands[0] if rule is not None and rule.operands else ()
        kinds = [[rule.factors[factor].kind for factor in dim] for dim in operand] if rule is not None else []
        reduced = frozenset(dim for dim, found in enumerate(kinds) if FactorKind.REDUCE in found)
        return cls(op, tuple(inputs), tuple(outputs), reduced, len(operand))

    @property
    def is_inner(self) -> bool:
        """Whether it reduces the fastest dim in memory."""
        return self.ndim - 1 in self.reduced


def ops_of(recording: Recording) -> list[ScheduledOp]:
    """The ops of a definition."""
    return [ScheduledOp.of(n.op, n.inputs, n.outputs, rule_of(recording.tensors, n)) for n in recording.nodes]


def scheduler_of(ops: Sequence[ScheduledOp]) -> SchedulerType | None:
    """The scheduler of one kernel of all these ops; None where nvFuser makes several kernels of them."""
    wanted = {op.op.scheduler for op in ops}
    if not ops:
        return SchedulerType.no_op
    if SchedulerType.expr_eval.name in wanted:
        return SchedulerType.expr_eval if len(ops) == 1 else None
    reductions = [op for op in ops if op.reduced]
    if reductions:
        return _of_reductions(ops, reductions)
    return SchedulerType.resize if SchedulerType.resize.name in wanted else SchedulerType.pointwise


def costliest(ops: Sequence[ScheduledOp]) -> SchedulerType:
    """Of several kernels, the scheduler of the one that takes longest: products before reductions."""
    evaluated = any(op.op.scheduler == SchedulerType.expr_eval.name for op in ops)
    return SchedulerType.expr_eval if evaluated else SchedulerType.reduction


def _of_reductions(ops: Sequence[ScheduledOp], reductions: Sequence[ScheduledOp]) -> SchedulerType | None:
    if any(_is_kept(ops, op) for op in reductions):
        inner = {op.is_inner for op in reductions}
        if len(inner) == 2:
            return SchedulerType.inner_outer_persistent
        return SchedulerType.inner_persistent if inner == {True} else SchedulerType.outer_persistent
    alike = len({(op.reduced, op.ndim) for op in reductions}) == 1
    apart = all(_after(ops, op.outputs).isdisjoint(other.inputs) for op in reductions for other in reductions)
    return SchedulerType.reduction if alike and apart else None


def _is_kept(ops: Sequence[ScheduledOp], reduction: ScheduledOp) -> bool:
    """Whether the operand of a reduction is read again beside its result; a kernel then keeps it (a normalization)."""
    makers = {tensor: op for op in ops for tensor in op.outputs}
    after = _after(ops, reduction.outputs)
    whole = _after([op for op in ops if not op.reduced], _before(makers, reduction.inputs)) - after
    return any(not after.isdisjoint(op.inputs) and not whole.isdisjoint(op.inputs) for op in ops)


def _after(ops: Sequence[ScheduledOp], tensors: Sequence[int] | set[int]) -> set[int]:
    """These tensors, and all that is made from them by these ops, which are in order."""
    found = set(tensors)
    for op in ops:
        if not found.isdisjoint(op.inputs):
            found.update(op.outputs)
    return found


def _before(makers: dict[int, ScheduledOp], tensors: Sequence[int]) -> set[int]:
    """These tensors, and all that they are made from, back to what is reduced."""
    found: set[int] = set()
    waiting = list(tensors)
    while waiting:
        tensor = waiting.pop()
        maker = makers.get(tensor)
        if tensor not in found:
            found.add(tensor)
            waiting += maker.inputs if maker is not None and not maker.reduced else ()
    return found
