"""The order in which nvFuser writes a definition: its inputs, and then what each output is made from."""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any

from ..definition.builder import DefinitionBuilder
from ..definition.records import OpNode
from ..ops.values import ScalarRef, TensorRef

Step = TensorRef | ScalarRef | OpNode


def writing_order(fd: DefinitionBuilder) -> list[Step]:
    """All steps of a definition, each after those that it reads; what no output needs comes last."""
    order: list[Step] = list(fd.inputs)
    done = {id(step) if isinstance(step, OpNode) else step for step in order}
    outputs = [_maker(fd, TensorRef(tensor)) for tensor in fd.outputs]
    for start in (*outputs, *fd.history):
        # Definitions are deeper than Python's recursion limit.
        waiting = [(start, False)]
        while waiting:
            step, ready = waiting.pop()
            key = id(step) if isinstance(step, OpNode) else step
            if key in done:
                continue
            if ready:
                done.add(key)
                order.append(step)
            else:
                waiting.append((step, True))
                waiting += [(_maker(fd, ref), False) for ref in reversed(list(_read(fd, step)))]
    return order


def _maker(fd: DefinitionBuilder, ref: TensorRef | ScalarRef) -> Step:
    node = fd.producer(ref.id) if isinstance(ref, TensorRef) else None
    return ref if node is None else node


def _read(fd: DefinitionBuilder, step: Step) -> Iterator[TensorRef | ScalarRef]:
    if isinstance(step, OpNode):
        yield from _refs(step.args)
    elif isinstance(step, ScalarRef):
        yield from _refs(fd.scalars[step.id].operands)


def _refs(value: Any) -> Iterator[TensorRef | ScalarRef]:
    if isinstance(value, (TensorRef, ScalarRef)):
        yield value
    elif isinstance(value, (tuple, list)):
        for part in value:
            yield from _refs(part)
