"""Moves that may be one call are one: how many calls a program makes, and that its results and bill stay."""

from __future__ import annotations

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st

import meshfuse as mf
from defining import collectives
from meshfuse.reshard.bucketing import LARGEST, bucket_collectives

MESH = mf.DeviceMesh((2, 2), ("dp", "tp"))


def sums(sizes: list[int], axes: list[str], dtypes: list[mf.DataType]) -> mf.FusionDefinition:
    """Independent sums over a sharded dim, each an all-reduce of so many elements over an axis."""
    with mf.FusionDefinition() as fd:
        for n, axis, dtype in zip(sizes, axes, dtypes, strict=True):
            x = fd.define_tensor([4, n], dtype=dtype)
            fd.mesh_split(x, MESH, [axis, None])
            made = fd.ops.sum(x, [0])
            fd.mesh_split(made, MESH, [None])
            fd.add_output(made)
    return fd


AXES = st.sampled_from(["dp", "tp"])
DTYPES = st.sampled_from([mf.DataType.Float, mf.DataType.Double])


@pytest.mark.slow
@given(st.lists(st.tuples(st.sampled_from([1, 7, 40]), AXES, DTYPES), min_size=1, max_size=8))
def test_independent_reductions_are_one_call_per_axis_and_dtype(made):
    sizes, axes, dtypes = (list(column) for column in zip(*made, strict=True))
    fd = sums(sizes, axes, dtypes)
    assert len(collectives(fd)) == len({(axis, dtype) for _, axis, dtype in made})
    inputs = [torch.randn(4, n, dtype=getattr(torch, d.value)) for n, d in zip(sizes, dtypes, strict=True)]
    for found, x in zip(fd.simulate(inputs, check_replicas=True), inputs, strict=True):
        torch.testing.assert_close(found, x.sum(0))


@pytest.mark.slow
@given(st.lists(st.tuples(st.sampled_from([1, 7, 40]), AXES, DTYPES), min_size=1, max_size=8))
def test_the_programs_bytes_are_the_bills(made):
    fd = sums(*(list(column) for column in zip(*made, strict=True)))
    sent = [(c.tensor, c.wire) for c in fd.host_program(0).communications]
    billed = [(entry.tensor, entry.wire) for entry in fd.bill().entries]
    assert sorted(sent) == sorted(billed)
    assert sum(call.about.wire for call in collectives(fd)) == fd.bill().total


def test_large_reductions_stay_apart():
    elements = LARGEST // 4
    assert len(collectives(sums([elements] * 2, ["tp", "tp"], [mf.DataType.Float] * 2))) == 1
    assert len(collectives(sums([elements + 1] * 2, ["tp", "tp"], [mf.DataType.Float] * 2))) == 2


def test_a_bucket_has_an_upper_size():
    count = (25 << 20) // LARGEST
    fd = sums([LARGEST // 4] * (2 * count), ["tp"] * (2 * count), [mf.DataType.Float] * (2 * count))
    assert len(collectives(fd)) == 2


def test_statistics_that_wait_for_each_other_do_not_move():
    """The second sum needs the first; a third that nothing needs goes with neither, but last."""
    with mf.FusionDefinition() as fd:
        x, y = fd.define_tensor([4, 6]), fd.define_tensor([4, 6])
        for t in (x, y):
            fd.mesh_split(t, MESH, ["tp", None])
        alone = fd.ops.sum(y, [0])
        first = fd.ops.sum(x, [0], keepdim=True)
        fd.add_output(fd.ops.sum((x - first) * (x - first), [0]))
        fd.add_output(alone)
    names = [call.about.tensor for call in collectives(fd)]
    assert len(names) == 2
    a, b = torch.randn(4, 6), torch.randn(4, 6)
    found, other = fd.simulate([a, b])
    torch.testing.assert_close(found, (a - a.sum(0)).square().sum(0))
    torch.testing.assert_close(other, b.sum(0))


@pytest.mark.slow
@pytest.mark.parametrize("layers", [1, 40])
def test_steps_are_put_in_another_order_and_no_more(layers):
    with mf.FusionDefinition() as fd:
        x = fd.define_tensor([8, 8])
        fd.mesh_split(x, MESH, ["dp", "tp"])
        y = x
        for _ in range(layers):
            y = fd.ops.layer_norm(y, [8])
        fd.add_output(y)
        fd.add_output(fd.ops.sum(y))
    resharded = fd.compile().resharded
    order = bucket_collectives(resharded)
    assert sorted(map(str, order.statements)) == sorted(map(str, resharded.statements))
    order.verify()


# (what a tensor of 12 x 12 is before, and what it comes to be): gathers, exchanges and windows, some of uneven parts.
MOVES = {
    "gather rows": (["tp", None], [None, None]),
    "gather columns": ([None, "tp"], [None, None]),
    "gather over the other axis": (["dp", None], [None, None]),
    "gather parts": ([[mf.Split(3), "tp"], None], [None, None]),
    "to columns": (["tp", None], [None, "tp"]),
    "to rows": ([None, "dp"], ["dp", None]),
    "into parts": (["tp", None], [[mf.Split(3), "tp"], None]),
    "inside parts": ([[mf.Split(2), "tp"], None], [[mf.Split(3), "tp"], None]),
}


def moved(chosen: list[str], sizes: list[int], dtypes: list[mf.DataType], casts: bool) -> mf.FusionDefinition:
    """Independent moves of inputs, or of what is cast of them."""
    with mf.FusionDefinition() as fd:
        for name, n, dtype in zip(chosen, sizes, dtypes, strict=True):
            before, after = MOVES[name]
            x = fd.define_tensor([n, 12], dtype=dtype)
            fd.mesh_split(x, MESH, before)
            y = fd.ops.cast(x, mf.DataType.Float) if casts else fd.ops.set(x)
            fd.mesh_split(y, MESH, after)
            fd.add_output(fd.ops.neg(y))
    return fd


@pytest.mark.slow
@given(
    st.lists(st.tuples(st.sampled_from([*MOVES]), st.sampled_from([12, 12, 7, 1]), DTYPES), min_size=1, max_size=6),
    st.booleans(),
)
def test_moves_of_any_kind_that_are_one_call_move_the_same(made, casts):
    fd = moved(*(list(column) for column in zip(*made, strict=True)), casts)
    inputs = [torch.randn(n, 12, dtype=getattr(torch, dtype.value)) for _, n, dtype in made]
    for found, x in zip(fd.simulate(inputs, check_replicas=True, check_streams=True), inputs, strict=True):
        assert torch.equal(found, -(x.float() if casts else x))
    sent = sum(call.about.wire for rank in range(4) for call in collectives(fd, rank))
    assert sent / 4 == pytest.approx(fd.bill().total)


@pytest.mark.slow
@given(st.lists(st.tuples(st.sampled_from([12, 12, 7, 1]), AXES, DTYPES), min_size=1, max_size=6))
def test_reduce_scatters_that_are_one_call_give_the_same(made):
    with mf.FusionDefinition() as fd:
        for n, axis, dtype in made:
            x = fd.define_tensor([4, n, 6], dtype=dtype)
            fd.mesh_split(x, MESH, [axis, None, None])
            y = fd.ops.sum(x, [0])
            fd.mesh_split(y, MESH, [axis, None])
            fd.add_output(fd.ops.neg(y))
    inputs = [torch.randint(-9, 9, (4, n, 6)).to(getattr(torch, dtype.value)) for n, _, dtype in made]
    for found, x in zip(fd.simulate(inputs, check_replicas=True, check_streams=True), inputs, strict=True):
        assert torch.equal(found, -x.sum(0))
    if all(n == 12 for n, _, _ in made):  # others may come there by way of another dim
        assert len(collectives(fd)) == len({(axis, dtype) for _, axis, dtype in made})


def layers(count: int, scale: int) -> mf.FusionDefinition:
    """Layers whose weights, biases and scales are all split (FSDP), the small ones with casts."""
    with mf.FusionDefinition() as fd:
        x = fd.define_tensor([8192, scale])
        fd.mesh_split(x, MESH, [["dp", "tp"], None])
        for _ in range(count):
            w, *small = (fd.define_tensor(shape) for shape in ([scale, scale], [scale], [scale], [scale]))
            for t in (w, *small):
                fd.mesh_split(t, MESH, [["dp", "tp"], *[None] * (len(t.shape()) - 1)])
            a, b, c = (fd.ops.cast(fd.ops.cast(t, mf.DataType.Double), mf.DataType.Float) for t in small)
            x = fd.ops.add(fd.ops.tanh(fd.ops.linear(fd.ops.mul(x, a), w, b)), c)
            fd.mesh_split(x, MESH, [["dp", "tp"], None])
        fd.add_output(x)
    return fd


def test_what_a_layer_gathers_of_its_small_inputs_is_one_call():
    """Its weight, of more than a megabyte, is a call of its own; the small ones of about a layer are another."""
    fd = layers(1, 640)
    calls = [len(call.about.parts) or 1 for call in collectives(fd)]
    assert sorted(calls) == [1, 3], [call.about.tensor for call in collectives(fd)]


@pytest.mark.slow
def test_gathers_are_not_brought_together_over_a_whole_program():
    """They would be held for long."""
    fd = layers(40, 8)
    calls = [len(call.about.parts) or 1 for call in collectives(fd)]
    assert 40 // 16 <= len(calls) <= 40 and sum(calls) == len(fd.bill().entries)
