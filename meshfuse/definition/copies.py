"""Copies put into a definition that is written already: what nvFuser's `cache_after` and `cache_before` do."""

from __future__ import annotations

from dataclasses import replace
from enum import Enum
from typing import Any

from ..errors import SourceLine, user_error
from ..ops.registry import find
from ..ops.values import TensorRef
from .recording import Entry, OpNode, Recording


class CommunicationType(Enum):
    """What a copy between two places is called. What is sent follows from where its operand and its result lie."""

    Scatter = 0
    Gather = 1
    Allgather = 2
    Broadcast = 3
    SendRecv = 4
    AllToAll = 5


def copy_after(recording: Recording, tensor: int, line: SourceLine) -> TensorRef:
    """A copy of a tensor, which every op that reads the tensor so far reads in its place.

    Raises DefinitionError where no op reads it.
    """
    if all(tensor not in node.inputs for node in recording.nodes):
        raise user_error(
            f"cache_after of {recording.tensors[tensor].label}", "a tensor that no op reads", "one with readers",
            "Call cache_before for what is returned.", line,
        )  # fmt: skip
    node = _copy(recording, tensor, line)
    made = TensorRef(node.outputs[0])
    place = 1 + next(i for i, entry in enumerate(recording.history) if _makes(entry, tensor))
    readers = [_reading(entry, tensor, made) for entry in recording.history[place:]]
    recording.rewrite([*recording.history[:place], node, *readers])
    return made


def copy_before(recording: Recording, tensor: int, line: SourceLine) -> TensorRef:
    """The result of the op that made a tensor, which is a copy of it from now on.

    Raises DefinitionError for an input, and for a tensor that is annotated: its axes are those of the op.
    """
    producer, made = recording.producer(tensor), recording.tensors[tensor]
    if producer is None or tensor in recording.own_annotations:
        found = "an input" if producer is None else "a tensor that is annotated"
        raise user_error(
            f"cache_before of {made.label}", found, "the result of an op, before it is annotated",
            "Call cache_after for an input, and annotate behind this call.", line,
        )  # fmt: skip
    copied = _copy(recording, tensor, line)
    (between,) = copied.outputs
    first = replace(producer, outputs=tuple([between if i == tensor else i for i in producer.outputs]))
    last = replace(copied, args=(TensorRef(between),), inputs=(between,), outputs=(tensor,))
    place = next(i for i, entry in enumerate(recording.history) if entry is producer)
    recording.rewrite([*recording.history[:place], first, last, *recording.history[place + 1 :]])
    return TensorRef(between)


def _copy(recording: Recording, tensor: int, line: SourceLine) -> OpNode:
    """A copy of a tensor, which stands nowhere yet."""
    op = find("set")
    assert op is not None
    recording.append(op, (TensorRef(tensor),), line)
    recording.history.pop()
    return recording.nodes.pop()


def _makes(entry: Entry, tensor: int) -> bool:
    return tensor in entry.outputs if isinstance(entry, OpNode) else isinstance(entry, TensorRef) and entry.id == tensor


def _reading(entry: Entry, old: int, new: TensorRef) -> Entry:
    """An op with one tensor in the place of another of the same type."""
    if not isinstance(entry, OpNode) or old not in entry.inputs:
        return entry
    inputs = tuple([new.id if i == old else i for i in entry.inputs])
    return replace(entry, args=_swapped(entry.args, TensorRef(old), new), inputs=inputs)


def _swapped(value: Any, old: TensorRef, new: TensorRef) -> Any:
    if type(value) in (list, tuple):
        return type(value)([_swapped(part, old, new) for part in value])
    return new if isinstance(value, TensorRef) and value == old else value
