"""The cheapest paths that are known without a search, where bytes alone decide."""

from __future__ import annotations

import functools
from collections.abc import Iterator
from typing import NamedTuple

from ..mesh import DeviceMesh
from ..sharding import layout as lay
from ..sharding.layout import Layout, Split
from ..sharding.value import Sharding
from .steps import Step, StepKind


def one_step(src: Sharding, dst: Sharding) -> Step | None:
    """The step between shardings of which one splits one dim over one axis more; None between others.

    No path takes less than a slice, or than a gather in which each rank receives just what it lacks.
    """
    found = [pair for pair in zip(src.dims, dst.dims, strict=True) if pair[0] != pair[1]]
    if len(found) != 1 or src.partial != dst.partial:
        return None
    coarse, fine = sorted(found[0], key=len)
    if len(fine) != len(coarse) + 1 or not lay.is_prefix(coarse, fine) or not fine[-1].bound:
        return None
    kind = StepKind.SLICE if coarse is found[0][0] else StepKind.ALL_GATHER
    return Step(kind, (fine[-1],), src, dst)


def straight(src: Sharding, dst: Sharding) -> tuple[Step, ...] | None:
    """Slices, then one all-reduce, then gathers, if each dim only gains axes or only loses some; else None.

    Each rank then receives just what it lacks, after a reduction of no more than is left of a block. That takes least
    where no axis is idle, over which ranks could share the reduction. Whole axes only: parts of one may stand for it.
    """
    reduced = () if src.partial == dst.partial else src.partial
    if dst.partial and reduced:
        return None
    changes = _changes(src, dst)
    if changes is None or not _apart(changes, reduced):
        return None
    if reduced and not _whole_axes(src.mesh) <= src.used() | dst.used():
        return None
    return tuple(_moves(src, dst, changes, reduced))


class _Change(NamedTuple):
    """The axes that a dim gains, or those that it loses."""

    dim: int
    gained: Layout
    lost: Layout


def _changes(src: Sharding, dst: Sharding) -> list[_Change] | None:
    """By dim that changes, what it gains or loses; None where a dim does both, or other than whole axes."""
    whole, found = _whole_axes(src.mesh), list[_Change]()
    for dim, (had, has) in enumerate(zip(src.dims, dst.dims, strict=True)):
        if not whole.issuperset(had) or not whole.issuperset(has):
            return None
        if lay.is_prefix(had, has):
            found += [_Change(dim, has[len(had) :], ())] if had != has else []
        elif (has and len(had) - len(has) > 1) or not lay.is_prefix(has, had):
            # One gather takes one axis or a whole dim.
            return None
        else:
            found.append(_Change(dim, (), had[len(has) :]))
    return found if whole.issuperset(src.partial) else None


def _apart(changes: list[_Change], reduced: Layout) -> bool:
    """Whether no axis moves from one dim to another, or from a sum to a dim."""
    axes = [*reduced, *(split for change in changes for split in (*change.gained, *change.lost))]
    return len(set(axes)) == len(axes)


def _moves(src: Sharding, dst: Sharding, changes: list[_Change], reduced: Layout) -> Iterator[Step]:
    state = src
    for change in changes:
        if change.gained:
            then = _with(state, change.dim, dst)
            yield Step(StepKind.SLICE, tuple(sorted(change.gained)), state, then)
            state = then
    if reduced:
        then = state.reduced()
        yield Step(StepKind.ALL_REDUCE, reduced, state, then)
        state = then
    for change in changes:
        if change.lost:
            then = _with(state, change.dim, dst)
            yield Step(StepKind.ALL_GATHER, change.lost, state, then)
            state = then


def _with(state: Sharding, dim: int, dst: Sharding) -> Sharding:
    return state.with_dims((*state.dims[:dim], dst.dims[dim], *state.dims[dim + 1 :]))


@functools.lru_cache(maxsize=1 << 10)
def _whole_axes(mesh: DeviceMesh) -> frozenset[Split]:
    """The mesh's axes of several ranks, each as one split."""
    return frozenset([Split(n, name) for n, name in zip(mesh.shape, mesh.names, strict=True) if n > 1])
