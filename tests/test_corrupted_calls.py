"""Every op's samples with one argument made wrong: a house error at the user's line, or the numbers of one rank."""

from __future__ import annotations

import enum
from collections.abc import Iterator
from typing import Any

import pytest
import torch

import meshfuse as mf
import op_references as references
from meshfuse import DataType
from meshfuse.ops import OPS
from meshfuse.ops.opdef import Sample
from meshfuse.ops.values import TensorType
from meshfuse.testing.calls import fill
from refusing import refused_in


class Number(enum.IntEnum):
    ONE = 1


# What is checked are numbers, whatever the plan.
pytestmark = pytest.mark.usefixtures("over_whole_axes")

MESH = mf.DeviceMesh((2, 2), ("x", "y"))
OTHER = mf.FusionDefinition().define_tensor([2, 3])
VALUES: list[Any] = [
    None, float("nan"), 1e300, "a", True, -7, 0, 3, 2**40, -(2**63), 2**70, 1.5, 1j, Number.ONE, torch.ones(2, 2), [],
    [0, 0], [-1], [99], [-9, 99], [99, -9], [None], [2**40], [1] * 99, {0: 1}, DataType.Null, DataType.Bool,
    DataType.Int32, OTHER,
]  # fmt: skip
SHAPES = ((), (1,), (0,), (3,), (2, 3), (3, 0), (7, 11), (1, 1, 1, 1), (2, 3, 4), (2,) * 9)
TYPES = [*(TensorType(shape, DataType.Float) for shape in SHAPES),
         *(TensorType((2, 3), dtype) for dtype in (DataType.Bool, DataType.Int, DataType.ComplexFloat))]  # fmt: skip


def corrupted(sample: Sample, place: int | str, value: Any) -> Sample:
    if isinstance(place, int):
        return Sample((*sample.args[:place], value, *sample.args[place + 1 :]), sample.kwargs, sample.values)
    return Sample(sample.args, {**sample.kwargs, place: value}, sample.values)


def calls(name: str, step: int = 2) -> Iterator[Sample]:
    """The first sample with each of its arguments, and each optional one, replaced by one in `step` wrong values.

    By others for the next argument, and for the next op.
    """
    op = OPS[name]
    sample = op.samples()[0]
    more = [param.name for param in op.params[len(sample.args) :]]
    for number, place in enumerate((*range(len(sample.args)), *more), list(OPS).index(name)):
        yield from (corrupted(sample, place, value) for value in (*VALUES, *TYPES)[number % step :: step])


def defined(name: str, sample: Sample) -> mf.FusionDefinition:
    """The call on inputs of their own. Raises the errors of a definition."""
    fd = mf.FusionDefinition()

    def argument(arg: Any) -> Any:
        if isinstance(arg, list):
            return [argument(a) for a in arg]
        return fd.define_tensor(list(arg.shape), dtype=arg.dtype) if isinstance(arg, TensorType) else arg

    made = fd.call(name, [argument(arg) for arg in sample.args], {k: argument(v) for k, v in sample.kwargs.items()})
    for out in made if isinstance(made, tuple) else (made,):
        fd.add_output(out)
    return fd


def split(fd: mf.FusionDefinition) -> None:
    """Annotate the first input with dims, which is split along its first and last one."""
    first = next((t for t in fd.fusion.inputs() if t.ndim), None)
    if first is not None:
        fd.mesh_split(first, MESH, ["x", *[None] * (first.ndim - 2), "y"] if first.ndim > 1 else [("x", "y")])


def tensors_of(fd: mf.FusionDefinition, sample: Sample) -> list[torch.Tensor] | None:
    """Arguments for the definition; None where they or its results would be large, or torch has none of the kind."""
    made = torch.Generator().manual_seed(0)
    types = [fd.recording.tensors[t.ref.id].type for t in fd.fusion.inputs()]
    results = [fd.recording.tensors[i].type for i in fd.recording.outputs]
    packed = any(t.dtype is DataType.Float4_e2m1fn for t in (*types, *results))
    if packed or any(t.numel > 2**20 for t in (*types, *results)):
        return None
    return [fill(t, sample.values.get(i), None, made) for i, t in enumerate(types)]


def definition(name: str, sample: Sample) -> mf.FusionDefinition | None:
    """The definition of the call; None where it is refused."""
    with refused_in(__file__):
        return defined(name, sample)
    return None


def outcome(fd: mf.FusionDefinition, sample: Sample) -> list[torch.Tensor] | None:
    """What a definition gives, nothing where it would be large; None where it is refused."""
    with refused_in(__file__):
        given = tensors_of(fd, sample)
        if given is None:
            fd.bill()
            return []
        return fd.simulate(given)
    return None


@pytest.mark.slow
@pytest.mark.filterwarnings("ignore:.*degrees of freedom")
@pytest.mark.parametrize("name", OPS)
@pytest.mark.sampled(1)
def test_a_wrong_argument_is_refused_or_means_the_same_on_every_mesh(name: str, pytestconfig: pytest.Config) -> None:
    tried = set[str]()
    for sample in calls(name, 1 if pytestconfig.getoption("--all-cases") else 3):
        arguments = f"{sample.args} {sample.kwargs}"
        fd = definition(name, sample)
        if fd is None or (text := repr(fd)) in tried:  # Many a wrong value is another way to write another one.
            continue
        tried.add(text)
        split(fd)
        found, expected = outcome(fd, sample), outcome(defined(name, sample), sample)
        assert (found is None) == (expected is None), arguments
        for a, b, i in zip(found or (), expected or (), fd.recording.outputs, strict=False):
            ttype = fd.recording.tensors[i].type
            assert (tuple(a.shape), str(a.dtype)) == (ttype.shape, f"torch.{ttype.dtype.value}"), arguments
            if name not in references.RANDOM and a.dtype != torch.uint64:
                torch.testing.assert_close(a, b, rtol=2e-3, atol=2e-3, equal_nan=True, msg=arguments)
