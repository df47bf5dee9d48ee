"""Sharding does not change which numbers are finite: programs on zeros, infinities, NaNs and the ends of the range."""

from __future__ import annotations

import math
from collections.abc import Callable, Sequence

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

import meshfuse as mf
from interpreter import has_reference, interpret, interpreted, narrow
from meshfuse.dtypes import Category
from meshfuse.ops.opdef import Partial
from meshfuse.testing import inputs_for
from meshfuse.testing.check import unsharded_copy
from test_random_programs import FAMILY_NAMES, examples, families, programs

DataType, Fd, Tensor = mf.DataType, mf.FusionDefinition, mf.TensorView
MESH = mf.DeviceMesh((3,), ("d",))
EXACT = {dtype for dtype in DataType if dtype.category < Category.FLOAT}
SPECIAL = (0.0, -0.0, math.inf, -math.inf, math.nan, 1.0, -2.0)


def with_special_values(fd: Fd, number: int) -> list[object]:
    """Arguments of which a third of all floating point numbers are special ones."""
    generator = torch.Generator().manual_seed(number)
    found = []
    for value in inputs_for(fd, number):
        if isinstance(value, torch.Tensor) and value.is_floating_point():
            choice = torch.tensor(SPECIAL, dtype=torch.float64)[
                torch.randint(len(SPECIAL), value.shape, generator=generator)
            ]
            value = torch.where(torch.rand(value.shape, generator=generator) < 1 / 3, choice.to(value.dtype), value)
        found.append(value)
    return found


def check(
    got: Sequence[torch.Tensor], wanted: Sequence[torch.Tensor], others: Sequence[Sequence[torch.Tensor]], lost: bool
) -> None:
    """Assert that numbers are of the same kind as torch's, where all of `others` agree with torch on the kind.

    These leave out what depends on more than sharding: an overflow that a wider type does not have, and ops that treat
    a NaN otherwise than torch on one rank, too. `lost`: whether an infinity may have become NaN, by a product with an
    infinite factor.
    """
    for place, (a, b) in enumerate(zip(got, wanted, strict=True)):
        if b.is_floating_point():
            kind = kinds(b)
            known = torch.stack([kinds(other[place]) == kind for other in others]).all(0)
            same = (kinds(a) == kind) | (torch.isinf(b) & torch.isnan(a) & lost)
            assert (same | ~known).all(), (place, a, b)


def kinds(t: torch.Tensor) -> torch.Tensor:
    """By element 0 for a finite number, 1 and -1 for infinities, 2 for NaN."""
    return torch.where(torch.isnan(t), 2.0, torch.where(torch.isinf(t), t.sign(), 0.0)).double()


def multiplies_infinity(fd: Fd, inputs: Sequence[object]) -> bool:
    """Whether a product of the program has an infinite factor."""
    tensors = interpreted(fd, inputs, as_type=narrow)
    return any(bool(torch.isinf(tensors[i]).any()) for node in fd.recording.nodes if node.op.partial is Partial.EACH
               for i in node.inputs if tensors[i].is_floating_point())  # fmt: skip


@pytest.mark.slow
@pytest.mark.fuzz
@pytest.mark.timeout(600)
@pytest.mark.parametrize("family", [name for name in FAMILY_NAMES if name not in ("random", "complex")])
def test_random_programs_keep_what_is_finite(family: str) -> None:
    @settings(max_examples=examples(20))
    @given(programs(families(family)), st.integers(0, 9999))
    def run(fd: Fd, number: int) -> None:
        # torch's functions, called on tensors of the very types, do not promote one floating point type to another.
        if not has_reference(fd) or len({t.type.dtype for t in fd.recording.tensors} - EXACT) > 1:
            return
        inputs = with_special_values(fd, number)
        sure = interpret(fd, inputs), unsharded_copy(fd).simulate(inputs)
        check(fd.simulate(inputs), interpret(fd, inputs, as_type=narrow), sure, multiplies_infinity(fd, inputs))

    run()


# What makes a term of a sum on each rank.
SUMS: dict[str, Callable[[Fd, Tensor], Tensor]] = {
    "sum": lambda fd, x: fd.ops.sum(x, [0]),
    "mean": lambda fd, x: fd.ops.mean(x, [0]),
    "matmul": lambda fd, x: fd.ops.matmul(fd.ops.permute(x, [1, 0]), x),
    "sum of a sum": lambda fd, x: fd.ops.sum(fd.ops.sum(x, [0], True), [0]),
    "difference of sums": lambda fd, x: fd.ops.sub(fd.ops.sum(x, [0]), fd.ops.sum(fd.ops.mul(x, 0.5), [0])),
}
READERS: dict[str, Callable[[Fd, Tensor, Tensor], Tensor]] = {
    "div": lambda fd, s, t: fd.ops.div(s, t),
    "truediv": lambda fd, s, t: fd.ops.truediv(s, t),
    "divided by it": lambda fd, s, t: fd.ops.truediv(t, s),
    "mul": lambda fd, s, t: fd.ops.mul(s, t),
    "add": lambda fd, s, t: fd.ops.add(s, t),
    "over a number": lambda fd, s, t: fd.ops.truediv(fd.ops.mul(t, s), 3.0),
    "over zero": lambda fd, s, t: fd.ops.add(fd.ops.truediv(s, 0.0), t),
    "over infinity": lambda fd, s, t: fd.ops.add(fd.ops.div(s, math.inf), t),
    "negated and over it": lambda fd, s, t: fd.ops.div(fd.ops.neg(s), t),
    "masked": lambda fd, s, t: fd.ops.div(fd.ops.where(fd.ops.gt(t, 0.0), s, 0.0), t),
}
VALUES = (0.0, -0.0, 1.0, -3.0, math.inf, -math.inf, math.nan, 1e-38, 1e4)


@pytest.mark.parametrize("made", SUMS)
@pytest.mark.parametrize("read", READERS)
def test_what_reads_a_sum_over_ranks_with_an_empty_shard_gives_numbers_of_the_same_kind(made: str, read: str) -> None:
    """Also of the smallest numbers. A product of a sum is made of the whole sum where that sends as little."""
    with mf.FusionDefinition() as fd:
        x, t = fd.define_tensor([4, 3]), fd.define_tensor([len(VALUES), 1, 1])
        fd.mesh_split(x, MESH, ["d", None])
        fd.add_output(READERS[read](fd, SUMS[made](fd, x), t))
    columns = torch.tensor([[1.0, 1.0, 0.0], [1.0, -1.0, -0.0], [1.0, math.inf, 0.0], [-3.0, 0.0, 1e-45]])
    inputs = [columns, torch.tensor(VALUES).reshape(-1, 1, 1)]
    sure = interpret(fd, inputs), unsharded_copy(fd).simulate(inputs)
    check(fd.simulate(inputs), interpret(fd, inputs, as_type=narrow), sure, lost=False)


LARGE = torch.tensor([6e4, 6e4, -6e4, -6e4, 1, 2])


@pytest.mark.parametrize("shards", [2, 3, 4])
@pytest.mark.parametrize("placed", [None, ["d"], [None]])
@pytest.mark.parametrize("made", [
    lambda fd, x: fd.ops.sum(x, [0]),
    lambda fd, x: fd.ops.matmul(fd.ops.permute(x, [1, 0]), fd.ops.full([6], 1.0, DataType.Half)),
    lambda fd, x: fd.ops.linear(fd.ops.permute(x, [1, 0]), fd.ops.full([6], 1.0, DataType.Half)),
    lambda fd, x: fd.ops.neg(fd.ops.sum(fd.ops.neg(x), [0])),
    lambda fd, x: fd.ops.sum(fd.ops.reshape(x, [2, 3, 4]), [0, 1]),
    lambda fd, x: fd.ops.sub(fd.ops.sum(x, [0]), fd.ops.mul(fd.ops.sum(x, [0]), 2.0)),
    lambda fd, x: fd.ops.cast(fd.ops.sum(x, [0]), DataType.Float),
])  # fmt: skip
def test_terms_of_half_precision_do_not_overflow_where_the_sum_does_not(
    made: Callable[[Fd, Tensor], Tensor], placed: list[str | None] | None, shards: int
) -> None:
    mesh = mf.DeviceMesh((shards,), ("d",))
    with mf.FusionDefinition() as fd:
        x = fd.define_tensor([6, 4], dtype=DataType.Half)
        fd.mesh_split(x, mesh, ["d", None])
        y = made(fd, x)
        if placed is not None:
            fd.mesh_split(y, mesh, placed)
        fd.add_output(y)
    values = LARGE[:, None].expand(6, 4).half()
    wanted = interpret(fd, [values])
    torch.testing.assert_close([t.double() for t in fd.simulate([values])], wanted)


def test_no_sum_of_other_types_is_widened() -> None:
    """BFloat16 has float32's range: it is sent as it is."""
    with mf.FusionDefinition() as fd:
        x = fd.define_tensor([6, 4], dtype=DataType.BFloat16)
        fd.mesh_split(x, MESH, ["d", None])
        fd.add_output(fd.ops.sum(x, [0]))
    assert fd.bill().total == pytest.approx(2 * 2 / 3 * 4 * 2)
