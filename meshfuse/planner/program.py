"""A program as a cost graph: a variable for every op, and one for every tensor whose readers may share a copy.

An op's labels are its placements; ops at the same place of equal layers are one variable (`equal_layers`). Those of a
tensor with several readers are (where it is made, a copy that is made of it once, or none). Every reader takes it from
the one that is cheaper for it: a reshard is paid once however many read its result. An annotated tensor is brought to
its annotation, and its readers take it from there alone.
"""

from __future__ import annotations

import functools
import itertools
from collections import Counter
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass, field

import numpy as np

from ..ops.values import TensorType
from ..sharding import layout as lay
from ..sharding.value import Sharding
from .cost_graph import Between, Classes, CostGraph, Costs, Digits, Edge, FromEither, Same
from .elimination import Assignment, eliminate, elimination_order
from .frame import Frame
from .labels import Label
from .op_labels import KnownLabels, LabelMaker, Labels, Needs, classes_of
from .prices import Prices, Shardings
from .reshard_costs import AtomsOf
from .stationary import moves_along
from .ties import by_layout, by_preference, own, sharding_key

# Seconds that a copy costs at least: one that costs no more is made by slices, which need no sharing.
_FREE = 2e-13
# As many times as much as a plan may cost at most.
_FORBIDDEN = 1e3


@dataclass(frozen=True, slots=True)
class Shared:
    """A tensor's variable: its labels are pairs of where it is made and a copy or, as the last one, none."""

    variable: int
    made: Shardings
    copies: Shardings

    def label(self, number: int) -> tuple[Sharding, ...]:
        """Where the tensor is made, and its copy, if it has one."""
        row, column = divmod(number, len(self.copies) + 1)
        return (self.made[row], *self.copies[column : column + 1])


@dataclass(frozen=True, slots=True)
class Home:
    """A tensor's variable where all its readers take it from one place: its labels are these."""

    variable: int
    places: Shardings

    def label(self, number: int) -> tuple[Sharding, ...]:
        """The place."""
        return (self.places[number],)


@dataclass(slots=True)
class Program:
    """The cost graph of a program at given prices.

    An input without an annotation is whole on all ranks of all meshes.

    atoms_of, around, free, along: which labels ops have (`LabelMaker`).
    known: the labels that were made so far for forms of the program.
    homes: whether all readers of a tensor take it from one place, which makes for far smaller tables of elimination. As
        slices cost nothing, there is little that a copy beside the tensor saves more.
    """

    frame: Frame
    prices: Prices
    atoms_of: AtomsOf
    around: Sequence[Label] = ()
    free: frozenset[int] | None = None
    along: str | None = None
    homes: bool = False
    known: KnownLabels = field(default_factory=KnownLabels)
    labels: list[Labels] = field(default_factory=list)
    costs: CostGraph = field(default_factory=CostGraph)
    variables: dict[int, int] = field(default_factory=dict)  # of ops
    shared: dict[int, Shared | Home] = field(default_factory=dict)
    edges_of: list[list[Edge]] = field(default_factory=list)  # by variable
    limit: float = 0.0

    def __post_init__(self) -> None:
        between = not self.homes
        self.labels = LabelMaker(
            self.frame, self.atoms_of, self.known, self.around, self.free, self.along, between
        ).all()

    def ttype(self, tensor: int) -> TensorType:
        """The type of a tensor."""
        return self.frame.graph.tensors[tensor].type

    def build(self) -> None:
        """Make the cost graph anew, at the prices of now. Variables are in program order: messages go along it."""
        if not self.variables:
            self._take_prices()
        self.costs, self.variables, self.shared = CostGraph(), {}, {}
        self.limit = self.limit or 2 * self._replicated()
        reserved = {i: self._reserved(i) for i in self.frame.inputs if i in self.frame.tensors}
        for node in self.frame.graph.nodes:
            if node.id in self.frame.ops:
                labels, number = self.labels[node.id], self.frame.numbers[node.outputs[0]]
                costs = labels.seconds * self.frame.ops[node.id] + labels.ties * own(number)
                self.variables[node.id] = self.costs.add_variable(costs)
            reserved |= {i: self._reserved(i) for i in node.outputs if i in self.frame.tensors}
        self.variables = {node.id: self.variables[self.frame.deciders[node.id]] for node in self.frame.graph.nodes}
        for i, variable in reserved.items():
            self._add_tensor(i, variable)
        self.edges_of = [[] for _ in self.costs.costs]
        for edge in self.costs.edges:
            for variable in edge.sides:
                self.edges_of[variable].append(edge)

    def _take_prices(self) -> None:
        """Ask at once for the prices between all shardings of all tensors: few large tables take least time."""
        found = dict[TensorType, dict[Sharding, None]]()
        for op in self.frame.ops:
            node, placements = self.frame.graph.nodes[op], self.labels[op].placements
            for place, i in enumerate(node.inputs):
                found.setdefault(self.ttype(i), {}).update(dict.fromkeys([p.operands[place] for p in placements]))
            for place, i in enumerate(node.outputs):
                found.setdefault(self.ttype(i), {}).update(dict.fromkeys([p.results[place] for p in placements]))
            for place, i in enumerate(node.outputs):
                if i in self.frame.outputs and i not in self.frame.given:
                    ends = [end for p in placements for end in self._ends(i, p.results[place])]
                    found[self.ttype(i)].update(dict.fromkeys(ends))
        for i, shardings in self.frame.given.items():
            found.setdefault(self.ttype(i), {}).update(dict.fromkeys(shardings))
        self.prices.take(found)

    def _reserved(self, tensor: int) -> int | None:
        """A variable for a tensor that has several readers, its place as an output or an annotation among them."""
        readers = len(self.frame.readers.get(tensor, ()))
        if tensor in self.frame.opened.places:
            return self.costs.add_variable([0.0])
        if tensor in self.frame.inputs and tensor not in self.frame.graph.annotations:
            return None  # Whole everywhere: its parts are free.
        more = tensor not in self.frame.given and tensor in self.frame.outputs
        return self.costs.add_variable([0.0]) if readers and readers + more > 1 else None

    def _replicated(self) -> float:
        """More seconds than the plan in which every rank computes everything: no part of the best one takes as long."""
        work = sum([float(labels.seconds[0]) for labels in self.labels])
        moves = sum([self._whole(tensor) * times for tensor, times in self.frame.tensors.items()])
        held = sum([self._held_whole(tensor) * times for tensor, times in self.frame.tensors.items()])
        return work + moves + held + 1e-9

    def _held_whole(self, tensor: int) -> float:
        """What the memory counts as of an open input, or of what ops hold, where every rank has all of it."""
        opened, whole = self.frame.opened, (Sharding.replicated(self.frame.meshes[0], self.ttype(tensor).ndim),)
        if tensor in opened.places:
            types = [self.ttype(i) for i in (tensor, *opened.followers(tensor))]
            return float(opened.seconds(whole, types, opened.more.get(tensor, 0.0))[0])
        return float(opened.seconds(whole, [self.ttype(tensor)])[0]) if self.frame.held[tensor] else 0.0

    def _whole(self, tensor: int) -> float:
        """Seconds from where a tensor has to be to all ranks of every mesh and back, and from each mesh to the others.

        It has to be at its annotation, or at one of an open input's places.
        """
        note, opened, ttype = self.frame.graph.annotations.get(tensor), self.frame.opened, self.ttype(tensor)
        on = [Sharding.replicated(mesh, ttype.ndim) for mesh in self.frame.meshes]

        def seconds(pairs: Iterable[tuple[Sharding, Sharding]]) -> float:
            return sum([self.prices.most(source, target, ttype) for source, target in pairs])

        # No reshard makes terms of a sum.
        ends = [note.reduced()] if note is not None else opened.places.get(opened.follow.get(tensor, tensor), ())
        there = [seconds((a, b) for s in on for a, b in ((s, end), (end, s))) for end in ends]
        return seconds(itertools.permutations(on, 2)) + min(there, default=0.0)

    # prices -----------------------------------------------------------------------------------------------------

    def _table(self, sources: Shardings, targets: Shardings, tensor: int) -> Costs:
        table = np.minimum(self.prices.table(sources, targets, self.ttype(tensor)), self.impossible)
        along = self.frame.kept.get(tensor)
        return (
            table
            if along is None
            else np.where(moves_along(along, sources, targets, self.frame.graph.shape(tensor)), self.forbidden, table)
        )

    @property
    def forbidden(self) -> float:
        """What a reshard costs that the user forbids: more than any plan without one."""
        return _FORBIDDEN * self.limit

    @property
    def impossible(self) -> float:
        """What there is no way to do costs: more than what is forbidden, and than plans that leave terms of sums."""
        return _FORBIDDEN * self.forbidden if self.frame.kept or self.frame.has_terms else self.limit

    def _needs(self, tensor: int, node: int) -> Needs:
        return self.labels[node].needs(tuple(self.frame.readers[tensor][node]))

    def _needs_of(self, tensor: int) -> dict[int, Needs]:
        """The same by op that decides for some readers."""
        return {self.frame.deciders[node]: self._needs(tensor, node) for node in self.frame.readers.get(tensor, ())}

    def _read(self, have: Shardings, needs: Needs, tensor: int) -> Costs:
        """[have, needs]: bringing a tensor to where a reader needs it."""
        table = self._table(have, needs.each, tensor)
        return np.stack([table[:, places].sum(1) for places in needs.places], 1) if needs.places else table

    def end(self, tensor: int, made: Sharding) -> Sharding:
        """Where an output that nobody places is left: a sum is scattered over a dim that divides, or else reduced."""
        return min(self._ends(tensor, made), key=lambda end: self.prices.seconds(made, end, self.ttype(tensor)))

    def _ends(self, tensor: int, made: Sharding) -> list[Sharding]:
        """Where an output may be left."""
        if not made.partial:
            return [made]
        scattered = [_scattered(made, d, n) for d, n in enumerate(self.frame.graph.shape(tensor))]
        return [*(s for s in scattered if s is not None), made.reduced()]

    def _end_costs(self, tensor: int, have: Shardings) -> np.ndarray:
        """Seconds from where a tensor is made to its annotation; to where it is left, if it is an output."""
        note = self.frame.graph.annotations.get(tensor)
        if note is not None:
            return self._table(have, (note,), tensor)[:, 0] * self.frame.share_of(tensor)
        if tensor not in self.frame.outputs or tensor in self.frame.opened.follow:
            return np.zeros(len(have))
        return np.array([self.prices.seconds(s, self.end(tensor, s), self.ttype(tensor)) for s in have])

    # tensors ----------------------------------------------------------------------------------------------------

    def _add_tensor(self, tensor: int, variable: int | None) -> None:
        """Add what a tensor costs; an annotated one is brought to its annotation, where all readers take it."""
        if variable is not None and tensor in self.frame.opened.places:
            self._open(tensor, variable)
            return
        if tensor in self.frame.makers:
            node, place = self.frame.makers[tensor]
            have, made = self.labels[node].results(place)
            if self.frame.held[tensor]:
                seconds = self.frame.opened.seconds(have, [self.ttype(tensor)]) * self.frame.held[tensor]
                self.costs.add_costs(self.variables[node], seconds[made.of])
            if tensor in self.frame.given or not self.frame.readers.get(tensor):
                self.costs.add_costs(
                    self.variables[node], self._end_costs(tensor, have)[made.of] * self.frame.tensors[tensor]
                )
            elif variable is not None:
                self._share(tensor, variable, have, made)
            else:
                self._pass(tensor, have, made)
        if tensor in self.frame.given and variable is not None:
            self._share(tensor, variable, self.frame.given[tensor], None)
        elif tensor in self.frame.given:
            self._pass_given(tensor)

    def _open(self, tensor: int, variable: int) -> None:
        """An input that may lie in several places: it takes memory there, and some outputs are left where it lies."""
        frame, places = self.frame, self.frame.opened.places[tensor]
        followers, times = frame.opened.followers(tensor), frame.tensors[tensor]
        if self.homes:
            self._settle(tensor, variable, (places, None), self._needs_of(tensor), ())
        else:
            self._share(tensor, variable, places, None)
        at = np.repeat(np.arange(len(places)), len(self.costs.costs[variable]) // len(places))
        types = tuple([self.ttype(i) for i in (tensor, *followers)])
        seconds = frame.opened.seconds(places, types, frame.opened.more.get(tensor, 0.0))
        self.costs.add_costs(variable, seconds[at] * times)
        for i in followers:
            node, place = frame.makers[i]
            have, made = self.labels[node].results(place)
            moves = self._table(have, places, i) * (times * frame.share_of(i))
            self.costs.edges.append(Between((self.variables[node], variable), moves, made, Classes(at, len(places))))

    def _pass_given(self, tensor: int) -> None:
        """An input, or an annotated tensor, with one reader."""
        for reader in self.frame.readers.get(tensor, ()):
            needs = self._needs(tensor, reader)
            least = self._read(self.frame.given[tensor], needs, tensor).min(0) * self.frame.tensors[tensor]
            self.costs.add_costs(self.variables[reader], least[needs.classes.of])

    def _pass(self, tensor: int, have: Shardings, made: Classes) -> None:
        """A tensor with one reader."""
        (reader,) = self.frame.readers[tensor]
        needs = self._needs(tensor, reader)
        maker, reader = self.variables[self.frame.makers[tensor][0]], self.variables[reader]
        costs = self._read(have, needs, tensor) * self.frame.tensors[tensor]
        if maker == reader:  # in equal layers: that of one layer, and that of the next
            self.costs.add_costs(maker, costs[made.of, needs.classes.of])
        else:
            self.costs.edges.append(Between((maker, reader), costs, made, needs.classes))

    def _share(self, tensor: int, variable: int, have: Shardings, made: Classes | None) -> None:
        """A tensor whose readers may share a copy."""
        needs = self._needs_of(tensor)
        copies = self._copies(tensor, needs)
        if self.homes:
            self._settle(tensor, variable, (have, made), needs, copies)
            return
        shared = self.shared[tensor] = Shared(variable, have, copies)
        costs = self._copy_costs(tensor, have, copies)
        rows, columns = (Digits((len(have), len(copies) + 1), axis) for axis in (0, 1))
        self.costs.costs[variable] = costs.ravel()
        readers = self.frame.readers_of(tensor)
        for node, need in needs.items():
            times = self.frame.tensors[tensor] * readers[node]
            costs = self._either(tensor, shared, need) * times
            self.costs.edges.append(FromEither((variable, self.variables[node]), costs, (rows, columns), need.classes))
        if made is not None:
            maker = self.variables[self.frame.makers[tensor][0]]
            self.costs.edges.append(Same((maker, variable), made, rows, self.impossible))

    def _settle(
        self, tensor: int, variable: int, source: tuple[Shardings, Classes | None], needs: Mapping[int, Needs],
        copies: Shardings,
    ) -> None:  # fmt: skip
        """A tensor whose readers all take it from one place: where it is made, or where it is brought once."""
        (have, made), times, readers = source, self.frame.tensors[tensor], self.frame.readers_of(tensor)
        places, numbered = classes_of(tuple(dict.fromkeys((*have, *copies))))
        self.shared[tensor] = Home(variable, places)
        moves = self._table(have, places, tensor) * times
        costs = by_layout(places) * own(self.frame.numbers[tensor])
        if tensor in self.frame.outputs and tensor not in self.frame.given:
            costs = costs + self._end_costs(tensor, places) * times
        self.costs.costs[variable] = costs + moves.min(0) if made is None else costs
        if made is not None:
            self.costs.edges.append(
                Between((self.variables[self.frame.makers[tensor][0]], variable), moves, made, numbered)
            )
        for node, need in needs.items():
            table = self._read(places, need, tensor) * (times * readers[node])
            self.costs.edges.append(Between((variable, self.variables[node]), table, numbered, need.classes))

    def _copies(self, tensor: int, needs: dict[int, Needs]) -> Shardings:
        """The shardings that more than one reader may need."""
        counts = Counter[Sharding]()
        for node, times in self.frame.readers_of(tensor).items():
            for s in needs[node].each:
                counts[s] += times
        wanted = 1 if tensor in self.frame.outputs and tensor not in self.frame.given else 2
        return tuple(s for s, n in counts.items() if n >= wanted)

    def _copy_costs(self, tensor: int, have: Shardings, copies: Shardings) -> Costs:
        """[have, copies and none]: making the copy, and leaving an output."""
        to_copy = self._table(have, copies, tensor) if copies else np.zeros((len(have), 0))
        costs = np.concatenate([np.where(to_copy > _FREE, to_copy, self.impossible), np.zeros((len(have), 1))], 1)
        if tensor in self.frame.outputs and tensor not in self.frame.given:
            unreduced = np.array([copy.partial != () for copy in copies] + [True])
            costs += np.where(unreduced, self._end_costs(tensor, have)[:, None], 0.0)
        ties = _copies_by_layout(copies) * own(self.frame.numbers[tensor])
        return np.minimum(costs * self.frame.tensors[tensor] + ties, self.impossible)

    def _either(self, tensor: int, shared: Shared, needs: Needs) -> Costs:
        """[where it is made, copies and none; needs]: bringing a tensor from either to where a reader needs it."""
        made, copies = self._read(shared.made, needs, tensor), shared.copies
        none = np.full((1, len(needs.sets)), 2 * self.impossible)
        return np.concatenate([made, *([self._read(copies, needs, tensor)] if copies else ()), none])

    def assigned(self, labels: Sequence[Label]) -> Assignment:
        """The best assignment in which every op has a given label."""
        kept = [np.arange(n) for n in self.costs.sizes()]
        for op in self.frame.ops:
            kept[self.variables[op]] = np.array([self.labels[op].number(labels[op].placement)])
        graph = self.costs.only(kept)
        found = eliminate(graph, elimination_order(graph.sizes(), graph.sides()))
        return Assignment(tuple(int(k[n]) for k, n in zip(kept, found.labels, strict=True)), found.value)

    def chosen(self, chosen: Sequence[int]) -> list[Label]:
        """Every op's label in an assignment."""
        at = [(self.labels[node.id], chosen[self.variables[node.id]]) for node in self.frame.graph.nodes]
        return [Label(labels.placements[n], labels.spots[n]) for labels, n in at]


@functools.lru_cache(maxsize=1 << 12)
def _copies_by_layout(copies: Shardings) -> Costs:
    """Seconds that are added to what each copy costs, and then to what none does, which comes first."""
    none, *each = by_preference([(), *map(sharding_key, copies)])
    return np.array([*each, none])


def _scattered(made: Sharding, dim: int, n: int) -> Sharding | None:
    """A sum scattered over a dim; None where that does not divide."""
    layout = (*made.dims[dim], *made.partial)
    if n % lay.extent(layout):
        return None
    return made.reduced().with_dims([lay.canonical(layout, n) if d == dim else o for d, o in enumerate(made.dims)])
