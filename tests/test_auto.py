"""`fd.auto`: inputs without annotations lie where a step takes the least time, in the memory that there is."""

from __future__ import annotations

import itertools
from collections import Counter
from collections.abc import Mapping, Sequence
from typing import Any

import numpy as np
import pytest
import torch

import meshfuse as mf
from meshfuse.graph import specialize
from meshfuse.planner.open_inputs import OpenInputs
from meshfuse.planner.place_inputs import place_inputs
from meshfuse.planner.prices import Prices
from meshfuse.planner.reshard_costs import whole_axes
from refusing import raises

ONE, TWO = mf.DeviceMesh((8,), ("x",), links="dgx-h100"), mf.DeviceMesh((2, 4), ("dp", "tp"), links="dgx-h100")
SMALL, WIDE = (8192, 256, 1024), (64, 8192, 32768)
Spec = Sequence[Any]


def mlp(batch: int, width: int, hidden: int, layers: int = 1, **more: Any) -> tuple[mf.FusionDefinition, list[Any]]:
    """Residual layers, a loss, and the gradients of the weights."""
    with mf.FusionDefinition(**more) as fd:
        x, weights = fd.define_tensor([batch, width]), []
        h = x
        for _ in range(layers):
            w1, w2 = fd.define_tensor([hidden, width]), fd.define_tensor([width, hidden])
            weights += [w1, w2]
            h = h + fd.ops.linear(fd.ops.gelu(fd.ops.linear(h, w1)), w2)
        loss = fd.ops.sum(h * h, [0, 1])
        for t in (loss, *fd.grad(loss, weights)):
            fd.add_output(t)
    return fd, [x, *weights]


def by_hand(sizes: Any, mesh: mf.DeviceMesh, specs: Sequence[Spec]) -> float:
    """Seconds of the plan under these annotations."""
    fd, inputs = mlp(*sizes)
    for tensor, spec in zip(inputs, specs, strict=True):
        fd.mesh_split(tensor, mesh, spec)
    return fd.compile().planned.seconds


def kinds(fd: mf.FusionDefinition) -> Counter[str]:
    return Counter(f"{entry.collective} {entry.axes}" for entry in fd.bill().entries if entry.wire > 1e3)


# which parallelism comes out -----------------------------------------------------------------------------------------


def test_a_small_model_on_many_rows_is_data_parallel() -> None:
    fd, _ = mlp(*SMALL, layers=2)
    plan = fd.auto(ONE)
    assert [str(sharding) for sharding in plan.shardings.values()] == ["[x, -]", *["[-, -]"] * 4]
    assert kinds(fd) == {"all-reduce x": 4}  # of each weight's gradient


def test_a_wide_model_on_few_rows_is_tensor_parallel() -> None:
    fd, _ = mlp(*WIDE, layers=2)
    plan = fd.auto(ONE)
    assert [str(sharding) for sharding in plan.shardings.values()] == ["[-, -]", *["[x, -]", "[-, x]"] * 2]
    assert kinds(fd) == {"all-reduce x": 3}


def test_two_axes_are_data_and_tensor_parallel() -> None:
    fd, _ = mlp(8192, 2048, 8192, layers=2)
    plan = fd.auto(TWO)
    assert [str(sharding) for sharding in plan.shardings.values()] == ["[dp, -]", *["[tp, -]", "[-, tp]"] * 2]


def test_what_does_not_fit_is_fully_sharded() -> None:
    """Weights lie in parts along the axis of the rows, are gathered for use, and gradients are scattered."""
    fd, _ = mlp(8192, 2048, 8192, layers=2)
    free = fd.auto(TWO)
    bounded, _ = mlp(8192, 2048, 8192, layers=2)
    plan = bounded.auto(TWO, max_memory=450e6)
    assert free.memory > 450e6 >= plan.memory == bounded.memory().peak
    assert [str(sharding) for sharding in plan.shardings.values()] == ["[dp, -]", *["[tp, dp]", "[dp, tp]"] * 2]
    # Gathered for the forward and, dropped in between, most of them again for the backward.
    assert 4 < kinds(bounded)["all-gather dp"] <= 8 and kinds(bounded)["reduce-scatter dp"] == 4
    assert plan.seconds >= free.seconds


# against plans by hand -----------------------------------------------------------------------------------------------


@pytest.mark.parametrize("sizes", [SMALL, WIDE, (512, 512, 2048), (16, 64, 256)], ids=str)
def test_no_annotation_of_the_inputs_by_hand_is_better_on_one_axis(sizes: tuple[int, int, int]) -> None:
    fd, _ = mlp(*sizes)
    plan = fd.auto(ONE)
    specs = [[None, None], ["x", None], [None, "x"]]
    least = min(by_hand(sizes, ONE, each) for each in itertools.product(specs, repeat=3))
    assert plan.seconds == fd.compile().planned.seconds <= least * (1 + 1e-9)


HAND: Mapping[str, tuple[Spec, Spec, Spec]] = {
    "data": ([["dp", "tp"], None], [None, None], [None, None]),
    "tensor": ([None, None], [["dp", "tp"], None], [None, ["dp", "tp"]]),
    "data and tensor": (["dp", None], ["tp", None], [None, "tp"]),
    "tensor and data": (["tp", None], ["dp", None], [None, "dp"]),
    "fully sharded": ([["dp", "tp"], None], [["dp", "tp"], None], [["dp", "tp"], None]),
    "fully sharded and tensor": (["dp", None], [["tp", "dp"], None], [None, ["tp", "dp"]]),
    "sequence": ([["dp", "tp"], None], ["tp", None], [None, "tp"]),
    "width": (["dp", "tp"], ["tp", None], [None, "tp"]),
}


@pytest.mark.parametrize("sizes", [SMALL, WIDE, (8192, 2048, 8192), (256, 256, 1024)], ids=str)
def test_no_known_parallelism_is_better_on_two_axes(sizes: tuple[int, int, int]) -> None:
    fd, _ = mlp(*sizes)
    plan = fd.auto(TWO)
    assert plan.seconds <= min(by_hand(sizes, TWO, specs) for specs in HAND.values()) * (1 + 1e-9)


# what it does to a definition ----------------------------------------------------------------------------------------


@pytest.mark.parametrize("memory", [None, 5e4])
def test_numbers_are_those_of_torch(memory: float | None) -> None:
    fd, inputs = mlp(32, 16, 64, layers=2)
    fd.auto(TWO, max_memory=memory)
    torch.manual_seed(0)
    given = [torch.randn(tuple(t.type.shape)) / 4 for t in inputs]
    loss, *grads = fd.simulate(given)
    leaves = [w.double().requires_grad_() for w in given[1:]]
    h = given[0].double()
    for w1, w2 in zip(leaves[::2], leaves[1::2], strict=True):
        h = h + torch.nn.functional.gelu(h @ w1.T) @ w2.T
    expected = (h * h).sum()
    torch.testing.assert_close(loss.double(), expected, rtol=1e-5, atol=1e-5)
    for found, of in zip(grads, torch.autograd.grad(expected, leaves), strict=True):
        torch.testing.assert_close(found.double(), of, rtol=1e-4, atol=1e-4)


def test_annotations_that_are_there_bind() -> None:
    fd, (x, w1, w2) = mlp(*WIDE)
    fd.mesh_split(x, ONE, ["x", None])
    fd.mesh_split(w2, ONE, [None, None])
    plan = fd.auto(ONE)
    assert set(plan.shardings) == {fd.recording.tensors[w1.id].label}
    shardings = fd.compile().sharded.shardings
    assert str(shardings[x.id]) == "[x, -]" and str(shardings[w2.id]) == "[-, -]"


def test_inputs_that_have_to_lie_in_parts_cost_what_gathering_them_costs() -> None:
    """Of a program whose computation is nothing: a limit of its time is no limit of the time of moves."""

    def made(annotated: bool) -> mf.FusionDefinition:
        with mf.FusionDefinition() as fd:
            h, weights = fd.define_tensor([8, 16]), list[Any]()
            for _ in range(4):
                weights.append(fd.define_tensor([16, 16]))
                h = fd.ops.tanh(fd.ops.linear(h, weights[-1]))
            fd.add_output(h)
            for w in weights if annotated else ():
                fd.mesh_split(w, ONE, ["x", None])
        return fd

    recording = made(annotated=False).recording
    shapes = {i: tuple(recording.tensors[i].type.shape) for i in recording.input_tensors()}
    graph = specialize(recording, shapes, {})
    x, *weights = graph.input_tensors
    every = OpenInputs.of(graph, ONE, {}).places
    places = {x: every[x][:1], **{w: tuple(s for s in every[w] if s.dims[0]) for w in weights}}
    found = place_inputs(graph, ONE, OpenInputs(places), Prices(whole_axes), {})
    assert found.plan.seconds == pytest.approx(made(annotated=True).compile().planned.seconds, rel=1e-6)


def test_the_plan_prints_the_calls_to_paste() -> None:
    def define() -> tuple[mf.FusionDefinition, dict[str, Any]]:
        with mf.FusionDefinition() as fd:
            x = fd.define_tensor([64, 8192])
            up = fd.define_tensor([32768, 8192])
            fd.add_output(fd.ops.relu(fd.ops.linear(x, up)))
        return fd, {"x": x, "up": up}

    fd, _ = define()
    plan = fd.auto(ONE)
    *calls, last = str(plan).splitlines()
    again, names = define()
    for call in calls:
        eval(call, {"fd": again, "mesh": ONE, **names})
    assert len(calls) == 2 and again.compile().planned.seconds == plan.seconds
    assert last.startswith("a step takes ")


def test_a_next_value_lies_as_its_input() -> None:
    with mf.FusionDefinition() as fd:
        x, w, m = fd.define_tensor([64, 8192]), fd.define_tensor([32768, 8192]), fd.define_tensor([32768, 8192])
        loss = fd.ops.sum(fd.ops.relu(fd.ops.linear(x, w)), [0, 1])
        (g,) = fd.grad(loss, [w])
        momentum = 0.9 * m + g
        step = w - 0.1 * momentum
        for t in (loss, step, momentum):
            fd.add_output(t)
    fd.auto(ONE, updates={w: step, m: momentum})
    found = fd.compile().sharded.shardings
    assert found[w.id] == found[step.id] and found[m.id] == found[momentum.id]
    assert str(found[w.id]) == "[x, -]" and not kinds(fd)


def test_open_sizes_are_given() -> None:
    with mf.FusionDefinition() as fd:
        x, w = fd.define_tensor([-1, 64]), fd.define_tensor([64, 64])
        fd.add_output(fd.ops.linear(x, w))
    raises("compile needs the size of every dim", lambda: fd.auto(ONE))
    plan = fd.auto(ONE, (4096, 64), (64, 64))
    assert "['x', None]" in str(plan)


# errors --------------------------------------------------------------------------------------------------------------


def test_a_bound_that_nothing_is_within() -> None:
    fd, _ = mlp(*SMALL)
    raises("fd.auto: max_memory: found 1,000,000 bytes, needed ", lambda: fd.auto(ONE, max_memory=1e6))
    assert not fd.recording.annotations


def test_a_step_that_is_shorter_than_any_message_is_within_a_bound_as_well() -> None:
    """There the price of memory must outweigh what messages take to start."""
    with mf.FusionDefinition() as fd:
        x, w = fd.define_tensor([16, 8]), fd.define_tensor([8, 8])
        fd.add_output(fd.ops.softmax(fd.ops.linear(fd.ops.softmax(fd.ops.linear(x, w), 0), w), 1))
    fd.auto(TWO, max_memory=1000)
    assert fd.memory().peak <= 1000


def test_what_auto_does_not_take() -> None:
    fd, (x, *_) = mlp(*SMALL)
    raises("mesh: found 'x', needed an mf.DeviceMesh", lambda: fd.auto("x"))
    raises("max_memory: found", lambda: fd.auto(ONE, max_memory=-1))
    raises("auto: updates: found 3, needed a tensor of this definition", lambda: fd.auto(ONE, updates={x: 3}))  # type: ignore[dict-item]
    for wrong in (3, True, "x", [x], np.zeros(2)):
        raises("auto: updates: found ", lambda wrong=wrong: fd.auto(ONE, updates=wrong))  # type: ignore[arg-type]
    fd.mesh_split(x, TWO, ["dp", None])
    raises("fd.auto: found ", lambda: fd.auto(ONE))
    empty = mf.FusionDefinition()
    raises("fd.auto: found a definition without outputs, needed outputs", lambda: empty.auto(ONE))
