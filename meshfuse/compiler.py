"""The stages in their order: the module to read first.

definition → `specialize` → `gather_units` → `split_biases` → `unify_links` → `carry_block_orders` →
`apply_distributed_forms` (by `propagate`) → `fuse_mean_variance` → `split_concats` → `update_in_place` →
`reassociate_sums` → `merge_windows` →
`lower_ring_ops` → `widen_sums` → `insert_resharding` → `hoist_reshards` → `rematerialize_gathers` →
`bucket_collectives` →
`pipeline_chunks` → `segment` → `lower_to_host_ir` → executor. Every stage is a function from one printable value to the
next and changes nothing of what it is given.

From `apply_distributed_forms` to `merge_windows`, a stage may write some ops in other ops. It then has the earlier
stages plan that graph as well, and the better of the two plans goes on. `decided` runs all of these stages,
`compile_sharded` those after them.
"""

from __future__ import annotations

import dataclasses
import functools
from collections import Counter
from collections.abc import Collection, Iterator, Mapping
from dataclasses import dataclass, field
from typing import Any

from .argument_checks import as_int
from .definition.recording import Recording
from .errors import caller_line, shown, user_error
from .gc_pause import no_collection
from .graph import Graph, specialize
from .host_ir import ChannelOf, HostProgram, digest_of, lower_to_host_ir, verify, verify_together
from .long_work import saying
from .lowering.instructions import call_channel
from .lowering.pipeline_chunks import pipeline_chunks
from .lowering.rank_classes import RankClasses, rank_classes
from .lowering.schedule import IN_FLIGHT
from .lowering.segments import SegmentedDefinition, segment
from .mesh import DeviceMesh
from .planner.effort import Effort
from .planner.open_inputs import NOTHING_OPEN, OpenInputs
from .plans.plan_cache import planned
from .plans.shape_reuse import PLANS
from .plans.within_memory import fastest_within
from .propagation import Propagation, ShardedDefinition, cheaper, ends, follow
from .reshard.borders import Borders
from .reshard.bucketing import bucket_collectives, unit_of
from .reshard.hoist_reshards import hoist_reshards
from .reshard.rematerialize import peak, rematerialize_gathers
from .resharding import Reshard, ReshardedDefinition, insert_resharding
from .rewrites.carry_block_orders import carry_block_orders
from .rewrites.distributed_forms import apply_distributed_forms
from .rewrites.fuse_mean_variance import fuse_mean_variance
from .rewrites.gather_units import gather_units, is_by_rule
from .rewrites.hoist_slices import Picked
from .rewrites.lower_ring_ops import lower_ring_ops
from .rewrites.merge_windows import merge_windows
from .rewrites.reassociate_sums import reassociate_sums
from .rewrites.sink_pads import Surrounded
from .rewrites.split_bias import split_biases
from .rewrites.split_concats import split_concats
from .rewrites.unify_links import unify_links
from .rewrites.update_in_place import update_in_place
from .rewrites.widen_sums import widen_sums
from .runtime.world import World
from .sharding.value import Sharding


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
    _classes: dict[str, RankClasses | None] = field(default_factory=dict, repr=False)

    def __repr__(self) -> str:
        ops, ranks = len(self.graph.nodes), len(self.ranks)
        return f"<CompiledProgram: {ops} op{'s' if ops != 1 else ''} on {ranks} rank{'s' if ranks != 1 else ''}>"

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
        """Check all ranks' programs against each other, by classes of ranks that do the same."""
        programs, channel = self.programs_of_classes()
        verify_together(programs, channel)

    def programs_of_classes(self) -> tuple[list[HostProgram], ChannelOf]:
        """A program for each class of ranks that do the same, and the channels that its calls stand for."""
        found = self.rank_classes()
        if found is None:
            return [self.host_program(rank) for rank in self.ranks], call_channel
        return [self.host_program(rank) for rank in found.representatives], found.channel

    def rank_classes(self) -> RankClasses | None:
        """Which ranks do the same; None where all are told apart."""
        if "ranks" not in self._classes:
            self._classes["ranks"] = rank_classes(self.segmented, lambda rank: self.host_program(rank).instructions)
        return self._classes["ranks"]

    @property
    def seconds(self) -> float:
        """The modelled seconds of a step."""
        return self.planned.seconds

    @property
    def memory(self) -> float:
        """The most bytes that a rank holds, as modelled."""
        return peak(self.resharded).nbytes

    def output_shardings(self) -> list[Sharding]:
        """The sharding of every output."""
        return [self.resharded.values[v].sharding for v in self.resharded.outputs]


def compile_definition(
    recording: Recording, shapes: Mapping[int, tuple[int, ...]], scalars: Mapping[int, Any], default_mesh: DeviceMesh,
    max_memory: float | None = None, near_factor: float = 1.0, effort: Effort = Effort.AUTO,
    borders: Borders | None = None,
) -> CompiledProgram:  # fmt: skip
    """Compile for inputs of these global shapes and scalars of these values, by number.

    default_mesh: the mesh of a program that no annotation puts on one.
    max_memory: bytes that a rank may hold; None for any number.
    near_factor: above 1, the plan of other sizes is taken over if all of them are within this factor
        (`plans.shape_reuse`).

    borders: how inputs are passed and outputs returned; None for as they are annotated and as the plan leaves them.

    A plan that took long is kept on disk (`plans.plan_cache`).
    """
    with no_collection():
        graph = graph_to_plan(recording, shapes, scalars)
        effort = Effort.FOLLOW if is_by_rule(graph, recording) else effort
        with World.planning(graph.in_words()), saying(f"planning {graph.in_words()}"):
            found = _compiled(graph, default_mesh, max_memory, near_factor, effort, borders)
            placed = _with_ends(graph, found, borders) if borders is not None else graph
            return found if placed is graph else _compiled(placed, default_mesh, max_memory, 1.0, effort, borders)


def _compiled(
    graph: Graph, default_mesh: DeviceMesh, max_memory: float | None, near_factor: float, effort: Effort,
    borders: Borders | None,
) -> CompiledProgram:  # fmt: skip
    taken = PLANS.near(graph, default_mesh, near_factor) if near_factor > 1 else None
    if taken is not None:
        compiled = compile_sharded(taken.plan, max_memory, taken.source, borders)
        if max_memory is None or compiled.memory <= max_memory:
            return compiled
    sharded = planned(graph, default_mesh, lambda: decided(graph, default_mesh, effort), effort.value)
    if near_factor > 1:
        PLANS.keep(graph, default_mesh, sharded)
    compiled = compile_sharded(sharded, max_memory, borders=borders)
    if max_memory is None or compiled.memory <= max_memory:
        return compiled
    return _within(graph, compiled, default_mesh, max_memory, effort, borders)


def _within(
    graph: Graph, free: CompiledProgram, default_mesh: DeviceMesh, max_memory: float, effort: Effort,
    borders: Borders | None,
) -> CompiledProgram:  # fmt: skip
    """The fastest program that holds no more than a bound; where there is none, one that holds least.

    What ops make, and the program without a bound holds when it holds most, has a price.
    """
    held = made_at_peak(graph, free)

    def at(price: float) -> CompiledProgram:
        plan = decided(graph, default_mesh, effort, OpenInputs(held=held, price=price))
        return compile_sharded(plan, max_memory, borders=borders)

    return fastest_within(max_memory, free, at) if effort is not Effort.FOLLOW else free


def made_at_peak(graph: Graph, compiled: CompiledProgram) -> frozenset[int]:
    """Of what a graph's ops make, what is in memory when a rank holds most. (Rewritings keep tensors' numbers.)"""
    there = {compiled.resharded.values[v].tensor for v in peak(compiled.resharded).held}
    return frozenset(there.intersection(i for node in graph.nodes for i in node.outputs))


def _with_ends(graph: Graph, compiled: CompiledProgram, borders: Borders) -> Graph:
    """The graph with all free outputs annotated, where one is to be elsewhere than the program leaves it."""
    targets = ends(compiled.sharded)
    left = {i: targets[end] for i, end in zip(graph.outputs, compiled.graph.outputs, strict=True)}
    made = {i for node in graph.nodes for i in node.outputs}
    free = {i: sharding for i, sharding in left.items() if i in made and i not in graph.annotations}
    layouts = {layout for i in graph.input_tensors if i in graph.annotations for layout in graph.annotations[i].dims}
    placed = {i: borders.placed(sharding, graph.shape(i), layouts) for i, sharding in free.items()}
    return graph if placed == free else graph.annotated(placed, "an output, laid out as DTensors can be")


def decided_without(
    recording: Recording, shapes: Mapping[int, tuple[int, ...]], default_mesh: DeviceMesh, free: Collection[int],
    effort: Effort,
) -> ShardedDefinition | None:  # fmt: skip
    """The plan if the inputs in `free` were not annotated; None where no other annotation is left."""
    with no_collection():
        graph = graph_to_plan(recording, shapes, {})
        left = {i: sharding for i, sharding in graph.annotations.items() if i not in free}
        with World.planning(graph.in_words()):
            return decided(dataclasses.replace(graph, annotations=left), default_mesh, effort) if left else None


def graph_to_plan(recording: Recording, shapes: Mapping[int, tuple[int, ...]], scalars: Mapping[int, Any]) -> Graph:
    """The stages before propagation."""
    graph = gather_units(specialize(recording, shapes, scalars), recording)
    return carry_block_orders(unify_links(split_biases(graph)))


def decided(
    graph: Graph, default_mesh: DeviceMesh, effort: Effort = Effort.AUTO, opened: OpenInputs = NOTHING_OPEN
) -> ShardedDefinition:
    """The best plan over all the forms in which the graph's ops may be written.

    The forms are compared by their plans over whole axes, equal layers all alike. The best one is then refined; where
    that is over parts of axes, what the user wrote is, too. opened: which tensors' memory has a price.
    """
    if effort is Effort.FOLLOW:
        return follow(graph, default_mesh)
    plan = Propagation(default_mesh, opened)
    plain, best = _forms(graph, plan) if effort.rewrites else (apply_distributed_forms(graph, plan),) * 2
    for other in _rewritten(graph) if effort.rewrites else ():
        best = cheaper(best, _forms(other, plan)[1])
    parts = effort.in_parts(graph)
    forms = (plain, best) if parts and best is not plain else (best,)
    return functools.reduce(cheaper, [plan.refined(found, parts) for found in forms])


def _rewritten(graph: Graph) -> Iterator[Graph]:
    """The graph with pads later and slices earlier, as far as that changes it."""
    for rewriting in (Surrounded(), Picked()):
        before, graph = graph, rewriting(graph)
        if graph is not before:
            yield graph


def _forms(graph: Graph, plan: Propagation) -> tuple[ShardedDefinition, ShardedDefinition]:
    """The plan of the graph as it is, and the best plan over the forms in which its ops may be written."""

    def with_forms(form: Graph) -> ShardedDefinition:
        return fuse_mean_variance(apply_distributed_forms(form, plan), plan)

    plain = with_forms(graph)
    found = update_in_place(
        graph, lambda form: split_concats(form, lambda last: plain if last is graph else with_forms(last))
    )
    return plain, merge_windows(reassociate_sums(found, plan), plan)


def compile_sharded(
    planned: ShardedDefinition, max_memory: float | None = None, taken_from: Graph | None = None,
    borders: Borders | None = None,
) -> CompiledProgram:  # fmt: skip
    """The stages after propagation; `taken_from` is the graph of other sizes that the plan was made for."""
    sharded = widen_sums(lower_ring_ops(planned))
    resharded = hoist_reshards(insert_resharding(sharded, borders))
    resharded.verify()
    resharded, in_flight = _in_order(resharded, max_memory)
    overlapped = pipeline_chunks(resharded)
    segmented = segment(overlapped)
    digest = digest_of(overlapped.fingerprint())
    return CompiledProgram(planned, sharded, resharded, segmented, digest, _ranks(resharded), in_flight, taken_from)


def _in_order(resharded: ReshardedDefinition, max_memory: float | None) -> tuple[ReshardedDefinition, int]:
    """The moves reordered, so that moves which can be one call are neighbours, if a rank has the memory for that.

    Also the most bytes that communications may then have in flight.
    """
    found = bucket_collectives(resharded)
    if max_memory is None:
        return found, min(IN_FLIGHT, 2 * _largest_unit(found)) if resharded.graph.units else IN_FLIGHT
    if peak(found).nbytes > max_memory:
        again = rematerialize_gathers(resharded, max_memory)
        ways = (bucket_collectives(again, sparing=True), again)
        found = min(ways, key=lambda way: max(peak(way).nbytes, max_memory))
    return found, int(min(IN_FLIGHT, max(max_memory - peak(found).nbytes, 0)))


def _largest_unit(resharded: ReshardedDefinition) -> int:
    """The most bytes that the collectives of a unit of weights read and write."""
    found: Counter[str] = Counter()
    for statement in resharded.statements:
        if isinstance(statement, Reshard) and (unit := unit_of(resharded, statement)):
            found[unit] += resharded.nbytes(statement.source) + resharded.nbytes(statement.target)
    return max(found.values(), default=0)


def _ranks(resharded: ReshardedDefinition) -> tuple[int, ...]:
    return tuple(sorted({rank for value in resharded.values for rank in value.sharding.mesh.ranks}))
