"""`search="follow"`: shardings go along the ops' dims by rules alone, as in Shardy, and nothing has a price."""

from __future__ import annotations

from collections import Counter

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

import meshfuse as mf
from interpreter import has_reference, interpret
from meshfuse.planner.effort import Effort
from meshfuse.testing import assert_same_as_unsharded, inputs_for
from meshfuse.testing import blocks as b
from meshfuse.testing.blocks import FAMILIES
from refusing import raises
from test_random_programs import examples, families, keeps_annotations
from test_random_programs import programs as random_programs
from test_shardy_agreement import product, programs, shardys

MESH = mf.DeviceMesh((2, 4), ("dp", "tp"))
# Ops whose dims both sides follow alike. (Shardy cannot say a reshape's strides, nor uneven windows.)
ALIKE = (
    b.unary, b.binary, b.binary, b.with_number, b.quotient, b.comparison, b.where, b.cast, b.reduction, b.softmax,
    b.matmul, product, product, b.gram, b.permute, b.broadcast,
)  # fmt: skip


def following(fd: mf.FusionDefinition) -> mf.FusionDefinition:
    """The definition, planned by rules."""
    fd._programs.effort = Effort.FOLLOW
    return fd


@pytest.mark.fuzz
@pytest.mark.timeout(600)
def test_outputs_lie_where_shardy_leaves_them() -> None:
    """In nearly all programs: where tensors disagree each has an order of its own in which they decide."""
    same: list[bool] = []

    @settings(max_examples=examples(150))
    @given(programs(ALIKE, 6, parts=False, free_outputs=True))
    def collect(fd: mf.FusionDefinition) -> None:
        theirs = shardys(fd).outputs
        compiled = following(fd).compile()
        left = [compiled.sharded.shardings[i].dims for i in compiled.graph.outputs]
        ours = [tuple(tuple((s.axis, s.pre, s.size) for s in dim) for dim in dims) for dims in left]
        same.append(all(a == b or not (any(a) or b) for a, b in zip(ours, theirs, strict=True)))

    collect()
    assert len(same) > 100 and same.count(True) >= 0.97 * len(same)


@pytest.mark.fuzz
@pytest.mark.timeout(600)
@pytest.mark.parametrize("family", [*FAMILIES, "all"])
def test_a_random_program_is_what_torch_computes(family: str) -> None:
    @settings(max_examples=examples(13))
    @given(random_programs(families(family)), st.integers(0, 99))
    def check(fd: mf.FusionDefinition, number: int) -> None:
        inputs = inputs_for(following(fd), number)
        assert_same_as_unsharded(fd, inputs, interpret(fd, inputs) if has_reference(fd) else None)
        keeps_annotations(fd, fd.latest().sharded)

    check()


def mlp(rows: int, **more: str) -> mf.FusionDefinition:
    with mf.FusionDefinition(**more) as fd:
        x, w1, w2 = fd.define_tensor([rows, 64]), fd.define_tensor([256, 64]), fd.define_tensor([64, 256])
        y = x + fd.ops.linear(fd.ops.gelu(fd.ops.linear(x, w1)), w2)
        fd.add_output(y)
        fd.mesh_split(x, MESH, ["dp", None])
        fd.mesh_split(w1, MESH, ["tp", None])
        fd.mesh_split(w2, MESH, [None, "tp"])
    return fd


@pytest.mark.parametrize("rows", [8, 64, 1 << 16])
def test_weights_stay_however_many_rows_there_are(rows: int) -> None:
    """Megatron's all-reduce; the optimum gathers the weights of many rows."""
    bill = mlp(rows, search="follow").bill()
    assert Counter(f"{e.collective} {e.axes}" for e in bill.entries) == {"all-reduce tp": 1}
    assert bill.gap is None and "proven" not in str(bill)


def test_a_later_annotation_is_followed_back() -> None:
    with mf.FusionDefinition(search="follow") as fd:
        x = fd.define_tensor([8, 64])
        a = fd.ops.exp(x)
        y = fd.ops.neg(a)
        fd.add_output(y)
        fd.mesh_split(y, MESH, ["dp", "tp"])
    assert str(fd.compile().sharded.shardings[a.id]) == "[dp, tp]" and not fd.bill().entries


def test_where_tensors_disagree_the_one_with_more_axes_decides() -> None:
    with mf.FusionDefinition(search="follow") as fd:
        a, c = fd.define_tensor([16, 64]), fd.define_tensor([16, 64])
        y = a + c
        fd.add_output(y)
        fd.mesh_split(a, MESH, ["tp", None])
        fd.mesh_split(c, MESH, ["dp", "tp"])
    assert [str(s) for s in fd.output_shardings()] == ["[dp, tp]"]


def test_stationary_tensors_that_rules_would_move_are_an_error() -> None:
    with mf.FusionDefinition(search="follow") as fd:
        x, w = fd.define_tensor([64, 64]), fd.define_tensor([64, 64])
        y = fd.ops.matmul(x, w)
        fd.add_output(y)
        fd.mesh_split(x, MESH, ["tp", None])
        fd.mesh_split(w, MESH, [None, "tp"], stationary=True)
        fd.mesh_split(y, MESH, ["tp", None])
    raises("stationary", lambda: fd.compile())


def test_two_meshes() -> None:
    one, other = mf.DeviceMesh([0, 1], ("x",)), mf.DeviceMesh([2, 3], ("x",))
    with mf.FusionDefinition(search="follow") as fd:
        x, w = fd.define_tensor([8, 16]), fd.define_tensor([16, 16])
        h = fd.ops.relu(x)
        y = fd.ops.linear(h, w)
        fd.add_output(y)
        fd.mesh_split(x, one, ["x", None])
        fd.mesh_split(w, other, ["x", None])
        fd.mesh_split(y, other, [None, "x"])
    assert_same_as_unsharded(fd, inputs_for(fd, 1))
