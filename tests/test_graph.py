"""Equal calls of concrete graphs are one object, so that what is worked out for one is found for others."""

from __future__ import annotations

from typing import Any

import pytest

import meshfuse as mf
from meshfuse.graph import CallTable, specialize
from meshfuse.ops import OPS
from meshfuse.ops.values import TensorRef, TensorType


def scaled(by: Any) -> mf.FusionDefinition:
    with mf.FusionDefinition() as fd:
        fd.add_output(fd.ops.mul(fd.define_tensor([4, 6]), by))
    return fd


def calls_of(fd: mf.FusionDefinition) -> list[Any]:
    return [(node.call, node.rule) for node in specialize(fd.recording, {0: (4, 6)}, {}).nodes]


def test_equal_calls_of_two_definitions_are_one() -> None:
    (one,), (other,) = calls_of(scaled(2.0)), calls_of(scaled(2.0))
    assert one[0] is other[0]
    assert one[1] is other[1]


@pytest.mark.parametrize("one, other", [(0.0, -0.0), (1.0, 1), (1, True), (2.0, 3.0)])
def test_calls_with_other_numbers_are_others(one: Any, other: Any) -> None:
    op, kind = OPS["mul"], TensorType((4, 6), mf.DataType.Float)
    calls = [CallTable().get(op, (TensorRef(0), number), (kind,))[0] for number in (one, other)]
    assert calls[0] is not calls[1]
    assert [(type(call.args[1]), repr(call.args[1])) for call in calls] == [(type(n), repr(n)) for n in (one, other)]


def test_calls_with_other_entries_in_a_list_are_others() -> None:
    op, kind = OPS["reshape"], TensorType((4, 6), mf.DataType.Float)
    one, other = (CallTable().get(op, (TensorRef(0), sizes), (kind,))[0] for sizes in ((1, 24), (True, 24)))
    assert one is not other


def test_a_call_is_refused_each_time() -> None:
    kinds = (TensorType((4, 6), mf.DataType.Float), TensorType((5, 6), mf.DataType.Float))
    for _ in range(2):
        with pytest.raises(mf.DefinitionError):
            CallTable().get(OPS["add"], (TensorRef(0), TensorRef(1)), kinds)
