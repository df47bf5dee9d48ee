"""The labels of all ops of a program, or some of them: those near a plan that is known."""

from __future__ import annotations

import itertools
from collections.abc import Hashable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from typing import TypeVar

import numpy as np

from ..graph import Graph, Node
from ..mesh import DeviceMesh
from ..ops.opdef import Call
from ..ops.rules import Rule
from ..placement.factors import Placement
from ..placement.options import window_placements
from ..placement.roofline import Roofline, stored_by
from ..sharding import layout as lay
from ..sharding.layout import WHOLE, Layout
from ..sharding.value import Sharding
from .cost_graph import Classes
from .frame import Frame
from .labels import Label, Near, Spot, axis_labels, identity, nowhere, others, own_seconds
from .prices import Shardings
from .reshard_costs import Atoms, AtomsOf, atoms_of_split
from .special_layouts import SpecialLayouts
from .ties import by_placement

_T = TypeVar("_T", bound=Hashable)


@dataclass(frozen=True, slots=True)
class Needs:
    """The sets of shardings in which a reader may need a tensor (several where it reads it twice), by label.

    each: all of these shardings. places: of each set, where its shardings are among them; () where each has one.
    """

    sets: tuple[Shardings, ...]
    classes: Classes
    each: Shardings
    places: tuple[tuple[int, ...], ...]

    @classmethod
    def of(cls, sets: Sequence[Shardings]) -> Needs:
        """Those of labels that need these."""
        different, classes = classes_of(sets)
        at = {s: n for n, s in enumerate(dict.fromkeys(itertools.chain.from_iterable(different)))}
        several = any([len(need) > 1 for need in different])
        places = tuple([tuple([at[s] for s in need]) for need in different]) if several else ()
        return cls(different, classes, tuple(at), places)


@dataclass(frozen=True, slots=True, eq=False)
class Labels:
    """The placements of an op, the seconds of its own work in each, and how each was made.

    Equal ops share theirs, and what is asked of them.

    windows: the results of the placements in which exact pieces are sent, which are asked of the ops after it.
    """

    placements: tuple[Placement, ...]
    seconds: np.ndarray
    spots: tuple[Spot | None, ...]
    ties: np.ndarray
    numbers: Mapping[tuple[object, ...], int]
    windows: Shardings = ()
    _results: dict[int, tuple[Shardings, Classes]] = field(default_factory=dict)
    _needs: dict[tuple[int, ...], Needs] = field(default_factory=dict)

    def number(self, placement: Placement) -> int:
        """Which label a placement is."""
        return self.numbers[identity(placement)]

    def results(self, place: int) -> tuple[Shardings, Classes]:
        """The different shardings of a result, and which one each label makes."""
        if place not in self._results:
            self._results[place] = classes_of([p.results[place] for p in self.placements])
        return self._results[place]

    def needs(self, places: tuple[int, ...]) -> Needs:
        """How labels need a tensor that the op reads at these places."""
        if places not in self._needs:
            sets = [tuple(dict.fromkeys([p.operands[place] for place in places])) for p in self.placements]
            self._needs[places] = Needs.of(sets)
        return self._needs[places]


def classes_of(values: Sequence[_T]) -> tuple[tuple[_T, ...], Classes]:
    """The different values, and which one each is."""
    numbers = {value: n for n, value in enumerate(dict.fromkeys(values))}
    return tuple(numbers), Classes(np.array([numbers[value] for value in values]), len(numbers))


KnownLabels = dict[Hashable, tuple[Labels, Call, Rule]]


@dataclass(frozen=True, slots=True)
class LabelMaker:
    """Makes the labels of a program's ops.

    atoms_of: the axes of a mesh that ops may be on, or parts of axes.
    around: a label of every op, which it has in any case; the only one of an op that works in chunks, which parts of
        axes would leave nothing to do with.
    free: numbers of atoms; only labels that differ from `around` in where these are then considered. None: all.
    along: an axis; only labels in which all others are on what they are on in `around` are then considered. None: all.
    between: whether ops of layers between the first and the last of equal ones have labels but that in `around`.
    known: the labels that were made so far, by what they follow from, with the call and the rule of their op.
    """

    frame: Frame
    atoms_of: AtomsOf
    known: KnownLabels
    around: Sequence[Label] = ()
    free: frozenset[int] | None = None
    along: str | None = None
    between: bool = True

    def all(self) -> list[Labels]:
        """The labels of every op, on each mesh; an op with an annotated result is on the annotation's."""
        frame, out = self.frame, dict[int, Labels]()
        graph, special = frame.graph, frame.special
        made = {i: dict.fromkeys(shardings) for i, shardings in frame.inputs.items()}
        windowed = {node.inputs[0] for node in graph.nodes if node.call.op.window is not None}
        if windowed:  # Each adds to what is asked of the ops after it.
            special = {mesh: layouts.copy() for mesh, layouts in special.items()}
        makers = {frame.makers[i][0] for i in windowed if i in frame.makers}
        for node in [graph.nodes[op] for op in sorted({*frame.ops, *makers})]:
            for layouts in special.values() if windowed else ():
                layouts.follow(node)
            out[node.id] = self._known(node, special, made)
            for place, i in enumerate(node.outputs) if windowed.intersection(node.outputs) else ():
                results = [p.results[place] for p in out[node.id].placements]
                results += filter(None, [graph.annotations.get(i)])
                made[i] = dict.fromkeys([*results, *(s.reduced() for s in results)])
        return [out[decider] for decider in frame.deciders]

    def _known(
        self, node: Node, special: Mapping[DeviceMesh, SpecialLayouts], made: Mapping[int, dict[Sharding, None]]
    ) -> Labels:
        key = self._kind(node, special, made)
        if key not in self.known:
            self.known[key] = self._labels_of(node, special, made), node.call, node.rule
        labels = self.known[key][0]
        for sharding in labels.windows:
            special[sharding.mesh].add(node.outputs[0], sharding.dims)
        return labels

    def _kind(
        self, node: Node, special: Mapping[DeviceMesh, SpecialLayouts], made: Mapping[int, dict[Sharding, None]]
    ) -> Hashable:
        """What an op's labels follow from: those of a window also from the labels of the ops before it."""
        meshes = tuple(self._meshes_of(node))
        asked = tuple([special[mesh].of_op(node) for mesh in meshes]) if self.free is None else ()
        around = self.around[node.id] if self.around else None
        facts = (self.frame.graph.reductions.get(node.id), around, self._is_in_chunks(node), tuple(self._cuts(node)))
        facts = (*facts, self._is_fixed(node), stored_by(node, self.frame.stored))
        here = (meshes, tuple(map(self.atoms_of, meshes)), self.free, self.along)
        if node.call.op.window is not None:
            ends = tuple([special[mesh].of_tensor(node.outputs[0]) for mesh in meshes])
            facts = (*facts, tuple(made[node.inputs[0]]), ends, self.frame.graph.annotations.get(node.outputs[0]))
        return (id(node.call), id(node.rule), *here, asked, *facts)

    def _is_fixed(self, node: Node) -> bool:
        """Whether an op of a layer between others stays while the first and the last layer are placed.

        Where there are many labels.
        """
        return not self.between and self.frame.ends and self.frame.ops[node.id] > 1

    def _is_in_chunks(self, node: Node) -> bool:
        """Whether an op's result is moved in chunks, or an operand is cut into some by the user."""
        return bool(
            self.frame.graph.streams.keys() & set(node.outputs) or self.frame.streamed.intersection(node.inputs)
        )

    def _cuts(self, node: Node) -> Iterator[tuple[int, int, Layout]]:
        """Of an op's operands, by place, those that the user cuts into chunks: the dim, and its layout."""
        for place, i in enumerate(node.inputs):
            if i in self.frame.streamed:
                dim, note = self.frame.graph.streams[i].dim, self.frame.graph.annotations.get(i)
                yield place, dim, note.dims[dim] if note is not None else WHOLE

    def _labels_of(
        self, node: Node, special: Mapping[DeviceMesh, SpecialLayouts], made: Mapping[int, dict[Sharding, None]]
    ) -> Labels:
        found = dict[tuple[object, ...], tuple[Label, float]]()
        for mesh in self._meshes_of(node):
            for label, seconds in self._labels_on(node, mesh, special[mesh], made):
                found.setdefault(identity(label.placement), (label, seconds))
        placements, spots = zip(*[label for label, _ in found.values()], strict=True)
        ties = by_placement(placements)
        numbers = {key: n for n, key in enumerate(found)}
        seconds = np.array([seconds for _, seconds in found.values()])
        windows = [p.results[0] for p in placements if p.step is not None] if node.call.op.window is not None else ()
        return Labels(placements, seconds, spots, ties, numbers, tuple(dict.fromkeys(windows)))

    def _meshes_of(self, node: Node) -> Sequence[DeviceMesh]:
        if self.free is not None or self.along is not None:
            return (self.around[node.id].placement.results[0].mesh,)
        notes = [self.frame.graph.annotations[i] for i in node.outputs if i in self.frame.graph.annotations]
        return [note.mesh for note in notes[:1]] or self.frame.meshes

    def _labels_on(
        self, node: Node, mesh: DeviceMesh, special: SpecialLayouts, made: Mapping[int, dict[Sharding, None]]
    ) -> Iterator[tuple[Label, float]]:
        """An op's labels on one mesh, with their seconds."""
        call, rule, roofline = node.call, node.rule, Roofline(node.call, stored_by(node, self.frame.stored))
        reductions, atoms, near = self.frame.graph.reductions.get(node.id, ()), self.atoms_of(mesh), None
        here = self.around[node.id] if self.around else None
        here = here if here is not None and here.placement.results[0].mesh == mesh else None
        if here is not None and (self._is_fixed(node) or (self._is_in_chunks(node) and self.along is None)):
            yield here, own_seconds(call, here.placement, roofline)
            return
        free = self._free(atoms)
        if here is not None and free is not None and (here.spot is not None or self.along is None):
            near = Near(here.spot or nowhere(rule, atoms), free)
        asked = special.of_op(node) if self.free is None else ()
        labels = axis_labels(call, rule, mesh, atoms, asked, reductions, near)
        if call.op.window is not None:
            labels = (*labels, *[Label(placement, None) for placement in self._windows(node, mesh, special, made)])
        if here is not None and self.along is not None:
            wanted = others(here.placement, self.along)
            labels = tuple([label for label in labels if others(label.placement, self.along) == wanted])
        cuts = [*self._cuts(node)]
        kept = [label for label in labels if label.spot is None or _keeps_chunks(label.placement, cuts)]
        # The user may have put an axis on a reduction over the chunks.
        for label in kept or labels:
            yield label, own_seconds(call, label.placement, roofline)
        if here is not None:
            yield here, own_seconds(call, here.placement, roofline)

    def _free(self, atoms: Atoms) -> frozenset[int] | None:
        """The numbers of the atoms that are placed; None for all."""
        if self.along is None:
            return self.free
        return frozenset([n for n, atom in enumerate(atoms) if atom.axis == self.along])

    def _windows(
        self, node: Node, mesh: DeviceMesh, special: SpecialLayouts, made: Mapping[int, dict[Sharding, None]]
    ) -> list[Placement]:
        (result,) = node.outputs
        asked, atoms = [Sharding(mesh, dims) for dims in special.of_tensor(result)], self.atoms_of(mesh)
        asked += [
            note for note in (self.frame.graph.annotations.get(result),) if note is not None and note.mesh == mesh
        ]
        there = self.around[node.id].placement.results if self.around else ()
        asked += [s for s in there if s.mesh == mesh]
        sources = [s for s in made[node.inputs[0]] if s.mesh == mesh]
        wanted = [(s, [*asked, *_beside(node.call, s, atoms)]) for s in sources]
        return [found for s, ends in wanted for found in window_placements(node.call, node.rule, [s], ends)]


def whole_labels(graph: Graph, mesh: DeviceMesh, atoms_of: AtomsOf) -> list[Label]:
    """For every op the label in which it is whole on all ranks, but for what the user says of its reductions."""
    atoms, said = atoms_of(mesh), graph.reductions
    each = [(node, Near(nowhere(node.rule, atoms), frozenset())) for node in graph.nodes]
    return [axis_labels(node.call, node.rule, mesh, atoms, (), said.get(node.id, ()), near)[0] for node, near in each]


def _keeps_chunks(placement: Placement, cuts: Sequence[tuple[int, int, Layout]]) -> bool:
    """Whether no axis cuts a dim that the user cuts into chunks: ranks would have chunks of another size, or none."""
    return all(set(lay.axes(placement.operands[place].dims[dim])) <= set(layout) for place, dim, layout in cuts)


def _beside(call: Call, source: Sharding, atoms: Atoms) -> Iterator[Sharding]:
    """Shardings of a window whose source lies over ranks along dims that the window changes.

    These axes on another dim, or some of their atoms where they are.
    """
    shape, target = call.types[0].shape, call.results[0].shape
    if len(shape) != len(target):
        return
    changed = [d for d, (n, m) in enumerate(zip(shape, target, strict=True)) if n != m]
    moved = tuple([axis for d in changed for axis in lay.axes(source.dims[d])])
    is_uneven = any(not lay.is_even(source.dims[d], shape[d]) for d in changed)
    for d, n in enumerate(target):
        layout = lay.canonical((*source.dims[d], *moved), n) if moved and d not in changed else ()
        if layout and (not n % lay.extent(layout) or (is_uneven and lay.extent(layout) <= n)):
            dims = [WHOLE if e in changed else layout if e == d else o for e, o in enumerate(source.dims)]
            yield Sharding(source.mesh, tuple(dims))
    for d in changed:
        cut = [atom or axis for axis in lay.axes(source.dims[d]) for atom in atoms_of_split(axis, atoms)]
        for kept in _parts(tuple(cut)):
            layout = lay.canonical(kept, target[d])
            if lay.extent(layout) < 2 * target[d]:
                yield source.with_dims([layout if e == d else o for e, o in enumerate(source.dims)])


def _parts(axes: Layout) -> Iterator[Layout]:
    """Some of several axes, in their order."""
    for count in range(1, len(axes)):
        yield from itertools.combinations(axes, count)
