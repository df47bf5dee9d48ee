"""Choosing where an op is computed: candidates from its operands' and results' shardings, compared by cost."""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import dataclass

from ..graph import Node
from ..mesh import DeviceMesh
from ..ops.base import FactorKind
from ..resharding.planner import BETA, plan
from ..sharding import layout as lay
from ..sharding.layout import WHOLE, Layout
from ..sharding.value import Sharding
from .factors import NO_CARRY, Carry, Layouts, Placement, carries, layouts_of, merged, placed, representable
from .sharded import Choice

IMPOSSIBLE = math.inf
# Seconds per operation: a byte on the wire costs as much as a thousand operations, as on an accelerator with fast links.
GAMMA = BETA / 1000


@dataclass(frozen=True, slots=True)
class Setting:
    """What the choice for a node depends on.

    `available[i]` are the shardings in which operand i exists, its home first. `wanted[j]` is the sharding that result
    j should have in the end (None: any) and `fixed[j]` tells whether it must. `single[i]`: no other op reads operand i.
    """

    node: Node
    mesh: DeviceMesh
    available: tuple[tuple[Sharding, ...], ...]
    wanted: tuple[Sharding | None, ...]
    fixed: tuple[bool, ...]
    single: tuple[bool, ...]
    reductions: tuple[Layout, ...] = ()


def choose(setting: Setting) -> Choice:
    """The placement of least modelled time; among equals the one that spreads the computation most, then the first."""
    scored = []
    for label, placement in _candidates(setting):
        wire = _wire_seconds(setting, placement)
        if wire < IMPOSSIBLE:
            work = _work(setting.node, placement)
            scored.append(((round(wire + work * GAMMA, 11), work), label, placement))
    assert scored, f"no placement for {setting.node}"
    scored.sort(key=lambda entry: entry[0])
    (seconds, _), label, placement = scored[0]
    others = [(text, key[0]) for key, text, _ in scored[1:] if key[0] > seconds]
    return Choice(placement, label, seconds, others[0] if others else None)


def _candidates(setting: Setting) -> list[tuple[str, Placement]]:
    found: dict[tuple[Layouts, Carry], tuple[str, Placement]] = {}
    for label, layouts, carry in _layout_candidates(setting):
        key = (layouts, carry)
        if key not in found:
            placement = placed(setting.node, setting.mesh, layouts, carry)
            if placement is not None:
                found[key] = (label, placement)
    return list(found.values())


def _layout_candidates(setting: Setting) -> list[tuple[str, Layouts, Carry]]:
    rule = setting.node.rule
    homes = [shardings[0] for shardings in setting.available]
    carry = carries(setting.node, homes)
    out: list[tuple[str, Layouts, Carry]] = []
    if carry is not None:
        votes = [vote for _, vote in _votes(setting, carry)]
        out.append(("carries the unreduced sum of its operand", representable(rule, merged(votes, carry.axes)), carry))
    votes_by_label = _votes(setting, NO_CARRY)
    for i, (label, _) in enumerate(votes_by_label):
        order = [votes_by_label[i], *votes_by_label[:i], *votes_by_label[i + 1 :]]
        layouts = _with_reductions(setting, merged([vote for _, vote in order]))
        layouts = representable(rule, layouts)
        out.append((f"follows {label}", layouts, NO_CARRY))
        if not setting.reductions:
            out.append((f"follows {label}, without splitting the reduction", _without_reductions(setting, layouts), NO_CARRY))
    whole = (WHOLE,) * len(rule.factors)
    out.append(("computed whole on every rank", _with_reductions(setting, whole), NO_CARRY))
    return out


def _votes(setting: Setting, carry: Carry) -> list[tuple[str, Layouts]]:
    """The factor layouts that each operand and each wanted result asks for; equal ones once."""
    node, rule = setting.node, setting.node.rule
    votes: dict[Layouts, str] = {}
    for i, shardings in enumerate(setting.available):
        home = shardings[0]
        if home.mesh == setting.mesh:
            vote = layouts_of(rule, rule.operands[i], node.call.types[i].shape, home.dims)
            votes.setdefault(vote, f"operand {i} (t{node.inputs[i]})")
    for j, sharding in enumerate(setting.wanted):
        if sharding is not None and sharding.mesh == setting.mesh:
            vote = layouts_of(rule, rule.results[j], node.call.results[j].shape, sharding.dims)
            votes.setdefault(vote, f"result {j} (t{node.outputs[j]})")
    if carry.axes:
        first = [v for v, label in votes.items() if label.startswith(f"operand {carry.operands[0]} ")]
        return [("", v) for v in [*first, *votes]]
    return [(label, vote) for vote, label in votes.items()]


def _with_reductions(setting: Setting, layouts: Layouts) -> Layouts:
    """The layouts that the user gave the reduction dims, before all others."""
    if not setting.reductions:
        return layouts
    given = iter(setting.reductions)
    rule = setting.node.rule
    forced = tuple(
        lay.canonical(next(given), factor.size) if factor.kind is FactorKind.REDUCE else WHOLE for factor in rule.factors
    )
    return merged([forced, layouts])


def _without_reductions(setting: Setting, layouts: Layouts) -> Layouts:
    factors = setting.node.rule.factors
    return tuple(WHOLE if f.kind is FactorKind.REDUCE else layout for f, layout in zip(factors, layouts, strict=True))


def _wire_seconds(setting: Setting, placement: Placement) -> float:
    node, total = setting.node, 0.0
    for i, needed in enumerate(placement.operands):
        total += cheapest(setting.available[i], needed, node.call.types[i].shape, node.call.types[i].dtype.itemsize)
    for j, made in enumerate(placement.results):
        kind = node.call.results[j]
        total += _completion(made, setting.wanted[j], setting.fixed[j], kind.shape, kind.dtype.itemsize)
    if placement.carry.axes and all(setting.single[i] for i in placement.carry.operands):
        total -= 1e-10
    elif placement.carry.axes:
        total += 1e-10
    return total


def cheapest(available: Sequence[Sharding], needed: Sharding, shape: tuple[int, ...], itemsize: int) -> float:
    """Modelled seconds of the cheapest reshard from any sharding that the tensor exists in."""
    plans = [plan(have, needed, shape, itemsize) for have in available]
    return min((p.seconds for p in plans if p is not None), default=IMPOSSIBLE)


def _completion(
    made: Sharding, wanted: Sharding | None, fixed: bool, shape: tuple[int, ...], itemsize: int
) -> float:
    """What it costs to bring a result to where it is wanted; a result that nobody asks for is just reduced."""
    target = made.reduced() if wanted is None else wanted
    found = plan(made, target, shape, itemsize)
    return IMPOSSIBLE if found is None else found.seconds


def _work(node: Node, placement: Placement) -> float:
    """Operations of one rank, for ties."""
    ways = math.prod(split.size or 1 for layout in placement.layouts for split in lay.axes(layout))
    return max(node.call.op.flops(node.call), 1.0) / ways
