"""Resharding: any sharding to any other, by moves that cost no more than a search over more moves finds."""

from __future__ import annotations

import heapq
import itertools
import math
from collections import Counter
from collections.abc import Iterable, Iterator
from typing import Any

import pytest
import torch
from hypothesis import assume, given, settings
from hypothesis import strategies as st

import meshfuse as mf
from meshfuse.costs import BYTES_ONLY
from meshfuse.executor import simulate
from meshfuse.reshard import bounds
from meshfuse.reshard import search as planner
from meshfuse.reshard.atoms import cuts_of
from meshfuse.reshard.prices import EXCHANGE_SECONDS, STEP_SECONDS
from meshfuse.reshard.search import plan
from meshfuse.reshard.steps import mean_wire_elements, wire_elements
from meshfuse.resharding import Reshard
from meshfuse.sharding import Sharding, Split
from meshfuse.sharding.layout import Layout
from meshfuse.testing import dim_layouts, meshes, shardings

SHAPES = st.lists(st.integers(0, 8), min_size=1, max_size=3).map(tuple)
REDUCTIONS = {"sum": torch.sum, "prod": torch.prod, "max": torch.amax, "min": torch.amin}


def numbers(shape: tuple[int, ...]) -> torch.Tensor:
    return torch.arange(1, math.prod(shape) + 1, dtype=torch.float64).reshape(shape)


class CountingHub(simulate.Hub):
    """The transport, with the bytes that each rank puts on the wire counted as rings do."""

    def __init__(self) -> None:
        super().__init__()
        self.bytes: Counter[int] = Counter()

    def arrive(self, group: Any, number: int, kind: str, arguments: tuple[Any, ...]) -> Any:
        tensor, n = arguments[1 if kind == "all_to_all" else 0], group.size
        if kind == "all_to_all":
            leaving = sum(size for place, size in enumerate(arguments[3]) if place != group.index)
        else:
            leaving = {"all_reduce": 2, "all_gather": 1}[kind] * tensor.numel() * (n - 1) / n
        self.bytes[group.ranks[group.index]] += leaving * tensor.element_size()
        return super().arrive(group, number, kind, arguments)

    def send(self, group: Any, tensor: torch.Tensor, target: int) -> Any:
        self.bytes[group.ranks[group.index]] += tensor.numel() * tensor.element_size()
        return super().send(group, tensor, target)


@pytest.fixture(scope="module", autouse=True)
def counting() -> Iterator[None]:
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(simulate, "Hub", CountingHub)
        yield


def run(fd: mf.FusionDefinition, value: torch.Tensor) -> torch.Tensor:
    """The output, with the bytes on the wire compared with the bill."""
    (found,) = fd.simulate([value], check_replicas=True)
    (made,) = fd._execution.simulated.values()
    compiled, counted = made.compiled, made.simulation.hub.bytes
    resharded = compiled.resharded
    for reshard in resharded.collectives:
        shape = resharded.type_of(reshard.source).shape
        each = [wire_elements(reshard.step, shape, rank) for rank in reshard.step.src.mesh.ranks]
        assert mean_wire_elements(reshard.step, shape) * reshard.step.src.mesh.size == pytest.approx(sum(each))
    for rank in compiled.ranks:
        billed = 0.0
        for statement in resharded.statements:
            if isinstance(statement, Reshard) and rank in (
                *statement.step.src.mesh.ranks,
                *statement.step.dst.mesh.ranks,
            ):
                ttype = compiled.graph.tensors[resharded.values[statement.source].tensor].type
                billed += wire_elements(statement.step, ttype.shape, rank) * ttype.dtype.itemsize
        assert billed == pytest.approx(counted[rank]), f"rank {rank}\n{resharded}"
    return found


def moved(src: Sharding, dst: Sharding, shape: tuple[int, ...]) -> None:
    """Simulate the reshard of a tensor and compare."""
    fd = mf.FusionDefinition()
    x = fd.define_tensor(list(shape), dtype=mf.DataType.Double)
    y = fd.ops.set(x)
    fd.add_output(y)
    fd.shard(x, src)
    fd.shard(y, dst)
    value = numbers(shape)
    assert torch.equal(run(fd, value), value)


@pytest.mark.slow
@settings(max_examples=90)
@given(st.data())
def test_any_sharding_to_any_other_on_one_mesh(data: st.DataObject) -> None:
    mesh, shape = data.draw(meshes()), data.draw(SHAPES)
    src, dst = data.draw(shardings(shape, mesh)), data.draw(shardings(shape, mesh))
    moved(src, dst, shape)


PARTS_OF_6 = [Split(2, "x"), Split(3, "x"), Split(6, "x"), Split(3, "x", 2), Split(2, "x", 3)]
HALVES, THIRDS = (Split(2, "x"), Split(3, "x", 2)), (Split(3, "x"), Split(2, "x", 3))
LAYOUTS_OF_6 = [*((part,) for part in PARTS_OF_6), HALVES, HALVES[::-1], THIRDS, THIRDS[::-1]]


@pytest.mark.sampled(2)
@pytest.mark.parametrize("src", LAYOUTS_OF_6, ids=str)
@pytest.mark.parametrize("dst", LAYOUTS_OF_6, ids=str)
@pytest.mark.parametrize("places", [(0, 0), (0, 1)], ids=["in place", "to another dim"])
def test_any_part_of_an_axis_to_any_other(src: Layout, dst: Layout, places: tuple[int, int]) -> None:
    """Halves and thirds of an axis of 6, major and minor: no cutting of the axis has both."""
    mesh, shape = mf.DeviceMesh((6, 2), ("x", "y")), (12, 7)
    ends = [[layout if d == place else () for d in range(2)] for layout, place in zip((src, dst), places, strict=True)]
    ends[1][1] += (Split(2, "y"),)
    moved(*(Sharding.make(mesh, dims, shape) for dims in ends), shape)


@pytest.mark.parametrize("term", PARTS_OF_6, ids=str)
@pytest.mark.parametrize("dst", PARTS_OF_6, ids=str)
def test_terms_on_any_part_of_an_axis_to_a_sum_on_any_other(term: Split, dst: Split) -> None:
    mesh, shape = mf.DeviceMesh((6,), ("x",)), (12, 5)
    src, target = Sharding.make(mesh, [()], shape[1:], (term,), "sum"), Sharding.make(mesh, [(dst,)], shape[1:])
    found = plan(src, target, shape[1:], 8)
    assert found is not None and found.steps[-1].dst == target
    fd = mf.FusionDefinition()
    x = fd.define_tensor(list(shape), dtype=mf.DataType.Double)
    y = fd.ops.sum(x, [0])
    fd.add_output(y)
    fd.shard(x, Sharding.make(mesh, [(term,), ()], shape))
    fd.shard(y, target)
    assert torch.equal(run(fd, numbers(shape)), numbers(shape).sum(0))


@pytest.mark.slow
@settings(max_examples=72)
@given(st.data())
def test_any_sharding_to_any_other_on_a_mesh_of_other_ranks(data: st.DataObject) -> None:
    """Other ranks, some of the same, or the same ranks in another order."""
    mesh, shape = data.draw(meshes(max_ranks=6)), data.draw(SHAPES)
    other = data.draw(meshes(max_ranks=6, first_rank=data.draw(st.sampled_from([6, 3, 0]))))
    moved(data.draw(shardings(shape, mesh)), data.draw(shardings(shape, other)), shape)


@pytest.mark.slow
@settings(max_examples=72)
@given(st.data(), st.sampled_from(sorted(REDUCTIONS)))
def test_any_partial_value_to_any_sharding(data: st.DataObject, reduce: str) -> None:
    """The reduction dim is split over some axes, kept dims over others, and the result wanted anywhere."""
    mesh = data.draw(meshes())
    shape = (data.draw(st.integers(1, 6)), *data.draw(SHAPES))
    fd = mf.FusionDefinition()
    x = fd.define_tensor(list(shape), dtype=mf.DataType.Double)
    y = fd.call(reduce, (x, [0]))
    fd.add_output(y)
    fd.mesh_split(x, mesh, [list(layout) or None for layout in data.draw(dim_layouts(mesh, shape))])
    target = mesh if data.draw(st.integers(0, 3)) else data.draw(meshes(first_rank=4))
    fd.shard(y, data.draw(shardings(shape[1:], target)))
    value = numbers(shape) % 5 - 2
    torch.testing.assert_close(run(fd, value), REDUCTIONS[reduce](value, 0), rtol=1e-12, atol=1e-12)


@pytest.mark.slow
@settings(max_examples=54)
@given(st.data())
def test_a_reduction_forced_over_mesh_axes(data: st.DataObject) -> None:
    """nvFuser's DIDs on the reduction dim of the result: the terms of every rank are reduced."""
    mesh, shape = data.draw(meshes()), (data.draw(st.integers(2, 9)), *data.draw(SHAPES))
    fd = mf.FusionDefinition()
    x = fd.define_tensor(list(shape), dtype=mf.DataType.Double)
    y = fd.ops.sum(x, [0])
    z = fd.ops.set(y)
    fd.add_output(z)
    y.set_device_mesh(mesh)
    y.outer_split(0, mesh.shape[-1])
    y.axis(0).parallelize(mf.ParallelType.mesh_x)
    fd.shard(z, data.draw(shardings(shape[1:], mesh)))
    value = numbers(shape)
    assert torch.equal(run(fd, value), value.sum(0))
    partial = fd.compile().resharded.values
    assert mesh.shape[-1] == 1 or any(v.sharding.partial for v in partial)


# cost -------------------------------------------------------------------------------------------------------

# A state of the independent search: per dim the axes that split it, major to minor. All sizes divide.
State = tuple[tuple[str, ...], ...]


def steps(state: State, shape: tuple[int, ...], mesh: mf.DeviceMesh) -> Iterator[tuple[float, State]]:
    """Every gather, slice and all-to-all of one minor axis of a dim, and its seconds on the axis' link."""
    local = math.prod(shape) * 8 / math.prod(mesh.axis_size(a) for dim in state for a in dim)
    used = {a for dim in state for a in dim}
    for axis in set(mesh.names) - used:
        yield from ((0.0, placed) for placed in placements(state, axis))
    for d, dim in enumerate(state):
        if dim:
            n, without = mesh.axis_size(dim[-1]), (*state[:d], dim[:-1], *state[d + 1 :])
            alpha, beta = link_over(mesh, {dim[-1]})
            yield STEP_SECONDS + alpha * math.ceil(math.log2(n)) + beta * (n - 1) * local, without
            for placed in placements(without, dim[-1]):
                yield STEP_SECONDS + alpha * (n - 1) + beta * (n - 1) / n * local, placed


def link_over(mesh: mf.DeviceMesh, axes: Iterable[str]) -> tuple[float, float]:
    """Seconds per start and per byte: of the slowest of the axes."""
    found = [link for name, link in zip(mesh.names, mesh.links, strict=True) if name in axes]
    return max(link.latency for link in found), 1 / min(link.bandwidth for link in found)


def at_once(src: Sharding, dst: Sharding, shape: tuple[int, ...]) -> float:
    """Seconds to send every rank exactly what it lacks, among the ranks that differ along an axis of either."""
    axes = {split.axis for s in (src, dst) for split in s.splits if split.axis}
    if not axes:
        return 0.0
    alpha, beta = link_over(src.mesh, axes)
    peers = math.prod(map(src.mesh.axis_size, axes)) - 1
    return EXCHANGE_SECONDS + alpha * peers + beta * 8 * lacking(src, dst, shape)


def placements(state: State, axis: str) -> Iterator[State]:
    for d, dim in enumerate(state):
        yield (*state[:d], (*dim, axis), *state[d + 1 :])


def reductions(
    state: State, left: frozenset[str], shape: tuple[int, ...], mesh: mf.DeviceMesh
) -> Iterator[tuple[float, State, frozenset[str]]]:
    """Every all-reduce of some unreduced axes and reduce-scatter of one, and its seconds."""
    local = math.prod(shape) * 8 / math.prod(mesh.axis_size(a) for dim in state for a in dim)
    for axis in left:
        n, (_, beta) = mesh.axis_size(axis), link_over(mesh, {axis})
        scatter = STEP_SECONDS + beta * local * (n - 1) / n
        yield from ((scatter, placed, left - {axis}) for placed in placements(state, axis))
    for count in range(1, len(left) + 1):
        for axes in itertools.combinations(sorted(left), count):
            n, (_, beta) = math.prod(map(mesh.axis_size, axes)), link_over(mesh, axes)
            yield STEP_SECONDS + beta * 2 * local * (n - 1) / n, state, left.difference(axes)


def shared(state: State, mesh: mf.DeviceMesh) -> set[State]:
    """The state, and with idle axes on its dims."""
    found = {state}
    for axis in set(mesh.names).difference(itertools.chain(*state)):
        found |= {placed for other in found for placed in placements(other, axis)}
    return found


def cheapest(
    src: State, dst: State, shape: tuple[int, ...], mesh: mf.DeviceMesh, left: frozenset[str] = frozenset()
) -> float:
    """Dijkstra over all states, `left` the axes that the first is unreduced over; from each that is reduced everything
    that is lacking may be sent at once, also in parts to ranks that share what they put together after.
    """
    order, ends = itertools.count(), {state: sharding(mesh, state, shape) for state in shared(dst, mesh)}
    queue, done = [(0.0, next(order), src, left)], set[tuple[State, frozenset[str]]]()
    while queue:
        seconds, _, state, left = heapq.heappop(queue)
        if (state, left) == (dst, frozenset()):
            return seconds
        if (state, left) not in done:
            done.add((state, left))
            free = ((more, to, left) for more, to in steps(state, shape, mesh) if left.isdisjoint(itertools.chain(*to)))
            sent = ((at_once(sharding(mesh, state, shape), end, shape), to, left) for to, end in ends.items())
            for more, *to in itertools.chain(free, () if left else sent, reductions(state, left, shape, mesh)):
                heapq.heappush(queue, (seconds + more, next(order), *to))
    raise AssertionError("every state is within reach")


def states(draw: st.DrawFn, names: tuple[str, ...], ndim: int) -> State:
    dims: list[tuple[str, ...]] = [()] * ndim
    for axis in draw(st.permutations(names)):
        d = draw(st.integers(0, ndim))
        if d:
            dims[d - 1] = (*dims[d - 1], axis)
    return tuple(dims)


LINKS = (BYTES_ONLY, mf.Link(450e9, 1e-9), mf.Link(1e9, 0.0))
SPEEDS = st.sampled_from([1e9, 3e9, 18e9])


@st.composite
def links_of_any_speed(draw: st.DrawFn, names: tuple[str, ...]) -> dict[str, mf.Link]:
    """Without latency: bytes decide."""
    speeds = [draw(SPEEDS)] * len(names) if draw(st.booleans()) else [draw(SPEEDS) for _ in names]
    return {name: mf.Link(speed, 0.0) for name, speed in zip(names, speeds, strict=True)}


@st.composite
def cost_cases(draw: st.DrawFn) -> tuple[mf.DeviceMesh, tuple[int, ...], State, State]:
    sizes = draw(st.lists(st.sampled_from([2, 3]), min_size=1, max_size=3))
    names = ("dp", "tp", "cp")[: len(sizes)]
    mesh = mf.DeviceMesh(tuple(sizes), names, links=draw(st.sampled_from(LINKS) | links_of_any_speed(names)))
    shape = tuple(mesh.size * n for n in draw(st.lists(st.integers(1, 2), min_size=1, max_size=3)))
    return mesh, shape, states(draw, mesh.names, len(shape)), states(draw, mesh.names, len(shape))


def sharding(mesh: mf.DeviceMesh, state: State, shape: tuple[int, ...]) -> Sharding:
    return Sharding.make(mesh, [tuple(Split(mesh.axis_size(a), a) for a in dim) for dim in state], shape)


@pytest.mark.slow
@settings(max_examples=54)
@given(cost_cases())
def test_a_plan_costs_no_more_than_a_search_over_all_layouts_finds(
    case: tuple[mf.DeviceMesh, tuple[int, ...], State, State],
) -> None:
    mesh, shape, first, last = case
    src, dst = sharding(mesh, first, shape), sharding(mesh, last, shape)
    found = plan(src, dst, shape, 8)
    assert found is not None
    starts = mesh.size * max(link.latency for link in mesh.links) + 1e-11
    assert found.seconds <= cheapest(first, last, shape, mesh) + starts


@st.composite
def unreduced_cases(draw: st.DrawFn) -> tuple[mf.DeviceMesh, tuple[int, ...], State, frozenset[str], State]:
    sizes = draw(st.lists(st.sampled_from([2, 3]), min_size=1, max_size=3))
    names = ("dp", "tp", "cp")[: len(sizes)]
    mesh = mf.DeviceMesh(tuple(sizes), names, links=draw(links_of_any_speed(names)))
    shape = (mesh.size,) * draw(st.integers(1, 3))
    first, last = states(draw, names, len(shape)), states(draw, names, len(shape))
    left = draw(st.sets(st.sampled_from(names)))
    return mesh, shape, first, frozenset(left.difference(*first)), last


@pytest.mark.slow
@settings(max_examples=63)
@given(unreduced_cases())
def test_a_plan_of_an_unreduced_tensor_costs_no_more_than_a_search_over_all_layouts_finds(
    case: tuple[mf.DeviceMesh, tuple[int, ...], State, frozenset[str], State],
) -> None:
    """Also where replicas can share the work, and where slow axes want fewer bytes than fast ones."""
    mesh, shape, first, left, last = case
    whole, terms = sharding(mesh, first, shape), tuple([Split(mesh.axis_size(a), a) for a in sorted(left)])
    src = Sharding.make(mesh, whole.dims, shape, terms, "sum") if left else whole
    found = plan(src, sharding(mesh, last, shape), shape, 8)
    assert found is not None
    assert found.seconds <= cheapest(first, last, shape, mesh, left) * (1 + 1e-6) + 1e-11


@pytest.mark.parametrize(("terms", "replicas"), [(3, 2), (4, 2), (8, 8)])
def test_replicas_each_reduce_a_part_of_their_own(terms: int, replicas: int) -> None:
    mesh, shape = mf.DeviceMesh((terms, replicas), ("dp", "tp")), (64 * 3, 64)
    found = plan(
        Sharding.make(mesh, [(), ()], shape, (Split(terms, "dp"),), "sum"), sharding(mesh, ((), ()), shape), shape, 4
    )
    assert found is not None
    assert found.wire == pytest.approx(4 * math.prod(shape) * (1 + (terms - 2) / (terms * replicas)))


def lacking(src: Sharding, dst: Sharding, shape: tuple[int, ...]) -> float:
    """The elements that a rank needs and does not hold, on the average."""
    total = 0.0
    for rank in src.mesh.ranks:
        have, need = src.runs(shape, rank), dst.runs(shape, rank)
        held = [{i for a, b in runs for i in range(a, b)} for runs in have]
        wanted = [{i for a, b in runs for i in range(a, b)} for runs in need]
        total += math.prod(map(len, wanted)) - math.prod(len(h & w) for h, w in zip(held, wanted, strict=True))
    return total / src.mesh.size


@pytest.mark.slow
@settings(max_examples=72)
@given(st.data())
def test_a_plan_sends_what_is_lacking_and_no_more_than_sending_exactly_that_costs(
    data: st.DataObject,
) -> None:
    mesh, shape = data.draw(meshes(min_ranks=2)), data.draw(SHAPES)
    src, dst = data.draw(shardings(shape, mesh)), data.draw(shardings(shape, mesh))
    found = plan(src, dst, shape, 8)
    assume(found is not None)
    needed = 8 * lacking(src, dst, shape)
    sent = 8 * sum(wire_elements(m, shape, rank) for m in found.steps for rank in mesh.ranks) / mesh.size
    assert sent >= needed - 1e-6
    assert found.seconds <= at_once(src, dst, shape) + 1e-11
    if sent == 0:
        assert needed == 0


def with_one_fast_axis(mesh: mf.DeviceMesh, fast: int) -> mf.DeviceMesh:
    """The mesh with links of three speeds, one of its axes the fastest."""
    speeds = [450e9 if place == fast % len(mesh.names) else 1e9 * (1 + place) for place in range(len(mesh.names))]
    links = {name: mf.Link(speed, 5e-6) for name, speed in zip(mesh.names, speeds, strict=True)}
    return mf.DeviceMesh(mesh.shape, mesh.names, links=links)


@pytest.mark.slow
@settings(max_examples=63)
@given(st.data(), st.lists(st.sampled_from([1024, 4096, 6144, 12288]), min_size=1, max_size=3).map(tuple))
def test_a_large_tensor_takes_no_more_memory_on_its_way_than_at_its_ends(data: st.DataObject, shape: Any) -> None:
    mesh = with_one_fast_axis(data.draw(meshes(min_ranks=2)), data.draw(st.integers(0, 2)))
    src, dst = data.draw(shardings(shape, mesh)), data.draw(shardings(shape, mesh))
    found = plan(src, dst, shape, 4)
    assume(found is not None)
    room = max(4 * src.max_local_numel(shape), 4 * dst.max_local_numel(shape), planner.ROOM)
    assert all(4 * step.dst.max_local_numel(shape) <= room for step in found.steps)


@pytest.mark.slow
@settings(max_examples=54)
@given(st.data())
def test_any_sharding_to_any_other_with_no_room(data: st.DataObject) -> None:
    """The bound leaves a way to everywhere, sums included, and the numbers right."""
    mesh, shape = data.draw(meshes()), data.draw(SHAPES)
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(planner, "ROOM", 0)
        plan.cache_clear()
        moved(data.draw(shardings(shape, mesh)), data.draw(shardings(shape, mesh)), shape)
    plan.cache_clear()


_LINKS = st.builds(mf.Link, st.sampled_from([25e9, 50e9, 450e9]), st.sampled_from([0.0, 2e-12, 5e-6, 20e-6]))


@pytest.mark.slow
@settings(max_examples=72)
@given(st.data())
def test_what_is_left_takes_no_less_than_the_bound_on_it(data: st.DataObject) -> None:
    """A search without a bound finds nothing cheaper: on links of any speed, of sums, blocks even or not. Paths that
    differ by less than a part of a move count as one.
    """
    grid = data.draw(meshes(min_ranks=2))
    links = {name: data.draw(_LINKS) for name in grid.names}
    mesh = mf.DeviceMesh(grid.shape, grid.names, ranks=grid.ranks, links=links)
    shape = tuple(data.draw(st.lists(st.sampled_from([1, 3, 8, 12, 64, 100, 4096]), min_size=1, max_size=3)))
    ends = [data.draw(shardings(shape, mesh)) for _ in range(2)]
    free = [Split(n, name) for n, name in zip(mesh.shape, mesh.names, strict=True)
            if all(split.axis != name for split in ends[0].splits)]  # fmt: skip
    src = Sharding.make(mesh, ends[0].dims, shape, data.draw(st.sampled_from([(), tuple(free)])), "sum")
    # Between others there is one exchange, and no search.
    assume(all(map(planner.nested, cuts_of((src, ends[1])).by_axis.values())))
    bounded, plain = (planner._PlanSearch(src, ends[1], shape, 4, room=0) for _ in range(2))
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(bounds.Bound, "seconds", lambda self, state: 0.0)
        least = plain.run()
    found = bounded.run()
    assert found is not None and least is not None
    assert found.seconds == pytest.approx(least.seconds, rel=1e-12, abs=2e-14)
    assert bounds.at_least(src, ends[1], shape, 4) <= least.seconds


def plan_is_that_of_its_sizes(src: Sharding, dst: Sharding, shape: tuple[int, ...]) -> None:
    """Where the plan is that of other sizes, it costs what its own does, down to the number of moves."""
    itemsize = max(1, (planner.ROOM >> 2) // math.prod(shape))
    assume(planner._alike(src, dst, shape, itemsize) is not None)
    assume(all(map(planner.nested, cuts_of((src, dst)).by_axis.values())))
    found, searched = plan(src, dst, shape, itemsize), planner._PlanSearch(src, dst, shape, itemsize, room=0).run()
    assert found is not None and searched is not None
    assert found.seconds == pytest.approx(searched.seconds, rel=1e-12, abs=5e-14)


@pytest.mark.slow
@settings(max_examples=54)
@given(st.data())
def test_sizes_that_stand_for_others_have_their_plan(data: st.DataObject) -> None:
    mesh = data.draw(meshes(min_ranks=2))
    shape = tuple([mesh.size * data.draw(st.sampled_from([1, 5, 16])) for _ in range(data.draw(st.integers(1, 4)))])
    src, dst = data.draw(shardings(shape, mesh)), data.draw(shardings(shape, mesh))
    free = [Split(n, name) for n, name in zip(mesh.shape, mesh.names, strict=True)
            if all(split.axis != name for split in src.splits)]  # fmt: skip
    terms = data.draw(st.sampled_from([(), tuple(free)]))
    plan_is_that_of_its_sizes(Sharding.make(mesh, src.dims, shape, terms, "sum"), dst, shape)


@pytest.mark.parametrize("dim", range(4))
@pytest.mark.parametrize(("term", "axis"), [("x", "y"), ("y", "x")])
def test_sizes_that_stand_for_large_ones_have_their_plan(term: str, axis: str, dim: int) -> None:
    """Few moves still count beside what very large tensors take."""
    mesh, shape = mf.DeviceMesh((2, 3), ("x", "y")), (12, 384, 12, 96)
    dims = [(Split(mesh.axis_size(axis), axis),) if d == dim else () for d in range(4)]
    terms = (Split(mesh.axis_size(term), term),)
    plan_is_that_of_its_sizes(Sharding.make(mesh, dims, shape, terms, "sum"), Sharding.replicated(mesh, 4), shape)


def test_an_axis_moves_to_another_dim_without_replicating_the_tensor() -> None:
    mesh, shape = mf.DeviceMesh((2, 4), ("dp", "tp")), (64, 64)
    src = sharding(mesh, (("dp", "tp"), ()), shape)
    dst = sharding(mesh, ((), ("dp", "tp")), shape)
    found = plan(src, dst, shape, 8)
    assert found is not None
    assert all(any(step.dst.dims) for step in found.steps)
    assert found.wire <= 8 * 64 * 64 / 8
