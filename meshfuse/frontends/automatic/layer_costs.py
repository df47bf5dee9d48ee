"""What each layer of a planned step takes and holds on a rank, read off the plan's statements."""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, field, replace

from ...graph import Graph
from ...placement.roofline import Roofline, stored_by, stored_tensors
from ...reshard.rematerialize import gather_again_after, held_across, peak
from ...resharding import Compute, Reshard, ReshardedDefinition, Statement


@dataclass(frozen=True, slots=True)
class LayerCost:
    """Of one micro-batch, on one rank.

    forward, backward: seconds. moving: those of them in which tensors move between ranks.
    ideal: seconds of the computation if it were spread evenly over ranks.
    peak: seconds of the operations at the full rate of all ranks.
    once: seconds, once in a step, of summing gradients over ranks and bringing them to where they are left.
    weights, gradients, states: bytes of parameters, of their gradients and of what an optimiser keeps.
    kept: bytes that the forward keeps for the backward.
    handed: bytes, on all ranks together, of what later layers read.
    """

    forward: float = 0.0
    backward: float = 0.0
    moving: float = 0.0
    ideal: float = 0.0
    peak: float = 0.0
    once: float = 0.0
    weights: float = 0.0
    gradients: float = 0.0
    states: float = 0.0
    kept: float = 0.0
    handed: float = 0.0

    @property
    def seconds(self) -> float:
        """Of a forward and a backward."""
        return self.forward + self.backward

    @property
    def held(self) -> float:
        """Bytes that are there all the time."""
        return self.weights + self.gradients + self.states


def total(costs: Sequence[LayerCost]) -> LayerCost:
    """What several layers take together; the last one hands on."""
    sums = {name: sum(getattr(cost, name) for cost in costs) for name in LayerCost.__slots__}
    return LayerCost(**{**sums, "handed": costs[-1].handed if costs else 0.0})


@dataclass(frozen=True, slots=True)
class Shared:
    """What of a joint definition belongs to what.

    layers: the full names of the layers, in order.
    forward: the tensors of the forward. parameters: inputs that are weights.
    gradients: by tensor that a gradient is made as the weight that it is of.
    states: how many tensors of a weight's size an optimiser keeps.
    is_summed_later: whether gradients of micro-batches are added up on each rank, and summed over ranks once.
    """

    layers: tuple[str, ...]
    forward: frozenset[int]
    parameters: frozenset[int]
    gradients: Mapping[int, int]
    states: float
    is_summed_later: bool


@dataclass(frozen=True, slots=True)
class LayerCosts:
    """By layer, with what stands before the first and behind the last; and the bytes at work beside what is held."""

    before: LayerCost
    layers: tuple[LayerCost, ...]
    behind: LayerCost
    working: float


def layer_costs(resharded: ReshardedDefinition, shared: Shared) -> LayerCosts:
    """What the layers of a joint definition take and hold, cut into a forward and a backward that gathers again."""
    border = _border(resharded, shared)
    return _Reader(gather_again_after(resharded, border), shared).costs()


def _border(resharded: ReshardedDefinition, shared: Shared) -> int:
    """The last statement of the forward."""
    values = resharded.values
    made = (i for i, s in enumerate(resharded.statements) if isinstance(s, Compute)
            and any(values[v].tensor in shared.forward for v in s.outputs))  # fmt: skip
    return max(made, default=-1)


@dataclass(slots=True)
class _Reader:
    """Goes through the statements; `found` has what stands before, the layers, and what stands behind."""

    resharded: ReshardedDefinition
    shared: Shared
    found: list[LayerCost] = field(default_factory=list)
    stored: frozenset[int] = frozenset()
    place_of: dict[int, int] = field(default_factory=dict)  # by tensor

    def costs(self) -> LayerCosts:
        self.found = [LayerCost()] * (len(self.shared.layers) + 2)
        self.stored = stored_tensors(self.graph)
        places, border = self._places(), _border(self.resharded, self.shared)
        for number, (statement, place) in enumerate(zip(self.resharded.statements, places, strict=True)):
            self._add_time(statement, place, number <= border)
        self._add_bytes(border)
        self._add_handed(places, border)
        return LayerCosts(self.found[0], tuple(self.found[1:-1]), self.found[-1], self._working())

    @property
    def graph(self) -> Graph:
        return self.resharded.graph

    def _places(self) -> list[int]:
        """By statement where it belongs: that of its tensor's name, else that of the statement before.

        What is named after none of the layers stands behind them in the forward once one has been met, and before
        them in the backward once the first one has.
        """
        found, at, last = list[int](), 0, len(self.found) - 1
        for statement in self.resharded.statements:
            tensor = self.resharded.values[statement.outputs[0]].tensor
            name = self.graph.tensors[tensor].line.name or ""
            named = self._named(name)
            if named:
                at = named
            elif name.count(".") or tensor in self.shared.parameters:
                at = (last if at else 0) if tensor in self.shared.forward else (last if at > 1 else 0)
            found.append(at)
            for v in statement.outputs:
                self.place_of.setdefault(self.resharded.values[v].tensor, at)
        for i in self.graph.input_tensors:
            self.place_of[i] = self._named(self.graph.tensors[i].line.name or "") or self._of_reader(i, found)
        return found

    def _named(self, name: str) -> int:
        return next((i for i, layer in enumerate(self.shared.layers, 1) if name.startswith(f"{layer}.")), 0)

    def _of_reader(self, tensor: int, places: Sequence[int]) -> int:
        """Where an input is read first."""
        for statement, place in zip(self.resharded.statements, places, strict=True):
            if any(self.resharded.values[v].tensor == tensor for v in statement.inputs):
                return place
        return 0

    def _add(self, place: int, **more: float) -> None:
        cost = self.found[place]
        self.found[place] = replace(cost, **{name: getattr(cost, name) + n for name, n in more.items()})

    def _add_time(self, statement: Statement, place: int, is_forward: bool) -> None:
        half = "forward" if is_forward else "backward"
        if isinstance(statement, Reshard):
            seconds = self.resharded.seconds(statement)
            if self.resharded.values[statement.source].tensor in self.shared.gradients:
                self._add(place, once=seconds)
            else:
                self._add(place, moving=seconds, **{half: seconds})
        elif not statement.placement.step:
            node = self.graph.nodes[statement.node]
            work, placement = Roofline(node.call, stored_by(node, self.stored)), statement.placement
            mesh = placement.results[0].mesh
            at_peak = node.call.op.flops(node.call) / (mesh.flops * mesh.size)
            self._add(place, ideal=work.least(mesh), peak=at_peak, **{half: work.seconds(placement)})

    def _add_bytes(self, border: int) -> None:
        for v in self.resharded.inputs:
            tensor, nbytes = self.resharded.values[v].tensor, self.resharded.nbytes(v)
            more = self.shared.states * nbytes if tensor in self.shared.parameters else 0.0
            self._add(self.place_of[tensor], weights=nbytes, states=more)
        for tensor, nbytes in self._gradients():
            self._add(self.place_of[self.shared.gradients[tensor]], gradients=nbytes)
        for v, nbytes in held_across(self.resharded, border).items():
            self._add(self.place_of[self.resharded.values[v].tensor], kept=nbytes)

    def _gradients(self) -> Iterator[tuple[int, int]]:
        """Of each gradient the bytes: as it is made if micro-batches are added up, else as it is left."""
        seen: dict[int, int] = {}
        for v, value in enumerate(self.resharded.values):
            if value.tensor in self.shared.gradients and (value.tensor not in seen or not self.shared.is_summed_later):
                seen[value.tensor] = self.resharded.nbytes(v)
        yield from seen.items()

    def _add_handed(self, places: Sequence[int], border: int) -> None:
        """What the forward makes in one layer and reads in a later one."""
        values, made = self.resharded.values, dict[int, int]()
        for statement, place in zip(self.resharded.statements[: border + 1], places, strict=False):
            for v in statement.inputs:
                tensor = values[v].tensor
                at = made.get(tensor, 0)
                if at and at < place:
                    self._add(at, handed=self.graph.tensors[tensor].type.nbytes)
                    made[tensor] = place
            if isinstance(statement, Compute):
                made |= {values[v].tensor: place for v in statement.outputs if values[v].tensor not in made}

    def _working(self) -> float:
        """The most bytes at once beside arguments, and what is kept or the gradients, whichever is more.

        Gradients of a micro-batch are beside the sums of earlier ones.
        """
        kept, gradients = sum(cost.kept for cost in self.found), sum(cost.gradients for cost in self.found)
        weights = sum(cost.weights for cost in self.found)
        counted = kept if self.shared.is_summed_later else max(kept, gradients)
        return max(peak(self.resharded).nbytes - weights - counted, 0.0)


def made_gradients(graph: Graph, follow: Mapping[int, int]) -> dict[int, int]:
    """By tensor that a gradient is made as, the weight. `follow`: by output that is a gradient the weight.

    An annotated output is a copy of what is made.
    """
    makers = {i: node for node in graph.nodes for i in node.outputs}
    return {makers[i].inputs[0] if makers[i].name == "set" else i: weight for i, weight in follow.items()}
