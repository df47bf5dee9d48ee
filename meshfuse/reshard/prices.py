"""What a step costs: its modelled seconds on the links of its axes, and the bytes that a rank sends."""

from __future__ import annotations

import functools
import math
from collections.abc import Iterable, Sequence
from typing import NamedTuple

from .. import costs
from ..costs import Link
from ..mesh import DeviceMesh
from ..sharding import layout as lay
from ..sharding.layout import Layout, Split
from ..sharding.value import Sharding
from .steps import Step, StepKind, group_size, is_even, sampled_digits, sampled_ranks
from .windows import window_peers, window_wire

# What a step costs beside its bytes and its links' latency: as much as part of a byte on the default link, so that no
# two collectives are made of one to save some hundred operations. An exchange of any pieces counts twice; a slice,
# which sends nothing, tells plans apart that are else the same.
SLICE_SECONDS, STEP_SECONDS, EXCHANGE_SECONDS = 1e-13, 1.5e-11, 3e-11
# Of an all-to-all and a reduce-scatter of as many bytes the latter is taken: it adds up what it brings.
A2A_SECONDS = STEP_SECONDS + SLICE_SECONDS


class Price(NamedTuple):
    """Modelled seconds, and the bytes that the rank with the largest shard sends: exact where sizes divide."""

    seconds: float
    wire: float


FREE = Price(SLICE_SECONDS, 0.0)
_IN_RINGS = {
    StepKind.ALL_REDUCE: (costs.all_reduce, 2),
    StepKind.REDUCE_SCATTER: (costs.reduce_scatter, 1),
    StepKind.ALL_TO_ALL: (costs.all_to_all, 1),
    StepKind.ALL_GATHER: (costs.all_gather, 1),
}


@functools.lru_cache(maxsize=1 << 14)
def price(step: Step, shape: tuple[int, ...], itemsize: float) -> Price:
    """The price of a step of a tensor of this global shape."""
    if step.kind is StepKind.SLICE:
        return FREE
    mesh = step.src.mesh
    if step.kind is StepKind.TRANSFER:
        wire = itemsize * max(step.dst.max_local_numel(shape), 1)
        return Price(costs.permute(between(mesh, step.dst.mesh), wire), wire)
    n, link = group_size(step.axes), link_over(mesh, step.axes)
    ring = _IN_RINGS.get(step.kind)
    if ring is not None:
        form, passes = ring
        whole = step.dst if step.kind is StepKind.ALL_GATHER else step.src
        nbytes = itemsize * whole.max_local_numel(shape)
        if step.kind is StepKind.ALL_TO_ALL and not is_even(step.src, step.dst, shape):
            nbytes = itemsize * received(step.src, step.dst, shape) * n / (n - 1)
        own = A2A_SECONDS if step.kind is StepKind.ALL_TO_ALL else STEP_SECONDS
        return Price(form(link, n, nbytes) + own, passes * (n - 1) / n * nbytes)
    if step.kind is StepKind.WINDOW:
        n, wire = 1 + window_peers(step), itemsize * window_wire(step)
        if not wire:
            return FREE
    else:
        lacking = received(step.src, step.dst, shape)
        n, wire = 1 + _peers(step, shape, lacking), itemsize * lacking
    return Price(costs.exchange(link, n, wire) + EXCHANGE_SECONDS, wire)


def _peers(step: Step, shape: tuple[int, ...], elements: float) -> int:
    """From how many other ranks a rank gets so many elements in an exchange, at most.

    Where blocks differ in size that is not known; then each may come from another rank.
    """
    found, n = holders(step.src, step.dst, shape), group_size(step.axes)
    most = found.count - found.itself if found.of_all else max(math.ceil(elements), (n - 1).bit_length())
    return min(n - 1, most)


class Holders(NamedTuple):
    """How many shards have something of one that a rank is to have, and whether every rank's own is one of them.

    Dims whose blocks differ in size are not counted; `of_all` if there are none.
    """

    count: int
    itself: bool
    of_all: bool


def holders(src: Sharding, dst: Sharding, shape: tuple[int, ...]) -> Holders:
    """The shards of the source that have something of one of the target's."""
    count, itself, of_all = 1, True, True
    for old, new, n in zip(src.dims, dst.dims, shape, strict=True):
        if old != new:
            along = _holders(old, new, n, dst.mesh)
            count, itself, of_all = count * along.count, itself and along.itself, of_all and along.of_all
    return Holders(count, itself, of_all)


@functools.lru_cache(maxsize=1 << 16)
def _holders(old: Layout, new: Layout, n: int, mesh: DeviceMesh) -> Holders:
    """The same of one dim."""
    count = lay.holders(old, new, n)
    return Holders(1, True, False) if count is None else Holders(count, all(_shared(old, new, n, mesh)), True)


def link_over(mesh: DeviceMesh, axes: Sequence[Split]) -> Link:
    """The link of a collective over these axes and sub-axes: the slowest of theirs."""
    return mesh.links[0] if mesh.uniform else mesh.link(tuple(split.axis or "" for split in axes))


def between(a: DeviceMesh, b: DeviceMesh) -> Link:
    """The link between two meshes: that of the slowest axis of both."""
    return costs.slowest((a.link(()), b.link(())))


def received(src: Sharding, dst: Sharding, shape: tuple[int, ...]) -> float:
    """Elements that a rank gets from others if it gets everything in one step: the mean over sampled ranks."""
    if not shape:
        return 0.0
    there = _total([_shared(old, new, n, dst.mesh) for old, new, n in zip(src.dims, dst.dims, shape, strict=True)])
    return (_held(dst, shape) - there) / len(sampled_ranks(dst.mesh))


def held(sharding: Sharding, shape: tuple[int, ...]) -> float:
    """Elements that a rank has: the mean over sampled ranks."""
    return _held(sharding, shape) / len(sampled_ranks(sharding.mesh)) if shape else 1.0


@functools.lru_cache(maxsize=1 << 16)
def _held(sharding: Sharding, shape: tuple[int, ...]) -> int:
    """Elements of all sampled ranks together."""
    return _total([_shared(layout, layout, n, sharding.mesh) for layout, n in zip(sharding.dims, shape, strict=True)])


def lacking(src: Sharding, dst: Sharding, shape: tuple[int, ...]) -> float:
    """Elements that a rank must get on any way, as a mean.

    A sum of p terms takes p - 1 messages until one rank has it, and one more for every other rank that needs it.
    """
    if src.partial == dst.partial:
        return received(src, dst, shape)
    left = group_size(dst.partial)
    return held(dst, shape) + math.prod(shape) * (group_size(src.partial) - 2 * left) / dst.mesh.size


def _total(counts: Iterable[tuple[int, ...]]) -> int:
    """Elements of all sampled ranks together, given how many indices of each dim each of them holds."""
    return sum(map(math.prod, zip(*counts, strict=True)))


@functools.lru_cache(maxsize=1 << 16)
def _shared(old: Layout, new: Layout, n: int, mesh: DeviceMesh) -> tuple[int, ...]:
    """For each sampled rank how many indices of a dim it holds in both layouts."""
    pairs = [*zip(sampled_digits(old, mesh), sampled_digits(new, mesh), strict=True)]
    found = {pair: lay.shared(old, pair[0], new, pair[1], n) for pair in dict.fromkeys(pairs)}
    return tuple([found[pair] for pair in pairs])
