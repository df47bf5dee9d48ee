"""Operands of every other shape: an op refuses them where it is defined, or gives what it says it does."""

from __future__ import annotations

import dataclasses
from collections.abc import Iterator
from typing import Any

import pytest
import torch

import meshfuse as mf
import op_references as references
from meshfuse.graph import CallTable
from meshfuse.kernels.indices import IndexOutOfRange
from meshfuse.ops import OPS
from meshfuse.ops.opdef import Sample
from meshfuse.ops.values import TensorType
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


def refused_or_right(name: str, sample: Sample) -> None:
    try:
        call = make_call(OPS[name], sample)
        CallTable().get(call.op, call.args, call.types)
    except mf.DefinitionError as error:
        assert name in str(error)
        return
    try:
        made = whole(call, operands_of(call, sample))
    except IndexOutOfRange:
        return  # The sample's indices are those of its own shape.
    assert [tuple(t.shape) for t in made] == [ttype.shape for ttype in call.results], (sample.args, sample.kwargs)


@pytest.mark.parametrize(("name", "place"), RUNNABLE)
@pytest.mark.filterwarnings("ignore")
def test_an_operand_of_another_shape_is_refused_or_right(name: str, place: int) -> None:
    for sample in changed(OPS[name].samples()[place]):
        refused_or_right(name, sample)


def without_dims(arg: Any) -> Any:
    """An argument with the tensors in it of no dims, and lists of numbers, which have one per dim, empty."""
    if isinstance(arg, TensorType):
        return arg._replace(shape=())
    numbers = isinstance(arg, (tuple, list)) and not any(isinstance(entry, TensorType) for entry in arg)
    return type(arg)() if numbers else [*map(without_dims, arg)] if isinstance(arg, list) else arg


@pytest.mark.parametrize(("name", "place"), RUNNABLE)
@pytest.mark.filterwarnings("ignore")
def test_operands_without_dims_are_refused_or_right(name: str, place: int) -> None:
    sample = OPS[name].samples()[place]
    args = tuple(map(without_dims, sample.args))
    kwargs = {key: without_dims(value) for key, value in sample.kwargs.items()}
    refused_or_right(name, dataclasses.replace(sample, args=args, kwargs=kwargs))


def test_windows_of_a_tensor_without_dims_are_itself() -> None:
    """And in a backward."""
    with mf.FusionDefinition() as fd:
        x = fd.define_tensor([], dtype=mf.DataType.Double)
        made = fd.ops.slice(fd.ops.pad(x * x, []), [], []) + fd.ops.slice(x, [], [], [])
        fd.add_output(made)
        fd.add_output(fd.grad(fd.ops.slice(fd.ops.pad(made, [], 1.0), [], []), x))
    made, gradient = fd(torch.tensor(3.0, dtype=torch.float64))
    assert (made.shape, made.item(), gradient.item()) == ((), 12.0, 7.0)
