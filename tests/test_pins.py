"""Plans with a tensor held elsewhere (planning/pins.py): every one is right, whatever it costs."""

from __future__ import annotations

import pytest

import meshfuse as mf
from defining import graph_of
from meshfuse import compiler
from meshfuse.planner.pins import pins
from meshfuse.propagation import LOOK, Propagation
from meshfuse.resharding import insert_resharding
from meshfuse.sharding.layout import extent
from meshfuse.testing import assert_same_as_unsharded, inputs_for

MESH = mf.DeviceMesh((2, 4), ("dp", "tp"))


def gated(uneven: bool = False) -> mf.FusionDefinition:
    """Two products and their gradients, of rows and weights that disagree."""
    rows = 12 if uneven else 16
    with mf.FusionDefinition() as fd:
        shapes = ([2, rows, 16], [16, 32], [16, 16])
        x, w, v = (fd.define_tensor(shape, dtype=mf.DataType.Double) for shape in shapes)
        fd.mesh_split(x, MESH, [None, ("dp", "tp"), None])
        fd.mesh_split(w, MESH, [None, "tp"])
        fd.mesh_split(v, MESH, ["tp", "dp"])
        both = fd.ops.matmul(x, w)
        left = fd.ops.slice(both, [0, 0, 0], [2, rows, 16])
        right = fd.ops.slice(both, [0, 0, 16], [2, rows, 32])
        y = fd.ops.softmax(fd.ops.matmul(fd.ops.silu(left) * right, v), 1)
        for result in (y, *fd.grad(fd.ops.sum(y * y), [w, v])):
            fd.add_output(result)
    return fd


@pytest.mark.parametrize("uneven", [False, True])
def test_a_plan_with_any_tensor_held_elsewhere_is_right(uneven: bool, monkeypatch: pytest.MonkeyPatch) -> None:
    graph = graph_of(gated(uneven))
    propagation = Propagation(graph, MESH)
    plan = propagation.first()
    found = pins(insert_resharding(plan))
    assert len(found) > 40
    # Every other one: the even rows' and the uneven ones' in turn.
    for pin in found[int(uneven) :: 2]:
        held = propagation.holding(plan.shardings, *pin, LOOK)
        assert held.graph == graph
        fd = gated(uneven)
        with monkeypatch.context() as patch:
            patch.setattr(compiler, "decided", lambda *_, held=held: held)
            fd.compile()
        assert_same_as_unsharded(fd, inputs_for(fd))
        assert fd.compile().planned is held


def test_what_is_held_lies_evenly_elsewhere_and_is_no_input_or_annotated() -> None:
    graph = graph_of(gated())
    plan = Propagation(graph, MESH).first()
    for tensor, place in pins(insert_resharding(plan)):
        assert tensor not in graph.input_tensors and tensor not in graph.annotations
        assert place != plan.shardings[tensor]
        assert all(n % extent(layout) == 0 for n, layout in zip(graph.shape(tensor), place.dims, strict=True))


def test_axes_that_nothing_lies_on_stay_free() -> None:
    """Nobody asked for them: what is computed is to be whole there."""
    mesh = mf.DeviceMesh((2, 4), ("spare", "tp"))
    with mf.FusionDefinition() as fd:
        x, w = fd.define_tensor([16, 16]), fd.define_tensor([16, 16])
        fd.mesh_split(x, mesh, ["tp", None])
        fd.mesh_split(w, mesh, ["tp", None])
        fd.add_output(fd.ops.softmax(fd.ops.matmul(fd.ops.softmax(fd.ops.matmul(x, w), 0), w), 0))
    plan = Propagation(graph_of(fd), mesh).first()
    found = pins(insert_resharding(plan))
    assert found
    assert not any(split.axis == "spare" for _, place in found for split in place.splits)
