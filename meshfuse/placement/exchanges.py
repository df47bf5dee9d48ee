"""Placements of ops that move rows between tokens and experts, where an axis cuts both (`ops/experts.py`)."""

from __future__ import annotations

import itertools
from collections.abc import Iterator, Sequence
from dataclasses import replace

from .. import costs
from ..ops.opdef import Call
from ..ops.rules import DimFactors, Rule
from ..ops.values import TensorType
from ..reshard.prices import A2A_SECONDS, link_over
from ..reshard.steps import group_size
from ..sharding import layout as lay
from ..sharding.layout import Layout, Split
from ..sharding.value import Sharding
from .factors import Layouts, Placement, tensor_layouts


def exchange_placements(call: Call, rule: Rule, placement: Placement) -> Iterator[Placement]:
    """The ways to have axes that cut the tokens of a placement cut the experts as well; first none of them.

    Such ranks have all rows of some experts: those of the tokens of all of them.
    """
    assert call.op.exchange is not None
    yield placement
    for axes, layouts in exchanged(call, rule, placement.layouts):
        operands = [
            _placed(rule, factors, t.shape, layouts, s) if t.rows or place == call.op.exchange.choice else s
            for place, (factors, t, s) in enumerate(zip(rule.operands, call.types, placement.operands, strict=True))
        ]
        results = [
            _placed(rule, factors, t.shape, layouts, s) if t.rows else s
            for factors, t, s in zip(rule.results, call.results, placement.results, strict=True)
        ]
        made = [*filter(None, operands)], [*filter(None, results)]
        if (len(made[0]), len(made[1])) == (len(operands), len(results)):
            yield replace(placement, operands=tuple(made[0]), results=tuple(made[1]), exchange=axes)


def exchanged(call: Call, rule: Rule, layouts: Layouts) -> Iterator[tuple[tuple[Split, ...], Layouts]]:
    """By axes that cut tokens the layouts of an op's factors, with these on the experts in their place."""
    assert call.op.exchange is not None
    tokens, experts = call.op.exchange[:2]
    count = rule.factors[experts].size
    for axes in _subsets(lay.axes(layouts[tokens])):
        cut = lay.canonical((*layouts[experts], *axes), count)
        if lay.extent(cut) < 2 * count:
            out = list(layouts)
            left = tuple([Split(split.size) if split in axes else split for split in layouts[tokens]])
            out[tokens], out[experts] = lay.canonical(left, rule.factors[tokens].size), cut
            yield axes, tuple(out)


def _subsets(axes: Layout) -> Iterator[tuple[Split, ...]]:
    for count in range(1, len(axes) + 1):
        yield from itertools.combinations(axes, count)


def _placed(
    rule: Rule, factors: DimFactors, shape: tuple[int, ...], layouts: Layouts, there: Sharding
) -> Sharding | None:  # fmt: skip
    dims = tensor_layouts(rule, factors, shape, layouts)
    return None if dims is None else there.with_dims(dims)


def exchange_seconds(call: Call, placement: Placement) -> float:
    """Modelled seconds in which rows go between tokens and experts, if every expert gets as many."""
    n, link = group_size(placement.exchange), link_over(placement.results[0].mesh, placement.exchange)
    return costs.all_to_all(link, n, _exchanged_bytes(call, placement)) + A2A_SECONDS


def exchange_wire(call: Call, placement: Placement) -> float:
    """The bytes that a rank sends in an exchange, if every expert gets as many rows."""
    return _exchanged_bytes(call, placement) * (1 - 1 / group_size(placement.exchange))


def _exchanged_bytes(call: Call, placement: Placement) -> float:
    """The bytes of the rows of one rank, those of its own experts among them, if every expert gets as many."""
    sharding, ttype = rows_of(call, placement)
    return ttype.nbytes / group_size(sharding.splits)


def rows_of(call: Call, placement: Placement) -> tuple[Sharding, TensorType]:
    """The rows that an exchange brings to experts, or takes from there."""
    types: Sequence[TensorType] = (*call.results, *call.types)
    pairs = zip((*placement.results, *placement.operands), types, strict=True)
    return next((s, t) for s, t in pairs if t.rows)
