"""What is sliced and put back in its place: as right as what is written, and nothing of it moves."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

import meshfuse as mf
from meshfuse.dtypes import Category
from meshfuse.graph import specialize
from meshfuse.plans import plan_cache
from meshfuse.rewrites import update_in_place as in_place
from meshfuse.testing import assert_same_as_unsharded, inputs_for

ROWS = mf.DeviceMesh((4,), ("x",))
BOTH = mf.DeviceMesh((2, 2), ("x", "y"))
N, WIDTH = 16, 6
Fd = mf.FusionDefinition
T = mf.TensorView


def rows(fd: Fd, x: T, start: int, stop: int) -> T:
    return fd.ops.slice(x, [start, 0], [stop, x.type.shape[1]])


def replaced(fd: Fd, x: T, new: T, start: int) -> T:
    """x with other rows from `start` on."""
    stop, (n, _) = start + new.type.shape[0], x.type.shape
    parts = [rows(fd, x, 0, start)] * (start > 0) + [new] + [rows(fd, x, stop, n)] * (stop < n)
    return fd.ops.cat(parts, 0)


def kept(fd: Fd, x: T, start: int, stop: int, fill: float) -> T:
    """x with other numbers before and after these rows."""
    return fd.ops.pad(rows(fd, x, start, stop), [0, 0, start, x.type.shape[0] - stop], fill)


# Whatever is put together ---------------------------------------------------------------------------------------

# What stands in some rows: those of x or y at their place, others of x, or new ones, which may lie over ranks.
SPAN = st.tuples(st.integers(1, 7), st.sampled_from(["x", "y", "other rows", "new", "split"]))
PLACES = st.sampled_from([(ROWS, ["x", None]), (BOTH, ["x", "y"]), (BOTH, [("x", "y"), None]), (BOTH, ["x", None])])
KINDS = mf.DataType
DTYPES = st.sampled_from([KINDS.Double, KINDS.Float, KINDS.BFloat16, KINDS.Int, KINDS.Int32, KINDS.Bool])


def put_together(spans: list[tuple[int, str]], place: tuple[mf.DeviceMesh, list[Any]], dtype: Any, fill: bool) -> Fd:
    n = sum(size for size, _ in spans)
    with mf.FusionDefinition() as fd:
        x, y = (fd.define_tensor([n, WIDTH], dtype=dtype) for _ in range(2))
        fd.mesh_split(x, *place)
        fd.mesh_split(y, *place)
        parts, start = [], 0
        for size, kind in spans:
            if kind in ("x", "y"):
                parts.append(rows(fd, x if kind == "x" else y, start, start + size))
            elif kind == "other rows":
                parts.append(rows(fd, x, n - start - size, n - start))
            else:
                parts.append(fd.define_tensor([size, WIDTH], dtype=dtype))
                if kind == "split":
                    fd.mesh_split(parts[-1], *place)
            start += size
        made = fd.ops.cat(parts, 0) if len(parts) > 1 else parts[0]
        if fill and len(spans) > 1:
            made = kept(fd, made, spans[0][0], n, 1.0 if dtype.category >= Category.FLOAT else 1)
        fd.mesh_split(made, *place)
        fd.add_output(made)
    return fd


@settings(max_examples=25)
@given(st.lists(SPAN, min_size=1, max_size=5), PLACES, DTYPES, st.booleans())
def test_choices_are_what_is_put_together(spans, place, dtype, fill) -> None:
    """Whatever it costs: one row and several, whole and split, ends and the middle, rows that stand elsewhere."""
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(in_place, "cheaper", lambda found, other: other)
        patch.setattr(in_place, "reshards_along", lambda found, dims: True)
        fd = put_together(spans, place, dtype, fill)
        tensors = inputs_for(fd)
        assert_same_as_unsharded(fd, tensors)


# Nothing moves -----------------------------------------------------------------------------------------------------


def cache(fd: Fd) -> T:
    x = fd.define_tensor([N, WIDTH], dtype=mf.DataType.Double)
    fd.mesh_split(x, ROWS, ["x", None])
    return x


def new(fd: Fd, count: int) -> T:
    return fd.define_tensor([count, WIDTH], dtype=mf.DataType.Double)


IN_PLACE: dict[str, Callable[[Fd], T]] = {
    "a token in the middle": lambda fd: replaced(fd, cache(fd), new(fd, 1), 5),
    "several over two ranks": lambda fd: replaced(fd, cache(fd), new(fd, 6), 5),
    "the first": lambda fd: replaced(fd, cache(fd), new(fd, 1), 0),
    "the last two": lambda fd: replaced(fd, cache(fd), new(fd, 2), N - 2),
    "one after another": lambda fd: replaced(fd, replaced(fd, cache(fd), new(fd, 1), 5), new(fd, 2), 9),
    "rows of two": lambda fd: fd.ops.cat([rows(fd, cache(fd), 0, 5), rows(fd, cache(fd), 5, N)], 0),
    "zeros at the end": lambda fd: kept(fd, cache(fd), 0, N - 3, 0.0),
    "ones on both sides": lambda fd: kept(fd, cache(fd), 3, N - 2, 1.0),
}


@pytest.mark.parametrize("name", IN_PLACE)
def test_what_stays_in_its_place_does_not_move(name: str) -> None:
    with mf.FusionDefinition() as fd:
        made = IN_PLACE[name](fd)
        fd.mesh_split(made, ROWS, ["x", None])
        fd.add_output(made)
    assert fd.bill().total == 0
    assert_same_as_unsharded(fd, inputs_for(fd))


def updated(fd: Fd, count: int) -> list[T]:
    x, token = cache(fd), new(fd, count)
    made = replaced(fd, x, token, 5)
    return [x, token, fd.ops.sum(fd.ops.sin(made) * made)]


@pytest.mark.parametrize("count", [1, 6])
def test_gradients_reach_what_is_put_in_alone(count: int) -> None:
    """The gradient of what was put in comes to all ranks, once; that of the rest stays."""
    with mf.FusionDefinition() as fd:
        x, token, loss = updated(fd, count)
        for made in fd.grad([loss], [x, token]):
            fd.add_output(made)
    assert fd.bill().total <= 2 * 3 / 4 * count * WIDTH * 8
    assert_same_as_unsharded(fd, inputs_for(fd))
    x_now, token_now = inputs_for(fd)
    found = fd.simulate([x_now, token_now])
    for given_, grad in zip(torch_gradients(x_now, token_now), found, strict=True):
        torch.testing.assert_close(given_, grad)


def torch_gradients(x: torch.Tensor, token: torch.Tensor) -> tuple[torch.Tensor, ...]:
    leaves = [t.clone().requires_grad_() for t in (x, token)]
    made = torch.cat([leaves[0][:5], leaves[1], leaves[0][5 + len(token) :]])
    return torch.autograd.grad((made.sin() * made).sum(), leaves)


# What is left as it is ---------------------------------------------------------------------------------------------


def test_a_slice_with_a_name_is_where_the_user_says() -> None:
    with mf.FusionDefinition() as fd:
        x = cache(fd)
        part = rows(fd, x, 0, 5)
        fd.mesh_split(part, ROWS, [None, "x"])
        fd.add_output(fd.ops.cat([part, new(fd, 1), rows(fd, x, 6, N)], 0))
    assert "[-, x]" in fd.explain(part)
    assert_same_as_unsharded(fd, inputs_for(fd))


def test_whole_dims_are_put_together_as_written() -> None:
    with mf.FusionDefinition() as fd:
        x = fd.define_tensor([N, 8])
        fd.mesh_split(x, ROWS, [None, "x"])
        made = replaced(fd, x, fd.define_tensor([1, 8]), 5)
        fd.add_output(fd.ops.sum(made, [1]))
    assert "cat" in [node.name for node in fd.compile().graph.nodes]
    assert_same_as_unsharded(fd, inputs_for(fd))


def test_such_a_plan_is_stored_and_made_again() -> None:
    with mf.FusionDefinition() as fd:
        made = IN_PLACE["several over two ranks"](fd)
        fd.mesh_split(made, ROWS, ["x", None])
        fd.add_output(made)
    shapes = {i: fd.recording.tensors[i].type.shape for i in fd.recording.input_tensors()}
    plan = fd.compile().planned
    assert [type(rewriting) for rewriting in plan.graph.rewritings] == [in_place.Placed]
    again = plan_cache.unpacked(plan_cache.packed(plan), specialize(fd.recording, shapes, {}))
    assert str(again) == str(plan)
