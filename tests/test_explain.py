"""`fd.explain`: where every split comes from, what is communicated, and what else could have been done."""

from __future__ import annotations

import os

import pytest
import torch

import meshfuse as mf

MESH = mf.DeviceMesh((2, 4), ("dp", "tp"))
HERE = os.path.basename(__file__)


class Mlp:
    def __init__(self) -> None:
        with mf.FusionDefinition() as self.fd:
            fd = self.fd
            self.x = x = fd.define_tensor([8, 64])
            self.w1 = w1 = fd.define_tensor([256, 64])
            self.w2 = w2 = fd.define_tensor([64, 256])
            self.h = h = fd.ops.relu(fd.ops.linear(x, w1))
            self.y = y = fd.ops.linear(h, w2)
            fd.add_output(y)
            fd.mesh_split(x, MESH, ["dp", None])
            fd.mesh_split(w1, MESH, ["tp", None])
            fd.mesh_split(w2, MESH, [None, "tp"])


def lines(text: str) -> list[str]:
    return [line.strip() for line in text.splitlines()]


def line_of(source: str) -> int:
    """The number of the first line of this file with this text."""
    with open(__file__) as file:
        return next(i for i, line in enumerate(file, 1) if line.strip() == source)


def test_a_result_follows_its_operands_back_to_the_annotations() -> None:
    made = Mlp()
    found = lines(made.fd.explain(made.h))
    assert found[0] == "h (t4): Float[8, 256], sharded [dp, tp] on DeviceMesh((2, 4), ('dp', 'tp'))"
    x_line, w_line = (line_of(f'fd.mesh_split({a}, MESH, ["{b}", None])') for a, b in (("x", "dp"), ("w1", "tp")))
    where = f'{HERE}:{x_line}: fd.mesh_split(x, MESH, ["dp", None])'
    unlabelled = [line.replace("h (t3)", "t3") for line in found]
    assert f"dp on dim 0: follows x (t0) through t3, annotated at {where}" in unlabelled
    assert any(line.startswith("tp on dim 1: follows w1 (t1)") and f"{HERE}:{w_line}" in line for line in found)
    assert any(line.startswith("relu is computed following") and "us modelled" in line for line in found)
    assert any(line.startswith("the alternative, as h (t4) is wanted: ") and "times)" in line for line in found)
    assert found[-1] == "none: every reader takes it as it is"


def test_an_unreduced_sum_and_its_collective() -> None:
    made = Mlp()
    found = lines(made.fd.explain(made.y))
    assert "sharded [(dp, tp), -]" in found[0]
    assert any(
        line.startswith("unreduced over tp: a dim summed over is split in w2 (t2), annotated at") for line in found
    )
    wire = 3 / 4 * (8 // 2) * 64 * 4
    where = line_of("self.y = y = fd.ops.linear(h, w2)")
    (reduction,) = (line for line in found if line.startswith("reduce-scatter over tp"))
    moves = "[dp, -] partial(sum: tp) -> [(dp, tp), -]"
    assert f"reduce-scatter over tp, {wire:,.0f} bytes per rank, 0.0154 us: {moves}" in reduction
    assert f"asked for by output at {HERE}:{where}" in reduction


def test_explain_says_whether_an_input_is_annotated() -> None:
    made = Mlp()
    assert any(line.startswith("annotated so at") for line in lines(made.fd.explain(made.w2)))
    with mf.FusionDefinition() as fd:
        x = fd.define_tensor([8, 16])
        b = fd.define_tensor([16])
        fd.add_output(fd.ops.add(x, b))
        fd.mesh_split(x, MESH, ["dp", "tp"])
    text = fd.explain(b)
    assert "never annotated: an input without an annotation is replicated, whole on every rank" in text
    assert "each rank takes its part, no bytes: [-] -> [tp], asked for by operand 1 of add" in text


def test_an_annotation_downstream_is_named() -> None:
    with mf.FusionDefinition() as fd:
        x = fd.define_tensor([512, 512])
        h = fd.ops.exp(x)
        y = fd.ops.neg(h)
        fd.add_output(y)
        fd.mesh_split(y, MESH, ["tp", None])
    assert any(line.startswith("tp on dim 0: wanted by y (t2), annotated at") for line in lines(fd.explain(h)))


def test_an_annotation_that_the_op_does_not_make() -> None:
    with mf.FusionDefinition() as fd:
        x = fd.define_tensor([512, 512])
        w = fd.define_tensor([512, 512])
        y = fd.ops.linear(x, w)
        fd.add_output(y)
        fd.mesh_split(x, MESH, [None, "tp"])
        fd.mesh_split(w, MESH, [None, "tp"])
        fd.mesh_split(y, MESH, [None, None])
    text = fd.explain(y)
    assert "annotated so at" in text
    assert "its op makes it as [-, -] partial(sum: tp), because:" in text
    assert "asked for by its annotation" in text


def test_explain_says_that_an_op_is_computed_whole() -> None:
    with mf.FusionDefinition() as fd:
        x = fd.define_tensor([8, 16])
        y = fd.ops.relu(x)
        fd.add_output(y)
    text = fd.explain(y)
    assert "computed whole: neither an operand nor an annotation splits it over an axis" in text
    assert "there was no other way to compute it" in text


@pytest.mark.slow
def test_computed_whole_from_a_split_operand() -> None:
    """What gathers an operand is not told that none is split."""
    with mf.FusionDefinition() as fd:
        x, w, v = (fd.define_tensor(shape) for shape in ([2, 16, 32], [32, 32], [32, 32]))
        k = fd.ops.linear(x, w)
        a = fd.ops.softmax(fd.ops.matmul(k, fd.ops.permute(k, [0, 2, 1])))
        y = x + fd.ops.linear(fd.ops.matmul(a, k), v)
        fd.add_output(y)
        for gradient in fd.grad(fd.ops.sum(y * y), [w, v]):
            fd.add_output(gradient)
        fd.mesh_split(x, mf.DeviceMesh((4,), ("cp",)), [None, "cp", None])
    text = fd.explain(y)
    assert "computed whole: no split of t0 is left in it" in text


def test_the_table_has_a_row_for_every_tensor() -> None:
    made = Mlp()
    table = made.fd.explain().splitlines()
    assert table[0] == "on DeviceMesh((2, 4), ('dp', 'tp'))"
    assert table[1].split() == ["tensor", "type", "sharding", "why", "line"]
    assert len(table) == 2 + len(made.fd.recording.tensors)
    rows = {line.split()[0]: line for line in table[2:]}
    assert "dp from x (t0), tp from w2 (t2)" in rows["y"]
    assert "annotated at" in rows["x"]


def test_shapes_choose_the_program() -> None:
    with mf.FusionDefinition() as fd:
        x = fd.define_tensor([-1, 16])
        y = fd.ops.relu(x)
        fd.add_output(y)
    assert "Float[5, 16]" in fd.explain(y, [5, 16])
    assert "Float[6, 16]" in fd.explain(None, [6, 16])
    assert "Float[6, 16]" in fd.explain(y)


def test_a_tensor_of_another_definition_is_an_error() -> None:
    made = Mlp()
    with pytest.raises(mf.DefinitionError, match=r"explain: found .* of another definition"):
        made.fd.explain(Mlp().x)


def test_what_no_output_needs_is_neither_computed_nor_communicated() -> None:
    mesh = mf.DeviceMesh((4,), ("tp",))
    with mf.FusionDefinition() as fd:
        x = fd.define_tensor([8, 8])
        unused = fd.ops.sum(x, [0])
        tail = fd.ops.relu(unused)
        fd.add_output(fd.ops.neg(x))
        fd.mesh_split(x, mesh, ["tp", None])
        fd.mesh_split(tail, mesh, [None])
    assert not fd.bill().entries
    assert [node.name for node in fd.compile().graph.nodes] == ["neg"]
    assert "no output needs it, so it is not computed" in fd.explain(tail)
    assert "unused" not in fd.explain()
    t = torch.randn(8, 8)
    assert torch.equal(fd(t)[0], -t)


def test_a_collective_names_the_other_annotation_that_it_is_for() -> None:
    with mf.FusionDefinition() as fd:
        x = fd.define_tensor([512, 64])
        w = fd.define_tensor([64, 64])
        fd.add_output(fd.ops.matmul(x, w))
        fd.mesh_split(x, MESH, ["tp", None])
        fd.mesh_split(w, MESH, ["tp", None])
    found = lines(fd.explain(w))
    assert any(
        line.startswith("for x (t0), annotated at") and 'fd.mesh_split(x, MESH, ["tp", None])' in line for line in found
    )


def moved_in_pieces() -> tuple[mf.FusionDefinition, dict[str, mf.TensorView]]:
    """Ops that are the move of exact pieces of a sharded dim."""
    with mf.FusionDefinition() as fd:
        x = fd.define_tensor([1600, 2])
        made = {
            "slice": fd.ops.slice(x, [3, 0], [1203, 2]),
            "pad": fd.ops.pad(x, [0, 0, 7, 9]),
            "reorder_blocks": fd.ops.reorder_blocks(x, 0, [2, 0, 3, 1]),
        }
        for tensor in made.values():
            result = fd.ops.relu(tensor)
            fd.add_output(result)
            fd.mesh_split(result, MESH, ["tp", None])
        fd.mesh_split(x, MESH, ["tp", None])
    return fd, made


def test_reshards_in_exact_pieces_are_not_called_whole() -> None:
    fd, made = moved_in_pieces()
    planned = fd.compile().planned
    sources = {node.name: c.source for node, c in zip(planned.graph.nodes, planned.choices, strict=True)}
    for name, tensor in made.items():
        assert sources[name].kind == "pieces"
        found = lines(fd.explain(tensor))
        assert any(line.startswith(f"{name} is computed by moving the pieces of x (t0) ") for line in found), found
        assert any(line.startswith("tp on dim 0: follows x (t0), annotated at ") for line in found), found


def test_an_unannotated_result_of_moved_pieces_follows_what_is_moved() -> None:
    with mf.FusionDefinition() as fd:
        x = fd.define_tensor([1600, 2])
        y = fd.ops.slice(x, [3, 0], [1203, 2])
        z = fd.ops.sum(fd.ops.exp(y))
        fd.add_output(z)
        fd.mesh_split(x, MESH, ["tp", None])
    found = lines(fd.explain(y))
    assert any(line.startswith("tp on dim 0: follows x (t0), annotated at ") for line in found), found
