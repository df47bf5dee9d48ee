"""A segment's ops in stages: what nvFuser fuses, the products of it by torch's libraries, what is fused of those, ...

nvFuser calls cuBLAS and flash attention as torch does, but not cuDNN's attention, which takes less of a GPU's time.
It moves the ops beside a product into whatever kernel has their operands first, and keeps all of what they make that is
read later: three values of Float per element of a norm, for its gradient, and a copy of each operand of a product whose
dims are merged. So of segments that keep a GPU busy the products are torch's, and each stage between them is a
definition.

What an earlier stage makes and a later one reads goes through memory. Pointwise ops are done again at the later stage
where that reads no more than keeping would write and read, the idea of rematerialisation at a minimum cut (the min-cut
partitioner of PyTorch's AOTAutograd), decided greedily, by value. Views for products are taken in torch, which copies
nothing for them.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, field

from ...graph import Graph
from ...ops.opdef import Call
from ...ops.values import TensorType
from ...resharding import Compute
from .unshared import LONGEST, is_pointwise

_SMALL = 16  # A value of so many times fewer elements than another costs nothing beside it.
_Run = tuple[list[Compute], list[str]]  # and why they are torch's


@dataclass(frozen=True, slots=True)
class Stage:
    """Ops that are done one after another: by torch for `reasons`, by nvFuser where there are none.

    `outputs` are what later stages read of them, and the segment's outputs.
    """

    computes: tuple[Compute, ...]
    reasons: tuple[str, ...]
    outputs: tuple[int, ...]


def stages(
    graph: Graph,
    computes: Sequence[Compute],
    ttypes: Mapping[int, TensorType],
    outputs: Sequence[int],
    reasons: Sequence[str | None],
) -> list[Stage]:
    """The ops in an order in which all that they take is there; pointwise ops and views may be done several times.

    ttypes: the local types of all values that the ops take or give. reasons: why an op is torch's, None if it is
    nvFuser's.
    """
    staging = _Staging(graph, computes, ttypes, outputs, reasons)
    runs = [run for level in staging.run() for run in level.runs()]
    return _with_outputs(_joined(_alive(runs, outputs)), outputs)


@dataclass(slots=True)
class _Level:
    """What follows from values in memory without a product, and then products of that."""

    fused: list[Compute] = field(default_factory=list)
    others: list[Compute] = field(default_factory=list)
    reasons: list[str] = field(default_factory=list)

    def runs(self) -> Iterator[_Run]:
        yield self.fused, []
        yield self.others, self.reasons


def _alive(runs: Sequence[_Run], outputs: Sequence[int]) -> list[_Run]:
    """The runs without ops whose results nothing reads: of an op that is done again, the first time may be such."""
    needed, found = set(outputs), list[_Run]()
    for computes, reasons in reversed(runs):
        kept = list[Compute]()
        for compute in reversed(computes):
            if not needed.isdisjoint(compute.outputs):
                kept.append(compute)
                needed.difference_update(compute.outputs)
                needed.update(compute.inputs)
        if kept:
            found.append((kept[::-1], reasons))
    return found[::-1]


def _joined(runs: Sequence[_Run]) -> list[_Run]:
    """The runs, of which neighbours that are both torch's are one: there is nothing to fuse between them."""
    found: list[_Run] = []
    for computes, reasons in runs:
        if found and bool(reasons) == bool(found[-1][1]):
            known = {c.node for c in found[-1][0]}
            found[-1][0].extend(c for c in computes if c.node not in known)
            found[-1][1].extend(reasons)
        else:
            found.append((list(computes), list(reasons)))
    return found


def _with_outputs(runs: Sequence[_Run], outputs: Sequence[int]) -> list[Stage]:
    """What each run gives: results that the segment gives or a later run reads before it makes them itself."""
    needed, found = set(outputs), list[Stage]()
    for computes, reasons in reversed(runs):
        made = dict.fromkeys(v for c in computes for v in c.outputs)
        given = tuple(v for v in made if v in needed)
        found.append(Stage(tuple(computes), tuple(dict.fromkeys(reasons)), given))
        needed.difference_update(made)
        needed.update(v for c in computes for v in c.inputs if v not in made)
    return found[::-1]


class _Staging:
    """Levels count the products before a value, along the longest way. Only ops with one result are done again."""

    def __init__(
        self,
        graph: Graph,
        computes: Sequence[Compute],
        ttypes: Mapping[int, TensorType],
        outputs: Sequence[int],
        reasons: Sequence[str | None],
    ):
        self.graph, self.computes, self.ttypes, self.reasons = graph, computes, ttypes, reasons
        fused = [c for c, reason in zip(computes, reasons, strict=True) if reason is None and len(c.outputs) == 1]
        self.views = {c.outputs[0]: c for c in fused if self._call(c).op.is_view}
        self.makers = {c.outputs[0]: c for c in fused if self._is_cheap(c)}
        self.kept = {*outputs} | self._read_by_others()
        self.level: dict[int, int] = {}
        self.levels: list[_Level] = []
        self.decided: set[tuple[int, int]] = set()
        self.viewed: set[tuple[int, int]] = set()

    def run(self) -> list[_Level]:
        for compute, reason in zip(self.computes, self.reasons, strict=True):
            number = max((self.level.get(v, 0) for v in compute.inputs), default=0)
            if reason is None:
                self._take(compute, number)
                self._at_level(number).fused.append(compute)
            else:
                self._view(compute, number)
                self._at_level(number).others.append(compute)
                self._at_level(number).reasons.append(reason)
            self.level.update(dict.fromkeys(compute.outputs, number + (reason is not None)))
        return self.levels

    def _at_level(self, number: int) -> _Level:
        while len(self.levels) <= number:
            self.levels.append(_Level())
        return self.levels[number]

    def _is_cheap(self, compute: Compute) -> bool:
        call = self._call(compute)
        return is_pointwise(call) or call.op.is_cheap

    def _call(self, compute: Compute) -> Call:
        return self.graph.nodes[compute.node].call

    def _read_by_others(self) -> set[int]:
        """Values that torch's ops read, also through views of them: they are in memory."""
        found: set[int] = set()
        for compute, reason in zip(reversed(self.computes), reversed(self.reasons), strict=True):
            if reason is not None or (compute.outputs[0] in self.views and not found.isdisjoint(compute.outputs)):
                found.update(compute.inputs)
        return found - self.views.keys()

    def _view(self, compute: Compute, number: int) -> None:
        """Takes the views that an op of torch reads, in torch."""
        left, found = [*compute.inputs], list[Compute]()
        while left:
            view = self.views.get(value := left.pop())
            if view is not None and (value, number) not in self.viewed:
                self.viewed.add((value, number))
                found.append(view)
                left += view.inputs
        self._at_level(number).others += sorted(found, key=lambda view: view.node)

    def _take(self, compute: Compute, number: int) -> None:
        """Does what a fused op of a level reads again there, where that is better than to keep it."""
        left, found = [compute], list[Compute]()
        while left:
            reader = left.pop()
            size = max((self.ttypes[v].numel for v in (*reader.inputs, *reader.outputs)), default=0)
            again = [self.makers[v] for v in reader.inputs if self._is_done_again(v, number, size)]
            left += again
            found += again
        self._at_level(number).fused += sorted(found, key=lambda maker: maker.node)

    def _is_done_again(self, value: int, number: int, size: int) -> bool:
        early = self.level.get(value, 0) < number and value in self.makers and value not in self.kept
        if not early or (value, number) in self.decided:
            return False
        self.decided.add((value, number))
        return self._is_better(value, size)

    def _is_better(self, value: int, size: int) -> bool:
        """Whether a value is done again for an op on so many elements, which does not read it from memory then."""
        if self._is_constant(value):
            return True
        if self.ttypes[value].numel * _SMALL <= size:
            return False
        if not self._pays(value):
            self.kept.add(value)
            return False
        return True

    def _is_constant(self, value: int) -> bool:
        """Whether a value follows from nothing in memory, as a causal mask does."""
        while value in self.makers and self._call(self.makers[value]).op.is_cheap:
            if not (inputs := self.makers[value].inputs):
                return True
            (value,) = inputs
        return False

    def _pays(self, value: int) -> bool:
        """Whether to do an op again: for what is read of one value, or to keep its operand, which is smaller."""
        sources = self._sources(value)
        own = self.ttypes[value].nbytes
        if sources is not None and len(sources) <= 1:
            return all(self.ttypes[v].nbytes <= 2 * own for v in sources)
        large = [v for v in self.makers[value].inputs if not self._is_small(v, value)]
        return len(large) == 1 and self.ttypes[large[0]].nbytes < own

    def _sources(self, value: int) -> set[int] | None:
        """The large values in memory that a value follows from; None where that takes too many ops."""
        found, seen, left = set[int](), {value}, [value]
        while left:
            for v in self._operands(left.pop(), value):
                if v not in self.makers or v in self.kept:
                    found.add(v)
                elif v not in seen:
                    seen.add(v)
                    left.append(v)
            if len(seen) > LONGEST:
                return None
        return found

    def _operands(self, made: int, beside: int) -> Iterator[int]:
        return (v for v in self.makers[made].inputs if not self._is_small(v, beside))

    def _is_small(self, value: int, beside: int) -> bool:
        return self.ttypes[value].numel * _SMALL <= self.ttypes[beside].numel
