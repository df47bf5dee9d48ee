"""`Sharding`: the layout of every dim of a tensor on a mesh, and what is still to be reduced."""

from __future__ import annotations

import functools
import itertools
import math
import threading
from collections import deque
from collections.abc import Iterable, Sequence
from typing import ClassVar
from weakref import WeakValueDictionary

from ..errors import MeshfuseError, caller_line, shown, user_error
from ..html_text import html_table
from ..mesh import DeviceMesh
from . import layout as lay
from .layout import Layout, Runs, Split
from .picture import picture_of

# An axis of a mesh: its name alone may be that of another mesh's, too.
Axis = tuple[DeviceMesh, str | None]
MOST_DIMS = 64  # of a torch tensor
_Parts = tuple[DeviceMesh, tuple[Layout, ...], tuple[Split, ...], str]
_REDUCTIONS = ("", "sum", "prod", "max", "min")


def _are_parts(mesh: object, dims: tuple[object, ...], partial: tuple[object, ...], reduce: object) -> bool:
    layouts = all(isinstance(d, tuple) and all(map(_is_split, d)) for d in dims)
    terms = all(map(_is_split, partial))
    return isinstance(mesh, DeviceMesh) and layouts and terms and reduce in _REDUCTIONS


def _is_split(part: object) -> bool:
    return isinstance(part, Split) and (part.size is None or (type(part.size) is int and part.size > 0))


def _no_sharding(parts: tuple[object, ...]) -> MeshfuseError:
    return user_error(
        "Sharding", ", ".join(map(shown, parts)), "a DeviceMesh, a tuple of Splits for each dim, and what is unreduced",
        "Write Sharding(mesh, ((Split(4, 'tp'),), ())), for example.", caller_line(),
    )  # fmt: skip


def _misfit(sharding: Sharding, shape: object, error: Exception) -> Exception:
    """The error of a shape that does not fit the sharding; `error` itself if it already says what is wrong."""
    if isinstance(error, MeshfuseError):
        return error
    if any(split.size is None for split in sharding.splits):
        return user_error(f"the parts of a tensor in {sharding}", "a split of no size over an axis", "its size",
                          "Write Split(4, 'tp'), with the size of the axis.", caller_line())  # fmt: skip
    return user_error(
        f"the shape of a tensor in {sharding}", shown(shape), f"{sharding.ndim} sizes of 0 or more, one per dim",
        "Pass the tensor's global shape.", caller_line(),
    )  # fmt: skip


class Sharding:
    """Where the elements of a tensor are. Immutable; equal shardings are one object, so that comparing them is free.

    `dims[d]` is the layout of dim d: a tuple of `Split`s, major to minor, () for a dim that is whole on every rank.
    `partial` are the axes over which each rank holds one term of a reduction by `reduce` ("sum", "prod", "max" or
    "min") that has not been done.

    Raises DefinitionError for parts of other types. Only `make`, which is given a shape, checks whether they fit a
    tensor.
    """

    __slots__ = ("__weakref__", "dims", "mesh", "partial", "reduce")

    mesh: DeviceMesh
    dims: tuple[Layout, ...]
    partial: tuple[Split, ...]
    reduce: str

    # Equal ones while anything holds one; the last of them are held here, as planning makes and drops the same ones.
    _interned: ClassVar[WeakValueDictionary[_Parts, Sharding]] = WeakValueDictionary()
    _recent: ClassVar[deque[Sharding]] = deque(maxlen=1 << 14)
    _making: ClassVar[threading.Lock] = threading.Lock()

    def __new__(
        cls, mesh: DeviceMesh, dims: Sequence[Layout], partial: Sequence[Split] = (), reduce: str = ""
    ) -> Sharding:
        try:
            key = (mesh, tuple(dims), tuple(partial), reduce)
            found = cls._interned.get(key)
        except (TypeError, MemoryError):  # no sequences, or of what is no value, or range(10**12)
            raise _no_sharding((mesh, dims, partial, reduce)) from None
        return found if found is not None else cls._made(key)

    @classmethod
    def _made(cls, key: _Parts) -> Sharding:
        if not _are_parts(*key):
            raise _no_sharding(key)
        made = super().__new__(cls)
        for name, value in zip(("mesh", "dims", "partial", "reduce"), key, strict=True):
            object.__setattr__(made, name, value)
        with cls._making:
            found = cls._interned.setdefault(key, made)
        cls._recent.append(found)
        return found

    def __setattr__(self, name: str, value: object) -> None:
        raise AttributeError(f"Sharding is immutable: cannot set {name!r}")

    def __reduce__(self) -> tuple[object, ...]:
        return (Sharding, (self.mesh, self.dims, self.partial, self.reduce))

    def __repr__(self) -> str:
        return _text(self)

    def _repr_html_(self) -> str:
        rows = [("dim", "axes"), *((str(d), lay.text(layout, self.mesh)) for d, layout in enumerate(self.dims))]
        return html_table(rows, caption=f"on {self.mesh}{self.note()}")

    def show(self, shape: Sequence[int]) -> None:
        """Show a tensor of this global shape as a grid of its pieces, coloured by the ranks that hold them.

        As SVG in a notebook, in colours in a terminal, else as text. Of more than two dims the two are shown that are
        cut into most pieces. Raises DefinitionError for a shape that does not fit.
        """
        name = f"{list(shape)} {self}" if isinstance(shape, (list, tuple)) else ""
        picture_of(self.placement(shape), shape, name, self.note()).show()

    def note(self) -> str:
        """In words what is still to be reduced; "" for nothing."""
        axes = ", ".join(lay.split_text(split, self.mesh) for split in self.partial)
        return f"; each rank has a term of a {self.reduce} over {axes}" if axes else ""

    @classmethod
    def replicated(cls, mesh: DeviceMesh, ndim: int) -> Sharding:
        """Whole on every rank of the mesh. Raises DefinitionError for an impossible number of dims."""
        if not isinstance(ndim, int) or not 0 <= ndim <= MOST_DIMS:
            raise user_error("Sharding.replicated: ndim", shown(ndim), f"an int from 0 to {MOST_DIMS}",
                             "Pass the tensor's number of dims.", caller_line())  # fmt: skip
        return cls(mesh, (lay.WHOLE,) * ndim)

    @classmethod
    def make(
        cls,
        mesh: DeviceMesh,
        dims: Sequence[Layout],
        shape: Sequence[int],
        partial: Iterable[Split] = (),
        reduce: str = "",
    ) -> Sharding:
        """The canonical sharding of a tensor of this global shape. Raises DefinitionError for parts that do not fit."""
        try:
            terms = canonical_partial(partial)
            layouts = tuple(lay.canonical(tuple(d), n) for d, n in zip(dims, shape, strict=True))
        except (TypeError, ValueError, AttributeError, RuntimeError, ZeroDivisionError):
            raise user_error(
                "Sharding.make", f"{shown(dims)} for shape {shown(shape)}",
                "a layout of Splits, and a size, for every dim",
                "Write Sharding.make(mesh, [(Split(4, 'tp'),), ()], [8, 16]), for example.", caller_line(),
            ) from None  # fmt: skip
        return cls(mesh, layouts, terms, reduce if terms else "")

    @property
    def ndim(self) -> int:
        """The number of dims."""
        return len(self.dims)

    @property
    def splits(self) -> tuple[Split, ...]:
        """Every bound split, dim by dim."""
        return tuple([split for layout in self.dims if layout for split in layout if split.bound])

    def used(self) -> frozenset[Split]:
        """Every bound split and every partial axis."""
        return frozenset(self.splits) | frozenset(self.partial)

    def with_dims(self, dims: Sequence[Layout]) -> Sharding:
        """The same mesh and the same unreduced axes, with other layouts of the dims."""
        return Sharding(self.mesh, dims, self.partial, self.reduce)

    def reduced(self) -> Sharding:
        """The sharding once the reduction is done, its result on every rank that held a term."""
        return Sharding(self.mesh, self.dims) if self.partial else self

    def placement(self, shape: Sequence[int]) -> Sharding:
        """The sharding without stream factors, which place no data. Raises DefinitionError for other shapes."""
        try:
            dims = tuple(lay.without_streams(d, n) for d, n in zip(self.dims, shape, strict=True))
        except (TypeError, ValueError, RuntimeError) as error:
            raise _misfit(self, shape, error) from None
        return self if dims == self.dims else self.with_dims(dims)

    def runs(self, shape: Sequence[int], rank: int) -> tuple[Runs, ...]:
        """For every dim the intervals [start, stop) of global indices that the rank holds, ascending.

        Raises DefinitionError for a global shape that does not fit.
        """
        try:
            return tuple(
                lay.runs(d, n, lay.digits(d, self.mesh, rank)) if d else lay.everything(n)
                for d, n in zip(self.dims, shape, strict=True)
            )
        except (TypeError, ValueError, RuntimeError) as error:
            raise _misfit(self, shape, error) from None

    def local_shape(self, shape: Sequence[int], rank: int) -> tuple[int, ...]:
        """The shape of the rank's shard of a tensor of this global shape; all zeros for a rank outside the mesh."""
        if rank not in self.mesh:
            return (0,) * len(self.dims)
        try:
            return tuple(lay.count(r) for r in self.runs(shape, rank))
        except (TypeError, ValueError) as error:
            raise _misfit(self, shape, error) from None

    def max_local_numel(self, shape: Sequence[int]) -> int:
        """The number of elements of the largest shard of a tensor of this global shape."""
        try:
            return math.prod([lay.largest(d, n) if d else n for d, n in zip(self.dims, shape, strict=True)])
        except (TypeError, ValueError, RuntimeError) as error:
            raise _misfit(self, shape, error) from None

    def coordinates(self, rank: int) -> tuple[int, ...]:
        """The rank's place along every bound split: ranks of equal coordinates hold replicas."""
        return lay.digits(self.splits, self.mesh, rank)

    def __str__(self) -> str:
        dims = ", ".join(lay.text(layout, self.mesh) for layout in self.dims)
        terms = ", ".join(lay.split_text(split, self.mesh) for split in self.partial)
        return f"[{dims}] partial({self.reduce}: {terms})" if terms else f"[{dims}]"


@functools.lru_cache(maxsize=1 << 12)
def _text(sharding: Sharding) -> str:
    """Kept, as fingerprints print the shardings of all placements."""
    more = f", {sharding.partial}, {sharding.reduce!r}" if sharding.partial else ""
    return f"Sharding({sharding.mesh}, {sharding.dims}{more})"


def canonical_partial(partial: Iterable[Split]) -> tuple[Split, ...]:
    """These sub-axes in order, neighbours joined; those of size 1 left out, as they have nothing to reduce."""
    ordered = sorted({s for s in partial if s.size != 1}, key=lambda s: (s.axis or "", s.pre))
    joined: list[Split] = []
    for split in ordered:
        last = joined[-1] if joined else None
        if last and last.axis == split.axis and last.pre * (last.size or 1) == split.pre:
            joined[-1] = Split((last.size or 1) * (split.size or 1), last.axis, last.pre)
        else:
            joined.append(split)
    return tuple(joined)


def disjoint(splits: Iterable[Split]) -> tuple[Split, ...]:
    """Sub-axes that do not overlap and together cover the same parts of the mesh's axes, in order.

    Sub-axes of one axis that do not nest, as 2 and 3 of 6, become the one sub-axis that covers both.
    """
    by_axis: dict[str, set[Split]] = {}
    for split in splits:
        by_axis.setdefault(split.axis or "", set()).add(split)
    out: list[Split] = []
    for axis, found in sorted(by_axis.items()):
        cuts = boundaries(found)
        atoms = [Split(b // a, axis, a) for a, b in itertools.pairwise(cuts)]
        out += (
            [atom for atom in atoms if any(conflicting(atom, s) for s in found)] if nested(cuts) else _covering(found)
        )
    return tuple(out)


def boundaries(splits: Iterable[Split]) -> tuple[int, ...]:
    """The place values at which sub-axes of one mesh axis begin and end, ascending."""
    return tuple(sorted({c for s in splits for c in (s.pre, s.pre * (s.size or 1))}))


def nested(cuts: Sequence[int]) -> bool:
    """Whether one axis can be cut at all of these boundaries: each divides the next."""
    return all(b % a == 0 for a, b in itertools.pairwise(cuts))


def _covering(found: Iterable[Split]) -> list[Split]:
    """The smallest sub-axes of one axis that cover these and do not overlap."""
    out: list[Split] = []
    for part in sorted(found, key=lambda s: s.pre):
        while met := [other for other in out if conflicting(part, other)]:
            out = [other for other in out if other not in met]
            part = _hull([part, *met])
        out.append(part)
    return sorted(out, key=lambda s: s.pre)


def _hull(parts: Sequence[Split]) -> Split:
    """The smallest sub-axis that covers some sub-axes of its axis."""
    first, end = math.gcd(*(s.pre for s in parts)), math.lcm(*(s.pre * (s.size or 1) for s in parts))
    return Split(end // first, parts[0].axis, first)


def conflicting(a: Split, b: Split) -> bool:
    """True where two bound splits cannot be of one tensor: they share a part of an axis, or do not nest.

    The halves of 6 ranks and their even ones share nothing, yet half of a group of even ranks is no group.
    """
    if a.axis != b.axis:
        return False
    return b.pre % (a.pre * (a.size or 1)) != 0 and a.pre % (b.pre * (b.size or 1)) != 0


def fit_together(splits: Iterable[Split]) -> bool:
    """Whether no two of these bound splits are conflicting: they can all be of one tensor."""
    return not any(conflicting(a, b) for a, b in itertools.combinations(splits, 2))


def intersecting(a: Split, b: Split) -> bool:
    """True where two bound splits share a part of a mesh axis."""
    return a.axis == b.axis and a.pre < b.pre * (b.size or 1) and b.pre < a.pre * (a.size or 1)
