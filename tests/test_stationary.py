"""Stationary tensors: no collective moves them along the axes named, ops come to them."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from typing import Any

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

import meshfuse as mf
from meshfuse.compiler import CompiledProgram
from meshfuse.testing import annotations, assert_same_as_unsharded, definitions, inputs_for

TP = mf.DeviceMesh((4,), ("tp",))
GRID = mf.DeviceMesh((2, 4), ("dp", "tp"))


def mlp(rows: int, mesh: mf.DeviceMesh = TP, stationary: Any = False, first: Sequence[Any] = ("tp", None)) -> Any:
    """(definition, first weight) of an MLP whose rows are many: weights are the cheaper ones to move."""
    with mf.FusionDefinition() as fd:
        x, w1, w2 = fd.define_tensor([rows, 64]), fd.define_tensor([256, 64]), fd.define_tensor([64, 256])
        y = fd.ops.linear(fd.ops.relu(fd.ops.linear(x, w1)), w2)
        fd.add_output(y)
        fd.mesh_split(x, mesh, ["dp" if "dp" in mesh.names else None, None])
        fd.mesh_split(w1, mesh, list(first), stationary=stationary)
        fd.mesh_split(w2, mesh, [first[1], first[0]], stationary=stationary)
    return fd, w1


def moved(compiled: CompiledProgram) -> Iterator[tuple[int, str]]:
    """The tensors that collectives move, with the axes."""
    for reshard in compiled.resharded.collectives:
        for split in reshard.step.axes:
            yield compiled.resharded.values[reshard.source].tensor, split.axis or ""


def test_megatrons_plan_comes_of_stationary_weights() -> None:
    free, w1 = mlp(65536)
    assert w1.id in {tensor for tensor, _ in moved(free.compile())}
    kept, _ = mlp(65536, stationary=True)
    (entry,) = kept.bill().entries
    assert entry.collective == "reduce-scatter" and entry.tensor.startswith("y")
    assert_same_as_unsharded(mlp(16, stationary=True)[0], inputs_for(mlp(16)[0]))


def test_a_weight_that_is_stationary_along_one_axis_is_gathered_along_the_other() -> None:
    """As fully sharded data parallelism beside tensor parallelism."""
    fd, _ = mlp(65536, GRID, "tp", (["tp", "dp"], None))
    axes = [entry.axes for entry in fd.bill().entries if entry.tensor.startswith(("t1", "t2"))]
    assert axes == ["dp", "dp"]
    kept, _ = mlp(65536, GRID, True, (["tp", "dp"], None))
    assert not [entry for entry in kept.bill().entries if entry.tensor.startswith(("t1", "t2"))]


def test_what_is_made_of_it_alone_stays_too() -> None:
    """Else a weight's cast would be gathered in its place."""
    with mf.FusionDefinition() as fd:
        x, w = fd.define_tensor([65536, 64], dtype=mf.DataType.BFloat16), fd.define_tensor([256, 64])
        cast = fd.ops.permute(fd.ops.cast(w, dtype=mf.DataType.BFloat16), [1, 0])
        fd.add_output(fd.ops.sum(fd.ops.matmul(x, cast)))
        fd.mesh_split(x, TP, ["tp", None])
        fd.mesh_split(w, TP, ["tp", None])
        fd.stationary(w)
    graph = fd.compile().graph
    made = {w.id, *(out for node in graph.nodes if node.name in ("cast", "permute") for out in node.outputs)}
    assert not made & {tensor for tensor, _ in moved(fd.compile())}


@settings(max_examples=40)
@given(definitions().flatmap(annotations), st.data())
def test_no_collective_moves_it_in_any_program(fd: mf.FusionDefinition, data: st.DataObject) -> None:
    placed = [i for i in fd.recording.input_tensors() if fd.recording.is_annotated(i)]
    if not placed:
        return
    tensor = data.draw(st.sampled_from(placed))
    names = fd.recording.own_annotations[tensor].mesh.names  # type: ignore[union-attr]
    along = data.draw(st.sets(st.sampled_from(names), min_size=1))
    fd.recording.own_annotations[tensor].stationary = tuple(sorted(along))
    try:
        compiled = fd.compile()
    except mf.DefinitionError as error:
        assert "is stationary along" in str(error)
        return
    assert not [axis for moves, axis in moved(compiled) if moves == tensor and axis in along]
    assert_same_as_unsharded(fd, inputs_for(fd))


def test_explain_gives_both_prices() -> None:
    free, w = mlp(65536)
    assert "moved: a step takes" in free.explain(w) and "; if it is stationary, " in free.explain(w)
    kept, w = mlp(65536, stationary="tp")
    assert "stationary along tp: a step takes" in kept.explain(w) and "; if it may move, " in kept.explain(w)


def test_an_op_that_must_have_it_whole_is_an_error() -> None:
    with mf.FusionDefinition() as fd:
        x = fd.define_tensor([8, 64])
        fd.add_output(fd.ops.argsort(x, 1))
        fd.mesh_split(x, TP, [None, "tp"], stationary=True)
    with pytest.raises(mf.DefinitionError) as raised:
        fd.compile()
    assert str(raised.value).startswith("x (t0) is stationary along tp: found argsort, which must have it as [")


@pytest.mark.parametrize("search", ["follow", "fast"])
def test_the_op_that_is_named_is_one_that_cannot_come(search: str) -> None:
    """And not an elementwise op that reads what is moved for another one."""
    mesh = mf.DeviceMesh((2, 2, 2), ("a", "b", "c"))
    with mf.FusionDefinition(search=search) as fd:
        x = fd.define_tensor([4, 7])
        double = fd.ops.sub(x, x)
        fd.add_output(fd.ops.reshape(fd.ops.cat([double, x], 1), [8, 7, 1]))
        fd.add_output(double)
        fd.mesh_split(x, mesh, [["b", "c"], "a"], stationary=True)
    with pytest.raises(mf.DefinitionError, match=r"x \(t0\) is stationary along a, b, c: found cat, which must have"):
        fd.compile()


@pytest.mark.parametrize(("along", "found"), [("dp", "'dp'"), (["tp", "x"], "['tp', 'x']"), (3, "3"), (None, "None")])
def test_what_is_no_axis_is_an_error(along: Any, found: str) -> None:
    with mf.FusionDefinition() as fd:
        x = fd.define_tensor([8, 64])
        with pytest.raises(mf.DefinitionError) as raised:
            fd.mesh_split(x, TP, [None, "tp"], stationary=along)
    assert str(raised.value).startswith(f"stationary: x (t0): found {found}, needed True, or axes of its mesh: 'tp'.")


def test_a_tensor_without_an_annotation_is_an_error() -> None:
    with mf.FusionDefinition() as fd:
        x = fd.define_tensor([8, 64])
        with pytest.raises(
            mf.DefinitionError, match="found a tensor without an annotation, needed one that is annotat"
        ):
            fd.stationary(x)


def test_it_is_part_of_the_definitions_text_and_of_the_plans_key() -> None:
    from meshfuse.plans.plan_cache import key_of

    free, kept = mlp(64)[0], mlp(64, stationary=True)[0]
    assert "stationary=['tp']" in repr(kept) and "stationary" not in repr(free)
    graphs = [fd.compile().planned.graph for fd in (free, kept)]
    assert key_of(graphs[0], TP) != key_of(graphs[1], TP)


def test_numbers_are_those_of_one_device() -> None:
    fd, _ = mlp(32, GRID, "tp", (["tp", "dp"], None))
    inputs = [torch.randn(n) for n in ([32, 64], [256, 64], [64, 256])]
    (found,) = fd.simulate(inputs, check_replicas=True)
    torch.testing.assert_close(found, torch.relu(inputs[0] @ inputs[1].T) @ inputs[2].T, rtol=1e-4, atol=1e-3)
