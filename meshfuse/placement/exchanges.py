"""Placements of ops that move rows between tokens and experts, where an axis cuts both (`ops/experts.py`)."""

from __future__ import annotations

import itertools
from collections.abc import Iterator
from dataclasses import replace

from .. import costs
from ..mesh import DeviceMesh
from ..ops.opdef import Call
from ..ops.values import TensorType
from ..reshard.prices import A2A_SECONDS, link_over
from ..reshard.steps import group_size
from ..sharding import layout as lay
from ..sharding.layout import Layout, Split
from ..sharding.value import Sharding
from .factors import Placement


def exchange_placements(call: Call, placement: Placement) -> Iterator[Placement]:
    """The ways to have axes that cut the tokens of a placement cut the experts as well; first none of them.

    Which tokens a rank has may lie in strides. Of rows, which stay where they are, it is enough to say over which axes.
    """
    assert call.op.exchange is not None
    tokens, experts = (placement.layouts[f] for f in call.op.exchange[:2])
    for axes in _subsets(lay.axes(tokens)):
        rest = [split for split in lay.axes(tokens) if split not in axes]
        ragged = (*lay.axes(experts), *axes), tuple(_in_mesh_order(placement.results[0].mesh, rest))
        sides = ((placement.operands, call.types), (placement.results, call.results))
        there = [[_with_rows(s, t, *ragged) for s, t in zip(*side, strict=True)] for side in sides]
        if all(None not in side for side in there):
            operands, results = (tuple([s for s in side if s is not None]) for side in there)
            yield replace(placement, operands=operands, results=results, exchange=axes)


def _subsets(axes: Layout) -> Iterator[Layout]:
    for count in range(len(axes) + 1):
        yield from itertools.combinations(axes, count)


def _in_mesh_order(mesh: DeviceMesh, axes: list[Split]) -> list[Split]:
    return sorted(axes, key=lambda split: (mesh.names.index(str(split.axis)), split.pre))


def _with_rows(sharding: Sharding, ttype: TensorType, experts: Layout, tokens: Layout) -> Sharding | None:
    """Where a ragged tensor is; None where an axis would leave too many ranks without anything. A dense one as it is."""
    if not ttype.rows:
        return sharding
    layouts = [lay.canonical(layout, n) for layout, n in zip((experts, tokens), ttype.shape[:2], strict=True)]
    fits = all(lay.extent(layout) < 2 * max(n, 1) for layout, n in zip(layouts, ttype.shape[:2], strict=True))
    return sharding.with_dims([*layouts, *sharding.dims[2:]]) if fits else None


def exchange_seconds(call: Call, placement: Placement) -> float:
    """Modelled seconds in which rows go between tokens and experts, if every expert gets as many."""
    if not placement.exchange:
        return 0.0
    n, link = group_size(placement.exchange), link_over(placement.results[0].mesh, placement.exchange)
    counts = costs.all_to_all(link, n, 0.0) if call.op.exchange and call.op.exchange.kind == "dispatch" else 0.0
    return costs.all_to_all(link, n, exchanged_bytes(call, placement)) + counts + A2A_SECONDS


def exchange_wire(call: Call, placement: Placement) -> float:
    """The bytes that a rank sends in an exchange, if every expert gets as many rows."""
    return exchanged_bytes(call, placement) * (1 - 1 / group_size(placement.exchange))


def exchanged_bytes(call: Call, placement: Placement) -> float:
    """The bytes of the rows of one rank, those of its own experts among them, if every expert gets as many."""
    sides = ((placement.operands, call.types), (placement.results, call.results))
    pairs = [pair for side in sides for pair in zip(*side, strict=True)]
    sharding, ttype = next((s, t) for s, t in pairs if t.rows)
    return ttype.nbytes / group_size(sharding.splits)
