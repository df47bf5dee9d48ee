"""Rolls of a dim that lies over ranks: as right as what is written, and each row moves once, whatever goes round."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from programs import outputs, split

import meshfuse as mf
from bill_classes.rolls import part, rolled, total
from meshfuse.propagation import Propagation
from meshfuse.rewrites import update_in_place as in_place
from meshfuse.testing import assert_same_as_unsharded, inputs_for

ROWS = mf.DeviceMesh((4,), ("x",))
BOTH = mf.DeviceMesh((2, 2), ("x", "y"))


# Whatever it costs ------------------------------------------------------------------------------------------------

AMOUNTS = st.lists(st.tuples(st.integers(-9, 9), st.integers(0, 1)), min_size=1, max_size=4)
PLACES = st.sampled_from([(ROWS, ["x", None]), (BOTH, ["x", "y"]), (BOTH, [("x", "y"), None]), (BOTH, ["x", None])])


@pytest.mark.usefixtures("over_whole_axes")
@settings(max_examples=18)
@given(st.tuples(st.integers(2, 17), st.integers(2, 9)), PLACES, AMOUNTS, st.integers(1, 2), st.booleans())
def test_rolls_written_otherwise_are_the_same(shape, place, amounts, times, backward) -> None:
    """By more than a block, the long way round, by the same twice, of rolls, along both dims, and the gradients."""
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(in_place, "cheaper", lambda found, other: other)
        patch.setattr(Propagation, "cheaper", lambda plan, found, form: plan(form))
        patch.setattr(in_place, "reshards_along", lambda found, dims: True)
        with mf.FusionDefinition() as fd:
            x, w = (fd.define_tensor(list(shape), dtype=mf.DataType.Double) for _ in range(2))
            fd.mesh_split(x, *place)
            y = x
            for _ in range(times):
                y = total([rolled(fd, y, by, dim) * w for by, dim in amounts])
            outputs(fd, y, *(fd.grad(fd.ops.sum(y * y), [x, w]) if backward else []))
        assert_same_as_unsharded(fd, inputs_for(fd))


# How many rows move -----------------------------------------------------------------------------------------------


def moved_rows(amounts: Sequence[int], backward: bool = False) -> float:
    """The rows that a rank gets for rolls of one tensor, or for their gradient."""
    with mf.FusionDefinition() as fd:
        x, w = fd.define_tensor([32, 8]), fd.define_tensor([len(amounts), 8])
        rows = [fd.ops.reshape(part(fd, w, 0, i, i + 1), [8]) for i in range(len(amounts))]
        y = total([rolled(fd, x, by, 0) * row for by, row in zip(amounts, rows, strict=True)])
        made: list[Any] = [y, *(fd.grad([y], [x], [y]) if backward else ())]
        split(fd, ROWS, *((t, ["x", None]) for t in (x, *made)))
        outputs(fd, *made)
    assert_same_as_unsharded(fd, inputs_for(fd))
    return fd.bill().total / (8 * 4)


@pytest.mark.parametrize("amounts", [(1,), (-1,), (3, 1), (1, 2, 3), (-2, -5), (1, -1), (2, 1, -1, -3), (8,)])
def test_rolls_of_one_tensor_move_its_rows_once(amounts: tuple[int, ...]) -> None:
    """As many as the furthest goes in each direction, and as many again for the gradient."""
    furthest = max(0, *amounts) - min(0, *amounts)
    assert moved_rows(amounts) == furthest
    assert moved_rows(amounts, backward=True) == 2 * furthest


@pytest.mark.sampled(2)
@pytest.mark.parametrize("dim", [0, 1])
@pytest.mark.parametrize("shift", [1, 3, 6, 7])
@pytest.mark.parametrize("n", [64, 61])
@pytest.mark.parametrize("width", [1, 64])
def test_a_roll_made_of_slices_moves_the_rows_that_change_their_rank(n: int, shift: int, width: int, dim: int) -> None:
    """Also where moving all to another dim takes less than bringing the smaller operand of the cat to every rank."""
    ranks, shape = 8, (n, width) if dim == 0 else (width, n)
    fd = mf.FusionDefinition()
    x = fd.define_tensor(list(shape), dtype=mf.DataType.Float)
    cut = [shift if d == dim else 0 for d in range(2)]
    head = fd.ops.slice(x, [0, 0], [shift if d == dim else size for d, size in enumerate(shape)])
    y = fd.ops.cat([fd.ops.slice(x, cut, list(shape)), head], dim)
    fd.add_output(y)
    fd.mesh_split(x, mf.DeviceMesh((ranks,), ("x",)), ["x" if d == dim else None for d in range(2)])
    given = torch.randn(shape, generator=torch.Generator().manual_seed(0))
    assert fd.bill().total <= 4 * width * (shift + (n % ranks > 0))
    assert torch.equal(fd.simulate([given], check_replicas=True)[0], given.roll(-shift, dim))
