"""Propagation: forward, backward and forward again over the ops, each decision by modelled time.

The first sweep follows the data from the inputs, the second carries what results are wanted as back to where they
are made, the third decides every op for good with a beam of plans. Annotated tensors never change. (The factor form of
the rules is GSPMD's and Shardy's; deciding by modelled time is our own.)
"""

from __future__ import annotations

from collections.abc import Mapping
from typing import NamedTuple

from ..graph import Graph, depth_first, reordered
from ..mesh import DeviceMesh
from ..sharding.value import Sharding
from .beam import Beam, Step
from .choose import Available, cheapest
from .ends import ends
from .growth import Roles
from .meshes import node_meshes
from .sharded import Choice, ShardedDefinition
from .wishes import wishes


class _Search(NamedTuple):
    """How many plans are kept, and after how many ops a choice is final."""

    width: int
    horizon: int


_FAST = _Search(24, 32)
# Small programs are searched a second time, for choices that pay off late. Each search finds what the other drops.
_LONG = _Search(32, 1 << 30)
SMALL = 256


def propagate(graph: Graph, world: DeviceMesh, twice: bool = True) -> ShardedDefinition:
    """A sharding for every tensor and a placement for every op. `world` is the mesh where no annotation names one.

    `twice`: search small programs a second time.
    """
    found = _searched(graph, world, _FAST)
    if twice and _FAST.horizon < len(graph.nodes) <= SMALL:
        found = min(found, _searched(graph, world, _LONG), key=lambda done: round(total_seconds(done), 12))
    found.verify()
    return found


def propagate_from(
    graph: Graph, world: DeviceMesh, asked: Mapping[int, Sharding] | None, thorough: bool
) -> ShardedDefinition:
    """Propagation with `asked` in the place of what the first sweep makes.

    Where it is `thorough`, ops try more placements (`choose.elsewhere`).
    """
    found = _searched(graph, world, _FAST, asked, thorough)
    found.verify()
    return found


def _searched(
    graph: Graph, world: DeviceMesh, search: _Search, asked: Mapping[int, Sharding] | None = None,
    thorough: bool = False,
) -> ShardedDefinition:  # fmt: skip
    order = depth_first(graph)
    state = _Propagation(reordered(graph, order), world, search.horizon, thorough)
    state.want(state.made(state.forward(width=1)) if asked is None else asked)
    state.backward()
    steps = dict(zip(order, state.forward(search.width), strict=True))
    choices = [_choice(steps[node.id]) for node in graph.nodes]
    return ShardedDefinition(graph, tuple(choices), state.homes(graph, choices))


def total_seconds(done: ShardedDefinition) -> float:
    """The modelled time of a plan, with that of the reductions which its outputs leave to do."""
    left = [(done.homes[i], end, done.graph.tensors[i].type) for i, end in ends(done).items()]
    owed = [cheapest((home,), end, t.shape, t.dtype.itemsize) for home, end, t in left]
    return sum(choice.seconds for choice in done.choices) + sum(owed)


def _choice(step: Step) -> Choice:
    option, other = step
    return Choice(option.placement, option.source, option.seconds, (other.source, other.seconds) if other else None)


class _Propagation:
    """The tables that the sweeps share."""

    def __init__(self, graph: Graph, world: DeviceMesh, horizon: int, thorough: bool):
        self.graph = graph
        self.meshes = node_meshes(graph, world)
        self.roles = Roles(graph, self.meshes.nodes, horizon, thorough)
        self.wanted: dict[int, Available] = {i: (sharding,) for i, sharding in graph.annotations.items()}
        self.inputs: dict[int, Available] = {i: (self._input_home(i),) for i in graph.input_tensors}

    def _input_home(self, tensor: int) -> Sharding:
        """Inputs that no annotation places are whole on every rank."""
        whole = Sharding.replicated(self.meshes.of_tensor(tensor), len(self.graph.shape(tensor)))
        return self.graph.annotations.get(tensor, whole)

    def forward(self, width: int) -> list[Step]:
        return Beam(self.graph, self.roles, self.wanted, self.inputs, width).run()

    def made(self, steps: list[Step]) -> dict[int, Sharding]:
        """What a sweep made of every tensor."""
        pairs = zip(self.graph.nodes, steps, strict=True)
        return {
            i: made for node, step in pairs for i, made in zip(node.outputs, step.option.placement.results, strict=True)
        }

    def want(self, made: Mapping[int, Sharding]) -> None:
        """Take these as what is wanted, where no annotation says otherwise."""
        for i, sharding in made.items():
            self.wanted.setdefault(i, (sharding.reduced(),))

    def backward(self) -> None:
        """Add to what is wanted of a tensor what its readers need to give what they are wanted to give."""
        fixed = self.graph.annotations.keys() | self.inputs.keys()
        for node in reversed(self.graph.nodes):
            kind, tensors = self.roles.kind(node.id)
            read = tensors[: kind.read]
            asked = wishes(kind, tuple(self.wanted.get(i, ()) for i in tensors), tuple(i not in fixed for i in read))
            self.wanted.update((i, new) for i, new in zip(read, asked, strict=True) if new)

    def homes(self, graph: Graph, choices: list[Choice]) -> dict[int, Sharding]:
        """Where each tensor is after its op: its annotation, or what the op makes."""
        homes = {i: available[0] for i, available in self.inputs.items()}
        for node, choice in zip(graph.nodes, choices, strict=True):
            homes.update(zip(node.outputs, choice.placement.results, strict=True))
        return homes | dict(graph.annotations)
