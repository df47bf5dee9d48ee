"""Tensors that no collective may move along some axes of their mesh: ops come to them.

What is made of such a tensor alone, element by element, is as stationary: else a weight's cast could be gathered in its
place.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence

import numpy as np

from ..errors import user_error
from ..graph import Graph, Node
from ..ops.rules import FactorKind, Rule
from ..sharding import layout as lay
from ..sharding.value import Sharding

# Where an axis' part lies: the part and its size, the dim, how many blocks of the dim are more major, and how many
# elements lie between the starts of its own.
_Place = tuple[str, int, int, int, int, int]


def stationary_axes(graph: Graph) -> dict[int, frozenset[str]]:
    """By tensor the axes along which it must stay."""
    found = {i: frozenset(axes) for i, axes in graph.stationary.items()}
    if found:
        for node in graph.nodes:
            along = found.get(node.inputs[0]) if len(node.inputs) == 1 else None
            if along and _keeps_all(node.rule):
                found.update((i, found.get(i, frozenset()) | along) for i in node.outputs)
    return found


def _keeps_all(rule: Rule) -> bool:
    """Whether all factors of a rule pass through."""
    return all([factor.kind is FactorKind.PASS for factor in rule.factors])


def _comes_to_all(rule: Rule) -> bool:
    """Whether an op takes operands wherever they lie: it merges and splits no dim either."""
    dims = [dim for side in (rule.operands, rule.results) for tensor in side for dim in tensor]
    return _keeps_all(rule) and all([len(factors) <= 1 for factors in dims])


def moves_along(
    axes: frozenset[str], sources: Sequence[Sharding], targets: Sequence[Sharding], shape: Sequence[int]
) -> np.ndarray:
    """[sources, targets]: whether a reshard moves a tensor along the axes; slicing it moves nothing."""
    before, after = ([_places(s, axes, shape) for s in side] for side in (sources, targets))
    meshes = [[s.mesh == t.mesh for t in targets] for s in sources]
    stays = [[old <= new for new in after] for old in before]
    return ~(np.array(stays, dtype=bool) & np.array(meshes, dtype=bool)).reshape(len(sources), len(targets))


def _places(sharding: Sharding, axes: frozenset[str], shape: Sequence[int]) -> frozenset[_Place]:
    found = set[_Place]()
    for dim, (layout, n) in enumerate(zip(sharding.dims, shape, strict=True)):
        above, apart = 1, n + -n % lay.extent(layout)
        for split in layout:
            size = split.size or 1
            apart //= size
            if split.axis in axes:
                found.add((split.axis or "", split.pre, size, dim, above, apart))
            above *= size
    return frozenset(found)


def check_stationary(
    graph: Graph,
    kept: Mapping[int, frozenset[str]],
    made: Mapping[int, Sharding],
    operands: Mapping[int, Sequence[Sharding]],
) -> None:
    """Raises DefinitionError where an op's placement needs a stationary tensor moved: no placement does without.

    made: where every tensor is made. operands: by op, where it needs its operands.
    """
    found = [
        (node, i, need)
        for node in graph.nodes
        for i, need in zip(node.inputs, operands[node.id], strict=True)
        if i in kept and moves_along(kept[i], [made[i]], [need], graph.shape(i)).all()
    ]
    # What another op has moved, elementwise ops read there, too: they are not the cause.
    for node, i, need in sorted(found, key=lambda entry: _comes_to_all(entry[0].rule))[:1]:
        raise _not_possible(graph, node, i, kept[i], made[i], need)


def _not_possible(
    graph: Graph, node: Node, tensor: int, axes: frozenset[str], here: Sharding, need: Sharding
) -> Exception:
    return user_error(
        f"{graph.tensors[tensor].label} is stationary along {', '.join(sorted(axes))}",
        f"{node.name}, which must have it as {need}, not {here}", "an op that can come to it",
        "Leave out `stationary` for this tensor, or split it along a dim that the op need not have whole.", node.line,
    )  # fmt: skip
