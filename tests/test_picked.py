"""Slices of products taken of their operands: columns of weights, rows that are read."""

from __future__ import annotations

import math

import pytest
from hypothesis import assume, given, settings
from hypothesis import strategies as st
from programs import TP8, Fd, outputs, split

import meshfuse as mf
from bill_classes.known import check_run
from bill_classes.picked import picked_in
from defining import graph_of
from meshfuse.ops.values import TensorRef
from meshfuse.rewrites.hoist_slices import Picked
from meshfuse.testing import definitions, inputs_for
from meshfuse.testing.check import assert_close, tolerance_of
from meshfuse.testing.concat_distributive import evaluated


def sliced(fd: Fd, of: str) -> None:
    """A product of which columns 2 to 6 and rows 1 to 5 in twos are read, and perhaps something else."""
    x, w = fd.define_tensor([8, 16]), fd.define_tensor([16, 8])
    p = fd.ops.matmul(x, w)
    q = fd.ops.relu(p) if of == "relu" else p
    outputs(fd, fd.ops.slice(q, [0, 2], [8, 6]), fd.ops.slice(q, [1, 0], [5, 8], [2, 1]))
    if of == "read by more":
        outputs(fd, fd.ops.sum(p, [0]))
    if of == "annotated":
        split(fd, TP8, (p, ["tp", None]))
    split(fd, TP8, (w, [None, "tp"]))


WRITTEN = [("product", True), ("relu", True), ("read by more", False), ("annotated", False)]


@pytest.mark.parametrize("of, changed", WRITTEN)
def test_what_else_is_read_or_annotated_is_not_written_otherwise(of: str, changed: bool) -> None:
    with mf.FusionDefinition() as fd:
        sliced(fd, of)
    graph = graph_of(fd)
    written = Picked()(graph)
    assert (written is not graph) == changed
    shapes = {node.call.results[0].shape for node in written.nodes if node.name == "matmul"}
    assert shapes == ({(8, 4), (2, 8)} if changed else {(8, 8)})
    check_run(fd)


def test_slices_of_what_is_not_summed_stay() -> None:
    """And so do those of what is put together, or cut along two dims at once."""
    with mf.FusionDefinition() as fd:
        x, w = fd.define_tensor([8, 16]), fd.define_tensor([16, 8])
        outputs(fd, fd.ops.slice(fd.ops.relu(x), [0, 0], [4, 16]))
        outputs(fd, fd.ops.slice(fd.ops.matmul(x, w), [0, 0], [4, 4]))
        outputs(fd, fd.ops.slice(fd.ops.reshape(fd.ops.matmul(x, w), [64]), [8], [24]))
    graph = graph_of(fd)
    assert Picked()(graph) is graph and math.isfinite(fd.bill().total)


@st.composite
def programs_picked_of(draw: st.DrawFn) -> mf.FusionDefinition:
    """A random program of whose last result rows are picked, in some way."""
    fd = draw(definitions(("products", "pointwise", "shapes")))
    last = mf.TensorView(fd, TensorRef(fd.recording.nodes[-1].outputs[0]))
    dims = [d for d, n in enumerate(last.type.shape) if n > 1]
    assume(dims and -1 not in last.type.shape and fd.recording.nodes[-1].op.name not in ("slice", "select"))
    dim, how = draw(st.sampled_from(dims)), draw(st.sampled_from(["slice", "select", "index_select", "take"]))
    count = last.type.shape[0] if how == "take" else draw(st.integers(1, 3))
    assume(how != "take" or dim > 0)
    index = fd.ops.full([count], last.type.shape[dim] - 1, mf.DataType.Int)
    found = picked_in(how, fd, last, dim, index)
    fd.recording.outputs.clear()
    fd.add_output(found)
    return fd


@pytest.mark.fuzz
def test_random_programs_with_rows_picked_early_are_the_programs() -> None:
    changed = []

    @settings(max_examples=100 if settings.get_current_profile_name() == "ci" else settings().max_examples)
    @given(programs_picked_of())
    def check(fd: mf.FusionDefinition) -> None:
        graph = graph_of(fd)
        other, inputs = Picked()(graph), inputs_for(fd)
        assume(len(inputs) == len(graph.input_tensors))
        changed.append(other is not graph)
        for a, b in zip(evaluated(graph, inputs), evaluated(other, inputs), strict=True):
            assert_close(b, a, max(1e-4, 4 * tolerance_of(fd) ** 2), str(other))

    check()
    assert sum(changed) > len(changed) / 20
