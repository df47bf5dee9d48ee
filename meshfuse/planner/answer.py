"""What an assignment of labels means: where ops and tensors are, and what each of them takes."""

from __future__ import annotations

from collections.abc import Hashable, Mapping
from dataclasses import dataclass

import numpy as np

from ..graph import Node
from ..placement.factors import Placement
from ..placement.options import Choice, RunnerUp, Source
from ..sharding.value import Sharding
from .elimination import Assignment
from .prices import Pair
from .program import Program, Shared
from .stationary import check_stationary


@dataclass(frozen=True, slots=True)
class Optimum:
    """A choice for every op, where tensors are, the seconds of the plan, and its gap.

    `gap` is the part of the seconds by which a plan of other placements may take less; None where not all that there
    are were considered at once. Of equal layers, plans in which these are equal are considered. Both are at the prices
    of the last round. Reshards that the plan does not use are priced in closed form, which for some is dearer than
    their cheapest path: the proof is of these prices.
    """

    choices: tuple[Choice, ...]
    shardings: Mapping[int, Sharding]
    seconds: float
    gap: float | None


@dataclass(frozen=True, slots=True)
class Answer:
    """An assignment of a program's labels."""

    program: Program
    assignment: Assignment

    def plan(self, gap: float | None, others: bool = True) -> Optimum:
        """The plan; `others`: with the next best placement of each op.

        Raises DefinitionError where it moves a tensor that is to stay.
        """
        frame = self.program.frame
        if frame.kept and self.assignment.value >= self.program.forbidden:
            operands = {node.id: self.placement(node.id).operands for node in frame.graph.nodes}
            check_stationary(frame.graph, frame.kept, {i: self.there(i)[0] for i in frame.kept}, operands)
        known, choices = dict[Hashable, Choice](), list[Choice]()
        for node in frame.graph.nodes:
            kind = self._kind(node)
            if kind not in known:
                known[kind] = self._choice(node, others)
            choices.append(known[kind])
        return Optimum(tuple(choices), self._shardings(), self.assignment.value, gap)

    def _shardings(self) -> dict[int, Sharding]:
        """Where every tensor is: an annotated one at its annotation, an output where it is left."""
        frame, graph = self.program.frame, self.program.frame.graph
        found = {i: given[0] for i, given in frame.inputs.items()}
        for node in graph.nodes:
            found.update(zip(node.outputs, self.placement(node.id).results, strict=True))
        free = [i for i in graph.outputs if i in frame.makers and i not in graph.annotations]
        return found | {i: self._left(i) for i in free} | dict(graph.annotations)

    def placement(self, op: int) -> Placement:
        """The placement of an op."""
        return self.program.labels[op].placements[self._label(op)]

    def _label(self, op: int) -> int:
        return self.assignment.labels[self.program.variables[op]]

    def there(self, tensor: int) -> tuple[Sharding, ...]:
        """Where a tensor is: where it is made, and its copy."""
        frame, shared = self.program.frame, self.program.shared.get(self.program.frame.alike[tensor])
        if isinstance(shared, Shared) or (shared is not None and tensor in frame.opened.places):
            return shared.label(self.assignment.labels[shared.variable])
        if shared is not None:
            made = frame.given[tensor][0] if tensor in frame.given else self.made(tensor)
            return tuple(dict.fromkeys((made, *shared.label(self.assignment.labels[shared.variable]))))
        return frame.given[tensor] if tensor in frame.given else (self.made(tensor),)

    def made(self, tensor: int) -> Sharding:
        """Where a tensor's op makes it."""
        op, place = self.program.frame.makers[tensor]
        return self.placement(op).results[place]

    def _end_of(self, tensor: int) -> Sharding | None:
        """Where a tensor must be in the end: at its annotation, or where an output is left."""
        frame = self.program.frame
        if tensor in frame.opened.follow:
            return self.there(frame.opened.follow[tensor])[0]
        return frame.graph.annotations.get(tensor) or (self._left(tensor) if tensor in frame.outputs else None)

    def _left(self, tensor: int) -> Sharding:
        """Where a free output is left: where it is made, or at its copy if that is reduced, or where a sum ends."""
        made, *copy = self.there(tensor)
        reduced = bool(made.partial and copy and not copy[0].partial)
        return copy[0] if reduced else self.program.end(tensor, made)

    # choices ----------------------------------------------------------------------------------------------------

    def _kind(self, node: Node) -> Hashable:
        """What an op's choice follows from."""
        frame = self.program.frame
        tensors = tuple([frame.alike[i] for i in (*node.inputs, *node.outputs)])
        first = tuple([i in frame.given and self._is_first(node, i) for i in node.inputs])
        return frame.deciders[node.id], tensors, first

    def _is_first(self, node: Node, tensor: int) -> bool:
        """Whether an op is the first reader of a tensor."""
        return next(iter(self.program.frame.readers[tensor])) == node.id

    def _choice(self, node: Node, others: bool) -> Choice:
        placement, seconds = self.placement(node.id), self._seconds(node)
        other = self._runner_up(node, seconds) if others else None
        return Choice(placement, self._source(node, placement), seconds, other)

    def _seconds(self, node: Node) -> float:
        """What an op takes: its work, bringing its operands, and its results' copies and ends."""
        program, frame, needs = self.program, self.program.frame, self.placement(node.id).operands
        total = float(program.labels[node.id].seconds[self._label(node.id)])
        for i, need in dict.fromkeys(zip(node.inputs, needs, strict=True)):
            total += min([program.prices.seconds(s, need, program.ttype(i)) for s in self.there(i)])
        for i in dict.fromkeys(node.inputs):
            if i in frame.given and frame.alike[i] in program.shared and self._is_first(node, i):
                made, *copy = self.there(i)  # The first reader pays for the copy.
                total += sum([program.prices.seconds(made, s, program.ttype(i)) for s in copy])
        return total + sum([self._after(i) for i in node.outputs])

    def _after(self, tensor: int) -> float:
        """Seconds of bringing a result to its annotation, or to its copy, or else to where it is left."""
        made, end = self.made(tensor), self._end_of(tensor)
        copy = () if tensor in self.program.frame.given else self.there(tensor)[1:]
        targets = copy or ((end,) if end is not None else ())
        seconds = sum([self.program.prices.seconds(made, target, self.program.ttype(tensor)) for target in targets])
        return seconds * self.program.frame.share_of(tensor)

    def _source(self, node: Node, placement: Placement) -> Source:
        """What a placement of an op follows: an operand that is there already, a result that is asked for so."""
        if placement.step is not None:
            return Source("pieces")
        if placement.carry.operands:
            return Source("carry", placement.carry.operands[0])
        rows = [*enumerate(zip(node.inputs, placement.operands, strict=True))]
        for place, (i, need) in sorted(rows, key=lambda row: -self.program.ttype(row[1][0]).nbytes):
            if need.splits and need in self.there(i):
                return Source("operand", place)
        for place, made in enumerate(placement.results):
            if made.splits:
                return Source("result", place)
        return Source("whole")

    def _runner_up(self, node: Node, seconds: float) -> RunnerUp | None:
        """The placement that costs least beside the chosen one if all other ops stay; None if there is none."""
        program, chosen = self.program, self.assignment.labels
        variable = program.variables[node.id]
        costs = program.costs.costs[variable].copy()
        for edge in program.edges_of[variable]:
            side = edge.sides.index(variable)
            other = np.full(len(program.costs.costs[edge.sides[1 - side]]), np.inf)
            other[chosen[edge.sides[1 - side]]] = 0.0
            costs += edge.passed(other, back=side == 0)
        taken = costs[chosen[variable]]
        costs[chosen[variable]] = np.inf
        best = int(costs.argmin())
        if not costs[best] < taken + program.limit:
            return None
        found = program.labels[node.id].placements[best]
        more = float(costs[best] - taken) / program.frame.ops[program.frame.deciders[node.id]]
        return RunnerUp(self._source(node, found), seconds + more, found.operands, found.results)

    # prices -----------------------------------------------------------------------------------------------------

    def used(self) -> set[Pair]:
        """The pairs whose prices the assignment depends on."""
        found = {pair for tensor in self.program.frame.tensors for pair in self._used(tensor)}
        return {pair for pair in found if pair[0] is not pair[1]}

    def _used(self, tensor: int) -> list[Pair]:
        frame, there, ttype = self.program.frame, self.there(tensor), self.program.ttype(tensor)
        is_free = tensor in frame.inputs and tensor not in frame.graph.annotations  # whole: its parts cost nothing
        needs = [self.placement(op).operands[place]
                 for op, places in frame.readers.get(tensor, {}).items() for place in places]  # fmt: skip
        pairs = [] if is_free else [(have, need, ttype) for have in there for need in (*needs, *there[1:])]
        if tensor in frame.makers:
            made, end = self.made(tensor), self._end_of(tensor)
            pairs += [(made, end, ttype)] if end is not None else []
        return pairs
