"""What a user says of a tensor's sharding, in whichever form, and its meaning for concrete shapes."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

from ..argument_checks import as_int
from ..errors import MeshfuseError, SourceLine, located, shown, user_error
from ..mesh import STREAM, DeviceMesh
from ..sharding.layout import MOST_RUNS, Layout, Split, axes, canonical, pieces, resolve, stream_count, text
from ..sharding.strided import Cut, cut_of, factors_of, layout_of_cuts
from ..sharding.value import Sharding, conflicting, intersecting
from .loop import TYPE_OF_NAME, WHOLE_AXIS, LoopDomain

# One dim in `mesh_split`: None, an axis, axes from major to minor, or splits of any kind.
DimSpec = Any
_MOST_CHUNKS = 1 << 14


@dataclass(eq=False, slots=True)
class Annotation:
    """The sharding of one tensor: a mesh and a loop domain; nvFuser's calls edit it while the definition is written.

    `stated`: it comes from a mesh_split or a sharding. A mesh alone leaves the splits open.
    `implied`: the reason, in words, where the user has not annotated the tensor.
    `stationary`: the mesh axes along which no collective may move the tensor.
    `terms`: the mesh axes, or parts of them, along which each rank holds a term of a sum.
    """

    line: SourceLine
    domain: LoopDomain
    label: str
    mesh: DeviceMesh | None = None
    allocation: tuple[int, ...] | None = None
    memory: str | None = None
    stated: bool = False
    implied: str = ""
    stationary: tuple[str, ...] = ()
    terms: Layout = ()

    def sharding(self, name: str, shape: Sequence[int]) -> Sharding:
        """The sharding of a tensor of this shape.

        Raises DefinitionError where an axis is used twice or unknown.
        """
        assert self.mesh is not None
        dims = [canonical(layout, n) for layout, n in zip(self.named(), shape, strict=True)]
        for dim, (layout, n) in enumerate(zip(dims, shape, strict=True)):
            _check_runs(f"tensor {name}, dim {dim}", layout, n, self.line)
        # A result may be scattered over the axis that its reduction runs over.
        for layouts in (dims, self.named(reduction=True)):
            check_axes(name, layouts, self.mesh, self.line)
        return Sharding.make(self.mesh, dims, shape, self.terms, "sum" if self.terms else "")

    def key(self) -> object:
        """Equal for annotations that give tensors of equal shapes equal shardings."""
        return self.mesh, self.domain.layouts(), self.domain.layouts(reduction=True), self.terms

    @property
    def is_on_devices(self) -> bool:
        """Whether some axis of the loop domain is bound to a mesh axis."""
        return any(leaf.axis not in (None, STREAM) for leaf in self.domain.order)

    @property
    def is_streamed(self) -> bool:
        """Whether a dim is to be worked on in chunks."""
        leaves = [leaf for root in self.domain.roots if not root[0].reduction for leaf in root]
        return any([leaf.axis == STREAM for leaf in leaves]) or any([leaf.swizzled for leaf in self.domain.order])

    def streams(self, shape: Sequence[int]) -> list[tuple[int, Layout, bool]]:
        """For each dim in chunks (dim, its factors with that of the chunks bound to the stream, whether in a ring)."""
        roots = [root for root in self.domain.roots if not root[0].reduction]
        if not any([leaf.swizzled or leaf.axis == STREAM for root in roots for leaf in root]):
            return []
        named = self.named() if self.mesh is not None else list(self.domain.layouts())
        found = []
        for dim, (root, layout, n) in enumerate(zip(roots, named, shape, strict=True)):
            ring = any(leaf.swizzled for leaf in root)
            streamed = any(split.axis == STREAM for split in layout)
            chosen = [s.axis == STREAM if streamed else leaf.swizzled for leaf, s in zip(root, layout, strict=True)]
            if any(chosen):
                bound = [Split(s.size, STREAM if c else None) for s, c in zip(layout, chosen, strict=True)]
                found.append((dim, resolve(tuple(bound), n), ring))
        return found

    def named(self, reduction: bool = False) -> list[Layout]:
        """The layouts of all dims (with `reduction`, of those that the tensor's op reduces), over named mesh axes."""
        layouts = enumerate(self.domain.layouts(reduction))
        return [self._named(layout, f"tensor {self.label}, dim {d}") for d, layout in layouts]

    def __str__(self) -> str:
        dims = self.named() if self.mesh is not None else self.domain.layouts()
        return f"[{', '.join(text(_trimmed(layout)) for layout in dims)}] on {self.mesh}"

    def meaning(self) -> tuple[object, ...]:
        """Equal for annotations that say the same in different words."""
        layouts = [tuple(map(_trimmed, self.named(reduction))) for reduction in (False, True)]
        return self.mesh, self.terms, *layouts

    def _named(self, layout: Layout, what: str) -> Layout:
        """The layout with nvFuser's parallel types as mesh axes, its sizes checked against the mesh's."""
        assert self.mesh is not None
        return tuple(_sized(_mesh_axis(split, self.mesh, self.line), self.mesh, what, self.line) for split in layout)


def check_agreement(old: Annotation, new: Annotation) -> None:
    """Raises DefinitionError unless the second annotation says the same, or the first one gave a mesh only."""
    splits = old.stated or any(leaf.axis is not None for leaf in old.domain.order)
    same = old.meaning() == new.meaning() if splits and old.mesh is not None else old.mesh in (None, new.mesh)
    if not same:
        raise contradiction(new.label, str(new), f"{old} at {old.line}", new.line)


def contradiction(name: str, new: str, old: str, line: SourceLine) -> Exception:
    """The error of a second annotation of a tensor that says something else than the first."""
    return user_error(
        f"tensor {name} is annotated twice", f"{new} after {old}", "one annotation, or equal ones",
        "Remove one, or reshard with fd.ops.set and annotate its result.", line,
    )  # fmt: skip


def _check_runs(what: str, layout: Layout, n: int, line: SourceLine) -> None:
    """Raises DefinitionError where a rank would hold a dim in too many runs, or work on it in too many chunks."""
    if (chunks := stream_count(layout)) > _MOST_CHUNKS:
        raise user_error(
            f"{what}: too many chunks",
            str(chunks),
            f"at most {_MOST_CHUNKS}",
            "Give the stream a smaller factor.",
            line,
        )
    if (found := min(n, pieces(layout))) > MOST_RUNS:
        raise user_error(
            f"{what}: too many pieces", f"{found} per rank in {text(layout)} of size {n}", f"at most {MOST_RUNS}",
            "Split into larger blocks: bind a more major factor.", line,
        )  # fmt: skip


def _trimmed(layout: Layout) -> Layout:
    splits = [split for split in layout if split.size != 1]
    while splits and splits[-1].axis is None:
        splits.pop()
    return tuple(splits)


def _mesh_axis(split: Split, mesh: DeviceMesh, line: SourceLine) -> Split:
    if split.pre == WHOLE_AXIS and split.axis in TYPE_OF_NAME:  # bound by `parallelize`, not to an axis of this name
        with located(line):
            return split._replace(axis=mesh.parallel_axis(TYPE_OF_NAME[split.axis]))
    return split


def _sized(split: Split, mesh: DeviceMesh, what: str, line: SourceLine) -> Split:
    """A split over an axis with the axis' own size, if it gives none; checked against the axis if it gives one."""
    if not split.bound:
        return split
    assert split.axis is not None
    if split.axis not in mesh.names:
        raise user_error(
            f"{what}: unknown mesh axis",
            repr(split.axis),
            f"one of {mesh.names} of {mesh}",
            "Use an axis of this mesh.",
            line,
        )
    size, pre = mesh.axis_size(split.axis), split.pre or 1
    wanted = size // pre if split.size is None else split.size
    if size % (pre * wanted) or (split.pre == WHOLE_AXIS and wanted != size):
        raise user_error(
            f"{what}: a factor of {wanted} cannot be bound to mesh axis {split.axis!r}", f"axis size {size}",
            "a factor as large as the axis (or as a sub-axis of it)", f"Split the dim by {size}.", line,
        )  # fmt: skip
    return Split(wanted, split.axis, pre)


def check_axes(name: str, dims: Sequence[Layout], mesh: DeviceMesh, line: SourceLine) -> None:
    """Check how the splits of a tensor use mesh axes.

    Raises DefinitionError where a part of an axis splits two dims, or one dim twice, and where parts of an axis do not
    nest.
    """
    bound = [(d, split) for d, layout in enumerate(dims) for split in layout if split.bound]
    for i, (d, split) in enumerate(bound):
        for e, other in bound[:i]:
            if conflicting(split, other):
                where = f"on dims {e} and {d}" if d != e else f"twice on dim {d}"
                if not intersecting(split, other):
                    raise _parts_apart(name, (other, split), where, mesh, line)
                raise user_error(
                    f"tensor {name}: mesh axis {split.axis!r} is used twice",
                    where,
                    "each axis once per tensor",
                    f"Remove it from one of the dims (mesh: {mesh}).",
                    line,
                )


def _parts_apart(
    name: str, parts: tuple[Split, Split], where: str, mesh: DeviceMesh, line: SourceLine
) -> MeshfuseError:
    texts = " and ".join(f"{split.axis}:({split.pre}){split.size}" for split in parts)
    size = mesh.axis_size(parts[0].axis or "")
    return user_error(
        f"tensor {name}: parts of mesh axis {parts[0].axis!r} do not nest", f"{texts} of {size}, {where}",
        "parts that one cutting of the axis has", "Begin the minor part where the major one ends, or use one alone.",
        line,
    )  # fmt: skip


def spec_of(sharding: Sharding) -> tuple[Any, ...]:
    """The spec that `layouts_of_spec` reads as this sharding of whole axes: by dim an axis, a list of some, or None."""
    names = ([split.axis for split in axes(layout)] for layout in sharding.dims)
    return tuple([None if not found else found[0] if len(found) == 1 else found for found in names])


def layouts_of_spec(
    name: str, mesh: DeviceMesh, spec: Sequence[DimSpec], ndim: int, line: SourceLine
) -> tuple[Layout, ...]:
    """Layouts from `mesh_split`'s per-dim list. Raises DefinitionError for a wrong length or unknown axes."""
    if not isinstance(spec, (list, tuple)) or len(spec) != ndim:
        raise user_error(
            f"tensor {name}: mesh_split takes one entry per dim",
            f"{shown(spec)} for {ndim} dims",
            f"a list of {ndim} entries",
            "Use None for dims that are not split.",
            line,
        )
    dims = tuple(_dim_layout(mesh, entry, f"tensor {name}, dim {d}", line) for d, entry in enumerate(spec))
    check_axes(name, dims, mesh, line)
    return dims


def _dim_layout(mesh: DeviceMesh, entry: DimSpec, what: str, line: SourceLine) -> Layout:
    if entry is None or as_int(entry) == -1:
        return ()
    entries = entry if isinstance(entry, (list, tuple)) and not isinstance(entry, Split) else (entry,)
    layout = tuple(_split_of(mesh, part, what, line) for part in entries)
    if sum(split.size is None and split.axis is None for split in layout) > 1:
        raise user_error(
            f"{what}: only one factor may be what remains of the dim",
            f"{list(layout)}",
            "sizes for all others",
            "Give Split(size) for all but one.",
            line,
        )
    return layout


def _split_of(mesh: DeviceMesh, part: Any, what: str, line: SourceLine) -> Split:
    """An axis by name or (GSPMD's dims mapping) number, or a split written out: Split, or (size, axis)."""
    number = as_int(part)
    if number is not None:
        if not 0 <= number < mesh.ndim:
            raise user_error(
                f"{what}: no such mesh axis",
                str(number),
                f"-1 (not split) or 0 to {mesh.ndim - 1} for {mesh}",
                "Use the number of an axis.",
                line,
            )
        return Split(mesh.shape[number], mesh.names[number])
    if isinstance(part, str):
        return _sized(Split(None, part), mesh, what, line)
    if isinstance(part, Split) or (isinstance(part, tuple) and 1 <= len(part) <= 3):
        return _sized(_checked_split(part, what, line), mesh, what, line)
    raise _no_entry(what, part, line)


def _checked_split(part: tuple[Any, ...], what: str, line: SourceLine) -> Split:
    size = part[0]
    axis = part[1] if len(part) > 1 else None
    pre = part[2] if len(part) > 2 else 1
    found = Split(None if size is None else as_int(size), axis, as_int(pre) or 0)
    wrong_size = size is not None and (found.size is None or found.size < 1)
    if wrong_size or getattr(part, "chunks", 0) or found.pre < 1 or not isinstance(axis, (str, type(None))):
        raise _no_entry(what, part, line)
    return found


def _no_entry(what: str, part: Any, line: SourceLine) -> Exception:
    return user_error(
        f"{what}: not a way to split a dim",
        shown(part),
        "None or -1, a mesh axis by name or number, a Split(size, axis), or a list of these",
        "Correct the entry.",
        line,
    )


def layouts_of_sharding(name: str, sharding: Sharding, ndim: int, line: SourceLine) -> tuple[Layout, ...]:
    """The layouts of a `Sharding`, with factors in the place of cuts in turn.

    Raises DefinitionError where it is partial or of another number of dims.
    """
    if sharding.partial:
        raise user_error(
            f"tensor {name}: an annotation must say where the elements are", f"{sharding}",
            "a sharding without partial axes", "Leave the axis out: the reduction is then done here.", line,
        )  # fmt: skip
    if sharding.ndim != ndim:
        raise user_error(
            f"tensor {name}: the sharding has another number of dims",
            f"{sharding.ndim} in {sharding}",
            str(ndim),
            "Give a layout for every dim.",
            line,
        )
    dims = [list(factors_of(layout) or layout) for layout in sharding.dims]
    return layouts_of_spec(name, sharding.mesh, dims, ndim, line)


def layouts_of_placements(
    name: str, mesh: DeviceMesh, placements: Any, ndim: int, line: SourceLine
) -> tuple[Layout, ...]:
    """Layouts from torch's DTensor placements, one per mesh axis.

    Raises DefinitionError for another number of placements, for partial ones and those that cut chunks which no other
    axis makes, and for dims that the tensor does not have.
    """
    listed = isinstance(placements, (list, tuple)) and all(hasattr(p, "is_shard") for p in placements)
    if not listed or len(placements) != mesh.ndim:
        raise user_error(
            f"tensor {name}: one placement per mesh axis",
            f"{shown(placements)} for {mesh}",
            f"a Sharding, or a list of {mesh.ndim} placements",
            "Use Replicate() for axes that do not shard it.",
            line,
        )
    dims: list[list[Cut]] = [[] for _ in range(ndim)]
    for axis, size, placement in zip(mesh.names, mesh.shape, placements, strict=True):
        _check_not_partial(name, placement, line)
        cut = cut_of(Split(size, axis), placement)
        if cut is not None:
            dims[_placed_dim(name, placement, ndim, line)].append(cut)
    return tuple([_layout_of_cuts(name, cuts, placements, line) for cuts in dims])


def _layout_of_cuts(name: str, cuts: Sequence[Cut], placements: Any, line: SourceLine) -> Layout:
    layout = layout_of_cuts(cuts)
    if layout is None:
        raise user_error(
            f"tensor {name}: a strided placement cuts chunks that later axes do not make", shown(placements),
            "a split_factor that is a product of their sizes, from the major one on, or a multiple of all",
            "Correct it, or name a dim's axes from major to minor, as fd.mesh_split does.", line,
        )  # fmt: skip
    return layout


def _check_not_partial(name: str, placement: Any, line: SourceLine) -> None:
    if placement.is_partial():
        raise user_error(
            f"tensor {name}: an annotation must say where the elements are",
            str(placement),
            "Shard or Replicate",
            "Annotate the tensor that it is reduced to.",
            line,
        )


def _placed_dim(name: str, placement: Any, ndim: int, line: SourceLine) -> int:
    if not -ndim <= placement.dim < ndim:
        raise user_error(
            f"tensor {name}: the placement names a dim that it has not",
            str(placement),
            f"a dim below {ndim}",
            "Name an existing dim.",
            line,
        )
    return placement.dim % ndim
