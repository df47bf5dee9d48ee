"""What other annotations would cost: the plan is made again with one of them changed, and its bill compared.

This gives the runner-up of a collective: the best plan in which an annotation behind it says something else, while all
other annotations and the distributed forms of ops stay as they are. Annotations of one source line and kind (the layers
of a model) are changed together. An input keeps its share of memory: its axes only move to other dims, or swap. Other
tensors may also be left without an annotation.
"""

from __future__ import annotations

import dataclasses
import functools
import itertools
from collections.abc import Iterator, Sequence
from dataclasses import dataclass

from ..compiler import CompiledProgram
from ..graph import Graph
from ..placement.exchanges import exchange_seconds, exchange_wire
from ..planner.effort import Effort
from ..propagation import ShardedDefinition, propagate
from ..reshard.steps import Step, mean_wire_elements
from ..resharding import Compute, ReshardedDefinition, insert_resharding
from ..rewrites.lower_ring_ops import lower_ring_ops
from ..sharding.layout import WHOLE, Layout, axes, extent
from ..sharding.value import Sharding

# At most so many other annotations are tried for one.
TRIED = 12
_MOST_PLACED = 10_000


@dataclass(frozen=True, slots=True)
class Total:
    """A plan's sums over all collectives: bytes per rank on the wire, and modelled seconds."""

    wire: float
    seconds: float


@dataclass(frozen=True, slots=True)
class Alternative:
    """Another annotation of some tensors (None: none at all), and what the whole plan would cost with it."""

    tensors: tuple[int, ...]
    old: Sharding
    new: Sharding | None
    total: Total

    def __str__(self) -> str:
        return f"{self.old} -> {'no annotation' if self.new is None else self.new}"


def wire_bytes(graph: Graph, tensor: int, step: Step) -> float:
    """The bytes that a move of a tensor puts on the wire: the mean over the ranks that it starts from."""
    ttype = graph.tensors[tensor].type
    return mean_wire_elements(step, ttype.shape) * ttype.dtype.itemsize


def total(resharded: ReshardedDefinition) -> Total:
    """The bytes and seconds of all collectives of a plan."""
    wire, seconds = 0.0, 0.0
    for found in resharded.sends:
        if isinstance(found, Compute):
            call = resharded.graph.nodes[found.node].call
            wire += exchange_wire(call, found.placement)
            seconds += exchange_seconds(call, found.placement)
        else:
            wire += wire_bytes(resharded.graph, resharded.values[found.source].tensor, found.step)
            seconds += resharded.seconds(found)
    return Total(wire, seconds)


class Alternatives:
    """The other annotations of one compiled program, each tried at most once."""

    def __init__(self, compiled: CompiledProgram):
        self.graph = compiled.planned.graph
        self.default_mesh = compiled.resharded.values[0].sharding.mesh
        self._totals: dict[tuple[tuple[int, ...], Sharding | None], Total] = {}

    def best(self, tensors: tuple[int, ...], most: int | None = None) -> Alternative | None:
        """The fastest plan with one of these tensors annotated otherwise; None where none of them can be.

        most: so many plans are looked at.
        """
        each = itertools.chain.from_iterable(map(self._of, dict.fromkeys(map(self._alike, tensors))))
        seen = itertools.islice(each, most)
        return min(seen, key=lambda other: (other.total.seconds, other.total.wire), default=None)

    def _of(self, alike: tuple[int, ...]) -> Iterator[Alternative]:
        """The plans with another annotation of these, which are annotated alike; each is made when it is asked for."""
        for new in itertools.islice(self._others(alike[0]), TRIED):
            if (alike, new) not in self._totals:
                self._totals[alike, new] = self._total(alike, new)
            yield Alternative(alike, self.graph.annotations[alike[0]], new, self._totals[alike, new])

    def _alike(self, tensor: int) -> tuple[int, ...]:
        graph = self.graph

        def kind(i: int) -> object:
            return (graph.annotation_lines[i], graph.annotations[i], graph.tensors[i].type, i in graph.input_tensors)

        return tuple(i for i in graph.annotations if kind(i) == kind(tensor))

    def _others(self, tensor: int) -> Iterator[Sharding | None]:
        old, shape = self.graph.annotations[tensor], self.graph.shape(tensor)
        if tensor not in self.graph.input_tensors and tensor not in self.graph.implied:
            yield None
        for dims in sorted(set(_placed(old.dims, shape)), key=str):
            cut = [_recut(layout, n) or WHOLE for layout, n in zip(dims, shape, strict=True)]
            new = Sharding.make(old.mesh, cut, shape)
            if new != old:
                yield new

    def _total(self, tensors: tuple[int, ...], new: Sharding | None) -> Total:
        kept = {i: s for i, s in self.graph.annotations.items() if i not in tensors}
        if new is not None:
            kept.update(dict.fromkeys(tensors, new))
        reductions = {n: r for n, r in self.graph.reductions.items() if not self._makes(n, tensors)}
        changed = dataclasses.replace(self.graph, annotations=kept, reductions=reductions)
        return total(insert_resharding(lower_ring_ops(propagate(changed, self.default_mesh))))

    def with_stationary(self, tensor: int, axes: tuple[str, ...]) -> ShardedDefinition:
        """The plan in which the tensor stays along these axes."""
        kept = {**self.graph.stationary, tensor: axes}
        parts = Effort.AUTO.in_parts(self.graph)
        return propagate(dataclasses.replace(self.graph, stationary=kept), self.default_mesh, parts)

    def _makes(self, node: int, tensors: tuple[int, ...]) -> bool:
        return any(i in tensors for i in self.graph.nodes[node].outputs)


def _placed(dims: Sequence[Layout], shape: Sequence[int]) -> Iterator[tuple[Layout, ...]]:
    """These layouts on any dims that they divide, in their order. Other orders would be too many."""
    moved = [layout for layout in dims if layout]
    fitting = [[d for d, n in enumerate(shape) if _recut(layout, n) is not None] for layout in moved]
    for places in itertools.islice(itertools.product(*fitting), _MOST_PLACED if 0 not in shape else 0):
        if len(set(places)) == len(places):
            at = dict(zip(places, moved, strict=True))
            yield tuple(at.get(d, WHOLE) for d in range(len(shape)))


@functools.lru_cache(maxsize=1 << 10)
def _recut(layout: Layout, n: int) -> Layout | None:
    """The layout's axes as even chunks of a dim of size n; None where they do not divide it."""
    bound = axes(layout)
    return bound if n and n % extent(bound) == 0 else None
