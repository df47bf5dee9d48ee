"""What is unreduced over ranks stays so through a change of type only where terms may be converted one by one."""

from __future__ import annotations

from collections.abc import Callable
from itertools import product
from typing import NamedTuple

import pytest
import torch

import meshfuse as mf
from defining import graph_of
from meshfuse.graph import Node
from meshfuse.placement.factors import passes
from meshfuse.testing import assert_same_as_unsharded

# What is checked are numbers, whatever the plan.
pytestmark = pytest.mark.usefixtures("over_whole_axes")

D = mf.DataType
T = mf.TensorView
MESH = mf.DeviceMesh((2,), ("a",))
TYPES = (D.Bool, D.Byte, D.Char, D.Int16, D.Int32, D.Int, D.Half, D.BFloat16, D.Float, D.Double,
         D.ComplexFloat, D.ComplexDouble)  # fmt: skip
# What the two ranks hold of four elements: sums that wrap in every integer type, halves, numbers of both signs.
INTEGERS = [[1, 100, -100, 2**31 - 5], [2, 100, -100, 2**31 - 5]]
FRACTIONS = [[0.5, 0.5, -1.5, 1.75], [0.5, 1.0, 0.5, -0.25]]


class Step(NamedTuple):
    """An op of an unreduced tensor and another: as it is defined, and what torch has for it."""

    define: Callable[[mf.FusionDefinition, T, T], T]
    torch: Callable[[torch.Tensor, torch.Tensor, torch.dtype], torch.Tensor]


def converting(to: mf.DataType) -> dict[str, Step]:
    """The ops with a parameter for their result's type."""
    return {
        f"cast to {to.name}": Step(lambda fd, y, _: fd.ops.cast(y, to), lambda y, _, d: y.to(d)),
        f"sum to {to.name}": Step(lambda fd, y, _: fd.ops.sum(y, [0], dtype=to), lambda y, _, d: y.sum(0, dtype=d)),
        f"prod to {to.name}": Step(lambda fd, y, _: fd.ops.prod(y, [0], dtype=to), lambda y, _, d: y.prod(0, dtype=d)),
    }


# Those that promote, and that take a type of their own from the operand's.
PROMOTING = {
    "sum": Step(lambda fd, y, z: fd.ops.sum(y, [0]), lambda y, z, d: y.sum(0, dtype=d)),
    "prod": Step(lambda fd, y, z: fd.ops.prod(y, [0]), lambda y, z, d: y.prod(0, dtype=d)),
    "neg": Step(lambda fd, y, z: -y, lambda y, z, d: -y.to(d)),
    "mul": Step(lambda fd, y, z: y * z, lambda y, z, d: y.to(d) * z.to(d)),
    "mul 2.5": Step(lambda fd, y, z: y * 2.5, lambda y, z, d: y.to(d) * 2.5),
    "truediv": Step(lambda fd, y, z: fd.ops.truediv(y, z), lambda y, z, d: y.to(d) / z.to(d)),
    "truediv 2": Step(lambda fd, y, z: fd.ops.truediv(y, 2), lambda y, z, d: y.to(d) / 2),
}
SUMMED = (D.Int16, D.Int32, D.Int, D.Float, D.Double, D.ComplexDouble)


def torch_type(dtype: mf.DataType) -> torch.dtype:
    return getattr(torch, dtype.value)


def terms(dtype: mf.DataType) -> list[torch.Tensor]:
    numbers = FRACTIONS if dtype.category >= D.Half.category else INTEGERS
    return [torch.tensor(row, dtype=torch.float64 if numbers is FRACTIONS else torch.int64).to(torch_type(dtype))
            for row in numbers]  # fmt: skip


def steps() -> dict[str, Step]:
    return {**PROMOTING, **{name: step for to in TYPES for name, step in converting(to).items()}}


def defined(step: Step, dtype: mf.DataType, other: mf.DataType, split: bool) -> tuple[mf.FusionDefinition, T]:
    """The op of a sum, over what ranks hold apart, that is of its terms' own type."""
    with mf.FusionDefinition() as fd:
        x, z = fd.define_tensor([4, 2], dtype=dtype), fd.define_tensor([4], dtype=other)
        made = step.define(fd, fd.ops.sum(x, [1], dtype=dtype), z)
        fd.add_output(made)
        if split:
            fd.mesh_split(x, MESH, [None, "a"])
    return fd, made


def others(name: str) -> tuple[mf.DataType, ...]:
    return SUMMED if name in ("mul", "truediv") else (D.Float,)


CASES = [(name, dtype, other) for name in PROMOTING for dtype in SUMMED for other in others(name)]
CONVERTED = [(name, dtype) for dtype, name in product(TYPES, [n for to in TYPES for n in converting(to)])]


def check_numbers(name: str, dtype: mf.DataType, other: mf.DataType) -> None:
    step, (first, second) = steps()[name], terms(dtype)
    fd, made = defined(step, dtype, other, split=True)
    x, z = torch.stack([first, second], 1), torch.tensor([1, 2, 3, 4]).to(torch_type(other))
    expected = step.torch(x.sum(1, dtype=x.dtype), z, torch_type(made.dtype))
    assert_same_as_unsharded(fd, [x, z], [expected])


@pytest.mark.parametrize("name, dtype, other", CASES)
def test_ops_that_promote(name: str, dtype: mf.DataType, other: mf.DataType) -> None:
    check_numbers(name, dtype, other)


@pytest.mark.filterwarnings("ignore:Casting complex values to real")
@pytest.mark.parametrize("dtype", SUMMED)
@pytest.mark.parametrize("to", TYPES)
def test_ops_with_a_type_of_the_users(dtype: mf.DataType, to: mf.DataType) -> None:
    for name in converting(to):
        check_numbers(name, dtype, D.Float)


@pytest.mark.parametrize("dtype", TYPES)
def test_what_passes_a_sum_on_may_be_done_term_by_term(dtype: mf.DataType) -> None:
    """Whatever the planner makes of it: f(a) + f(b) = f(a + b), in torch's arithmetic."""
    first, second = terms(dtype)
    for name, step in steps().items():
        for other in others(name):
            fd, made = defined(step, dtype, other, split=False)
            node, wanted = graph_of(fd).nodes[-1], torch_type(made.dtype)
            if passes(node.call, node.rule, (0,), "sum") and (name, dtype) != ("neg", D.Bool):  # torch has none
                z = torch.tensor([1, 2, 3, 4]).to(torch_type(other))
                apart = step.torch(first, z, wanted) + step.torch(second, z, wanted)
                torch.testing.assert_close(apart, step.torch(first + second, z, wanted), msg=f"{name} {other}")


JOINT = {"add": torch.add, "sub": torch.sub, "cat": lambda y, z: torch.cat([y, z])}
ORDERED = {"max": torch.maximum, "min": torch.minimum}


def of_two(name: str, a: mf.DataType, b: mf.DataType) -> tuple[Node, torch.dtype]:
    """An op of two tensors, and its result's type."""
    with mf.FusionDefinition() as fd:
        y, z = (fd.define_tensor([4], dtype=dtype) for dtype in (a, b))
        made = fd.ops.cat([y, z], 0) if name == "cat" else fd.call(name, [y, z])
        fd.add_output(made)
    return graph_of(fd).nodes[-1], torch_type(made.dtype)


@pytest.mark.parametrize("name", JOINT)
def test_what_passes_two_sums_on_may_be_done_term_by_term(name: str) -> None:
    for a, b in product(TYPES[1:], TYPES[1:]):
        if name == "cat" and a is not b:
            continue
        node, wanted = of_two(name, a, b)
        if passes(node.call, node.rule, (0, 1), "sum"):
            (y, v), (z, w) = terms(a), terms(b)

            def made(y: torch.Tensor, z: torch.Tensor, wanted: torch.dtype = wanted) -> torch.Tensor:
                return JOINT[name](y.to(wanted), z.to(wanted))

            torch.testing.assert_close(made(y, z) + made(v, w), made(y + v, z + w), msg=f"{name} {a} {b}")


@pytest.mark.parametrize("name", ORDERED)
def test_what_passes_an_extreme_on_keeps_the_order(name: str) -> None:
    reduce = ORDERED[name]
    for a, b in product(TYPES[:-2], TYPES[:-2]):
        node, wanted = of_two({"max": "maximum", "min": "minimum"}[name], a, b)
        if passes(node.call, node.rule, (0,), name):
            numbers = torch.arange(-300, 300, 7).to(torch_type(a))
            pairs = torch.cartesian_prod(numbers, numbers).unbind(1)
            apart, whole = reduce(*(n.to(wanted) for n in pairs)), reduce(*pairs).to(wanted)
            assert torch.equal(apart, whole), f"{name} {a} {b}"


def test_sums_still_pass_where_terms_grow_wider() -> None:
    """So that sums of half precision go on in single precision, and reductions meet in one."""
    for dtype, to in ((D.BFloat16, D.Float), (D.Half, D.Double), (D.Float, D.Double), (D.Float, D.Float)):
        for name, step in converting(to).items():
            fd, _ = defined(step, dtype, D.Float, split=False)
            node = graph_of(fd).nodes[-1]
            assert passes(node.call, node.rule, (0,), "sum") == (not name.startswith("prod"))
