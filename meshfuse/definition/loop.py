"""The loop domain of a tensor as nvFuser's scripts edit it: splits, order and parallel types of its dims."""

from __future__ import annotations

import dataclasses
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any, NoReturn

from ..argument_checks import as_int
from ..errors import caller_line, shown, user_error
from ..mesh import STREAM, ParallelType
from ..sharding.layout import Layout, Split

# nvFuser's types for the axes of one device's kernels.
KERNEL_TYPES = frozenset(kind for kind in ParallelType if kind.value > ParallelType.stream.value)
# In the place of a sub-axis' `pre`: the factor must be as large as the axis.
WHOLE_AXIS = 0
# Until a tensor's mesh is known, nvFuser's parallel types stand for its axes.
PARALLEL_NAMES = {ParallelType.mesh_x: "DIDx", ParallelType.mesh_y: "DIDy", ParallelType.mesh_z: "DIDz"}
TYPE_OF_NAME = {name: kind for kind, name in PARALLEL_NAMES.items()}


@dataclass(eq=False, slots=True)
class Leaf:
    """One axis of a loop domain. A size of None is what the other axes of its dim leave.

    A `merged` axis goes over leaves of several dims, which stay as they are in their roots: it only orders a kernel's
    work, and cannot be bound.
    """

    size: int | None
    axis: str | None = None
    reduction: bool = False
    swizzled: bool = False
    pre: int = 1
    merged: bool = False

    def __str__(self) -> str:
        kind = "r" if self.reduction else "i"
        return f"{kind}{self.axis or ''}{{{self.size if self.size is not None else '?'}}}"


@dataclass(eq=False, slots=True)
class LoopDomain:
    """The loop domain of a tensor: `roots` has each dim's leaves, major to minor, `order` all in loop order.

    `axis(i)` counts the leaves of `order`, but for the last `factored` ones: these are reduced earlier (rfactor).
    """

    roots: list[list[Leaf]]
    order: list[Leaf]
    factored: int = 0

    @classmethod
    def whole(cls, reduction_flags: Sequence[bool]) -> LoopDomain:
        """One leaf for every dim; the flags tell which are reductions of the op that makes the tensor."""
        leaves = [Leaf(None, reduction=flag) for flag in reduction_flags]
        return cls([[leaf] for leaf in leaves], list(leaves))

    @classmethod
    def of_layouts(
        cls, dims: Sequence[Layout], reduction_flags: Sequence[bool], reductions: Sequence[Layout] = ()
    ) -> LoopDomain:
        """The loop domain that says the same as these layouts of the dims; `reductions` are those of reduced ones."""
        rest, reduced = iter(dims), iter(reductions)
        roots = [_leaves(next(reduced, ()), True) if flag else _leaves(next(rest)) for flag in reduction_flags]
        return cls(roots, [leaf for root in roots for leaf in root])

    @property
    def loop(self) -> list[Leaf]:
        """The leaves of the tensor itself, in loop order: those that `axis(i)` counts."""
        return self.order[: len(self.order) - self.factored]

    def place(self, axis: Any, what: str) -> int:
        """The axis counted from the front. Raises DefinitionError where there is none."""
        found = as_int(axis)
        if found is None or not -len(self.loop) <= found < len(self.loop):
            raise user_error(
                f"{what}: no such axis", f"axis {shown(axis)} of the loop domain {self}", self._places(),
                "Count the axes after the splits made so far.", caller_line(),
            )  # fmt: skip
        return found % len(self.loop)

    def _places(self) -> str:
        return f"a number from {-len(self.loop)} to {len(self.loop) - 1}" if self.loop else "a tensor with dims"

    def split(self, axis: int, factor: int, inner: bool) -> None:
        """Split an axis in two; the inner one (the outer one, without `inner`) has size `factor`."""
        what = "inner_split" if inner else "outer_split"
        size = as_int(factor)
        if size is None or size < 1:
            raise user_error(
                f"{what}: factor",
                shown(factor),
                "an int >= 1",
                "Pass how many parts to cut the axis into.",
                caller_line(),
            )
        place = self.place(axis, what)
        leaf = self.order[place]
        if leaf.axis is not None:
            raise user_error(
                f"{what}: axis {place} is parallelized", f"{leaf} in {self}", "an axis that is not",
                "Split it before parallelizing.", caller_line(),
            )  # fmt: skip
        parts = _halves(leaf, size, inner, what)
        self.order[place : place + 1] = parts
        root = self._root(leaf)
        at = next((i for i, other in enumerate(root) if other is leaf), 0)
        root[at : at + 1] = parts

    def merge(self, outer: Any, inner: Any) -> None:
        """Put two axes together, in the place of the outer one: the inverse of a split, or one axis over two dims.

        Raises DefinitionError for an axis that is bound, and where one is a reduction and the other not.
        """
        places = self.place(outer, "merge"), self.place(inner, "merge")
        pair = [self.order[place] for place in places]
        if places[0] == places[1] or any(leaf.axis for leaf in pair) or pair[0].reduction != pair[1].reduction:
            raise user_error(
                "merge: these axes cannot be one", f"{pair[0]} and {pair[1]} of {self}",
                "two free axes, both or none a reduction", "Merge before parallelizing.", caller_line(),
            )  # fmt: skip
        made = self._merged(pair[0], pair[1])
        self.order = [made if leaf is pair[0] else leaf for leaf in self.order if leaf is not pair[1]]

    def _merged(self, outer: Leaf, inner: Leaf) -> Leaf:
        sizes = (outer.size, inner.size)
        size = None if None in sizes else sizes[0] * sizes[1]  # type: ignore[operator]
        root = self._root(outer)
        at = next((i for i, leaf in enumerate(root) if leaf is outer), len(root))
        if not any(leaf is inner for leaf in root[at + 1 : at + 2]):
            return Leaf(size, reduction=outer.reduction, merged=True)
        root[at : at + 2] = [Leaf(size, reduction=outer.reduction)]
        return root[at]

    def unmerged(self) -> LoopDomain:
        """The same sharding without axes over several dims; itself where it has none."""
        if not any(leaf.merged for leaf in self.order):
            return self
        return LoopDomain(self.roots, [leaf for root in self.roots for leaf in root])

    def _root(self, leaf: Leaf) -> list[Leaf]:
        """The leaves of the leaf's dim; an empty list for a merged axis, which has no dim."""
        return next((root for root in self.roots if any(other is leaf for other in root)), [])

    def reorder(self, moves: Mapping[int, int]) -> None:
        """Move axes: old position to new position; the others keep their order (nvFuser's reorder)."""
        pairs = [(self.place(old, "reorder"), self.place(new, "reorder")) for old, new in moves.items()]
        if any(len(set(side)) != len(pairs) for side in zip(*pairs, strict=True)):
            raise user_error(
                "reorder: a position is named twice", str(dict(moves)), "each old and each new position once",
                "Correct the mapping.", caller_line(),
            )  # fmt: skip
        placed = {new: self.order[old] for old, new in pairs}
        rest = iter([leaf for leaf in self.order if not any(leaf is moved for moved in placed.values())])
        self.order = [placed[i] if i in placed else next(rest) for i in range(len(self.order))]

    def factor_out(self, chosen: Sequence[Leaf]) -> LoopDomain:
        """Take these reduction leaves out of the loop; the result is the loop domain of the unreduced terms.

        Both share the leaves of reduction dims: binding one says over which axis the later reduction runs.
        """
        terms = self.copy()
        pairs = zip(terms.order, self.order, strict=True)
        shared = {id(twin): leaf for twin, leaf in pairs if leaf.reduction}
        terms.roots = [[shared.get(id(leaf), leaf) for leaf in root] for root in terms.roots]
        terms.order = [shared.get(id(leaf), leaf) for leaf in terms.order]
        kept = [leaf for leaf in self.order if not any(leaf is other for other in chosen)]
        self.order = [*kept, *chosen]
        self.factored += len(chosen)
        return terms

    def layouts(self, reduction: bool = False) -> tuple[Layout, ...]:
        """The layout of every dim (with `reduction`, of every reduction dim)."""
        roots = [root for root in self.roots if root[0].reduction == reduction]
        return tuple([tuple([Split(leaf.size, leaf.axis, leaf.pre) for leaf in root]) for root in roots])

    def dims_in_order(self, leaves: Sequence[Leaf]) -> tuple[int, ...]:
        """The dims of these leaves as memory has them, major to minor; leaves of other domains are left out.

        The first unbound leaf of a dim, which is the rank's own part, says where the dim lies, unless its size is 1;
        the first leaf of the dim if there is no other.
        """
        roots = [root for root in self.roots if not root[0].reduction]
        dim_of = {id(leaf): d for d, root in enumerate(roots) for leaf in root}
        listed = [leaf for leaf in leaves if id(leaf) in dim_of]
        first = {dim_of[id(leaf)]: place for place, leaf in reversed([*enumerate(listed)])}
        own = [(i, leaf) for i, leaf in enumerate(listed) if leaf.axis is None and leaf.size != 1]
        local = {dim_of[id(leaf)]: i for i, leaf in reversed(own)}
        return tuple(sorted(first, key=lambda d: local.get(d, first[d])))

    def copy(self) -> LoopDomain:
        """A copy that can be edited without changing this one."""
        leaves = [*self.order, *(leaf for root in self.roots for leaf in root)]
        twins = {id(leaf): dataclasses.replace(leaf) for leaf in leaves}
        roots = [[twins[id(leaf)] for leaf in root] for root in self.roots]
        return LoopDomain(roots, [twins[id(leaf)] for leaf in self.order], self.factored)

    def __str__(self) -> str:
        return "[" + ", ".join(map(str, self.loop)) + "]"


def _leaves(layout: Layout, reduction: bool = False) -> list[Leaf]:
    leaves = [Leaf(split.size, split.axis, reduction, pre=split.pre) for split in layout]
    return leaves if any(leaf.size is None for leaf in leaves) else [*leaves, Leaf(None, reduction=reduction)]


def _halves(leaf: Leaf, factor: int, inner: bool, what: str) -> list[Leaf]:
    rest = None
    if leaf.size is not None:
        if leaf.size % factor:
            raise user_error(
                f"{what}: an axis of known size must split evenly", f"size {leaf.size} by {factor}",
                f"a divisor of {leaf.size}", "Split the dim by the product first.", caller_line(),
            )  # fmt: skip
        rest = leaf.size // factor
    sizes = (rest, factor) if inner else (factor, rest)
    return [Leaf(size, None, leaf.reduction, merged=leaf.merged) for size in sizes]


@dataclass(frozen=True, slots=True, repr=False)
class AxisView:
    """One axis of a tensor's loop domain, as `tv.axis(i)` gives it.

    `tensor` is its TensorView, which knows sizes, and whether the definition may still change.
    """

    domain: LoopDomain
    leaf: Leaf
    tensor: Any

    def parallelize(self, parallel_type: ParallelType) -> None:
        """Bind the axis to a mesh axis or a stream; `ParallelType.serial` unbinds it.

        Raises DefinitionError where it is bound to something else already, and for an axis that has been split or
        merged, or whose tensor has been annotated anew, since `axis` returned it: that binds nothing.
        """
        self.tensor.fd.recording.check_open()
        if not self.tensor.has_axis(self.domain, self.leaf):
            raise self._gone("parallelize")
        if isinstance(parallel_type, ParallelType) and parallel_type in KERNEL_TYPES:
            return  # These order the work inside a kernel, which is torch's here.
        axis = _axis_name(parallel_type)
        if self.leaf.merged and axis is not None:
            raise user_error(
                "parallelize: an axis merged of several dims", f"{self.leaf} in {self.domain}", "an axis of one dim",
                "Split each dim and parallelize its parts.", caller_line(),
            )  # fmt: skip
        if axis == STREAM and self.leaf.swizzled and self.is_device_dim():
            return  # The swizzled loop is the stream; the memory stays split over the mesh axis.
        if None not in (axis, self.leaf.axis) and axis != self.leaf.axis:
            raise user_error(
                "parallelize: the axis is bound already",
                f"{self.leaf.axis} on {self.leaf} in {self.domain}",
                "a free axis",
                "Unbind it with ParallelType.serial first.",
                caller_line(),
            )
        if axis != self.leaf.axis:
            self.leaf.axis = axis
            self.leaf.pre = WHOLE_AXIS if self.is_device_dim() else 1

    def is_parallelized(self) -> bool:
        return self.leaf.axis is not None

    def is_device_dim(self) -> bool:
        return self.leaf.axis not in (None, STREAM)

    def is_reduction(self) -> bool:
        return self.leaf.reduction

    def definition(self) -> NoReturn:
        """nvFuser's op that makes an axis. Raises DefinitionError: axes are parts of a dim here."""
        self._no_op("definition")

    def uses(self) -> NoReturn:
        """nvFuser's ops on an axis. Raises DefinitionError."""
        self._no_op("uses")

    def _no_op(self, what: str) -> NoReturn:
        raise user_error(
            f"{what} of a loop axis", f"{self.leaf} in {self.domain}", "a tensor or a scalar",
            "Axes are no values of ops: ask the tensor, tv.definition() or tv.uses().", caller_line(),
        )  # fmt: skip

    def is_tensor(self) -> bool:
        return False

    def extent(self) -> Any:
        """The size of the axis: an int where the definition says it, else a scalar of the definition."""
        if not any(leaf is self.leaf for part in (self.domain.order, *self.domain.roots) for leaf in part):
            raise self._gone("extent")
        return self.tensor.extent(self.domain, self.leaf)

    def _gone(self, what: str) -> Exception:
        return user_error(
            f"{what}: the axis is none of {self.tensor.label} any more",
            f"{self.leaf}, and the loop domain {self.tensor.loop_text()}",
            "an axis as it is after all splits, merges and annotations", "Ask for it again: tv.axis(i).", caller_line(),
        )  # fmt: skip

    def is_symbolic(self) -> bool:
        """Whether arguments decide the size."""
        return not isinstance(self.extent(), int)

    def __repr__(self) -> str:
        return self.tensor.axis_text(self.domain, self.leaf)


def _axis_name(parallel_type: ParallelType) -> str | None:
    if not isinstance(parallel_type, ParallelType):
        raise user_error(
            "parallelize",
            shown(parallel_type),
            f"one of {list(ParallelType)}",
            "Pass an mf.ParallelType.",
            caller_line(),
        )
    if parallel_type is ParallelType.serial:
        return None
    return STREAM if parallel_type is ParallelType.stream else PARALLEL_NAMES[parallel_type]
