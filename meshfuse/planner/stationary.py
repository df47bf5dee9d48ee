"""Tensors that no collective may move along some axes of their mesh: ops come to them.

What is made of such a tensor alone, element by element, is as stationary: else a weight's cast could be gathered in its
place.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence

import numpy as np

from ..errors import user_error
from ..graph import Graph, Node
from ..ops.rules import FactorKind
from ..sharding.value import Sharding

# Where an axis' part lies: the part and its size, the dim, and how many blocks of the dim are more major.
_Place = tuple[str, int, int, int, int]


def stationary_axes(graph: Graph) -> dict[int, frozenset[str]]:
    """By tensor the axes along which it must stay."""
    found = {i: frozenset(axes) for i, axes in graph.stationary.items()}
    if found:
        for node in graph.nodes:
            along = found.get(node.inputs[0]) if len(node.inputs) == 1 else None
            if along and all(factor.kind is FactorKind.PASS for factor in node.rule.factors):
                found.update((i, found.get(i, frozenset()) | along) for i in node.outputs)
    return found


def moves_along(axes: frozenset[str], sources: Sequence[Sharding], targets: Sequence[Sharding]) -> np.ndarray:
    """[sources, targets]: whether a reshard moves a tensor along the axes; slicing it moves nothing."""
    before, after = ([_places(s, axes) for s in side] for side in (sources, targets))
    meshes = [[s.mesh == t.mesh for t in targets] for s in sources]
    stays = [[old <= new for new in after] for old in before]
    return ~(np.array(stays, dtype=bool) & np.array(meshes, dtype=bool)).reshape(len(sources), len(targets))


def _places(sharding: Sharding, axes: frozenset[str]) -> frozenset[_Place]:
    found = set[_Place]()
    for dim, layout in enumerate(sharding.dims):
        above = 1
        for split in layout:
            if split.axis in axes:
                found.add((split.axis or "", split.pre, split.size or 1, dim, above))
            above *= split.size or 1
    return frozenset(found)


def check_stationary(
    graph: Graph, kept: Mapping[int, frozenset[str]], there: Mapping[int, Sequence[Sharding]],
    operands: Mapping[int, Sequence[Sharding]],
) -> None:  # fmt: skip
    """Raises DefinitionError where an op's placement needs a stationary tensor moved: no placement does without.

    there: where every tensor is. operands: by op, where it needs its operands.
    """
    for node in graph.nodes:
        for i, need in zip(node.inputs, operands[node.id], strict=True):
            if i in kept and moves_along(kept[i], there[i], [need]).all():
                raise _not_possible(graph, node, i, kept[i], there[i][0], need)


def _not_possible(
    graph: Graph, node: Node, tensor: int, axes: frozenset[str], here: Sharding, need: Sharding
) -> Exception:
    return user_error(
        f"{graph.tensors[tensor].label} is stationary along {', '.join(sorted(axes))}",
        f"{node.name}, which must have it as {need}, not {here}", "an op that can come to it",
        "Leave out `stationary` for this tensor, or split it along a dim that the op need not have whole.", node.line,
    )  # fmt: skip
