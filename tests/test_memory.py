"""What a rank holds, and moves done again in place of holding their results."""

from __future__ import annotations

import itertools
import re
import warnings
from collections.abc import Callable
from dataclasses import replace
from typing import Any

import pytest
import torch
from hypothesis import assume, given, settings
from hypothesis import strategies as st
from torch.profiler import ProfilerActivity, profile

import meshfuse as mf
from meshfuse import compiler, programs
from meshfuse.executor.bind import bind_program
from meshfuse.ops import OPS
from meshfuse.ops.binding import make_call
from meshfuse.reshard.rematerialize import Peak, _Usage, peak, rematerialize_gathers
from meshfuse.resharding import Reshard, ReshardedDefinition
from meshfuse.testing import annotations, assert_same_as_unsharded, definitions, inputs_for, meshes, shapes_for
from meshfuse.testing.calls import operands_of, whole
from op_harness import sample_ids

LAYERS, ROWS, WIDTH = 4, 64, 32
WEIGHT = WIDTH * WIDTH * 4


def fsdp(layers: int = LAYERS, **bounds: Any) -> mf.FusionDefinition:
    """A deep MLP, its weights and rows split over four ranks, forward and backward. Calls start at once, and there are
    many rows: of few, gathering x and the seed would leave no gradient to reduce.
    """
    mesh = mf.DeviceMesh([0, 1, 2, 3], ("dp",), links=mf.Link(450e9, 1e-9), flops=989e12)
    with mf.FusionDefinition(**bounds) as fd:
        x = fd.define_tensor([4 * ROWS, WIDTH])
        seed = fd.define_tensor([4 * ROWS, WIDTH])
        weights = [fd.define_tensor([WIDTH, WIDTH]) for _ in range(layers)]
        y = x
        for w in weights:
            y = fd.ops.tanh(fd.ops.linear(y, w))
        grads = fd.grad([y], weights, [seed])
        for out in (y, *grads):
            fd.add_output(out)
        for t in (x, seed, y):
            fd.mesh_split(t, mesh, ["dp", None])
        for t in (*weights, *grads):
            fd.mesh_split(t, mesh, ["dp", None])
    return fd


def gathers(fd: mf.FusionDefinition) -> int:
    return sum(e.collective == "all-gather" for e in fd.bill().entries)


def sequence_parallel(**bounds: Any) -> mf.FusionDefinition:
    """Two Megatron MLPs, rows between them split over the ranks, forward and backward."""
    mesh = mf.DeviceMesh([0, 1, 2, 3], ("tp",), links="dgx-h100")
    with mf.FusionDefinition(**bounds) as fd:
        x = fd.define_tensor([4 * ROWS, WIDTH])
        seed = fd.define_tensor([4 * ROWS, WIDTH])
        weights = [(fd.define_tensor([2 * WIDTH, WIDTH]), fd.define_tensor([WIDTH, 2 * WIDTH])) for _ in range(2)]
        y = x
        for up, down in weights:
            h = fd.ops.rms_norm(y, [WIDTH])
            z = fd.ops.linear(fd.ops.tanh(fd.ops.linear(h, up)), down)
            fd.mesh_split(z, mesh, ["tp", None])
            y = y + z
        flat = [w for pair in weights for w in pair]
        grads = fd.grad([y], flat, [seed])
        for out in (y, *grads):
            fd.add_output(out)
        for t in (x, seed, y):
            fd.mesh_split(t, mesh, ["tp", None])
        for up, down in weights:
            fd.mesh_split(up, mesh, ["tp", None])
            fd.mesh_split(down, mesh, [None, "tp"])
    return fd


@pytest.mark.slow
def test_what_an_op_made_is_kept_in_parts_and_gathered_again():
    """Rows that a product needs whole, in the forward and for its weight's gradient."""
    free = sequence_parallel()
    rows = 4 * ROWS * WIDTH * 4
    limit = free.memory().peak - 2 * rows
    fd = sequence_parallel(max_memory=limit)
    assert gathers(fd) > gathers(free)
    assert peak(ran(fd)).nbytes == fd.memory().peak <= limit
    assert_same_as_unsharded(fd, inputs_for(fd))


@pytest.mark.slow
def test_without_a_limit_a_weight_is_gathered_once():
    assert gathers(fsdp()) == LAYERS


def test_with_a_limit_weights_are_gathered_again_for_the_backward():
    free = fsdp().memory().peak
    limit = free - 2 * WEIGHT
    fd = fsdp(max_memory=limit)
    assert LAYERS < gathers(fd) < 2 * LAYERS
    assert fd.memory().peak <= limit
    assert {e.why for e in fd.bill().entries if e.why.endswith("again")} == {"operand 1 of matmul, again"}
    assert fd.bill().total > fsdp().bill().total


def test_the_numbers_are_those_of_unsharded_torch():
    fd = fsdp(max_memory=fsdp().memory().peak - 2 * WEIGHT)
    assert_same_as_unsharded(fd, inputs_for(fd))


@pytest.mark.slow
def test_no_more_is_gathered_again_than_the_limit_asks():
    """Of layers that are all alike one weight after the other is given up, and none of those that do not help."""
    free = fsdp().memory().peak
    counts = [gathers(fsdp(max_memory=free - saved)) for saved in (0, 1, WEIGHT, WEIGHT + 1)]
    assert counts == sorted(counts)
    assert counts[:2] == [LAYERS, LAYERS + 1]


def ran(fd: mf.FusionDefinition) -> ReshardedDefinition:
    """The steps in the order in which the programs of ranks have them."""
    parts = fd.latest(shapes_for(fd)).segmented.parts
    statements = [
        statement for part in parts for statement in ((part,) if isinstance(part, Reshard) else part.computes)
    ]
    return replace(fd.latest().resharded, statements=tuple(statements))


@pytest.mark.slow
@pytest.mark.parametrize("saved", range(0, 8, 2))
def test_the_limit_is_kept_by_what_runs(saved: int):
    """Also by small gathers, which would otherwise come together, and the sums of gradients, which would come last."""
    limit = fsdp(8).memory().peak - saved * WEIGHT
    fd = fsdp(8, max_memory=limit)
    assert peak(ran(fd)).nbytes == fd.memory().peak <= limit
    assert (gathers(fd) > 8) == (saved > 0)


@pytest.mark.slow
def test_communications_ahead_of_their_need_keep_to_what_is_left():
    free = fsdp().compile()
    limit = fsdp().memory().peak + 1000
    assert fsdp(max_memory=limit).compile().in_flight == 1000 < free.in_flight
    assert compiler.compile_sharded(free.planned, 1).in_flight == 0


def megatron(**bounds: Any) -> mf.FusionDefinition:
    """Layers whose sums take as long as messages take to start: rows are whole, as that is fewer of them."""
    mesh = mf.DeviceMesh((4,), ("tp",), links="dgx-h100")
    with mf.FusionDefinition(**bounds) as fd:
        x, up, down = (fd.define_tensor(shape) for shape in ([256, 64], [64, 64], [64, 64]))
        seed, y = fd.define_tensor([256, 64]), x
        for _ in range(4):
            y = y + fd.ops.linear(fd.ops.tanh(fd.ops.linear(fd.ops.tanh(y), up)), down)
        grads = fd.grad([y], [up, down], [seed])
        for out in (y, *grads):
            fd.add_output(out)
        for t in (x, seed):
            fd.mesh_split(t, mesh, [None, None])
        for t, spec in ((up, ["tp", None]), (down, [None, "tp"])):
            fd.mesh_split(t, mesh, spec, stationary=True)
    return fd


def test_activations_lie_in_parts_where_there_is_no_room_for_them_whole():
    """As in Megatron's sequence parallelism: no gather that could be dropped would help."""
    free = megatron()
    limit = free.memory().peak * 0.6
    with warnings.catch_warnings():
        warnings.simplefilter("error")
        fd = megatron(max_memory=limit)
        assert fd.memory().peak <= limit
    assert fd.compile().seconds > free.compile().seconds
    assert_same_as_unsharded(fd, [given / 16 for given in inputs_for(fd)])


def test_what_cannot_be_helped_is_an_error_that_says_the_least_and_names_the_tensors():
    fd = fsdp(max_memory=1000)
    needed = r"max_memory: found 1,000 bytes, needed ([\d,]+), the least that a plan was found to hold: .*the largest: "
    for _ in range(2):  # It is no program then, the second time neither.
        with pytest.raises(mf.DefinitionError, match=needed) as caught:
            fd.compile()
    text = str(caught.value)
    assert "mesh_split" in text and "test_memory.py" in text
    found = re.search(needed, text)
    assert found is not None
    least = float(found[1].replace(",", ""))
    assert fsdp(max_memory=least).memory().peak == least
    with pytest.raises(mf.DefinitionError, match="max_memory"):
        fsdp(max_memory=least - 1).compile()


@pytest.mark.parametrize("name", ["cumsum", "topk", "var"])
def test_the_forms_of_one_op_are_compared_within_a_bound(name: str):
    """By graphs of that op alone, which lack the other tensors that are held."""
    more = {"cumsum": (0,), "topk": (2, 0), "var": ([0],)}[name]
    with mf.FusionDefinition(max_memory=1500) as fd:
        x = fd.define_tensor([16, 8], dtype=mf.DataType.Double)
        made = getattr(fd.ops, name)(x, *more)
        for out in (*(made if isinstance(made, tuple) else (made,)), fd.ops.matmul(fd.ops.tanh(x), x.T)):
            fd.add_output(out)
        fd.mesh_split(x, mf.DeviceMesh((4,), ("x",)), ["x", None])
    with pytest.raises(mf.DefinitionError, match=r"max_memory: found 1,500 bytes, needed [12],"):
        fd.compile()


def test_a_limit_that_is_kept_warns_of_nothing():
    with warnings.catch_warnings():
        warnings.simplefilter("error")
        fsdp(max_memory=1e9).compile()


@pytest.mark.slow
def test_the_limit_may_come_from_the_environment(monkeypatch: pytest.MonkeyPatch):
    monkeypatch.setenv("MESHFUSE_MAX_MEMORY", str(fsdp().memory().peak - 1))
    assert gathers(fsdp()) > LAYERS
    monkeypatch.setenv("MESHFUSE_MAX_MEMORY", "much")
    with pytest.raises(mf.DefinitionError, match="MESHFUSE_MAX_MEMORY: found 'much', needed bytes per rank"):
        mf.FusionDefinition()


@pytest.mark.parametrize("wrong", ["x", -1, float("nan"), True, [1]])
def test_a_wrong_limit_is_an_error(wrong: Any):
    with pytest.raises(mf.DefinitionError, match=r"max_memory: found .*, needed bytes per rank"):
        mf.FusionDefinition(max_memory=wrong)


def test_the_peak_is_the_one_counted_by_hand():
    """Arguments all the time, results to the end, what is between as long as it is read; views take nothing."""
    mesh = mf.DeviceMesh([0, 1], ("dp",))
    with mf.FusionDefinition() as fd:
        x = fd.define_tensor([8, 6])
        a = fd.ops.exp(x)
        b = fd.ops.permute(a, [1, 0])
        c = fd.ops.exp(b)
        d = fd.ops.sum(c, [0])
        fd.add_output(d)
        fd.mesh_split(x, mesh, ["dp", None])
        fd.mesh_split(d, mesh, ["dp"])
    found = fd.memory()
    assert found.peak == 3 * (4 * 6 * 4)
    held = [(h.tensor.split()[0], h.nbytes, h.origin) for h in found.held]
    assert held == [("x", 96, "argument"), ("a", 96, "exp"), ("c", 96, "exp")]
    assert found.step.startswith("in exp at")
    assert str(found).startswith("at most 288 bytes per rank, in exp at")


def allocated(statement: Callable[[], Any]) -> int:
    """The most bytes that torch had allocated at once in a step."""
    with profile(activities=[ProfilerActivity.CPU], profile_memory=True) as found:
        out = statement()
    events = [e for e in found.profiler.kineto_results.events() if e.name() == "[memory]"]  # type: ignore[union-attr]
    del out
    return max(itertools.accumulate(e.nbytes() for e in sorted(events, key=lambda e: e.start_ns())))


@pytest.mark.parametrize(("layers", "rows", "width", "trained"), [(2, 512, 256, 0), (4, 512, 256, 1), (3, 2048, 64, 1)])
def test_it_is_what_torch_allocates(layers: int, rows: int, width: int, trained: int):
    """On one rank, op by op."""
    with mf.FusionDefinition() as fd:
        x, seed, *weights = (fd.define_tensor([n, width]) for n in [rows, rows] + [width] * layers)
        y = x
        for w in weights:
            y = fd.ops.gelu(fd.ops.linear(fd.ops.layer_norm(y, [width]), w))
        for out in (y, *(fd.grad([y], weights, [seed]) if trained else ())):
            fd.add_output(out)
    given = inputs_for(fd)
    fd.execute(given, backend="eager")
    measured = allocated(lambda: fd.execute(given, backend="eager")) + sum(t.nbytes for t in given)
    assert fd.memory().peak == pytest.approx(measured, rel=0.01)


@pytest.mark.parametrize("made", [True, False])
def test_a_slice_keeps_what_it_is_of_in_memory(made: bool):
    """It is a view: of a tensor that an op has made whole, and of an argument, which is there anyway."""
    mesh, whole, rest = mf.DeviceMesh((8,), ("tp",)), 1 << 14, 1 << 13
    with mf.FusionDefinition() as fd:
        x, other = fd.define_tensor([whole]), fd.define_tensor([rest])
        y = fd.ops.exp(x) if made else x
        block = fd.ops.set(y)
        last = fd.ops.select(fd.ops.cumsum(fd.ops.exp(fd.ops.exp(other)), 0), rest - 1, 0)  # on every rank: no sum
        fd.add_output(fd.ops.add(block, last))
        for t in dict.fromkeys((x, y, other)):
            fd.mesh_split(t, mesh, [None])
        fd.mesh_split(block, mesh, ["tp"])
    given = inputs_for(fd)
    main = bind_program(fd.host_program(0), lambda _: None, torch.device("cpu")).main
    measured = allocated(lambda: main(*given, 0, 0)) + sum(t.nbytes for t in given)
    assert fd.memory().peak == pytest.approx(measured, rel=0.01)


def test_ranks_of_several_meshes_hold_what_is_theirs():
    first, second = mf.DeviceMesh([0, 1], ("dp",)), mf.DeviceMesh([2, 3], ("dp",))
    with mf.FusionDefinition() as fd:
        x = fd.define_tensor([8, 6])
        w = fd.define_tensor([1000, 6])
        y = fd.ops.exp(x)
        z = fd.ops.linear(y, w)
        fd.add_output(z)
        fd.mesh_split(x, first, ["dp", None])
        fd.mesh_split(y, second, ["dp", None])
        fd.mesh_split(w, second, [None, None])
        fd.mesh_split(z, second, ["dp", None])
    held = {h.tensor.split()[0] for h in fd.memory().held}
    assert held == {"y", "w", "z"}


def storage(t: torch.Tensor) -> int:
    return t.untyped_storage().data_ptr()


@pytest.mark.parametrize(("name", "number"), [(n, i) for n, i in sample_ids() if OPS[n].is_view])
def test_views_are_views(name: str, number: int):
    sample = OPS[name].samples()[number]
    call = make_call(OPS[name], sample)
    operands = operands_of(call, sample)
    (made,) = whole(call, operands)
    assert storage(made) == storage(operands[0])


@st.composite
def deep(draw: st.DrawFn) -> mf.FusionDefinition:
    """Rows through products with few weights, each read many times; all of them split, and mostly gathered."""
    mesh = draw(meshes(min_ranks=2))
    rows, width = draw(st.integers(1, 24)), draw(st.integers(1, 12))
    with mf.FusionDefinition() as fd:
        y = fd.define_tensor([rows, width], dtype=mf.DataType.Double)
        weights = [fd.define_tensor([width, width], dtype=mf.DataType.Double) for _ in range(draw(st.integers(1, 4)))]
        named = [y, *weights]
        for _ in range(draw(st.integers(2, 8))):
            w = draw(st.sampled_from(weights))
            y = fd.ops.linear(fd.ops.sin(y), fd.ops.permute(w, [1, 0]) if draw(st.booleans()) else w)
        outputs = [y, *(fd.grad([fd.ops.sum(y)], weights) if draw(st.booleans()) else [])]
        for out in outputs:
            fd.add_output(out)
    for t in named:
        axis = draw(st.sampled_from(mesh.names))
        fd.mesh_split(t, mesh, [axis, None] if draw(st.integers(0, 3)) else [None, axis])
    return fd


PROGRAMS = deep() | deep() | definitions(("pointwise", "products", "shapes")).flatmap(annotations)


def again(resharded: ReshardedDefinition) -> ReshardedDefinition:
    """With everything dropped at every step where it can be made again."""
    usage = _Usage(resharded)
    for place in range(len(resharded.statements)):
        usage.lower(Peak(1 << 60, place, tuple(usage.lives)), 0)
    return usage.rewritten()


def ops_of(resharded: ReshardedDefinition) -> list[int]:
    return [statement.node for statement in resharded.statements if statement.node is not None]


@pytest.mark.slow
def test_whatever_is_dropped_the_numbers_are_right():
    """Nothing is read that was dropped, and what is made again is what it was."""
    more: list[int] = []

    @settings(max_examples=13)
    @given(PROGRAMS)
    def check(fd: mf.FusionDefinition) -> None:
        plain = fd.compile(*shapes_for(fd)).resharded
        assume(any(statement.node is None for statement in plain.statements))
        fd.max_memory = 0.0
        fd._programs.compiled.clear()
        with pytest.MonkeyPatch.context() as patch:
            patch.setattr(compiler, "rematerialize_gathers", lambda resharded, _: again(resharded))
            patch.setattr(compiler, "_within", lambda graph, free, *_: free)
            patch.setattr(programs, "check_memory", lambda *_: None)
            assert_same_as_unsharded(fd, inputs_for(fd))
            found = fd.compile(*shapes_for(fd)).resharded
        assert sorted(ops_of(found)) == sorted(ops_of(plain))
        more.append(len(found.statements) - len(plain.statements))

    check()
    assert sum(n > 0 for n in more) > len(more) / 10, "the programs tried hardly ever move anything again"


@pytest.mark.slow
@settings(max_examples=25)
@given(PROGRAMS)
def test_the_modelled_memory_is_that_of_the_program_that_runs(fd: mf.FusionDefinition):
    modelled = fd.memory(*shapes_for(fd)).peak
    assert fd.latest().graph.streams or modelled == peak(ran(fd)).nbytes


@pytest.mark.slow
@settings(max_examples=13)
@given(PROGRAMS, st.sampled_from([0.0, 0.6, 0.8, 0.95]))
def test_no_peak_gets_higher(fd: mf.FusionDefinition, part: float):
    resharded = fd.compile(*shapes_for(fd)).resharded
    before = peak(resharded).nbytes
    after = rematerialize_gathers(resharded, part * before)
    assert peak(after).nbytes <= before
    assert rematerialize_gathers(after, part * before) == after or peak(after).nbytes > part * before


@pytest.mark.parametrize("n", range(1, 9))
def test_what_is_made_again_by_several_moves_counts_with_what_is_between_them(n: int):
    """A block of a whole tensor, by a slice of each dim, read before and after the peak in between."""
    mesh = mf.DeviceMesh((2, 2), ("tp", "cp"))
    with mf.FusionDefinition() as fd:
        x, other = (fd.define_tensor(shape, dtype=mf.DataType.Double) for shape in ([4, 4], [n]))
        first, between = fd.ops.sigmoid(x), fd.ops.tanh(fd.ops.sin(other))
        last = fd.ops.floor(x)
        for out in (first, between, last):
            fd.add_output(out)
        for out in (first, last):
            fd.mesh_split(out, mesh, ["tp", "cp"])
    resharded = fd.compile(*shapes_for(fd)).resharded
    assert peak(rematerialize_gathers(resharded, 0.0)).nbytes <= peak(resharded).nbytes
