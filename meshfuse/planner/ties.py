"""Which of equally good plans is taken: one that follows from the program alone.

Not from what its axes are called, nor from the order in which it names independent ops. A label costs the more, by what
no step notices, the later it comes in an order of the layouts: whole first, then by the mesh's order of axes. Where ops
could exchange their labels, what each one is computed from decides.
"""

from __future__ import annotations

import functools
import hashlib
import itertools
from collections.abc import Callable, Hashable, Mapping, Sequence
from typing import Any, TypeVar

import numpy as np

from ..graph import Graph
from ..placement.factors import Placement
from ..sharding.layout import Layout
from ..sharding.value import Sharding

# Seconds by which the last label of an op exceeds its first; the part of it that depends on the op.
_MOST, _OWN = 1e-15, 1e-3
Key = tuple[object, ...]
_T = TypeVar("_T", bound=Hashable)


def by_preference(keys: Sequence[Key]) -> np.ndarray:
    """Seconds that are added to what each of these choices costs."""
    return _in_order(sorted(range(len(keys)), key=keys.__getitem__))


def _in_order(order: Sequence[int] | np.ndarray) -> np.ndarray:
    """The seconds of choices of which these are the numbers, the preferred one first."""
    ranks = np.empty(len(order))
    ranks[order] = np.arange(len(order))
    return ranks * (_MOST / max(len(order), 1))


@functools.lru_cache(maxsize=1 << 12)
def by_layout(shardings: tuple[Sharding, ...]) -> np.ndarray:
    """Seconds that are added to what each of these shardings costs."""
    return by_preference([*map(sharding_key, shardings)])


def own(number: float) -> float:
    """How many times as much these seconds are for an op of this number."""
    return 1 + _OWN * number


def by_placement(placements: Sequence[Placement]) -> np.ndarray:
    """Seconds that are added to what each of an op's placements costs.

    What orders them is what they send, what they carry on, and then the sharding of every result and operand. An op
    has far fewer shardings than placements: these are ordered first, and placements by their numbers.
    """
    sides = zip(*[(*p.results, *p.operands) for p in placements], strict=True)
    columns = [_numbers([p.step is not None for p in placements], bool)]
    columns += [_numbers([p.carry.operands for p in placements], tuple)]
    columns += [_numbers(side, sharding_key) for side in sides]
    return _in_order(np.lexsort(columns[::-1]))


def _numbers(choices: Sequence[_T], key: Callable[[_T], Any]) -> list[int]:
    """Where each choice comes in the order of these keys; equal ones at the same place."""
    ordered = itertools.groupby(sorted(dict.fromkeys(choices), key=key), key)
    places = {choice: n for n, (_, alike) in enumerate(ordered) for choice in alike}
    return [places[choice] for choice in choices]


@functools.lru_cache(maxsize=1 << 14)
def sharding_key(sharding: Sharding) -> Key:
    """Where a sharding comes among those of a tensor."""
    at = {name: n for n, name in enumerate(sharding.mesh.names)}
    dims = tuple([_layout_key(at, layout) for layout in sharding.dims])
    return sharding.mesh.ranks, _layout_key(at, sharding.partial), dims


def _layout_key(at: Mapping[str, int], layout: Layout) -> Key:
    return tuple([(at.get(s.axis or "", -1), s.pre, s.size or 0, s.chunks) for s in layout])


def numbers(graph: Graph) -> dict[int, float]:
    """By tensor a number from 0 to 1 that follows from what it is computed from, and from nothing else."""
    texts = {i: f"input {place}".encode() for place, i in enumerate(graph.input_tensors)}
    said: dict[int, bytes] = {}  # by identity of calls, which equal ops share
    for node in graph.nodes:
        call = node.call
        if id(call) not in said:
            said[id(call)] = repr((node.name, call.args, call.types)).encode()
        made = hashlib.blake2b(said[id(call)] + b"".join([texts[i] for i in node.inputs]), digest_size=8).digest()
        texts |= {i: made + bytes([place]) for place, i in enumerate(node.outputs)}
    return {i: int.from_bytes(hashlib.blake2b(text, digest_size=6).digest(), "big") / (1 << 48)
            for i, text in texts.items()}  # fmt: skip
