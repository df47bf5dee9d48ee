"""Windows of windows as one, and shifts in a chain: as right as what is written, and no more than neighbours lack."""

from __future__ import annotations

import itertools
from collections.abc import Sequence
from typing import Any

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

import meshfuse as mf
from meshfuse.propagation import Propagation
from meshfuse.testing import assert_same_as_unsharded, inputs_for

ROWS = mf.DeviceMesh((4,), ("x",))
BOTH = mf.DeviceMesh((2, 2), ("x", "y"))
# Before and after, of each of two dims; less than none are cut off. And what comes in.
Step = tuple[tuple[int, int], tuple[int, int], float]


def window(fd: mf.FusionDefinition, x: mf.TensorView, step: Step) -> mf.TensorView:
    """A slice where nothing comes in, else a pad; x where nothing would be left."""
    *widths, fill = step
    shape = x.type.shape
    if any(n + sum(w) < 1 or -min(w) >= n for n, w in zip(shape, widths, strict=True)):
        return x
    if max(map(max, widths)) <= 0:
        starts = [-before for before, _ in widths]
        return fd.ops.slice(x, starts, [n + after for n, (_, after) in zip(shape, widths, strict=True)])
    return fd.ops.pad(x, [*widths[1], *widths[0]], fill)


def back(fd: mf.FusionDefinition, x: mf.TensorView, shape: Sequence[int]) -> mf.TensorView:
    """With zeros after it, or cut off, to this shape."""
    return window(fd, x, (*((0, n - m) for n, m in zip(shape, x.type.shape, strict=True)), 0.0))  # type: ignore[arg-type]


WIDTHS = st.tuples(st.integers(-3, 3), st.integers(-3, 3))
STEPS = st.lists(st.tuples(WIDTHS, st.just((0, 0)) | WIDTHS, st.sampled_from([0.0, 0.0, 1.5])), min_size=1, max_size=3)
TAPS = st.lists(STEPS, min_size=1, max_size=5)


def defined(
    shape: tuple[int, int],
    place: tuple[mf.DeviceMesh, list[Any]],
    taps: list[list[Step]],
    last: Step,
    roots: int,
    out: bool,
    turns: frozenset[int] = frozenset(),
    sets: frozenset[int] = frozenset(),
) -> mf.FusionDefinition:
    """A window of the sum of the taps, which are windows of windows of some products of x.

    `turns`: before which windows of each tap, and (3) before the last one of all, the dims change places. `sets`: after
    which windows of each tap there is a place for an annotation.
    """
    with mf.FusionDefinition() as fd:
        x = fd.define_tensor(list(shape))
        fd.mesh_split(x, *place)
        made, total = [x * (i + 1.0) for i in range(roots)], None
        for i, steps in enumerate(taps):
            part = made[i % roots]
            for place_of_step, step in enumerate(steps):
                part = turned(fd, part) if place_of_step in turns else part
                part = window(fd, part, step)
                part = fd.ops.set(part) if place_of_step in sets else part
            part = turned(fd, part) if len(turns & set(range(len(steps)))) % 2 else part
            part = back(fd, part, shape)
            total = part if total is None else total + part
            if out:
                fd.add_output(fd.ops.neg(part))
        assert total is not None
        fd.add_output(window(fd, turned(fd, total) if 3 in turns else total, last))
    return fd


def turned(fd: mf.FusionDefinition, x: mf.TensorView) -> mf.TensorView:
    return fd.ops.permute(x, [1, -2])


@settings(max_examples=14)
@given(
    st.tuples(st.integers(1, 17), st.integers(1, 9)), st.sampled_from([(ROWS, ["x", None]), (BOTH, ["x", "y"])]),
    TAPS, STEPS, st.integers(1, 2), st.booleans(), st.frozensets(st.integers(0, 3)), st.frozensets(st.integers(0, 2)),
)  # fmt: skip
def test_windows_written_otherwise_are_the_same(shape, place, taps, last, roots, out, turns, sets):
    """Whatever it costs: with several fills, elements that a window hides from the next one, sums read once or not."""
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(Propagation, "cheaper", lambda plan, found, form: plan(form))
        fd = defined(shape, place, taps, last[0], roots, out, turns, sets)
        assert_same_as_unsharded(fd, inputs_for(fd))


@pytest.mark.parametrize("place", [[("x", "y"), None], ["y", "x"]], ids=str)
@pytest.mark.parametrize("step", [2, 3])
def test_slices_in_steps_of_one_row_of_a_dim_that_lies_over_ranks(step: int, place: list[Any]) -> None:
    """And their gradients. Padded to whole steps, a dim may have as many of them as it had elements."""
    for n, start in ((1, 0), (3, 2), (8, 0), (8, 4), (8, 7)):
        with mf.FusionDefinition() as fd:
            x = fd.define_tensor([n, 4], dtype=mf.DataType.Double)
            made = fd.ops.slice(x, [start, 0], [start + 1, 4], [step, step])
            fd.mesh_split(x, BOTH, place)
            fd.add_output(made)
            fd.add_output(fd.grad(fd.ops.sum(made * made), x))
        (whole,) = inputs_for(fd)
        rows, gradient = whole[start : start + 1, ::step], torch.zeros_like(whole)
        gradient[start : start + 1, ::step] = 2 * rows
        assert_same_as_unsharded(fd, [whole], [rows, gradient])


def taps_of(fd: mf.FusionDefinition, x: mf.TensorView, before: int, after: int) -> list[mf.TensorView]:
    rows, width = x.type.shape
    padded = fd.ops.pad(x, [0, 0, before, after])
    return [fd.ops.slice(padded, [i, 0], [i + rows, width]) for i in range(before + after + 1)]


def moved_rows(before: int, after: int, grad: bool = False) -> float:
    """Rows that a rank in the middle gets for a convolution by hand of a sum per tap."""
    with mf.FusionDefinition() as fd:
        x, w = fd.define_tensor([64, 8]), fd.define_tensor([before + after + 1, 8])
        total = None
        for i, tap in enumerate(taps_of(fd, x, before, after)):
            part = tap * fd.ops.slice(w, [i, 0], [i + 1, 8])
            total = part if total is None else total + part
        assert total is not None
        fd.mesh_split(x, ROWS, ["x", None])
        fd.mesh_split(total, ROWS, ["x", None])
        fd.add_output(total)
        if grad:
            (made,) = fd.grad([total], [x], [total])
            fd.mesh_split(made, ROWS, ["x", None])
            fd.add_output(made)
    assert_same_as_unsharded(fd, inputs_for(fd))
    return fd.bill().total / (3 / 4 * 8 * 4)


@pytest.mark.parametrize(("before", "after"), [(1, 1), (3, 0), (0, 2), (2, 3)])
def test_a_convolution_moves_each_neighbours_row_once(before: int, after: int) -> None:
    assert moved_rows(before, after) == before + after
    assert moved_rows(before, after, grad=True) == 2 * (before + after)


@pytest.mark.parametrize("way", ["one", "both ways", "alike", "all"])
def test_what_no_window_shows_is_not_shifted(way: str) -> None:
    """Shifts of some channels, as of RWKV and temporal shift modules: one row of these from each neighbour."""
    rows, channels = 16, 8
    parts = {"one": [(0, 2, 1)], "both ways": [(0, 2, 1), (2, 4, -1)], "alike": [(0, 2, 1), (4, 6, 1)],
             "all": [(0, 8, 2), (0, 2, 1)]}[way]  # fmt: skip
    moved = {"one": 2, "both ways": 4, "alike": 6, "all": 2 * 8}[way]  # channels of a row, what lies between once more
    with mf.FusionDefinition() as fd:
        x = fd.define_tensor([rows, channels], dtype=mf.DataType.Double)
        fd.mesh_split(x, ROWS, ["x", None])
        y = fd.ops.sin(x)
        for low, high, by in parts:
            padded = fd.ops.pad(fd.ops.slice(y, [0, low], [rows, high]), [0, 0, max(-by, 0), max(by, 0)])
            made = fd.ops.cos(fd.ops.slice(padded, [max(by, 0), 0], [rows + max(by, 0), high - low]))
            fd.mesh_split(made, ROWS, ["x", None])
            fd.add_output(made)
    assert_same_as_unsharded(fd, inputs_for(fd))
    assert fd.bill().total == 3 / 4 * 8 * moved


@pytest.mark.parametrize("name", ["set", "segment_set"])
def test_places_for_annotations_between_windows_cost_nothing(name: str) -> None:
    """In a convolution by hand, its gradient, and a slice of a slice."""
    bills = []
    for between in (None, name):
        with mf.FusionDefinition() as fd:
            x, total = fd.define_tensor([96, 4], dtype=mf.DataType.Double), None
            padded = fd.ops.pad(x, [0, 0, 1, 1])
            padded = fd.call(between, (padded,)) if between else padded
            for i in range(3):
                part = fd.ops.slice(padded, [i, 0], [i + 96, 4]) * (i + 2.0)
                total = part if total is None else total + part
            cut = fd.ops.slice(x, [12, 0], [74, 4])
            cut = fd.call(between, (cut,)) if between else cut
            fd.mesh_split(x, ROWS, ["x", None])
            for made in (total, fd.ops.slice(cut, [24, 0], [57, 4]), fd.grad(fd.ops.sum(total * total), x)):
                fd.add_output(made)
                fd.mesh_split(made, ROWS, ["x", None])
        assert_same_as_unsharded(fd, inputs_for(fd))
        bills.append(fd.bill().total)
    assert bills[0] == bills[1]


@pytest.mark.parametrize("order", [[0, 2, 3, 1], [2, 0, 3, 1]])
def test_channels_that_go_last_after_the_pad_cost_nothing(order: list[int]) -> None:
    """An image [b, c, h, w], padded, then permuted, then a slice per tap; and its gradient."""
    back = [order.index(d) for d in range(4)]
    with mf.FusionDefinition() as fd:
        x, total = fd.define_tensor([2, 3, 32, 8], dtype=mf.DataType.Double), None
        padded = fd.ops.permute(fd.ops.pad(x, [1, 1, 1, 1]), order)
        for i, j in itertools.product(range(3), repeat=2):
            at, sizes = [0, 0, i, j], [2, 3, 32, 8]
            stops = [n + o for n, o in zip(sizes, at, strict=True)]
            part = fd.ops.slice(padded, [at[d] for d in order], [stops[d] for d in order]) * (i + 2.0 * j)
            total = part if total is None else total + part
        assert total is not None
        out = fd.ops.permute(total, back)
        fd.mesh_split(x, ROWS, [None, None, "x", None])
        fd.add_output(out)
        fd.add_output(fd.grad(fd.ops.sum(out * out), x))
    assert_same_as_unsharded(fd, inputs_for(fd))
    assert fd.bill().total == 2 * (2 * 3 / 4 * (2 * 3 * 8 * 8))


def convolved(fd: mf.FusionDefinition, x: mf.TensorView, w: mf.TensorView) -> mf.TensorView:
    """A convolution by hand: x [b, h, w, c] with w [3, 3, c, c]."""
    *image, c = x.type.shape
    padded, total = fd.ops.pad(x, [0, 0, 1, 1, 1, 1]), None
    for i in range(3):
        for j in range(3):
            at = [0, i, j, 0]
            tap = fd.ops.slice(padded, at, [n + o for n, o in zip([*image, c], at, strict=True)])
            part = fd.ops.matmul(tap, fd.ops.reshape(fd.ops.slice(w, [*at[1:3], 0, 0], [i + 1, j + 1, c, c]), [c, c]))
            total = part if total is None else total + part
    assert total is not None
    return total


@pytest.mark.parametrize("layers", [2, 3])
def test_a_plan_that_goes_out_of_the_way_of_windows_comes_back(layers: int) -> None:
    """Nine windows one by one take more than an all-to-all to the batch; the two rows that a rank lacks take less."""
    rows = layers * 16
    with mf.FusionDefinition() as fd:
        y, weights = fd.define_tensor([4, rows, 8, 4]), [fd.define_tensor([3, 3, 4, 4]) for _ in range(layers)]
        fd.mesh_split(y, ROWS, [None, "x", None, None])
        for w in weights:
            y = convolved(fd, y, w)
        fd.add_output(y)
    assert fd.bill().total == layers * 3 / 4 * 2 * (4 * 8 * 4) * 4
    assert_same_as_unsharded(fd, inputs_for(fd))


def test_what_is_annotated_is_made() -> None:
    """A padded tensor that the user places is there, as it is placed."""
    with mf.FusionDefinition() as fd:
        x = fd.define_tensor([16, 4])
        padded = fd.ops.pad(x, [0, 0, 1, 1])
        fd.add_output(fd.ops.slice(padded, [0, 0], [16, 4]) + fd.ops.slice(padded, [2, 0], [18, 4]))
        fd.mesh_split(x, ROWS, ["x", None])
        fd.mesh_split(padded, ROWS, [None, "x"])
    assert "[-, x]" in fd.explain(padded)
    assert "pad" in [node.name for node in fd.compile().graph.nodes]
    assert_same_as_unsharded(fd, inputs_for(fd))


def test_whole_dims_keep_their_views() -> None:
    """Slices of a padded dim that no rank has a part of are left as they are."""
    with mf.FusionDefinition() as fd:
        x = fd.define_tensor([8, 16])
        padded = fd.ops.pad(x, [1, 1])
        fd.add_output(fd.ops.sum(fd.ops.slice(padded, [0, 0], [8, 16]) * fd.ops.slice(padded, [0, 2], [8, 18])))
        fd.mesh_split(x, ROWS, ["x", None])
    assert [node.name for node in fd.compile().graph.nodes].count("slice") == 2
