"""In which order to bring a tensor to several shardings, as one of them may lie on the way to another.

If one reader needs a tensor gathered and another a slice of that, the gather is best made first, whichever reader
stands first in the program.
"""

from __future__ import annotations

import functools
import itertools
from collections.abc import Mapping, Sequence
from typing import NamedTuple

from ..errors import SourceLine
from ..ops.values import TensorType
from ..placement.options import cheapest
from ..propagation import ShardedDefinition
from ..sharding.value import Sharding

# Of so many shardings of a tensor every order is tried.
MOST = 4


class Request(NamedTuple):
    """A sharding that is needed of a tensor, why, and the line of the script that asks for it."""

    sharding: Sharding
    why: str
    line: SourceLine


# By tensor and sharding what of the same tensor is to be there before.
Before = Mapping[tuple[int, Sharding], Request]
_Requests = dict[int, dict[Sharding, Request]]


def before(sharded: ShardedDefinition, ends: Mapping[int, Sharding]) -> Before:
    """By tensor and sharding, what to make of the tensor before: so that all shardings together take the least time."""
    origins, requests = _requests(sharded, ends)
    found: dict[tuple[int, Sharding], Request] = {}
    for tensor, needs in requests.items():
        if 1 < len(needs) <= MOST and len({origins[tensor].mesh, *(s.mesh for s in needs)}) == 1:
            sources = _cheapest(origins[tensor], tuple(needs), sharded.graph.tensors[tensor].type)
            found.update(((tensor, needed), needs[source]) for needed, source in sources.items() if source in needs)
    return found


def _requests(sharded: ShardedDefinition, ends: Mapping[int, Sharding]) -> tuple[dict[int, Sharding], _Requests]:
    """The sharding in which every tensor is made, and what else is needed of it, in the order of its readers."""
    graph, requests = sharded.graph, _Requests()
    origins, annotations = {i: sharded.shardings[i] for i in graph.input_tensors}, graph.annotations
    for node, choice in zip(graph.nodes, sharded.choices, strict=True):
        placement = choice.placement
        for i, needed in zip(node.inputs, placement.operands, strict=True):
            if needed is not origins[i] and needed not in requests.setdefault(i, {}):
                place = list(zip(node.inputs, placement.operands, strict=True)).index((i, needed))
                requests[i][needed] = Request(needed, f"operand {place} of {node.name}", node.line)
        for i, made in zip(node.outputs, placement.results, strict=True):
            origins[i] = made
            if i in annotations and annotations[i] is not made:
                requests.setdefault(i, {})[annotations[i]] = Request(
                    annotations[i], graph.brought_for(i), graph.annotation_lines[i]
                )
    for i, end in ends.items():
        if end is not origins[i]:
            requests.setdefault(i, {}).setdefault(end, Request(end, "output", graph.tensors[i].line))
    return origins, requests


@functools.lru_cache(maxsize=1 << 12)
def _cheapest(origin: Sharding, needs: tuple[Sharding, ...], ttype: TensorType) -> dict[Sharding, Sharding]:
    """What each needed sharding is made from, in the order that takes the least time; of equal orders the first."""
    found = [_in_turn(origin, order, ttype) for order in itertools.permutations(needs)]
    return min(found, key=lambda entry: round(entry[0], 15))[1]


def _in_turn(origin: Sharding, order: Sequence[Sharding], ttype: TensorType) -> tuple[float, dict[Sharding, Sharding]]:
    """The time to make these in turn, each from the nearest that is there, and from which each is made."""
    total, sources = 0.0, dict[Sharding, Sharding]()
    for needed in order:
        ways = [(cheapest((have,), needed, ttype.shape, ttype.dtype.itemsize), have) for have in (origin, *sources)]
        seconds, sources[needed] = min(ways, key=lambda way: way[0])
        total += seconds
    return total, sources
