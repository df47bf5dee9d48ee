"""Operands of every other shape: an op refuses them where it is defined, or gives what it says it does."""

from __future__ import annotations

import dataclasses
from collections.abc import Iterator
from typing import Any

import pytest

import meshfuse as mf
import op_references as references
from meshfuse.graph import CallTable
from meshfuse.kernels.lookup import IndexOutOfRange
from meshfuse.ops import OPS
from meshfuse.ops.base import Sample, TensorType
from op_harness import make_call, operands_of, sample_ids, whole

RUNNABLE = [pair for pair in sample_ids() if pair[0] not in references.NVIDIA_ONLY]


def other_shapes(shape: tuple[int, ...]) -> Iterator[tuple[int, ...]]:
    """With one dim a little longer or shorter, one more, or one less."""
    for d, n in enumerate(shape):
        yield from ((*shape[:d], m, *shape[d + 1 :]) for m in (n + 1, n - 1) if m >= 0)
    yield from ((*shape, 2), (2, *shape), *([shape[1:]] if shape else []))


def with_another(arg: Any) -> Iterator[Any]:
    """An argument with the shape of one tensor in it changed."""
    if isinstance(arg, TensorType):
        yield from (arg._replace(shape=shape) for shape in other_shapes(arg.shape))
    elif isinstance(arg, (tuple, list)):
        for i, entry in enumerate(arg):
            yield from (type(arg)((*arg[:i], other, *arg[i + 1 :])) for other in with_another(entry))


def changed(sample: Sample) -> Iterator[Sample]:
    args = tuple(sample.args)
    for i, arg in enumerate(args):
        for other in with_another(arg):
            yield dataclasses.replace(sample, args=(*args[:i], other, *args[i + 1 :]))


@pytest.mark.parametrize(("name", "place"), RUNNABLE)
@pytest.mark.filterwarnings("ignore")
def test_an_operand_of_another_shape_is_refused_or_right(name: str, place: int) -> None:
    for sample in changed(OPS[name].samples()[place]):
        try:
            call = make_call(OPS[name], sample)
            CallTable().get(call.op, call.args, call.types)
        except mf.DefinitionError as error:
            assert name in str(error)
            continue
        try:
            made = whole(call, operands_of(call, sample))
        except IndexOutOfRange:
            continue  # The sample's indices are those of its own shape.
        assert [tuple(t.shape) for t in made] == [kind.shape for kind in call.results], call.types
