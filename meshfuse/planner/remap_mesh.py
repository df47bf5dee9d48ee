"""A plan on meshes that stand for other meshes, as the same plan on those."""

from __future__ import annotations

import dataclasses
from collections.abc import Callable, Sequence

from ..graph import Graph, Node
from ..placement.factors import Placement
from ..propagation import RunnerUp, ShardedDefinition
from ..reshard.windows import window_step
from ..sharding import layout as lay
from ..sharding.layout import Layout
from ..sharding.value import Sharding, canonical_partial

# A sharding of a tensor of this shape, and a layout, on the other mesh.
OfSharding = Callable[[Sharding, tuple[int, ...]], Sharding]
OfLayout = Callable[[Layout], Layout]


def remap_mesh(plan: ShardedDefinition, graph: Graph, sharding: OfSharding, layout: OfLayout) -> ShardedDefinition:
    """The plan as one of `graph`, which is the plan's own graph annotated on other meshes."""
    choices = tuple(
        dataclasses.replace(
            choice,
            placement=_placement(node, choice.placement, sharding, layout),
            runner_up=_runner_up(node, choice.runner_up, sharding),
        )
        for node, choice in zip(graph.nodes, plan.choices, strict=True)
    )
    shardings = {i: sharding(old, graph.shape(i)) for i, old in plan.shardings.items()}
    found = ShardedDefinition(graph, choices, shardings)
    found.verify()
    return found


def _runner_up(node: Node, other: RunnerUp | None, sharding: OfSharding) -> RunnerUp | None:
    if other is None:
        return None
    operands, results = _on_other_mesh(node, other.operands, other.results, sharding)
    return other._replace(operands=operands, results=results)


def _on_other_mesh(
    node: Node, operands: Sequence[Sharding], results: Sequence[Sharding], sharding: OfSharding
) -> tuple[tuple[Sharding, ...], tuple[Sharding, ...]]:
    of_operands = tuple(sharding(s, t.shape) for s, t in zip(operands, node.call.types, strict=False))
    return of_operands, tuple(sharding(s, t.shape) for s, t in zip(results, node.call.results, strict=True))


def _placement(node: Node, placement: Placement, sharding: OfSharding, layout: OfLayout) -> Placement:
    carry = placement.carry
    window = placement.step and placement.step.window
    factors = zip(placement.layouts, node.rule.factors, strict=True)
    operands, results = _on_other_mesh(node, placement.operands, placement.results, sharding)
    return Placement(
        tuple(lay.canonical(layout(of), factor.size) for of, factor in factors),
        operands,
        results,
        dataclasses.replace(carry, axes=canonical_partial(layout(carry.axes))),
        window_step(operands[0], results[0], window) if window else None,
        placement.ways,
    )
