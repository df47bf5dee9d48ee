"""The best plan of a program over all placements of its ops on the axes of its meshes, with its proof.

The planner's whole problem is one cost graph (`program`), which is minimised exactly (`dual_ascent`). Its prices are
closed forms; those that the answer uses are then worked out exactly, and the problem is solved again until they agree.
"""

from __future__ import annotations

import functools
import itertools
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from typing import Any, NamedTuple

import numpy as np

from ..graph import Graph
from ..mesh import DeviceMesh
from ..placement.factors import Placement
from ..sharding.layout import Split
from .answer import Answer, Optimum
from .dual_ascent import ADVANCE, MOST_SWEEPS, TOLERANCE, Certified, solve
from .elimination import Assignment
from .frame import Frame
from .labels import Label, Spot
from .op_labels import KnownLabels, whole_labels
from .open_inputs import NOTHING_OPEN, OpenInputs
from .prices import Prices
from .program import Program
from .reshard_costs import Atoms, AtomsOf, whole_axes

# Times that a problem is solved again at most; once suffices for most programs.
_MOST_ROUNDS = 11
# Parts of axes that labels are made of at most: each has an op's factors to be on.
_MOST_PARTS = 4
# Sweeps in which one part of an axis is placed anew: a better assignment is found early or not at all.
_FEW_SWEEPS = 16
# Labels of all ops together that are considered at once where a tensor's readers may share copies, and labels of one op
# where they share one place: a table of these has so many squared.
_MOST_LABELS, _MOST_OF_AN_OP = 1_800, 150


class Known(NamedTuple):
    """The placement of every op in an assignment, and its gap."""

    placements: Sequence[Placement]
    gap: float | None


@dataclass(frozen=True, slots=True)
class Solved:
    """A program whose ops are on whole axes and whose equal layers are all alike, and its best assignment.

    axes: those that were placed one after another, where there were too many labels for all at once.
    """

    program: Program
    found: Certified
    axes: tuple[str, ...] = ()

    @property
    def gap(self) -> float | None:
        """The part of the value by which a better assignment may cost less; None where that is not known."""
        return None if self.axes or self.found.bound == -np.inf else self.found.gap

    def plan(self) -> Optimum:
        """The plan of this assignment, without its ops' next best placements."""
        return Answer(self.program, self.found.assignment).plan(self.gap, others=False)

    def refined(self, parts: bool) -> Optimum:
        """The plan whose first and last layers may be others.

        parts: place the parts of axes one by one, too: 8 ranks as 2 x 2 x 2.
        """
        frame = self.program.frame
        atoms_of = _among(_named_axes(frame.graph, frame.opened), parts_of_axes)
        if not parts or all(len(atoms_of(mesh)) == len(self.program.atoms_of(mesh)) for mesh in frame.meshes):
            return _with_ends(self.program, self.found, self.gap, [{"along": axis} for axis in self.axes or (None,)])
        if not self.axes and sum(_counts(frame, atoms_of)) <= _MOST_LABELS:
            program, best = _all_parts(self.program, atoms_of, self._in_atoms(atoms_of))
            if not best.gap:
                return _with_ends(program, best, best.gap, [{}])
        # The minor part first: it leaves neighbouring blocks together on the others.
        count = max(len(atoms_of(mesh)) for mesh in frame.meshes)
        ways = [{"free": frozenset([part])} for part in reversed(range(count))]
        best = _in_parts(self.program, atoms_of, self._in_atoms(atoms_of), ways)
        if self.program.homes:  # Of so many labels others may be found from a start that says nothing.
            nothing = whole_labels(frame.graph, frame.meshes[0], atoms_of)
            best = _best([best, _in_parts(self.program, atoms_of, nothing, ways[::-1])])
        return _with_ends(*best, None, ways)

    def _in_atoms(self, atoms_of: AtomsOf) -> list[Label]:
        """The labels of this assignment with axes in parts."""
        labels = self.program.chosen(self.found.assignment.labels)
        return [_in_atoms(self.program.atoms_of, atoms_of, label) for label in labels]


def solved(
    graph: Graph, default_mesh: DeviceMesh, prices: Prices, known: Known | None = None,
    opened: OpenInputs = NOTHING_OPEN, labels: KnownLabels | None = None, frames: list[Frame] | None = None,
    below: float = np.inf,
) -> Solved:  # fmt: skip
    """A graph's best assignment on the meshes that its annotations name, or on this one.

    known: the best assignment, if it is known.
    opened: the inputs whose places are to be found.
    labels: those that were made for other forms of the graph, to which are added those that are made for it.
    frames: those of other forms of the graph, as `labels`.
    below: seconds that the assignment is to take less than; any may be found where none does.
    """
    meshes = tuple(dict.fromkeys(note.mesh for note in graph.annotations.values())) or (default_mesh,)
    mesh, *others = meshes
    frame = _frame(graph, meshes, opened, [] if frames is None else frames)
    atoms_of = _among(_named_axes(graph, opened), whole_axes)
    axes = tuple([axis.axis for axis in sorted(atoms_of(mesh), key=lambda axis: -(axis.size or 1)) if axis.axis])
    counts = [0] if others or len(axes) < 2 else _counts(frame, atoms_of)
    homes = sum(counts) > _MOST_LABELS
    make = functools.partial(Program, frame, prices, atoms_of, homes=homes, known={} if labels is None else labels)
    axes = axes if homes and max(counts) > _MOST_OF_AN_OP else ()
    if known is not None:
        return _taken(make, known, axes)
    if not axes:
        program = make()
        return Solved(program, _solved(program, below=below))
    whole = whole_labels(graph, mesh, atoms_of)
    return Solved(*_best([_from_whole(make, whole, order) for order in (axes, axes[::-1])]), axes)


def _frame(graph: Graph, meshes: tuple[DeviceMesh, ...], opened: OpenInputs, frames: list[Frame]) -> Frame:
    """The graph's frame, which is added to the others; made from one of these where only rules differ."""
    found = next(filter(None, [other.with_rules_of(graph) for other in frames]), None)
    frames.append(Frame.of(graph, meshes, opened) if found is None else found)
    return frames[-1]


def _taken(make: Callable[..., Program], known: Known, axes: tuple[str, ...]) -> Solved:
    """A known assignment, as the only one of its program."""
    labels = [Label(placement, None) for placement in known.placements]
    program = make(labels, free=frozenset())
    program.build()
    found = program.assigned(labels)
    bound = -np.inf if known.gap is None else found.value - known.gap * abs(found.value)
    return Solved(program, Certified(found, bound), axes)


def _best(found: Sequence[tuple[Program, Certified]]) -> tuple[Program, Certified]:
    return min(found, key=lambda each: each[1].assignment.value)


def _from_whole(
    make: Callable[..., Program], labels: Sequence[Label], axes: Sequence[str]
) -> tuple[Program, Certified]:
    """The best assignment that is found by placing one axis after another: in which order may matter."""
    program = make(labels, along=axes[0])
    return _one_by_one(make, [{"along": axis} for axis in axes], program, _solved(program), tried=1)


def _one_by_one(
    make: Callable[..., Program], ways: Sequence[Mapping[str, Any]], program: Program, found: Certified, tried: int = 0
) -> tuple[Program, Certified]:
    """The best assignment that is found by what each of some ways leaves free in turn, as long as that pays.

    tried: how many of the ways found it.
    """
    labels, idle, at = program.chosen(found.assignment.labels), tried, tried
    while idle < len(ways):
        there = make(labels, **ways[at % len(ways)], limit=program.limit)
        better = _solved(there, labels, _FEW_SWEEPS)
        improved = better.assignment.value < found.assignment.value * (1 - TOLERANCE)
        idle, at = (1 if improved else idle + 1), at + 1
        if improved:
            program, found, labels = there, better, there.chosen(better.assignment.labels)
    return program, found


def _all_parts(program: Program, atoms_of: AtomsOf, labels: Sequence[Label]) -> tuple[Program, Certified]:
    """The best assignment over all parts of axes at once."""
    prices = program.prices.over(parts_of_axes)
    there = Program(program.frame, prices, atoms_of, labels, known=program.known)
    return there, _solved(there, labels)


def _in_parts(
    program: Program, atoms_of: AtomsOf, labels: Sequence[Label], ways: Sequence[Mapping[str, Any]]
) -> tuple[Program, Certified]:
    """The best assignment that is found by placing one part of an axis anew in all ops, as long as that pays."""
    prices = program.prices.over(parts_of_axes)
    make = functools.partial(Program, program.frame, prices, atoms_of, homes=program.homes, known=program.known)
    first = make(labels, **ways[0])
    return _one_by_one(make, ways, first, _solved(first, labels, _FEW_SWEEPS), tried=1)


def _with_ends(program: Program, found: Certified, gap: float | None, ways: Sequence[Mapping[str, Any]]) -> Optimum:
    """The plan with the first and the last one of equal layers other than those between, which stay, if that pays.

    The gap is that of plans whose layers are all equal.
    """
    frame = program.frame
    if len(frame.ops) == len(frame.graph.nodes):
        return Answer(program, found.assignment).plan(gap)
    make = functools.partial(
        Program, frame.with_ends(), program.prices, program.atoms_of, homes=program.homes, known=program.known
    )
    there, better = _one_by_one(make, ways, program, found)
    return Answer(there, better.assignment).plan(gap)


def _counts(frame: Frame, atoms_of: AtomsOf) -> list[int]:
    """About how many labels each op has."""
    atoms = max(len(atoms_of(mesh)) for mesh in frame.meshes)
    return [(len(frame.graph.nodes[op].rule.factors) + 1) ** atoms for op in frame.ops]


def _named_axes(graph: Graph, opened: OpenInputs = NOTHING_OPEN) -> frozenset[tuple[DeviceMesh, str]]:
    """The axes that some annotation has, or an open input may have; all others stay idle."""
    shardings = [*graph.annotations.values(), *itertools.chain.from_iterable(set(opened.places.values()))]
    found = {(s.mesh, split.axis or "") for s in shardings
             for splits in (*s.dims, s.partial) for split in splits if split.bound}  # fmt: skip
    layouts = {layout for layouts in graph.reductions.values() for layout in layouts}
    axes = {split.axis or "" for layout in layouts for split in layout if split.bound}
    return frozenset(found | {(s.mesh, axis) for s in graph.annotations.values() for axis in axes})


def _among(named: frozenset[tuple[DeviceMesh, str]], atoms_of: AtomsOf) -> AtomsOf:
    return lambda mesh: tuple([atom for atom in atoms_of(mesh) if (mesh, atom.axis) in named])


def _solved(
    program: Program, known: Sequence[Label] = (), sweeps: int = MOST_SWEEPS, below: float = np.inf
) -> Certified:
    """The best assignment, at prices that are exact for what it uses; `known` is a good one, if one is known."""
    program.build()
    search = functools.partial(solve, sweeps=sweeps, below=below)
    found = search(program.costs, known=program.assigned(known) if known else None)
    best = found.assignment.labels
    for _ in range(_MOST_ROUNDS):
        if not program.prices.correct(Answer(program, found.assignment).used()):
            return found
        before = program.costs
        program.build()
        now = found.repriced(before, program.costs)
        if now.bound >= below or (found.bound < below and now.gap <= found.gap + (ADVANCE if found.gap else 0.0)):
            return now
        best = min(best, found.assignment.labels, key=program.costs.value)
        found = search(program.costs, known=program.assigned(program.chosen(best)))
    # The last one may look good at prices that are not exact.
    return Certified(Assignment(best, program.costs.value(best)), found.bound)


def _in_atoms(axes_of: AtomsOf, atoms_of: AtomsOf, label: Label) -> Label:
    """A label over whole axes with its axes' parts."""
    if label.spot is None:
        return label
    mesh, spot = label.placement.results[0].mesh, label.spot
    axes, atoms = axes_of(mesh), atoms_of(mesh)
    on = {axis.axis: at for axis, at in zip(axes, spot.at, strict=True)}
    order = [n for axis in spot.order for n, atom in enumerate(atoms) if atom.axis == axes[axis].axis]
    return label._replace(spot=Spot(spot.start, tuple([on[atom.axis] for atom in atoms]), tuple(order)))


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
