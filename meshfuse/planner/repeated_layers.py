"""Long programs of equal layers are planned with few of them, and the plan is written out for all.

An unrolled model repeats itself: forward it has a stretch of ops for each layer, backward another, in which what a
layer does with its neighbours is what the one before it did with its own. So the ops of layers in the middle are left
out, what is left is planned, and each layer that was left out is planned as the last one before them. (Loops are
planned once in Alpa, 2022, and PartIR, 2024, where the user marks them; here they are found.)

What is left out decides how good a plan is, never whether it is right: the shorter program need not compute anything
that makes sense, only ops of the same kinds on tensors of the same types.
"""

from __future__ import annotations

import dataclasses
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from typing import Any, NamedTuple

from ..graph import Graph, Node, numbered
from ..placement.factors import placed
from ..placement.options import Choice
from ..reshard.bounds import is_possible
from ..sharding.value import Sharding

# The fewest ops of a program that is folded: shorter ones are planned whole.
LONG = 400
# So many layers are left: one before those that are left out, and one after them.
KEPT = 2
# At least one of so many ops is left out.
_PART = 4
# What repeats is found by so many ops in a row.
_ROW = 24
# A tensor that all layers read is small where one of their own is so many times as large.
_SMALL = 8


@dataclass(frozen=True, slots=True)
class Folded:
    """A program with layers left out; `places[i]` is the op of it that stands for op i of the whole.

    `joints` are the ops of it, in pairs, that do the same in the layers on both sides of those left out.
    """

    whole: Graph
    short: Graph
    places: tuple[int, ...]
    joints: tuple[tuple[int, int], ...]

    def is_steady(self, choices: Sequence[Choice]) -> bool:
        """Whether a plan of the short program does the same on both sides of what is left out, so that it goes on."""
        return all(choices[a].placement == choices[b].placement for a, b in self.joints)

    def written_out(
        self, short: Sequence[Choice], there: Mapping[int, Sharding]
    ) -> tuple[tuple[Choice, ...], dict[int, Sharding]]:
        """(the choices, where tensors are) of the plan of the whole, from those of the short program's plan."""
        choices = list[Choice]()
        shardings = {i: there[i] for i in self.whole.input_tensors}
        for node, place in zip(self.whole.nodes, self.places, strict=True):
            choice = short[place]
            if choice.placement.carry.operands:
                choice = _reached(node, choice, shardings)
            choices.append(choice)
            stands_for = self.short.nodes[place].outputs
            for i, other, made in zip(node.outputs, stands_for, choice.placement.results, strict=True):
                shardings[i] = self._left(i, there[other], made)
        return tuple(choices), shardings

    def _left(self, tensor: int, other: Sharding, made: Sharding) -> Sharding:
        """Where a tensor of the whole is after its op: one that nobody places and that is an output is left reduced.

        other: where the tensor is that stands for it; made: as its op makes it.
        """
        if tensor in self.whole.annotations:
            return self.whole.annotations[tensor]
        if tensor not in self.whole.outputs or not made.partial:
            return made
        return made.reduced() if other.partial else other


def _reached(node: Node, choice: Choice, shardings: Mapping[int, Sharding]) -> Choice:
    """The choice for an op that carries sums, whose stand-in may have read other layers.

    Where those left sums unreduced that this op's own operands do not, it reads them reduced.
    """
    placement = choice.placement
    if all(is_possible(shardings[i], need) for i, need in zip(node.inputs, placement.operands, strict=True)):
        return choice
    reduced = placed(node.call, node.rule, placement.results[0].mesh, placement.layouts)
    assert reduced is not None, f"{node.name}: what may be unreduced may be reduced"
    return dataclasses.replace(choice, placement=reduced)


class _Stretch(NamedTuple):
    """Ops from `start` to before `end` that repeat every `period`."""

    start: int
    period: int
    end: int

    @property
    def count(self) -> int:
        return (self.end - self.start) // self.period


class _Gap(NamedTuple):
    """So many `layers` of a stretch left out, from op `start` on; `backward`: the first of them is the last layer's."""

    stretch: _Stretch
    start: int
    layers: int
    backward: bool = False

    @property
    def size(self) -> int:
        return self.layers * self.stretch.period

    @property
    def end(self) -> int:
        return self.start + self.size

    def stand_in(self, op: int) -> int:
        """The op of the layer next to those left out that stands for one of them."""
        first = self.end if self.backward else self.start - self.stretch.period
        return first + (op - self.start) % self.stretch.period

    @property
    def joints(self) -> list[tuple[int, int]]:
        """The ops of the layers before and after those left out, in pairs."""
        period = self.stretch.period
        return [(op, op + self.size + period) for op in range(self.start - period, self.start)]

    def nearest(self, op: int) -> int:
        """The op like one that is left out, in the layers that come to lie where it was, for a reader next to it.

        Where the stretch does not go on so far, the reader is next to none of those left out, as one that reads all
        layers: the one in the layer next to them.
        """
        first_half = op < self.start + self.size // 2
        moved = op + self.size if first_half else op - self.size
        if self.stretch.start <= moved < self.stretch.end:
            return moved
        beside = self.end if first_half else self.start - self.stretch.period
        return beside + (op - self.start) % self.stretch.period


def repeated_layers(graph: Graph, kept: int = KEPT, *, sharing: bool = False) -> Folded | None:
    """The program with all but so many of its layers left out.

    None where it is short or repeats nothing, or spans several meshes; and, but for `sharing`, where layers read one
    large tensor from outside: a plan of few layers may then be a bad one for all.
    """
    if len(graph.nodes) <= LONG or len({sharding.mesh for sharding in graph.annotations.values()}) != 1:
        return None
    producers = {out: node.id for node in graph.nodes for out in node.outputs}
    cuts = list(_cuts(graph, producers, kept))
    out = {op: cut for cut in cuts for op in range(cut.start, cut.end)}
    if len(out) * _PART < len(graph.nodes) or (not sharing and _shares_much(graph, producers, cuts)):
        return None
    return _without(graph, producers, out, cuts)


def _shares_much(graph: Graph, producers: Mapping[int, int], cuts: Sequence[_Gap]) -> bool:
    """Whether layers read one large tensor from outside, such as weights that they share.

    To bring it where it is read is worth more for many of them than for few.
    """
    largest, shared = 0, 0
    for cut in cuts:
        middle = cut.start + cut.stretch.period
        read = {i for node in graph.nodes[cut.start : middle] for i in node.inputs}
        for node in graph.nodes[middle : middle + cut.stretch.period]:  # the next layer
            largest = max(largest, *(t.nbytes for t in (*node.call.types, *node.call.results)))
            both = read.intersection(node.inputs)
            outside = [
                i for i in both if not any(c.stretch.start <= producers.get(i, -1) < c.stretch.end for c in cuts)
            ]
            shared = max([shared, *(graph.tensors[i].type.nbytes for i in outside)])
    return shared * _SMALL > largest


# what repeats ------------------------------------------------------------------------------------------------------


def _kinds(graph: Graph) -> list[int]:
    """A number for each op, equal where the same is done with tensors of which the same is said."""
    inputs, outputs, said = set(graph.input_tensors), set(graph.outputs), graph.annotations
    told = {i: (said.get(i), i in inputs, i in outputs) for i in {*inputs, *outputs, *said}}
    numbers: dict[Any, int] = {}
    kinds = []
    for node in graph.nodes:
        places = tuple(map(node.inputs.index, node.inputs)) if len(node.inputs) > 1 else ()
        facts = tuple(map(told.get, (*node.inputs, *node.outputs)))
        key = (id(node.call), id(node.rule), places, facts, graph.reductions.get(node.id))
        kinds.append(numbers.setdefault(key, len(numbers)))
    return kinds


def _stretches(kinds: Sequence[int], kept: int) -> list[_Stretch]:
    """The longest stretches that repeat often enough, in order; no two share an op."""
    chosen: list[_Stretch] = []
    for found in sorted(_repeating(kinds, kept), key=lambda s: s.start - s.end):
        for other in chosen:
            found = _beside(found, other)
        if found.count > kept:
            chosen.append(found)
    return sorted(chosen)


def _beside(stretch: _Stretch, other: _Stretch) -> _Stretch:
    """What is left of a stretch before or after another."""
    if stretch.start < other.start:
        return stretch._replace(end=min(stretch.end, other.start))
    return stretch._replace(start=max(stretch.start, other.end))


def _repeating(kinds: Sequence[int], kept: int) -> Iterator[_Stretch]:
    """Every stretch that repeats more often than its layers are kept."""
    last: dict[tuple[int, ...], int] = {}
    ends: dict[int, int] = {}  # by period, up to where it has been tried
    for place in range(len(kinds) - _ROW + 1):
        row = tuple(kinds[place : place + _ROW])
        before = last.get(row)
        last[row] = place
        if before is not None and place >= ends.get(place - before, 0):
            found = _extended(kinds, before, place - before)
            ends[found.period] = found.end
            if found.count > kept:
                yield found


def _extended(kinds: Sequence[int], start: int, period: int) -> _Stretch:
    end = start + period + _ROW
    while end < len(kinds) and kinds[end] == kinds[end - period]:
        end += 1
    while start > 0 and kinds[start - 1] == kinds[start - 1 + period]:
        start -= 1
    return _Stretch(start, period, end)


# what is left out --------------------------------------------------------------------------------------------------


def _cuts(graph: Graph, producers: Mapping[int, int], kept: int) -> Iterator[_Gap]:
    """What to leave out of each stretch: of one that reads another layer by layer, the same layers."""
    found: list[_Gap] = []
    for stretch in _stretches(_kinds(graph), kept):
        alone = _Gap(stretch, stretch.start + (kept + 1) // 2 * stretch.period, stretch.count - kept)
        cut = next(filter(_is_between, (*_following(graph, producers, stretch, found), alone)), None)
        if cut is not None:
            found.append(cut)
            yield cut


def _is_between(cut: _Gap) -> bool:
    """Whether a whole layer is left on both sides."""
    stretch = cut.stretch
    return stretch.start + stretch.period <= cut.start and cut.end + stretch.period <= stretch.end


def _following(graph: Graph, producers: Mapping[int, int], stretch: _Stretch, cuts: Sequence[_Gap]) -> Iterator[_Gap]:
    """The cuts of a stretch that leave out what reads the layers which an earlier cut leaves out."""
    start, period, _ = stretch
    middle = start + stretch.count // 2 * period
    for op in range(middle, middle + period):
        pairs = zip(graph.nodes[op].inputs, graph.nodes[op - period].inputs, strict=True)
        for now, before in ((producers.get(a, -1), producers.get(b, -1)) for a, b in pairs):
            for cut in cuts:
                step = cut.stretch.period
                if cut.stretch.start <= now < cut.stretch.end and abs(now - before) == step:
                    yield _alongside(stretch, op, now, now < before, cut)


def _alongside(stretch: _Stretch, op: int, reads: int, backward: bool, cut: _Gap) -> _Gap:
    """The cut of a stretch whose `op` reads the op `reads` of another's.

    It begins at the first op like it that reads what is left out there.
    """
    step = cut.stretch.period
    layer = (reads - cut.start) // step  # of those left out, counted from the first
    ahead = layer - (cut.layers - 1) if backward else -layer
    return _Gap(stretch, op + ahead * stretch.period, cut.layers, backward != cut.backward)


def _without(
    graph: Graph, producers: Mapping[int, int], out: Mapping[int, _Gap], cuts: Sequence[_Gap]
) -> Folded | None:
    """The program without these ops; None where what is left reads one that nothing kept stands for."""
    kept = [node.id for node in graph.nodes if node.id not in out]
    places = {op: place for place, op in enumerate(kept)}
    nodes: list[Node] = []
    for op in kept:
        node = graph.nodes[op]
        inputs = [_instead(graph, producers, out, i) for i in node.inputs]
        if any(producers.get(i, -1) >= op or producers.get(i) in out for i in inputs):
            return None
        nodes.append(numbered(node, places[op], tuple(inputs)))
    stand_ins = [places.get(out[op].stand_in(op) if op in out else op) for op in range(len(graph.nodes))]
    if None in stand_ins:
        return None
    made = {i for node in nodes for i in node.outputs} | set(graph.input_tensors)
    short = dataclasses.replace(
        graph,
        nodes=tuple(nodes),
        outputs=tuple([i for i in graph.outputs if i in made]),
        annotations={i: said for i, said in graph.annotations.items() if i in made},
        reductions={places[op]: layouts for op, layouts in graph.reductions.items() if op in places},
        streams={i: stream for i, stream in graph.streams.items() if i in made},
    )
    joints = [(places[a], places[b]) for cut in cuts for a, b in cut.joints]
    return Folded(graph, short, tuple([place for place in stand_ins if place is not None]), tuple(joints))


def _instead(graph: Graph, producers: Mapping[int, int], out: Mapping[int, _Gap], tensor: int) -> int:
    """The tensor of a layer that is kept, in the place of one of those left out."""
    op = producers.get(tensor, -1)
    if op not in out:
        return tensor
    other = out[op].nearest(op)
    return graph.nodes[other].outputs[graph.nodes[op].outputs.index(tensor)]
