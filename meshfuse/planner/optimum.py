"""The best plan of a program over all placements of its ops on the axes of its meshes, with its proof.

The planner's whole problem is one cost graph (`program`), which is minimised exactly (`dual_ascent`). Its prices are
closed forms; those that the answer uses are then worked out exactly, and the problem is solved again until they agree.
"""

from __future__ import annotations

import functools
from dataclasses import dataclass

from ..graph import Graph
from ..mesh import DeviceMesh
from ..placement.operand_layouts import Source
from ..placement.options import Choice
from ..propagation import ShardedDefinition
from ..sharding.layout import Split
from .dual_ascent import Certified, solve
from .prices import Prices
from .program import Program
from .reshard_costs import Atoms, whole_axes

# Times that a problem is solved at most; two suffice for most programs.
_MOST_ROUNDS = 12
# Parts of axes that labels are made of at most: each has an op's factors to be on.
_MOST_PARTS = 4


@dataclass(frozen=True, slots=True)
class Optimum:
    """A plan, the seconds that it takes, and a bound that no plan of these labels takes less than.

    Both are at the prices of the last round. Reshards that the plan does not use are priced in closed form, which for
    some is dearer than their cheapest path: the proof is of these prices.
    """

    sharded: ShardedDefinition
    certified: Certified

    @property
    def seconds(self) -> float:
        return self.certified.assignment.value


def optimum(graph: Graph, default_mesh: DeviceMesh, parts: bool = False) -> Optimum:
    """The best plan of a graph on the meshes that its annotations name, or on this one.

    parts: place the parts of axes one by one, too: 8 ranks as 2 x 2 x 2.
    """
    meshes = tuple(dict.fromkeys(note.mesh for note in graph.annotations.values())) or (default_mesh,)
    program = Program(graph, meshes, Prices(parts_of_axes if parts else whole_axes))
    for _ in range(_MOST_ROUNDS):
        program.build()
        found = solve(program.costs)
        if not program.prices.correct(program.used(found.assignment.labels)):
            break
    return Optimum(_decoded(program, found.assignment.labels), found)


def _decoded(program: Program, chosen: tuple[int, ...]) -> ShardedDefinition:
    graph, shardings = program.graph, {i: given[0] for i, given in program.inputs.items()}
    placements = [program.placement(node.id, chosen) for node in graph.nodes]
    for node, placement in zip(graph.nodes, placements, strict=True):
        shardings.update(zip(node.outputs, placement.results, strict=True))
    free = [i for i in graph.outputs if i in program.makers and i not in graph.annotations]
    shardings |= {i: program.left(i, chosen) for i in free} | dict(graph.annotations)
    seconds = [program.seconds(node, chosen) for node in graph.nodes]
    choices = [Choice(p, Source("whole"), s) for p, s in zip(placements, seconds, strict=True)]
    sharded = ShardedDefinition(graph, tuple(choices), shardings)
    sharded.verify()
    return sharded


@functools.lru_cache(maxsize=1 << 10)
def parts_of_axes(mesh: DeviceMesh, most: int = _MOST_PARTS) -> Atoms:
    """The axes in their prime factors, small axes first, as long as these are at most so many in all."""
    out = list(whole_axes(mesh))
    for axis in sorted(out, key=lambda axis: axis.size or 1):
        parts = _prime_parts(axis)
        if len(out) - 1 + len(parts) <= most:
            place = out.index(axis)
            out[place : place + 1] = parts
    return tuple(out)


def _prime_parts(axis: Split) -> list[Split]:
    """An axis as splits of prime sizes, major to minor."""
    left, pre, out = axis.size or 1, axis.pre, list[Split]()
    prime = 2
    while left > 1:
        if left % prime:
            prime += 1
        else:
            out.append(Split(prime, axis.axis, pre))
            left, pre = left // prime, pre * prime
    return out
