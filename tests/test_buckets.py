"""All-reduces that may be one call are one: how many calls a program makes, and that its results and bill stay."""

from __future__ import annotations

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st

import meshfuse as mf
from defining import collectives
from meshfuse.resharding.postpone import LARGEST, postponed

MESH = mf.DeviceMesh((2, 2), ("dp", "tp"))


def sums(sizes: list[int], axes: list[str], dtypes: list[mf.DataType]) -> mf.FusionDefinition:
    """Independent sums over a sharded dim, each an all-reduce of so many elements over an axis."""
    with mf.FusionDefinition() as fd:
        for n, axis, dtype in zip(sizes, axes, dtypes, strict=True):
            x = fd.define_tensor([4, n], dtype=dtype)
            fd.mesh_split(x, MESH, [axis, None])
            fd.add_output(fd.ops.sum(x, [0]))
    return fd


AXES = st.sampled_from(["dp", "tp"])
DTYPES = st.sampled_from([mf.DataType.Float, mf.DataType.Double])


@given(st.lists(st.tuples(st.sampled_from([1, 7, 40]), AXES, DTYPES), min_size=1, max_size=8))
def test_independent_reductions_are_one_call_per_axis_and_dtype(made):
    sizes, axes, dtypes = (list(column) for column in zip(*made, strict=True))
    fd = sums(sizes, axes, dtypes)
    assert len(collectives(fd)) == len({(axis, dtype) for _, axis, dtype in made})
    inputs = [torch.randn(4, n, dtype=getattr(torch, d.value)) for n, d in zip(sizes, dtypes, strict=True)]
    for found, x in zip(fd.simulate(inputs, check_replicas=True), inputs, strict=True):
        torch.testing.assert_close(found, x.sum(0))


@given(st.lists(st.tuples(st.sampled_from([1, 7, 40]), AXES, DTYPES), min_size=1, max_size=8))
def test_the_programs_bytes_are_the_bills(made):
    fd = sums(*(list(column) for column in zip(*made, strict=True)))
    told = [(c.tensor, c.wire) for c in fd.host_program(0).communications]
    billed = [(entry.tensor, entry.wire) for entry in fd.bill().entries]
    assert sorted(told) == sorted(billed)
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
    order = postponed(resharded)
    assert sorted(map(str, order)) == sorted(map(str, resharded.steps))
    known = set(resharded.inputs)
    for step in order:
        assert known.issuperset(step.inputs)
        known.update(step.outputs)
