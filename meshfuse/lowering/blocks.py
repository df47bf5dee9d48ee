"""Where the parts of a reshard lie in local tensors, and whether they are equal blocks in the order of the ranks."""

from __future__ import annotations

import functools
import itertools
import math
from collections.abc import Sequence

from ..reshard.steps import Step, StepKind
from ..sharding import layout as lay
from ..sharding.layout import Runs
from .boxes import Box

Group = tuple[int, ...]


def local_shape(index: Sequence[Runs]) -> tuple[int, ...]:
    """The shape of a local tensor with these global indices, dim by dim."""
    return tuple(map(lay.count, index))


def local_box(held: Sequence[Runs], part: Sequence[Runs]) -> Box:
    """Where a box of global indices lies in a local tensor that holds `held`."""
    return tuple(lay.positions(lay.intersect(p, h), h) for h, p in zip(held, part, strict=True))


def is_dense(box: Box, shape: Sequence[int]) -> bool:
    """Whether a box of a contiguous tensor is one piece of memory."""
    counts = [lay.count(runs) for runs in box]
    if not all(counts):
        return True
    cut = next((d for d, n in enumerate(counts) if n != 1), len(counts))
    return all(len(runs) == 1 for runs in box) and counts[cut + 1 :] == list(shape[cut + 1 :])


def gathered_dim(step: Step, shape: tuple[int, ...], group: Group, rank: int) -> int | None:
    """The dim along which the ranks' equal blocks, in order, make the gathered tensor; None where none does."""
    held = [step.held(shape, r) for r in group]
    if len(set(map(local_shape, held))) != 1:
        return None
    wanted = step.wanted(shape, rank)
    return _cut_dim([local_box(wanted, index) for index in held], local_shape(wanted))


@functools.lru_cache(maxsize=4096)
def block_exchange_dims(step: Step, shape: tuple[int, ...], group: Group) -> tuple[int, int] | None:
    """(the dim along which each rank cuts its source, the dim along which it joins what comes) of an all-to-all.

    Both must be equal blocks in the order of the ranks, one from and for each rank; None for all other exchanges.
    """
    if step.kind is not StepKind.ALL_TO_ALL or step.only is not None:
        return None
    held, wanted = ([*zip(*[index(shape, rank) for rank in group], strict=True)] for index in (step.held, step.wanted))
    changed = [d for d in range(len(shape)) if len({*held[d], *wanted[d]}) > 1]
    # All of the group have the same of the other dims: dim by dim tells of all pairs of ranks, which may be millions.
    if len(changed) == 2 and all(along[0] for along in held):
        for cut, joined in itertools.permutations(changed):
            if _are_slices(wanted[cut], held[cut]) and _are_slices(held[joined], wanted[joined]):
                return cut, joined
    return None


def _are_slices(parts: Sequence[Runs], wholes: Sequence[Runs]) -> bool:
    """Whether the parts of a dim are, in order, equal slices of the wholes, which are all the same."""
    whole = wholes[0]
    size = lay.count(whole) // len(parts)
    return (
        len(set(wholes)) == 1
        and size * len(parts) == lay.count(whole)
        and all(
            lay.intersect(part, whole) == part and lay.positions(part, whole) == ((i * size, (i + 1) * size),)
            for i, part in enumerate(parts)
        )
    )


def _cut_dim(boxes: Sequence[Box], shape: tuple[int, ...]) -> int | None:
    """The dim along which these boxes are, in order, equal slices of a tensor of this shape."""
    changed = [d for d in range(len(shape)) if len({box[d] for box in boxes}) > 1]
    if len(changed) != 1 or not math.prod(shape):
        return None
    (dim,) = changed
    size = shape[dim] // len(boxes)
    whole = all(box[d] == ((0, n),) for box in boxes for d, n in enumerate(shape) if d != dim)
    in_order = all(box[dim] == ((i * size, (i + 1) * size),) for i, box in enumerate(boxes))
    return dim if whole and in_order and size * len(boxes) == shape[dim] else None
