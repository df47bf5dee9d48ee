"""Windows in blocks with their neighbours' edges: steps, zeros between, several dims, what is done before the taps."""

from __future__ import annotations

import functools
import itertools
from collections.abc import Callable, Iterator, Sequence
from typing import Any

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

import meshfuse as mf
from meshfuse import compiler
from meshfuse.propagation import Propagation
from meshfuse.testing import assert_same_as_unsharded, inputs_for

ROWS = mf.DeviceMesh((4,), ("x",))
BOTH = mf.DeviceMesh((2, 2), ("x", "y"))
DOUBLE = mf.DataType.Double
Tensor = mf.TensorView


# numbers ----------------------------------------------------------------------------------------------------------


@pytest.fixture
def written_in_any_case(monkeypatch: pytest.MonkeyPatch) -> Iterator[None]:
    """Whatever it costs."""
    monkeypatch.setattr(compiler, "cheaper", lambda found, other: other)
    monkeypatch.setattr(Propagation, "cheaper", lambda plan, found, form: plan(form))
    yield


def cat_zeros(fd: mf.FusionDefinition, x: Tensor, dim: int, width: int, fill: float = 0.0) -> Tensor:
    shape = list(x.type.shape)
    shape[dim] = width
    edge = fd.ops.full(shape, fill, DOUBLE)
    return fd.ops.cat([edge, x, edge], dim)


BETWEEN: dict[str, Callable[[mf.FusionDefinition, Tensor], Tensor]] = {
    "nothing": lambda fd, x: x,
    "relu": lambda fd, x: fd.ops.relu(x),
    "a number": lambda fd, x: 1.0 - x * 2.0,
    "a square": lambda fd, x: fd.ops.relu(x) * x,
    "a function": lambda fd, x: fd.ops.exp(fd.ops.sin(x)),
    "a cast": lambda fd, x: fd.ops.cast(x, mf.DataType.Float),
    "another pad": lambda fd, x: fd.ops.pad(fd.ops.relu(x), [1, 0, 0, 1], 1.5),
}


class Taps:
    """Windows of what is padded: in steps, from several places, and how their results are one."""

    def __init__(self, starts: Sequence[Sequence[int]], steps: Sequence[int], weighed: bool):
        self.starts, self.steps, self.weighed = starts, steps, weighed

    def of(self, fd: mf.FusionDefinition, padded: Tensor) -> Tensor | None:
        shape, total = padded.type.shape, None
        reach = [max(starts) for starts in zip(*self.starts, strict=True)]
        sizes = [(n - 1 - far) // step + 1 for n, far, step in zip(shape, reach, self.steps, strict=True)]
        if min(sizes) < 1:
            return None
        for number, starts in enumerate(self.starts):
            stops = [a + step * (m - 1) + 1 for a, step, m in zip(starts, self.steps, sizes, strict=True)]
            part = fd.ops.slice(padded, list(starts), stops, list(self.steps))
            part = part * (number + 1.5) if self.weighed else part
            total = part if total is None else total + part
        return total


SPOTS = st.lists(st.tuples(st.integers(0, 4), st.integers(0, 3)), min_size=1, max_size=4)
TAPS = st.builds(Taps, SPOTS, st.tuples(st.integers(1, 4), st.sampled_from([1, 1, 2])), st.booleans())
PLACES = st.sampled_from([(ROWS, ["x", None]), (BOTH, ["x", "y"]), (BOTH, [("x", "y"), None])])
WIDTHS = st.tuples(st.integers(0, 2), st.integers(0, 2), st.integers(0, 3), st.integers(0, 3))


@pytest.mark.usefixtures("written_in_any_case", "over_whole_axes")
@settings(max_examples=9)
@given(
    st.tuples(st.integers(1, 21), st.integers(1, 9)), PLACES, WIDTHS, st.sampled_from([0.0, 0.0, -1.5]),
    st.sampled_from([*BETWEEN]), TAPS, st.booleans(), st.booleans(),
)  # fmt: skip
def test_taps_are_the_same_however_they_are_written(shape, place, widths, fill, between, taps, by_cat, turned):
    """And their gradients, which have zeros between."""
    with mf.FusionDefinition() as fd:
        x = fd.define_tensor(list(shape), dtype=DOUBLE)
        padded = cat_zeros(fd, x, 0, 2, fill) if by_cat else fd.ops.pad(x, list(widths), fill)
        changed = BETWEEN[between](fd, padded)
        made = taps.of(fd, fd.ops.permute(changed, [1, 0]) if turned else changed)
        if made is None:
            return
        fd.mesh_split(x, *place)
        fd.add_output(made)
        fd.add_output(fd.grad(fd.ops.sum(fd.ops.sin(made)), x))
    assert_same_as_unsharded(fd, inputs_for(fd))


@pytest.mark.usefixtures("written_in_any_case")
@settings(max_examples=10)
@given(st.integers(1, 19), st.integers(1, 3), st.integers(0, 2), st.integers(0, 2), st.integers(1, 4), PLACES)
def test_convolutions_of_what_has_zeros_between(n, up, inside, before, size, place):
    """Transposed convolutions by hand."""
    with mf.FusionDefinition() as fd:
        x, inside = fd.define_tensor([n, 4], dtype=DOUBLE), min(inside, up - 1)
        spread = fd.ops.pad(fd.ops.broadcast(x, [False, True, False]), [0, 0, inside, up - 1 - inside])
        padded = fd.ops.pad(fd.ops.reshape(spread, [n * up, 4]), [0, 0, before, size - 1])
        made = Taps([(i, 0) for i in range(size)], (1, 1), True).of(fd, padded)
        assert made is not None
        fd.mesh_split(x, *place)
        fd.add_output(made)
        fd.add_output(fd.grad(fd.ops.sum(fd.ops.sin(made)), x))
    assert_same_as_unsharded(fd, inputs_for(fd))


# bytes ------------------------------------------------------------------------------------------------------------


def blocks(n: int, ranks: int) -> list[set[int]]:
    size = -(-n // ranks)
    return [set(range(min(r * size, n), min((r + 1) * size, n))) for r in range(ranks)]


def lacking(n: int, size: int, step: int, before: int) -> float:
    """Rows that a rank lacks, in the mean, for its rows of a convolution of rows that lie over four."""
    made = (n + 2 * before - size) // step + 1
    rows = zip(blocks(n, 4), blocks(made, 4), strict=True)
    wanted = [
        ({i * step + o - before for i in mine for o in range(size)} & set(range(n))) - have for have, mine in rows
    ]
    return sum(map(len, wanted)) / 4


def convolved(fd: mf.FusionDefinition, padded: Tensor, size: int, step: int) -> Tensor:
    made = Taps([(i, 0) for i in range(size)], (step, 1), True).of(fd, padded)
    assert made is not None
    return made


def bill(n: int, convolution: Callable[[mf.FusionDefinition, Tensor], Tensor], grad: bool = False) -> float:
    """Rows that a rank gets."""
    with mf.FusionDefinition() as fd:
        x = fd.define_tensor([n, 8], dtype=DOUBLE)
        made = convolution(fd, x)
        for tensor in (x, made):
            fd.mesh_split(tensor, ROWS, ["x", None])
        fd.add_output(made)
        if grad:
            fd.add_output(fd.grad(fd.ops.sum(fd.ops.sin(made)), x))
    assert_same_as_unsharded(fd, inputs_for(fd))
    return fd.bill().total / (8 * 8)


# Of n rows: how many taps in which steps, and how many rows of zeros before and after.
SHAPES = [
    (64, 3, 2, 1), (62, 3, 2, 1), (52, 3, 2, 1), (30, 3, 2, 1), (64, 5, 2, 2), (64, 4, 2, 1), (60, 4, 2, 1),
    (64, 7, 4, 3), (64, 3, 3, 1), (64, 3, 2, 0), (60, 3, 2, 0), (64, 3, 1, 0), (60, 3, 1, 0), (64, 1, 2, 0),
    (64, 2, 2, 0), (64, 5, 1, 2), (56, 7, 2, 3),
]  # fmt: skip


@pytest.mark.parametrize(("n", "size", "step", "before"), SHAPES)
def test_a_convolution_moves_the_rows_that_a_rank_lacks(n: int, size: int, step: int, before: int) -> None:
    found = bill(n, lambda fd, x: convolved(fd, fd.ops.pad(x, [0, 0, before, before]) if before else x, size, step))
    assert found == lacking(n, size, step, before)


@pytest.mark.sampled(2)
@pytest.mark.parametrize(("n", "step"), [(64, 1), (62, 2), (30, 2)])
@pytest.mark.parametrize("between", [*BETWEEN][:4])
@pytest.mark.parametrize("by_cat", [False, True])
def test_what_is_done_to_the_padded_tensor_moves_nothing(n: int, step: int, between: str, by_cat: bool) -> None:
    """And as many rows of the gradient go back."""

    def convolution(fd: mf.FusionDefinition, x: Tensor) -> Tensor:
        padded = cat_zeros(fd, x, 0, 1) if by_cat else fd.ops.pad(x, [0, 0, 1, 1])
        return convolved(fd, BETWEEN[between](fd, padded), 3, step)

    assert bill(n, convolution, grad=True) == 2 * lacking(n, 3, step, 1)


@pytest.mark.parametrize("step", [1, 2])
def test_edges_of_rows_and_columns_travel_once(step: int) -> None:
    """With nine taps, each with a weight, the columns come with the rows from above and below: not once for each."""
    with mf.FusionDefinition() as fd:
        x = fd.define_tensor([16, 16, 8], dtype=DOUBLE)
        padded, size = fd.ops.pad(x, [0, 0, 1, 1, 1, 1]), 16 // step
        at = list(itertools.product(range(3), repeat=2))
        stops = [[i + step * (size - 1) + 1, j + step * (size - 1) + 1, 8] for i, j in at]
        taps = [fd.ops.slice(padded, [*a, 0], b, [step, step, 1]) for a, b in zip(at, stops, strict=True)]
        total = functools.reduce(fd.ops.add, [tap * (i + 1.0) for i, tap in enumerate(taps)])
        fd.mesh_split(x, BOTH, ["x", "y", None])
        fd.mesh_split(total, BOTH, ["x", "y", None])
        fd.add_output(total)
    assert_same_as_unsharded(fd, inputs_for(fd))
    # A row of 8 from below or above, a column of 8 and the corners; in steps of two from one side only.
    assert fd.bill().total == (8 + 10 if step == 1 else (8 + 9) / 2) * 8 * 8


@pytest.mark.parametrize("step", [1, 2])
def test_taps_side_by_side_and_their_gradients(step: int) -> None:
    """As for one product (im2col)."""

    def columns(fd: mf.FusionDefinition, x: Tensor) -> Tensor:
        padded, m = fd.ops.pad(x, [0, 0, 1, 1]), 64 // step
        taps = [fd.ops.slice(padded, [i, 0], [i + step * (m - 1) + 1, 8], [step, 1]) for i in range(3)]
        return fd.ops.cat(taps, 1)

    assert bill(64, columns, grad=True) == 2 * lacking(64, 3, step, 1)


def test_numbers_known_at_run_time_only_stay_where_they_are() -> None:
    """What a pad fills with, and what a padded tensor is multiplied by."""
    with mf.FusionDefinition() as fd:
        x, scale = fd.define_tensor([16, 4], dtype=DOUBLE), fd.define_scalar(dtype=DOUBLE)
        padded = fd.ops.pad(x, [0, 0, 1, 1]) * scale
        fd.add_output(convolved(fd, padded, 3, 2))
        fd.mesh_split(x, ROWS, ["x", None])
    inputs: list[Any] = inputs_for(fd)
    assert_same_as_unsharded(fd, inputs)


def test_what_is_annotated_is_there() -> None:
    """A padded tensor that the user places, the op behind it, and the zeros of a `cat`."""
    with mf.FusionDefinition() as fd:
        x = fd.define_tensor([16, 4], dtype=DOUBLE)
        zeros = fd.ops.full([1, 4], 0.0, DOUBLE)
        padded = fd.ops.relu(fd.ops.cat([zeros, x, zeros], 0))
        again = fd.ops.sin(fd.ops.pad(padded, [0, 0, 1, 1]))
        fd.add_output(convolved(fd, again, 3, 2))
        fd.mesh_split(x, ROWS, ["x", None])
        for tensor in (zeros, padded, again):
            fd.mesh_split(tensor, ROWS, [None, "x"])
    assert "[-, x]" in fd.explain(padded) and "[-, x]" in fd.explain(again)
    assert_same_as_unsharded(fd, inputs_for(fd))
