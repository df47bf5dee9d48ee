"""The stages in their order: the module to read first.

definition → `concretize` → `taken_apart` → `with_links` → `distribute` (by `propagate`) → `moments_merged` → `searched`
→ `in_parts` → `in_place` → `regrouped` → `shifted` → `written` → `widen_sums` → `insert_resharding` → `early` →
`fitted` → `postponed` → `overlap` → `segment` → `lower_to_host_ir` → executor. Every stage is a function from one
printable value to the next and changes nothing of what it is given.

From `distribute` to `shifted`, a stage may write some ops in other ops. It then has the earlier stages plan that graph
as well, and the better of the two plans goes on. `decided` runs all of these stages, `compile_sharded` those after
them.
"""

from __future__ import annotations

import dataclasses
import functools
from collections.abc import Collection, Iterator, Mapping
from dataclasses import dataclass, field
from typing import Any

from .collector import no_collection
from .definition.builder import DefinitionBuilder
from .errors import caller_line, shown, user_error
from .graph import Graph, concretize
from .host_ir.lower import lower_to_host_ir
from .host_ir.program import HostProgram, digest_of
from .host_ir.schedule import IN_FLIGHT
from .host_ir.verify import verify, verify_together
from .mesh import DeviceMesh
from .plan_store.cache import planned
from .plan_store.nearby import PLANS
from .planning.effort import Effort
from .planning.search import searched, searched_far
from .planning.spending import better, spent
from .propagation.growth import EPSILON
from .propagation.outputs import ends
from .propagation.sharded import ShardedDefinition
from .resharding.borders import Borders
from .resharding.early import early
from .resharding.insert import insert_resharding
from .resharding.memory import fitted, peak
from .resharding.postpone import postponed
from .resharding.resharded import ReshardedDefinition
from .rewriting.apart import taken_apart
from .rewriting.distribution import distribute
from .rewriting.in_place import in_place
from .rewriting.mesh_links import with_links
from .rewriting.moments import moments_merged
from .rewriting.parts import in_parts
from .rewriting.picked import Picked
from .rewriting.rounds import written
from .rewriting.shifts import shifted
from .rewriting.sums import regrouped
from .rewriting.surrounds import Surrounded
from .rewriting.wide_sums import widen_sums
from .runtime.world import World
from .segmentation import SegmentedDefinition, segment
from .sharding.value import Sharding
from .streams.chunking import overlap
from .user_values import as_int


@dataclass(frozen=True, slots=True)
class CompiledProgram:
    """All stages of one definition for one set of shapes. Host programs are made per rank, when asked for.

    `planned` is what propagation decided. In `sharded`, ops that are computed in rounds are written out. `in_flight` is
    the most bytes of communications that may be issued before they are needed. If the plan was taken over from other
    sizes, `taken_from` is the graph it was made for.
    """

    planned: ShardedDefinition
    sharded: ShardedDefinition
    resharded: ReshardedDefinition
    segmented: SegmentedDefinition
    digest: str
    ranks: tuple[int, ...]
    in_flight: int
    taken_from: Graph | None = None
    _programs: dict[int, HostProgram] = field(default_factory=dict, repr=False)

    @property
    def graph(self) -> Graph:
        return self.sharded.graph

    def host_program(self, rank: int) -> HostProgram:
        """The verified program of a rank. Raises DefinitionError for a rank that the program does not have."""
        number = as_int(rank)
        if number is None or number not in self.ranks:
            needed = f"one of {shown(list(self.ranks))}"
            raise user_error("host_program: no such rank", shown(rank), needed, "", caller_line())
        if number not in self._programs:
            with no_collection():
                program = lower_to_host_ir(self.segmented, number, self.digest, self.in_flight)
                verify(program)
            self._programs[number] = program
        return self._programs[number]

    def verify(self) -> None:
        """Check all ranks' programs against each other."""
        verify_together([self.host_program(rank) for rank in self.ranks])

    def output_shardings(self) -> list[Sharding]:
        """The sharding of every output."""
        return [self.resharded.values[v].sharding for v in self.resharded.outputs]


def compile_definition(
    fd: DefinitionBuilder, shapes: Mapping[int, tuple[int, ...]], scalars: Mapping[int, Any], world: DeviceMesh,
    max_memory: float | None = None, near_factor: float = 1.0, effort: Effort = Effort.AUTO,
    borders: Borders | None = None,
) -> CompiledProgram:  # fmt: skip
    """Compile for inputs of these global shapes and scalars of these values, by number.

    world: the mesh of a program that no annotation puts on one.
    max_memory: bytes that a rank may hold; None for any number.
    near_factor: above 1, the plan of other sizes is taken over if all of them are within this factor
        (`plan_store.nearby`).

    borders: how inputs are passed and outputs returned; None for as they are annotated and as the plan leaves them.

    A plan that took long is kept on disk (`plan_store.cache`).
    """
    with no_collection():
        graph = _graph(fd, shapes, scalars)
        with World.planning(graph.in_words()):
            found = _compiled(graph, world, max_memory, near_factor, effort, borders)
            asked = _with_ends(graph, found, borders) if borders is not None else graph
            return found if asked is graph else _compiled(asked, world, max_memory, 1.0, effort, borders)


def _compiled(
    graph: Graph, world: DeviceMesh, max_memory: float | None, near_factor: float, effort: Effort,
    borders: Borders | None,
) -> CompiledProgram:  # fmt: skip
    taken = PLANS.near(graph, world, near_factor) if near_factor > 1 else None
    if taken is not None:
        return compile_sharded(taken.plan, max_memory, taken.source, borders)
    sharded = planned(graph, world, lambda: decided(graph, world, effort), effort.value)
    if near_factor > 1:
        PLANS.keep(graph, world, sharded)
    return compile_sharded(sharded, max_memory, borders=borders)


def _with_ends(graph: Graph, compiled: CompiledProgram, borders: Borders) -> Graph:
    """The graph with all free outputs annotated, where one is to be elsewhere than the program leaves it."""
    targets = ends(compiled.sharded)
    left = {i: targets[end] for i, end in zip(graph.outputs, compiled.graph.outputs, strict=True)}
    made = {i for node in graph.nodes for i in node.outputs}
    free = {i: home for i, home in left.items() if i in made and i not in graph.annotations}
    told = {layout for i in graph.input_tensors if i in graph.annotations for layout in graph.annotations[i].dims}
    asked = {i: borders.placed(home, graph.shape(i), told) for i, home in free.items()}
    return graph if asked == free else graph.annotated(asked, "an output, laid out as DTensors can be")


def decided_without(
    fd: DefinitionBuilder, shapes: Mapping[int, tuple[int, ...]], world: DeviceMesh, free: Collection[int],
    effort: Effort,
) -> ShardedDefinition | None:  # fmt: skip
    """The plan if the inputs in `free` were not annotated; None where no other annotation is left."""
    with no_collection():
        graph = _graph(fd, shapes, {})
        left = {i: sharding for i, sharding in graph.annotations.items() if i not in free}
        with World.planning(graph.in_words()):
            return decided(dataclasses.replace(graph, annotations=left), world, effort) if left else None


def _graph(fd: DefinitionBuilder, shapes: Mapping[int, tuple[int, ...]], scalars: Mapping[int, Any]) -> Graph:
    """The stages before propagation."""
    return with_links(taken_apart(concretize(fd, shapes, scalars)))


def decided(graph: Graph, world: DeviceMesh, effort: Effort = Effort.AUTO) -> ShardedDefinition:
    """The best plan over all the forms in which the graph's ops may be written.

    Far searches take longest: only the form that looks best is planned by them, and the one that the user wrote.
    """
    plain, best = _forms(graph, world, effort)
    for other in _rewritten(graph) if effort.rewrites else ():
        if spent(best).moving > EPSILON:
            best = better(best, _forms(other, world, effort)[1])
    plans = (plain,) if best is plain else (plain, best)
    return functools.reduce(better, [searched_far(plan, world, effort) for plan in plans])


def _rewritten(graph: Graph) -> Iterator[Graph]:
    """The graph with pads later and slices earlier, as far as that changes it."""
    for rewriting in (Surrounded(), Picked()):
        before, graph = graph, rewriting(graph)
        if graph is not before:
            yield graph


def _forms(graph: Graph, world: DeviceMesh, effort: Effort) -> tuple[ShardedDefinition, ShardedDefinition]:
    """The plan of the graph as it is, and the best plan over the forms in which its ops may be written."""

    def plan(form: Graph) -> ShardedDefinition:
        return searched(moments_merged(distribute(form, world), world), world, effort)

    plain = plan(graph)
    found = in_place(
        graph, lambda form: in_parts(form, lambda last: plain if last is graph else plan(last), effort), effort
    )
    return plain, shifted(regrouped(found, world, effort), world, effort)


def compile_sharded(
    planned: ShardedDefinition, max_memory: float | None = None, taken_from: Graph | None = None,
    borders: Borders | None = None,
) -> CompiledProgram:  # fmt: skip
    """The stages after propagation; `taken_from` is the graph of other sizes that the plan was made for."""
    sharded = widen_sums(written(planned))
    resharded = early(insert_resharding(sharded, borders))
    resharded.verify()
    resharded, in_flight = _in_order(resharded, max_memory)
    overlapped = overlap(resharded)
    segmented = segment(overlapped)
    digest = digest_of(overlapped.fingerprint())
    return CompiledProgram(planned, sharded, resharded, segmented, digest, _ranks(resharded), in_flight, taken_from)


def _in_order(resharded: ReshardedDefinition, max_memory: float | None) -> tuple[ReshardedDefinition, int]:
    """The moves reordered, so that moves which can be one call are neighbours, if a rank has the memory for that.

    Also the most bytes that communications may then have in flight.
    """
    found = postponed(resharded)
    if max_memory is None:
        return found, IN_FLIGHT
    if peak(found).nbytes > max_memory:
        again = fitted(resharded, max_memory)
        ways = (postponed(again, sparing=True), again)
        found = min(ways, key=lambda way: max(peak(way).nbytes, max_memory))
    return found, int(min(IN_FLIGHT, max(max_memory - peak(found).nbytes, 0)))


def _ranks(resharded: ReshardedDefinition) -> tuple[int, ...]:
    return tuple(sorted({rank for value in resharded.values for rank in value.sharding.mesh.ranks}))
