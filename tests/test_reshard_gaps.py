"""Reshards of sums whose ranks have blocks that lie apart: the terms may be scattered between those of other axes."""

from __future__ import annotations

import itertools
import math
from collections.abc import Iterator

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st

import meshfuse as mf
from meshfuse.reshard.prices import EXCHANGE_SECONDS, STEP_SECONDS
from meshfuse.reshard.search import plan
from meshfuse.sharding import layout as lay
from meshfuse.sharding.layout import Layout, Split
from meshfuse.sharding.value import Sharding
from test_reshard_properties import at_once, numbers

MESH = mf.DeviceMesh((2, 4), ("x", "y"), links=mf.Link(1e9, 0.0))
X, Y = Split(2, "x"), Split(4, "y")
SHAPE = (16, 8)


def layouts(axis: Split, n: int) -> Iterator[Layout]:
    """All even ways to have an axis on a dim of size n: with so many blocks of every rank before, and so many after."""
    steps = n // (axis.size or 1)
    for before in (k for k in range(1, steps + 1) if steps % k == 0):
        yield lay.canonical((Split(before), axis), n)


def scattered(src: Sharding) -> Iterator[Sharding]:
    """Where a reduce-scatter of the sum over y may leave it: a part of what each rank has, cut along any dim."""
    for dim, n in enumerate(SHAPE):
        parts = lay.padded(src.dims[dim], n)
        for place, split in enumerate(parts):
            steps = (split.size or 1) // 4 if not split.bound and (split.size or 1) % 4 == 0 else 0
            for major in (k for k in (1, steps) if steps):
                cut = (Split(major), Y, Split(steps // major))
                dims = [*src.dims]
                dims[dim] = lay.canonical((*parts[:place], *cut, *parts[place + 1 :]), n)
                yield Sharding.make(MESH, dims, SHAPE)


@st.composite
def cases(draw: st.DrawFn) -> tuple[Sharding, Sharding]:
    """A sum over y that lies over x, in blocks apart, and where it goes: over y, in other blocks, or to all."""
    dim = draw(st.integers(0, 1))
    dims: list[Layout] = [(), ()]
    dims[dim] = draw(st.sampled_from([*layouts(X, SHAPE[dim])]))
    ends: list[Layout] = [(), ()]
    if draw(st.booleans()):
        place = draw(st.integers(0, 1))
        ends[place] = draw(st.sampled_from([*layouts(Y, SHAPE[place])]))
    return Sharding.make(MESH, dims, SHAPE, (Y,), "sum"), Sharding.make(MESH, ends, SHAPE)


@given(cases())
def test_a_plan_costs_no_more_than_any_scatter_and_what_is_lacking_then(case: tuple[Sharding, Sharding]) -> None:
    src, dst = case
    found = plan(src, dst, SHAPE, 8)
    assert found is not None
    local = 8 * math.prod(SHAPE) / 2
    ways = [STEP_SECONDS + local * 3 / 4 / 1e9 + at_once(there, dst, SHAPE) for there in scattered(src)]
    assert ways and found.seconds <= min(ways) + 1e-11


PAIRS = [*itertools.product(layouts(X, 16), layouts(Y, 16))]


@pytest.mark.parametrize("there, dst", PAIRS)
def test_sums_scattered_between_blocks_are_right(there: Layout, dst: Layout) -> None:
    with mf.FusionDefinition() as fd:
        terms = fd.define_tensor([4, *SHAPE], dtype=mf.DataType.Double)
        total = fd.ops.sum(terms, [0])
        fd.add_output(total)
        fd.shard(terms, Sharding.make(MESH, ((Y,), there, ()), (4, *SHAPE)))
        fd.shard(total, Sharding.make(MESH, (dst, ()), SHAPE))
    value = numbers((4, *SHAPE))
    (found,) = fd.simulate([value], check_replicas=True)
    assert torch.equal(found, value.sum(0))


def test_a_sum_of_rows_that_lie_apart_is_scattered_between_them() -> None:
    """[(4, x)] becomes [(y, x)], and [y] by a gather, which moves less than what lies elsewhere in [(4, x, y)]."""
    found = plan(Sharding.make(MESH, ((Split(4), X), ()), (256, 128), (Y,), "sum"),
                 Sharding.make(MESH, ((Y,), ()), (256, 128)), (256, 128), 4)  # fmt: skip
    assert found is not None and found.wire == 65536 * 3 / 4 + 32768 / 2


SLOW, FAST = mf.Link(25e9, 0.0), mf.Link(450e9, 0.0)
HOSTS = mf.DeviceMesh((3, 4), ("host", "gpu"), links={"host": SLOW, "gpu": FAST})
H, G = Split(3, "host"), Split(4, "gpu")
PODS = mf.DeviceMesh((2, 2, 4), ("host", "pod", "gpu"), links={"host": SLOW, "pod": SLOW, "gpu": FAST})
POD_HOST, POD = Split(2, "host"), Split(2, "pod")


def seconds_over(steps: list[tuple[str, float]], nbytes: int) -> float:
    """Of what each rank sends over an axis, in parts of a tensor of so many bytes."""
    return sum(part * nbytes / (25e9 if axis == "host" else 450e9) for axis, part in steps)


def test_a_sum_over_hosts_and_their_ranks_is_scattered_where_it_stays() -> None:
    """Over the ranks of a host first, each a part of every host's block; then over hosts, and nothing has to move but
    to be put together.
    """
    shape = (24, 8)
    src = Sharding.make(HOSTS, [(), ()], shape, (H, G), "sum")
    found = plan(src, Sharding.make(HOSTS, [(H,), ()], shape), shape, 8)
    assert found is not None
    kinds = [step.kind.value for step in found.steps]
    assert kinds == ["reduce-scatter", "reduce-scatter", "all-gather"]
    least = seconds_over([("gpu", 3 / 4), ("host", 2 / 3 / 4), ("gpu", 3 / 4 / 3)], 24 * 8 * 8)
    assert found.seconds == pytest.approx(least + 3 * STEP_SECONDS, rel=1e-4)


@pytest.mark.parametrize("shared", [True, False])
def test_what_hosts_exchange_their_ranks_share(shared: bool) -> None:
    """Blocks of rows to blocks of others: a quarter of what lacks to each rank of a host, unless they have parts."""
    shape, columns = (16, 8), () if shared else (G,)
    first, last = (Sharding.make(PODS, [rows, columns], shape) for rows in ((POD_HOST, POD), (POD,)))
    found = plan(first, last, shape, 8)
    assert found is not None
    lacking = (at_once(first, last, shape) - EXCHANGE_SECONDS) * 25e9 / (16 * 8 * 8)
    steps = [("host", lacking / 4), ("gpu", 3 / 4 / 2)] if shared else [("host", lacking)]
    own = EXCHANGE_SECONDS + (STEP_SECONDS if shared else 0.0)
    assert found.seconds == pytest.approx(seconds_over(steps, 16 * 8 * 8) + own, rel=1e-3)
    assert len(found.steps) == (2 if shared else 1)


@pytest.mark.parametrize("dims", [[(H,), ()], [(), (H,)], [(G, H), ()], [(), ()]], ids=str)
@pytest.mark.parametrize("left", [(G,), (H, G)], ids=str)
def test_numbers_of_sums_over_fast_and_slow_axes(dims: list[Layout], left: tuple[Split, ...]) -> None:
    shape = (24, 12)
    with mf.FusionDefinition() as fd:
        terms = fd.define_tensor([12, *shape], dtype=mf.DataType.Double)
        total = fd.ops.sum(terms, [0])
        fd.add_output(total)
        rows = tuple(split for split in (G, H) if split not in left)
        fd.shard(terms, Sharding.make(HOSTS, (left, rows, ()), (12, *shape)))
        fd.shard(total, Sharding.make(HOSTS, dims, shape))
    value = numbers((12, *shape))
    (found,) = fd.simulate([value], check_replicas=True)
    assert torch.equal(found, value.sum(0))


def test_numbers_of_what_ranks_share_of_an_exchange() -> None:
    value = numbers((16, 8))
    with mf.FusionDefinition() as fd:
        x = fd.define_tensor([16, 8], dtype=mf.DataType.Double)
        y = fd.ops.set(x)
        fd.add_output(y)
        fd.mesh_split(x, PODS, [("host", "pod"), None])
        fd.mesh_split(y, PODS, ["pod", None])
    assert [step.step.kind.value for step in fd.compile().resharded.reshards] == ["permute", "all-gather"]
    (found,) = fd.simulate([value], check_replicas=True)
    assert torch.equal(found, value)


def test_what_stays_unreduced_over_a_fast_axis_is_shared_by_nobody() -> None:
    first, last = (Sharding.make(PODS, [rows, ()], (16, 8), (G,), "sum") for rows in ((POD_HOST, POD), (POD,)))
    found = plan(first, last, (16, 8), 8)
    assert found is not None and all(G not in step.dst.splits for step in found.steps)
