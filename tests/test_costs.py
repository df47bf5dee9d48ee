"""Links, the times of collectives against schedules played through step by step, and plans that follow the links."""

from __future__ import annotations

import enum
import itertools
import math
import pickle
from collections.abc import Callable, Sequence
from fractions import Fraction
from typing import Any

import numpy as np
import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

import meshfuse as mf
from defining import graph_of, rebuilt
from meshfuse import costs
from meshfuse.lowering.durations import CostModel
from meshfuse.reshard.prices import link_over, price
from meshfuse.reshard.search import plan
from meshfuse.reshard.steps import StepKind
from meshfuse.sharding import Sharding, Split
from meshfuse.testing import meshes, shardings

FAST, SLOW = mf.Link(450e9, 5e-6), mf.Link(25e9, 20e-6)
LINKS = {"dp": SLOW, "tp": FAST}


# collectives ------------------------------------------------------------------------------------------------------


def gathered_by_ring(n: int) -> tuple[int, float]:
    """(steps, share of the tensor that a rank sends) of a ring all-gather, played through."""
    held = [{rank} for rank in range(n)]
    steps, sent = 0, 0
    while any(len(blocks) < n for blocks in held):
        passed = [(rank - steps) % n for rank in range(n)]
        for rank in range(n):
            assert passed[rank] in held[rank]
            held[(rank + 1) % n].add(passed[rank])
        steps, sent = steps + 1, sent + 1
    return steps, sent / n


def gathered_by_doubling(n: int) -> tuple[int, float]:
    """The same of Bruck's all-gather: at step k a rank sends what it has, and is lacking there, 2^k ranks on."""
    held = [{rank} for rank in range(n)]
    steps, sent = 0, 0
    while any(len(blocks) < n for blocks in held):
        lacking = [sorted(held[rank] - held[(rank - 2**steps) % n]) for rank in range(n)]
        for rank in range(n):
            held[(rank - 2**steps) % n] |= set(lacking[rank])
        steps, sent = steps + 1, sent + max(map(len, lacking))
    return steps, sent / n


@given(st.integers(2, 40), st.floats(1, 1e9), st.sampled_from([FAST, SLOW, costs.BYTES_ONLY]))
def test_gathers_scatters_and_all_reduces_take_the_best_known_schedule(n: int, nbytes: float, link: mf.Link) -> None:
    played = [link.seconds(steps, sent * nbytes) for steps, sent in (gathered_by_ring(n), gathered_by_doubling(n))]
    assert costs.all_gather(link, n, nbytes) == pytest.approx(min(played))
    assert costs.reduce_scatter(link, n, nbytes) == pytest.approx(min(played))  # the same, backwards in time
    doubled = math.ceil(math.log2(n)) * link.seconds(1, nbytes)
    assert costs.all_reduce(link, n, nbytes) == pytest.approx(min(2 * min(played), doubled))


@given(st.integers(2, 40), st.floats(1, 1e9))
def test_an_all_to_all_costs_the_cheaper_of_two_algorithms(n: int, nbytes: float) -> None:
    pairwise = sum(SLOW.seconds(1, nbytes / n) for _ in range(n - 1))
    rounds = math.ceil(math.log2(n))
    assert costs.all_to_all(SLOW, n, nbytes) == pytest.approx(min(pairwise, rounds * SLOW.seconds(1, nbytes / 2)))
    assert costs.exchange(SLOW, n, nbytes) == pytest.approx((n - 1) * SLOW.latency + nbytes / SLOW.bandwidth)
    assert costs.permute(SLOW, nbytes) == SLOW.latency + nbytes / SLOW.bandwidth


@pytest.mark.parametrize("form", [costs.all_gather, costs.reduce_scatter, costs.all_reduce, costs.all_to_all])
def test_one_rank_communicates_nothing(form: Callable[[mf.Link, int, float], float]) -> None:
    assert form(SLOW, 1, 1e6) == 0


@given(st.lists(st.builds(mf.Link, st.floats(1e6, 1e12), st.floats(0, 1e-3)), min_size=1, max_size=4))
def test_several_axes_go_at_the_slowest_of_each(links: list[mf.Link]) -> None:
    found = costs.slowest(links)
    assert found.bandwidth == min(link.bandwidth for link in links)
    assert found.latency == max(link.latency for link in links)


def test_computation_takes_the_peak_rate() -> None:
    assert costs.computation(2e12, 1e9, 989e12, 3e12) == 2e12 / 989e12
    assert costs.computation(2e9, 1e9, 989e12, 3e12) == 1e9 / 3e12


# meshes -----------------------------------------------------------------------------------------------------------


def test_the_link_of_several_axes_is_the_slowest() -> None:
    mesh = mf.DeviceMesh((2, 4), ("dp", "tp"), links=LINKS)
    assert mesh.links == (SLOW, FAST) and not mesh.uniform
    assert mesh.link(("tp",)) == FAST and mesh.link(("dp", "tp")) == mesh.link(()) == SLOW
    assert link_over(mesh, (Split(2, "tp", 2),)) == FAST
    assert link_over(mesh, (Split(2, "dp"), Split(4, "tp"))) == SLOW
    assert mf.DeviceMesh((2, 4), ("dp", "tp"), links=FAST).links == (FAST, FAST)
    assert mf.DeviceMesh((1, 4), ("dp", "tp"), links={"tp": FAST}).link(("tp",)) == FAST


def test_a_machine_tells_which_axes_leave_a_host() -> None:
    machine = costs.DGX_H100
    assert mf.DeviceMesh((2, 8), ("dp", "tp"), links="dgx-h100").links == (machine.between, machine.inside)
    assert mf.DeviceMesh((2, 4), ("dp", "tp"), links=machine).links == (machine.inside,) * 2
    assert mf.DeviceMesh((4, 8), ("dp", "tp"), links=machine).flops == machine.flops
    across = [[0, 8], [1, 9]]
    assert mf.DeviceMesh(across, ("dp", "tp"), links=machine).links == (machine.inside, machine.between)
    for made in [machine for name, machine in costs.MACHINES.items() if name != "bytes"]:
        assert made.inside.bandwidth > made.between.bandwidth and made.inside.latency < made.between.latency


def test_equal_meshes_have_equal_links() -> None:
    plain, linked = mf.DeviceMesh((2, 4), ("dp", "tp")), mf.DeviceMesh((2, 4), ("dp", "tp"), links=LINKS)
    assert plain != linked and plain.grid == linked.grid
    assert plain == mf.DeviceMesh((2, 4), ("dp", "tp"), links=costs.BYTES_ONLY)
    assert mf.DeviceMesh((2,), ("tp",)) != mf.DeviceMesh((2,), ("tp",), flops=1e12)
    assert Sharding.replicated(plain, 1) is not Sharding.replicated(linked, 1)


class Axis(str, enum.Enum):
    """A name that is printed otherwise."""

    DP = "dp"
    TP = "tp"


COSTS = [
    {}, {"links": costs.BYTES_ONLY}, {"flops": costs.BYTES_ONLY_FLOPS}, {"links": LINKS}, {"links": FAST},
    {"links": mf.Link(123456789, 0)}, {"links": mf.Link(123456789.0, 0.0)},
    {"links": mf.Link(np.float64(123456789), np.float32(0))}, {"links": mf.Link(Fraction(123456789), -0.0)},
    {"flops": int(costs.BYTES_ONLY_FLOPS)}, {"links": FAST, "flops": np.float32(1e12)},
    {"links": FAST, "flops": float(np.float32(1e12))},
]  # fmt: skip
NAMES = [("dp", "tp"), [Axis.DP, Axis.TP], tuple(map(np.str_, ("dp", "tp")))]


@pytest.mark.parametrize("names", NAMES, ids=["str", "enum", "numpy"])
def test_equal_meshes_are_the_same_to_a_plan(names: Sequence[str]) -> None:
    """Shardings are looked up by their mesh: an equal one made before must differ in nothing that plans see."""
    made = [mf.DeviceMesh(np.int64([[0, 1], [2, 3]]), given, **more) for given in (names, NAMES[0]) for more in COSTS]
    for mesh, other in itertools.combinations(made, 2):
        if mesh == other:
            assert (repr(mesh), mesh.linked, pickle.dumps(mesh)) == (repr(other), other.linked, pickle.dumps(other))
            assert CostModel.of([mesh]) == CostModel.of([other])
    for mesh in made:
        assert eval(repr(mesh), {"DeviceMesh": mf.DeviceMesh, "mf": mf}) == mesh


UNSEEN = itertools.count(100, 4)  # ranks of which no sharding was made before


@pytest.mark.parametrize("more", COSTS[:3], ids=str)
def test_a_plan_does_not_depend_on_definitions_before_it(more: dict[str, Any]) -> None:
    """Of an equal mesh that says its links, or of one that says none."""
    texts = []
    for before, here in [(None, {}), (more, {}), (None, more), ({}, more)]:
        start = next(UNSEEN)
        ranks = range(start, start + 4)
        if before is not None:
            _gathered(ranks, before)
        texts.append(_gathered(ranks, here))
    assert len(set(texts)) == 1


def _gathered(ranks: Sequence[int], more: dict[str, Any]) -> str:
    """The steps of a program on a mesh: their order follows from its costs."""
    with mf.FusionDefinition() as fd:
        x, w = fd.define_tensor([256, 512]), fd.define_tensor([512, 256])
        y = fd.ops.matmul(fd.ops.relu(x), w)
        fd.add_output(y)
        mesh = mf.DeviceMesh((4,), ("tp",), ranks=ranks, **more)
        fd.mesh_split(x, mesh, [None, "tp"])
        fd.mesh_split(y, mesh, [None, None])
    compiled = fd.compile()
    used = {s.mesh for s in compiled.sharded.shardings.values() if s.mesh.ranks == mesh.ranks}
    assert used
    return f"{CostModel.of(used)} {[m.linked for m in used]}"


@given(meshes(), st.integers(1, 10**12), st.floats(0, 1e-3))
def test_meshes_with_links_are_copied_and_printed_whole(mesh: mf.DeviceMesh, bandwidth: int, latency: float) -> None:
    link = mf.Link(bandwidth, latency)
    made = mf.DeviceMesh(mesh.shape, mesh.names, ranks=mesh.ranks, links=link, flops=bandwidth / 3)
    assert pickle.loads(pickle.dumps(made)) == made
    assert eval(repr(made), {"DeviceMesh": mf.DeviceMesh, "mf": mf}) == made
    assert hash(eval(repr(made), {"DeviceMesh": mf.DeviceMesh, "mf": mf})) == hash(made)


@pytest.mark.parametrize(
    ("links", "text"),
    [
        ({"dp": FAST}, r"links of \('dp',\), needed one for each axis \('dp', 'tp'\)"),
        ({"dp": FAST, "tp": FAST, "cp": FAST}, "one for each axis"),
        ({"dp": 1e9, "tp": 1e9}, "needed a Link, a Link for each of"),
        ("dgx", "found 'dgx', needed a Link, .* or one of 'dgx-h100'"),
        ([FAST, FAST], "needed a Link"),
    ],
)
def test_wrong_links_are_errors(links: object, text: str) -> None:
    with pytest.raises(mf.DefinitionError, match=text) as caught:
        mf.DeviceMesh((2, 4), ("dp", "tp"), links=links)  # type: ignore[arg-type]
    assert "test_costs.py" in str(caught.value)


@pytest.mark.parametrize(
    "pair", [(0, 1e-6), (-1, 0), (math.inf, 0), (math.nan, 0), ("1e9", 0), (True, 0), (1e9, -1e-9)]
)
def test_wrong_figures_of_a_link_are_errors(pair: tuple[float, float]) -> None:
    with pytest.raises(mf.DefinitionError, match=r"a link's (bandwidth|latency): found .*, needed .* 0"):
        mf.Link(*pair)


@pytest.mark.parametrize("rate", [0, -1.0, math.inf, "fast", True])
def test_a_wrong_rate_is_an_error(rate: float) -> None:
    with pytest.raises(mf.DefinitionError, match=r"a mesh's flops: found .*, needed operations per second"):
        mf.DeviceMesh((2,), ("tp",), flops=rate)


# plans ------------------------------------------------------------------------------------------------------------


def on(mesh: mf.DeviceMesh, *dims: tuple[str, ...]) -> Sharding:
    return Sharding(mesh, [tuple(Split(mesh.axis_size(a), a) for a in dim) for dim in dims])


def unreduced(mesh: mf.DeviceMesh, ndim: int) -> Sharding:
    return Sharding(mesh, ((),) * ndim, [Split(n, a) for a, n in zip(mesh.names, mesh.shape, strict=True)], "sum")


def kinds(src: Sharding, dst: Sharding, shape: tuple[int, ...]) -> list[tuple[StepKind, str]]:
    found = plan(src, dst, shape, 4)
    assert found is not None
    return [(step.kind, ",".join(map(str, step.axes))) for step in found.steps]


def test_an_all_reduce_over_unequal_axes_sends_least_over_the_slow_one() -> None:
    """A ring over both axes sends as many bytes, all of them at the slow axis' speed."""
    shape = (1024, 1024)
    plain, linked = mf.DeviceMesh((2, 4), ("dp", "tp")), mf.DeviceMesh((2, 4), ("dp", "tp"), links=LINKS)
    whole = [(StepKind.ALL_REDUCE, "dp,tp")]
    assert kinds(unreduced(plain, 2), Sharding.replicated(plain, 2), shape) == whole
    assert kinds(unreduced(linked, 2), Sharding.replicated(linked, 2), shape) == [
        (StepKind.REDUCE_SCATTER, "tp"), (StepKind.ALL_REDUCE, "dp"), (StepKind.ALL_GATHER, "tp"),
    ]  # fmt: skip
    plans = [plan(unreduced(m, 2), Sharding.replicated(m, 2), shape, 4) for m in (plain, linked)]
    assert plans[0] is not None and plans[1] is not None
    assert plans[0].wire == plans[1].wire
    tiny = kinds(unreduced(linked, 2), Sharding.replicated(linked, 2), (4, 8))
    assert [kind for kind, _ in tiny] == [StepKind.ALL_REDUCE] * 2  # fewer starts on the slow axis decide


@pytest.mark.parametrize("links", [LINKS, {"dp": FAST, "tp": SLOW}])
def test_of_equal_bytes_the_slow_axis_is_gathered_while_the_tensor_is_small(links: dict[str, mf.Link]) -> None:
    mesh = mf.DeviceMesh((4, 4), ("dp", "tp"), links=links)
    slow = min(links, key=lambda name: links[name].bandwidth)
    for dims in ((("dp",), ("tp",)), (("tp",), ("dp",)), (("dp", "tp"), ()), (("tp", "dp"), ())):
        found = kinds(on(mesh, *dims), Sharding.replicated(mesh, 2), (4096, 4096))
        assert found == [(StepKind.ALL_GATHER, slow), (StepKind.ALL_GATHER, ({"dp", "tp"} - {slow}).pop())]


def conflicting(op: str, links: dict[str, mf.Link] | None) -> mf.FusionDefinition:
    """An op whose operands have the dim that they share split over different axes of equal size."""
    mesh, size = mf.DeviceMesh((4, 4), ("dp", "tp"), links=links), [1024, 1024]
    with mf.FusionDefinition() as fd:
        a, b = fd.define_tensor(size), fd.define_tensor(size)
        fd.add_output(fd.ops.add(a, b) if op == "add" else fd.ops.matmul(a, b))
        fd.mesh_split(a, mesh, ["dp", None] if op == "add" else [None, "dp"])
        fd.mesh_split(b, mesh, ["tp", None])
    return fd


def bytes_by_axis(fd: mf.FusionDefinition) -> dict[str, float]:
    found: dict[str, float] = {}
    for entry in fd.bill().entries:
        found[entry.axes] = found.get(entry.axes, 0.0) + entry.wire
    return found


@pytest.mark.parametrize(("fast", "slow"), [("dp", "tp"), ("tp", "dp")])
def test_propagation_puts_the_bytes_on_the_fast_axis(fast: str, slow: str) -> None:
    """A gather of more bytes over the fast axis beats an exchange over both, which goes at the slow one."""
    links = {fast: mf.Link(450e9, 1e-7), slow: mf.Link(5e9, 1e-7)}
    assert bytes_by_axis(conflicting("add", None)).keys() == {"dp, tp"}
    assert bytes_by_axis(conflicting("add", links)).keys() == {fast}


@pytest.mark.slow
@pytest.mark.parametrize(("fast", "slow"), [("dp", "tp"), ("tp", "dp")])
def test_bytes_leave_the_slow_axis_where_that_takes_less_time(fast: str, slow: str) -> None:
    """Either operand may be laid as the other, or both be moved; what the fast axis takes may be more in all."""
    links = {fast: mf.Link(450e9, 1e-7), slow: mf.Link(150e9, 1e-7)}
    unlinked, linked = bytes_by_axis(conflicting("matmul", None)), bytes_by_axis(conflicting("matmul", links))

    def seconds(found: dict[str, float]) -> float:
        return sum(wire / (150e9 if slow in axes else 450e9) for axes, wire in found.items())

    assert slow not in linked
    assert seconds(linked) < seconds(unlinked) if slow in unlinked else linked == unlinked


@pytest.mark.slow
@settings(max_examples=50)
@given(st.data())
def test_a_plan_for_the_links_is_no_slower_on_them_than_one_that_counts_bytes(data: st.DataObject) -> None:
    shape = tuple(data.draw(st.lists(st.integers(1, 64), min_size=1, max_size=3)))
    plain = data.draw(meshes(min_ranks=2))
    links = {name: data.draw(st.sampled_from([FAST, SLOW, mf.Link(1e8, 0.0)])) for name in plain.names}
    linked = mf.DeviceMesh(plain.shape, plain.names, ranks=plain.ranks, links=links)
    src, dst = data.draw(shardings(shape, plain)), data.draw(shardings(shape, plain))
    partial = [s for s in unreduced(plain, 1).partial if not any(s.axis == u.axis for u in src.used()) and s.size != 1]
    src = Sharding.make(plain, src.dims, shape, partial, "sum")
    counted = plan(src, dst, shape, 8)
    found = plan(relinked(src, linked), relinked(dst, linked), shape, 8)
    assert counted is not None and found is not None
    moved = [(m, type(m)(m.kind, m.axes, relinked(m.src, linked), relinked(m.dst, linked))) for m in counted.steps]
    assert found.seconds <= sum(price(new, shape, 8).seconds for _, new in moved) + 1e-12
    check_values(found.steps, shape)


@pytest.mark.slow
@pytest.mark.usefixtures("over_whole_axes")
@settings(max_examples=25)
@given(st.data())
def test_values_move_right_on_axes_of_any_speed(data: st.DataObject) -> None:
    """From any sharding to any other, and from unreduced sums over all axes to any."""
    plain = data.draw(meshes(min_ranks=2))
    links = {
        name: data.draw(st.sampled_from([FAST, SLOW, mf.Link(1e8, 0.0), mf.Link(2e9, 0.0)])) for name in plain.names
    }
    mesh = mf.DeviceMesh(plain.shape, plain.names, ranks=plain.ranks, links=links)
    shape = tuple(data.draw(st.lists(st.integers(1, 16), min_size=2, max_size=3)))
    with mf.FusionDefinition() as fd:
        x = fd.define_tensor(list(shape), dtype=mf.DataType.Double)
        y, z = fd.ops.set(x), fd.ops.sum(x, [0])
        again = fd.ops.set(z)
        for out in (y, again):
            fd.add_output(out)
        fd.shard(x, data.draw(shardings(shape, mesh)))
        fd.shard(y, data.draw(shardings(shape, mesh)))
        fd.shard(again, data.draw(shardings(shape[1:], mesh)))
    value = torch.arange(math.prod(shape), dtype=torch.float64).reshape(shape)
    moved, summed_up = fd.simulate([value], check_replicas=True)
    assert torch.equal(moved, value) and torch.equal(summed_up, value.sum(0))


def relinked(sharding: Sharding, mesh: mf.DeviceMesh) -> Sharding:
    return Sharding(mesh, sharding.dims, sharding.partial, sharding.reduce)


def check_values(steps: tuple, shape: tuple[int, ...]) -> None:
    """Each move ends where the next begins, and only reductions end partial sums."""
    for before, after in itertools.pairwise(steps):
        assert before.dst == after.src
    for step in steps:
        reduces = step.kind in (StepKind.ALL_REDUCE, StepKind.REDUCE_SCATTER)
        assert reduces == (step.src.partial != step.dst.partial)


# definitions ------------------------------------------------------------------------------------------------------


def summed(links: object, other: object) -> mf.FusionDefinition:
    """A product whose contraction is split over both axes."""
    with mf.FusionDefinition() as fd:
        x, w = fd.define_tensor([64, 512]), fd.define_tensor([512, 64])
        y = fd.ops.matmul(x, w)
        fd.add_output(y)
        fd.mesh_split(x, mf.DeviceMesh((2, 4), ("dp", "tp"), links=links), [None, ("dp", "tp")])  # type: ignore[arg-type]
        fd.mesh_split(w, mf.DeviceMesh((2, 4), ("dp", "tp"), links=other), [("dp", "tp"), None])  # type: ignore[arg-type]
        fd.mesh_split(y, mf.DeviceMesh((2, 4), ("dp", "tp")), [None, None])
    return fd


QUICK = {"dp": mf.Link(1e9, 0.0), "tp": mf.Link(450e9, 0.0)}


@pytest.mark.parametrize(("links", "other"), [(QUICK, None), (None, QUICK), (QUICK, QUICK)])
def test_what_one_annotation_says_of_links_holds_for_all_on_the_mesh(links: object, other: object) -> None:
    fd = summed(links, other)
    assert [e.collective for e in fd.bill().entries] == ["reduce-scatter", "all-reduce", "all-gather"]
    assert [e.collective for e in summed(None, None).bill().entries] == ["all-reduce"]
    x, w = (torch.randn(*shape, dtype=torch.float32) for shape in ((64, 512), (512, 64)))
    (got,) = fd.simulate([x, w], check_replicas=True)
    torch.testing.assert_close(got, x @ w, rtol=1e-4, atol=1e-4)


def test_two_sets_of_links_for_one_mesh_are_refused() -> None:
    with pytest.raises(mf.DefinitionError, match=r"is on a mesh whose links differ .*Make one DeviceMesh") as caught:
        summed(QUICK, LINKS).bill()
    assert "test_costs.py" in str(caught.value)


def test_a_definition_with_links_is_printed_whole() -> None:
    fd = summed(LINKS, LINKS)
    assert rebuilt(fd).bill().total == fd.bill().total


def test_links_that_are_the_defaults_plan_as_no_links_do() -> None:
    bills = []
    for links in (None, {"tp": mf.DeviceMesh((4,), ("tp",)).links[0]}):
        mesh, fd = mf.DeviceMesh((4,), ("tp",), links=links), mf.FusionDefinition()
        x, w = fd.define_tensor([8, 8]), fd.define_tensor([8, 8])
        fd.add_output(fd.ops.linear(x, w))
        for tensor in (x, w):
            fd.mesh_split(tensor, mesh, [None, "tp"])
        bills.append(fd.bill().total)
    assert bills[0] == bills[1] > 0


@pytest.mark.parametrize("rows", [5, 8, 9, 12, 24])
def test_work_is_that_of_the_rank_which_has_most(rows: int) -> None:
    """Some ranks have less where an axis does not divide a dim, or nothing."""
    mesh = mf.DeviceMesh((8,), ("tp",))
    with mf.FusionDefinition() as fd:
        x, w = fd.define_tensor([rows, 64]), fd.define_tensor([64, 32])
        fd.mesh_split(x, mesh, ["tp", None])
        fd.add_output(fd.ops.matmul(x, w))
    (choice,) = fd.compile().planned.choices
    (left, _), (made,) = choice.placement.operands, choice.placement.results
    shares = [math.prod((*made.local_shape((rows, 32), r), left.local_shape((rows, 64), r)[1])) for r in range(8)]
    assert choice.placement.ways == pytest.approx(rows * 32 * 64 / max(shares))


def _places(fd: mf.FusionDefinition, *shape: int) -> mf.TensorView:
    return fd.ops.reshape(fd.ops.iota(math.prod(shape)), list(shape))


PICKS: dict[str, Callable[[mf.FusionDefinition, mf.TensorView], mf.TensorView]] = {
    "select": lambda fd, x: fd.ops.select(x, 5, 0),
    "slice": lambda fd, x: fd.ops.slice(x, [3, 0], [5, 64]),
    "index_select": lambda fd, x: fd.ops.index_select(x, _places(fd, 2), 0),
    "take_along_axis": lambda fd, x: fd.ops.take_along_axis(x, _places(fd, 1, 64), 0),
    "gather": lambda fd, x: fd.ops.gather(x, _places(fd, 1, 64), 0),
    "embedding_fwd": lambda fd, x: fd.ops.embedding_fwd(_places(fd, 2), x),
}


@pytest.mark.parametrize("op", PICKS)
def test_to_read_a_little_is_as_much_work_of_a_lot(op: str) -> None:
    work = []
    for rows in (8, 8000):
        with mf.FusionDefinition() as fd:
            fd.add_output(PICKS[op](fd, fd.define_tensor([rows, 64])))
        work.append(sum(node.call.op.flops(node.call) for node in graph_of(fd).nodes))
    assert work[0] == work[1]


@pytest.mark.parametrize("first", ["select", "slice"])
@pytest.mark.parametrize("op", PICKS)
def test_what_every_rank_has_whole_is_read_there(first: str, op: str) -> None:
    """To share what is read of a table among ranks saves nothing that is worth a move."""
    mesh, parts = mf.DeviceMesh((2,), ("dp",)), [2, 1 << 22, 64]
    with mf.FusionDefinition() as fd:
        table, beside = fd.define_tensor(parts), fd.define_tensor([64])
        if first == "select":
            part = fd.ops.select(table, 1, 0)
        else:
            part = fd.ops.squeeze(fd.ops.slice(table, [1, 0, 0], parts), [0])
        found, other = PICKS[op](fd, part), fd.ops.tanh(beside)
        fd.mesh_split(beside, mesh, ["dp"])
        for made in (found, other):
            fd.mesh_split(made, mesh, [None] * made.type.ndim)
            fd.add_output(made)
    assert fd.bill().total == 64 * 4 / 2
