"""Definitions in two, what follows from some inputs alone and the rest, against the whole in plain torch."""

from __future__ import annotations

import math
import re
import warnings
from collections.abc import Callable, Sequence
from typing import Any

import pytest
import torch
from hypothesis import assume, given, settings
from hypothesis import strategies as st

import meshfuse as mf
from defining import collectives, random_inputs
from interpreter import has_reference, interpret
from meshfuse import fusion_definition
from meshfuse.graph import shape_scalars
from meshfuse.ops.values import TensorRef, TensorType
from meshfuse.testing import annotations, definitions, inputs_for, shapes_for
from meshfuse.testing.check import assert_close, tolerance_of

TP = mf.DeviceMesh((4,), ("tp",))
GRID = mf.DeviceMesh((2, 2), ("dp", "tp"))
Halves = tuple[mf.FusionDefinition, mf.FusionDefinition]


def views(fd: mf.FusionDefinition, places: Sequence[int]) -> list[mf.TensorView]:
    """The inputs at these places."""
    return [mf.TensorView(fd, ref) for place in places if isinstance(ref := fd.recording.inputs[place], TensorRef)]


def run(halves: Halves, inputs: Sequence[Any], kept: Sequence[int]) -> list[torch.Tensor]:
    """The outputs, with the inputs at the places `kept` given once."""
    once, each = halves
    made = once.simulate([inputs[place] for place in kept], check_replicas=True)
    others = [value for place, value in enumerate(inputs) if place not in kept]
    return each.simulate([*others, *made], check_replicas=True)


@pytest.mark.slow
@pytest.mark.fuzz
@settings(max_examples=25)
@given(definitions(open_sizes=True).flatmap(annotations), st.integers(0, 99), st.booleans(), st.data())
def test_random_programs_in_two_are_what_torch_computes(
    fd: mf.FusionDefinition, number: int, gathered: bool, data: Any
) -> None:
    assume(has_reference(fd) and not shape_scalars(fd.recording))
    read = {i for node in fd.recording.nodes for i in node.inputs}.union(fd.recording.outputs)
    places = [place for place, ref in enumerate(fd.recording.inputs) if isinstance(ref, TensorRef) and ref.id in read]
    assume(places)
    kept = data.draw(st.lists(st.sampled_from(places), min_size=1, unique=True))
    inputs = inputs_for(fd, number)
    try:
        halves = fd.prepared(views(fd, kept), *shapes_for(fd), gathered=gathered)
    except mf.DefinitionError as error:  # what reads them no output follows from
        assert "nothing follows" in str(error)
        return
    for got, wanted in zip(run(halves, inputs, kept), interpret(fd, inputs), strict=True):
        assert_close(got, wanted, tolerance_of(fd), "an output")
    rest, whole = halves[1].bill(), fd.bill()
    assert rest.total <= whole.total + 1e-6 or rest.seconds < whole.seconds
    assert gathered or kept_bytes(halves[0]) <= given_bytes(halves[0])


def given_bytes(once: mf.FusionDefinition) -> int:
    """Bytes of the inputs on the rank with most of each."""
    shardings, made = once.compile().sharded.shardings, once.recording
    return sum(most_bytes(shardings[i], made.tensors[i].type) for i in made.input_tensors())


def kept_bytes(once: mf.FusionDefinition) -> int:
    """The same of the outputs."""
    types = [once.recording.tensors[i].type for i in once.recording.outputs]
    return sum(map(most_bytes, once.compile().output_shardings(), types))


def most_bytes(sharding: mf.Sharding, ttype: TensorType) -> int:
    held = [sharding.local_shape(ttype.shape, rank) for rank in sharding.mesh.ranks]
    return max(map(math.prod, held)) * ttype.dtype.itemsize


def fused(rows: int, max_wire: float | None = None) -> tuple[mf.FusionDefinition, mf.TensorView]:
    """Three products by one weight, which is split across them, for a result that is split inside of each."""
    with mf.FusionDefinition(max_wire=max_wire) as fd:
        x, w = fd.define_tensor([rows, 32]), fd.define_tensor([96, 32])
        y = fd.ops.linear(x, w)
        q, k, v = (fd.ops.slice(y, [0, 32 * i], [rows, 32 * i + 32]) for i in range(3))
        z = fd.ops.add(fd.ops.mul(q, k), v)
        fd.add_output(z)
        fd.mesh_split(w, TP, ["tp", None])
        fd.mesh_split(z, TP, [None, "tp"])
    return fd, w


@pytest.mark.parametrize("rows", [16, 512])
def test_a_weight_is_laid_out_once(rows: int) -> None:
    """Of few rows the products move at each call, as that is less than the weight; once the weight does in any case."""
    fd, w = fused(rows)
    moved = {entry.tensor for entry in fd.bill().entries}
    assert moved == ({"t1"} if rows == 512 else {"y (t2)"})
    once, each = halves = fd.prepared(w)
    assert once.bill().total == 2048.0 and not each.bill().entries and not collectives(each)
    inputs = random_inputs(fd)
    q, k, v = (inputs[0].double() @ inputs[1].double().T).split(32, 1)
    (got,) = run(halves, inputs, [1])
    assert_close(got, q * k + v, 1e-5, "z")
    assert once.compile().output_shardings()[0].max_local_numel((96, 32)) == 96 * 32 // 4


def cast() -> tuple[mf.FusionDefinition, list[mf.TensorView]]:
    """A weight in shards, cast and used, and a bias that is broadcast."""
    with mf.FusionDefinition() as fd:
        x = fd.define_tensor([64, 32], dtype=mf.DataType.BFloat16)
        w, b = fd.define_tensor([32, 32]), fd.define_tensor([32], dtype=mf.DataType.BFloat16)
        y = fd.ops.matmul(x, fd.ops.cast(w, mf.DataType.BFloat16))
        fd.add_output(fd.ops.add(y, fd.ops.broadcast_in_dim(b, [64, 32], [1])))
        fd.mesh_split(x, TP, ["tp", None])
        fd.mesh_split(w, TP, ["tp", None])
    return fd, [w, b]


def test_casts_and_gathers_are_done_once_and_what_grows_is_not() -> None:
    fd, weights = cast()
    once, each = fd.prepared(weights, gathered=True)
    shapes = [each.recording.tensors[i].type for i in each.recording.input_tensors()]
    assert [(ttype.shape, ttype.dtype) for ttype in shapes] == [
        ((64, 32), mf.DataType.BFloat16), ((32, 32), mf.DataType.BFloat16), ((32,), mf.DataType.BFloat16),
    ]  # fmt: skip
    assert [node.op.name for node in each.recording.nodes] == ["matmul", "broadcast_in_dim", "add"]
    assert once.bill().total == fd.bill().total == 2 * 32 * 32 * 3 / 4 and each.bill().total == 0


def test_gathered_tensors_are_kept_with_the_option_only() -> None:
    """Else the cast is kept, in shards, and gathered at each call: four times the shard is more than was given."""
    fd, weights = cast()
    once, each = fd.prepared(weights)
    assert [node.op.name for node in once.recording.nodes if node.op.name != "set"] == ["cast"]
    assert once.bill().total == 0 and each.bill().total == fd.bill().total
    assert kept_bytes(once) == 32 * 32 // 4 * 2 + 32 * 2 < given_bytes(once)
    assert kept_bytes(fd.prepared(weights, gathered=True)[0]) == 32 * 32 * 2 + 32 * 2


def layers(count: int, max_memory: float | None = None) -> tuple[mf.FusionDefinition, list[mf.TensorView]]:
    """Products by weights in shards, which ranks need whole for their rows."""
    with mf.FusionDefinition(max_memory=max_memory) as fd:
        x = fd.define_tensor([1024, 64])
        fd.mesh_split(x, TP, ["tp", None])
        weights = [fd.define_tensor([64, 64]) for _ in range(count)]
        for w in weights:
            fd.mesh_split(w, TP, ["tp", None])
            x = fd.ops.relu(fd.ops.linear(x, w))
        fd.add_output(x)
    return fd, weights


WEIGHT = 64 * 64 * 4


def peaks(halves: Halves) -> int:
    return max(half.memory().peak for half in halves)


@pytest.mark.parametrize("kept_weights", [0, 1, 3, 5, 6])
def test_no_more_is_gathered_than_the_memory_holds(kept_weights: int) -> None:
    fd, weights = layers(6)
    free = fd.prepared(weights, gathered=True)
    assert kept_bytes(free[0]) == 6 * WEIGHT and free[1].bill().total == 0
    more = WEIGHT * 3 // 4  # that a gathered one takes than its shard
    # The shards, three rows' parts and one weight gathered: what the program takes in any case.
    limit = 6 * WEIGHT // 4 + 3 * 1024 * 64 + WEIGHT + kept_weights * more
    with warnings.catch_warnings():
        warnings.simplefilter("error")  # of more than the bound
        fd, weights = layers(6, max_memory=limit)
        halves = fd.prepared(weights, gathered=True)
        assert peaks(halves) <= limit
    assert halves[1].bill().total <= 2 * (6 - kept_weights) * more
    assert kept_bytes(halves[0]) <= limit - 3 * 1024 * 64
    inputs = [torch.randn(1024, 64), *(torch.randn(64, 64) / 8 for _ in weights)]
    wanted = inputs[0].double()
    for w in inputs[1:]:
        wanted = (wanted @ w.double().T).relu()
    assert_close(run(halves, inputs, range(1, 7))[0], wanted, 1e-5, "y")


def test_two_uses_of_a_weight_in_two_places_are_kept_once() -> None:
    """Of the same size each, but together twice what was given."""
    fd = mf.FusionDefinition()
    x, z, w = fd.define_tensor([4096, 32]), fd.define_tensor([4096, 32]), fd.define_tensor([32, 32])
    for made in (fd.ops.linear(x, w), fd.ops.matmul(z, w)):
        fd.add_output(made)
        fd.mesh_split(made, TP, [None, "tp"])
    fd.mesh_split(w, TP, ["tp", None])
    assert kept_bytes(fd.prepared(w, gathered=True)[0]) == 2 * 32 * 32 * 4 // 4
    halves = fd.prepared(w)
    assert kept_bytes(halves[0]) == 32 * 32 * 4 // 4
    inputs = random_inputs(fd)
    a, b, c = (t.double() for t in inputs)
    for got, wanted in zip(run(halves, inputs, [2]), (a @ c.T, b @ c), strict=True):
        assert_close(got, wanted, 1e-5, "a product")


def test_what_grows_is_left_to_the_rest_even_where_it_moves() -> None:
    """An outer product that is read elsewhere than it is made."""
    with mf.FusionDefinition() as fd:
        x, a, b = fd.define_tensor([4096, 64]), fd.define_tensor([64, 2]), fd.define_tensor([2, 64])
        y = fd.ops.matmul(x, fd.ops.matmul(a, b))
        fd.add_output(y)
        fd.mesh_split(y, TP, [None, "tp"])
        fd.mesh_split(a, TP, ["tp", None])
    halves = fd.prepared([a, b])
    assert kept_bytes(halves[0]) <= given_bytes(halves[0])
    inputs = random_inputs(fd)
    wanted = inputs[0].double() @ (inputs[1].double() @ inputs[2].double())
    assert_close(run(halves, inputs, [1, 2])[0], wanted, 1e-5, "y")


def test_products_of_weights_alone_are_done_once() -> None:
    """Low-rank updates of a weight."""
    with mf.FusionDefinition() as fd:
        x, w, a, b = (fd.define_tensor(shape) for shape in ([8, 32], [32, 32], [4, 32], [32, 4]))
        fd.add_output(fd.ops.linear(x, fd.ops.add(w, fd.ops.matmul(b, a))))
        fd.mesh_split(w, GRID, ["tp", None])
    once, each = halves = fd.prepared([w, a, b])
    assert [node.op.name for node in each.recording.nodes] == ["linear"] and len(once.recording.outputs) == 1
    inputs = random_inputs(fd)
    x64, w64, a64, b64 = (t.double() for t in inputs)
    assert_close(run(halves, inputs, [1, 2, 3])[0], x64 @ (w64 + b64 @ a64).T, 1e-5, "y")


def test_random_numbers_are_drawn_at_each_call() -> None:
    with mf.FusionDefinition(seed=3) as fd:
        x, w = fd.define_tensor([8, 8]), fd.define_tensor([8, 8])
        fd.mesh_split(w, TP, ["tp", None])
        fd.add_output(fd.ops.add(x, fd.ops.mul(w, fd.ops.rand_like(w))))
    _, each = halves = fd.prepared(w)
    assert "rand_like" in [node.op.name for node in each.recording.nodes]
    inputs = [torch.zeros(8, 8), torch.ones(8, 8)]
    first, second = (run(halves, inputs, [1])[0] for _ in range(2))
    assert not torch.equal(first, second)


def test_scalars_and_chunks_and_memory_orders_stay() -> None:
    with mf.FusionDefinition() as fd:
        x, w = fd.define_tensor([16, 8]), fd.define_tensor([8, 8])
        factor = fd.define_scalar(dtype=mf.DataType.Double)
        y = fd.ops.matmul(x, fd.ops.mul(w, 2.0))
        z = fd.ops.mul(y, fd.ops.add(factor, x.size(0)))
        fd.overlap(y, 2)
        fd.mesh_split(w, TP, ["tp", None])
        fd.add_output(fd.ops.permute(z, [1, 0]))
    halves = fd.prepared(w)
    assert {asked[:3] for asked in halves[1].recording.overlaps.values()} == {(0, 2, False)}
    inputs = [torch.randn(16, 8), torch.randn(8, 8), 0.5]
    wanted = (inputs[0].double() @ (inputs[1].double() * 2) * 16.5).T
    assert_close(run(halves, inputs, [1])[0], wanted, 1e-5, "z")


def test_an_output_of_kept_inputs_alone() -> None:
    with mf.FusionDefinition() as fd:
        x, w = fd.define_tensor([8, 8]), fd.define_tensor([8, 8])
        fd.add_output(fd.ops.tanh(w))
        fd.add_output(fd.ops.add(x, w))
        fd.add_output(w)
        fd.mesh_split(w, TP, [None, "tp"])
    inputs = random_inputs(fd)
    tanh, total, same = run(fd.prepared(w), inputs, [1])
    assert_close(tanh, inputs[1].double().tanh(), 1e-6, "tanh")
    assert torch.equal(total, inputs[0] + inputs[1]) and torch.equal(same, inputs[1])


def prepared_and_observed(
    monkeypatch: pytest.MonkeyPatch, fd: mf.FusionDefinition, w: mf.TensorView
) -> tuple[Halves, list[Any]]:
    """A definition's halves, and all definitions that came to be meanwhile."""
    observed: list[Any] = []
    monkeypatch.setattr(fusion_definition, "observers", [observed.append])
    return fd.prepared(w), observed


def test_the_plan_that_is_not_taken_is_neither_observed_nor_warned_of(monkeypatch: pytest.MonkeyPatch) -> None:
    """Neither by the command line, nor by a warning: that plan moves more than the bound at each call."""
    fd, w = fused(16, max_wire=512)
    with pytest.warns(mf.PlanWarning):
        fd.compile()
    with warnings.catch_warnings():
        warnings.simplefilter("error")
        halves, observed = prepared_and_observed(monkeypatch, fd, w)
        assert not halves[1].bill().entries
    assert observed == list(halves)


def test_changes_of_a_half_do_not_reach_the_definition() -> None:
    fd, w = fused(512)
    before = repr(fd)
    once, each = fd.prepared(w)
    for half in (once, each):
        for view in views(half, range(len(half.recording.inputs))):
            if view.has_device_mesh():
                view.split(len(view.get_loop_domain()) - 1, 2)
    assert repr(fd) == before


def test_without_a_mesh_both_run_on_any() -> None:
    with mf.FusionDefinition() as fd:
        x, w = fd.define_tensor([8, 8]), fd.define_tensor([8, 8])
        fd.add_output(fd.ops.matmul(x, fd.ops.mul(w, 2.0)))
    halves = fd.prepared(w)
    assert not any(half.recording.annotations for half in halves)
    inputs = random_inputs(fd)
    assert_close(run(halves, inputs, [1])[0], inputs[0].double() @ inputs[1].double() * 2, 1e-5, "y")


def open_scalar() -> Any:
    fd = mf.FusionDefinition()
    n, w = fd.define_scalar(dtype=mf.DataType.Int), fd.define_tensor([8])
    fd.add_output(fd.ops.add(fd.ops.full([n], 1.0, mf.DataType.Float), w))
    return fd.prepared(w)


def unread() -> Any:
    fd = mf.FusionDefinition()
    x, w = fd.define_tensor([8]), fd.define_tensor([8])
    fd.add_output(fd.ops.neg(x))
    return fd.prepared(w)


def with_output(pick: Callable[[mf.FusionDefinition, Any, Any], Any]) -> Callable[[], Any]:
    def ask() -> Any:
        fd = mf.FusionDefinition()
        x = fd.define_tensor([8])
        y = fd.ops.neg(x)
        fd.add_output(y)
        return fd.prepared(pick(fd, x, y))

    return ask


EACH_ONCE = "needed input tensors, each once. Pass what define_tensor returned."
WRONG = {
    "made": (with_output(lambda fd, x, y: [x, y]), f"prepared: found y (t1), made by ops, {EACH_ONCE}"),
    "twice": (with_output(lambda fd, x, y: [x, x]), f"prepared: found one twice, {EACH_ONCE}"),
    "none": (with_output(lambda fd, x, y: []), f"prepared: found none, {EACH_ONCE}"),
    "number": (with_output(lambda fd, x, y: 3), "prepared: found 3, needed a tensor of this definition."),
    "unread": (unread, "prepared: nothing follows: found no reader of t1, needed inputs that are read"),
    "sizes": (open_scalar, "prepared: sizes are fixed: found some that follow s0, needed sizes that depend on no"),
}  # fmt: skip


@pytest.mark.parametrize("case", WRONG)
def test_what_cannot_be_prepared(case: str) -> None:
    ask, text = WRONG[case]
    with pytest.raises(mf.DefinitionError, match=re.escape(text)) as raised:
        ask()
    assert "test_prepared.py:" in str(raised.value)


def test_open_sizes_are_those_of_the_latest_call() -> None:
    with mf.FusionDefinition() as fd:
        x, w = fd.define_tensor([-1, 8]), fd.define_tensor([8, 8])
        fd.add_output(fd.ops.matmul(x, w))
        fd.mesh_split(w, TP, ["tp", None])
    inputs = [torch.randn(6, 8), torch.randn(8, 8)]
    fd.simulate(inputs)
    halves = fd.prepared(w)
    assert_close(run(halves, inputs, [1])[0], inputs[0].double() @ inputs[1].double(), 1e-5, "y")
    with pytest.raises(mf.ArgumentError, match=re.escape("found [7, 8], needed [6, 8]")):
        halves[1].simulate([torch.randn(7, 8), inputs[1]])
