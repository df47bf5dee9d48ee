"""The mesh of ranks that a program runs on, its named axes and its groups."""

from __future__ import annotations

import enum
import functools
import math
from collections import Counter
from collections.abc import Iterable, Mapping, Sequence
from typing import Any

from .costs import BYTES, BYTES_ONLY, Link, Machine, plain, slowest
from .errors import ArgumentError, caller_line, located, shown, user_error
from .html_text import html_table
from .mesh_arguments import read_costs, read_devices, usual_machine

_DEFAULT_NAMES = ("w", "v", "u", "z", "y", "x")
STREAM = "stream"
_LARGEST_RANK = 2**31 - 1
_SHOWN_LINES = 16  # Of ranks in a notebook.
_MOST_DIGITS = 10  # Of a size in a text: int() takes long for very many.
# What stands around the names of axes where shardings and communications are printed, and in `--mesh dp=2,tp=4`.
_MARKS = ",:=()[]"


class ParallelType(enum.Enum):
    """What a loop axis is bound to, in nvFuser's words: `mesh_x` is the last axis of a mesh, `mesh_y` the one before.

    The types after `stream` order the work inside a kernel: they are accepted and change nothing.
    """

    serial = 0
    mesh_x = 1
    mesh_y = 2
    mesh_z = 3
    stream = 4
    grid_x = 5
    grid_y = 6
    grid_z = 7
    block_x = 8
    block_y = 9
    block_z = 10
    vectorize = 11
    unroll = 12
    unswitch = 13
    mma = 14
    tma = 15

    def __repr__(self) -> str:
        return f"ParallelType.{self.name}"


class DeviceMesh:
    """Ranks in a grid with one name per axis. Immutable; meshes of equal ranks, shape, names and links are equal.

    A shape needs names; without names (nvFuser's form) numbers are the ranks themselves::

        DeviceMesh((2, 4), ("dp", "tp"))  # ranks 0 to 7 in that shape
        DeviceMesh([[0, 1], [4, 5]])  # these ranks, from lists, a range or a tensor; axes are called y and x
        DeviceMesh((2, 4))  # the ranks 2 and 4
        DeviceMesh([2, 4], ("dp",))  # these too; a tuple with names is a shape, and needs one for each of its axes
        DeviceMesh((1,), ("s",), ranks=[1])  # a shape, and its ranks: rank 1 alone

    As many numbers as names are a shape, in a list too. Unnamed axes are called x (the last), y, z. A name is a word
    without any of `,:=()[]`.

    `links` says how fast each axis is, and so which of several plans is the fastest: one `Link` for all axes, a mapping
    (`{"dp": Link(25e9, 20e-6), "tp": Link(450e9, 5e-6)}`), a `Machine`, or the name of one in `meshfuse.costs.MACHINES`
    ("dgx-h100"). `flops` is a rank's operations per second, `memory` the bytes per second that it reads and writes.
    Without links the mesh is on the machine that MESHFUSE_LINKS names, or that `meshfuse doctor --links` measured here,
    or on a DGX H100. `links=Link.bytes_only()`, or "bytes", has bytes alone decide. If some tensors of a definition are
    annotated on the mesh with links and others on the same mesh without, the links hold for all; default links and
    rates count as none.

    Raises DefinitionError for other names, for ranks or names that occur twice, and for links that are none of these.
    """

    __slots__ = (
        "_coordinates", "_hash", "_over", "flops", "links", "memory", "names", "ranks", "shape", "uniform",
    )  # fmt: skip

    shape: tuple[int, ...]
    names: tuple[str, ...]
    ranks: tuple[int, ...]
    links: tuple[Link, ...]
    flops: float
    memory: float
    uniform: bool

    def __init__(
        self, devices: Any, names: Sequence[str] | None = None, *, ranks: Iterable[int] | None = None,
        links: Link | Machine | str | Mapping[str, Link] | None = None, flops: float | None = None,
        memory: float | None = None,
    ):  # fmt: skip
        names = (names,) if isinstance(names, str) else names
        line = caller_line()
        with located(line):
            shape, flat = read_devices(devices, names, ranks)
            names = tuple(names) if names is not None else _DEFAULT_NAMES[-len(shape) :]
            _check_mesh(shape, names, flat)
        # The text alone, of names of any class: equal meshes are printed alike.
        names = tuple(map(str.__str__, names))
        self.shape, self.names, self.ranks = shape, names, flat
        self._over: dict[tuple[str, ...], Link] = {}
        coordinates = {rank: _unravel(place, shape) for place, rank in enumerate(flat)}
        axes = dict(zip(names, shape, strict=True))
        with located(line):
            costs = read_costs(axes, coordinates, links, flops, memory)
        self.links, self.flops, self.memory = costs
        self.uniform = len(set(self.links)) == 1
        self._hash = hash((shape, names, flat, costs))
        self._coordinates = coordinates

    @property
    def linked(self) -> bool:
        """Whether its links and rates are others than those of the default machine.

        By what they are and not by whether they were given: equal meshes stand for one another.
        """
        axes = dict(zip(self.names, self.shape, strict=True))
        return self.costs != read_costs(axes, self._coordinates, None, None, None)

    def __setattr__(self, name: str, value: object) -> None:
        if hasattr(self, "_coordinates"):
            raise AttributeError(f"DeviceMesh is immutable: cannot set {name!r}")
        object.__setattr__(self, name, value)

    def __eq__(self, other: object) -> bool:
        if self is other:
            return True
        if not isinstance(other, DeviceMesh) or self._hash != other._hash:
            return False
        return self.grid == other.grid and self.costs == other.costs

    def __hash__(self) -> int:
        return self._hash

    def __reduce__(self) -> tuple[Any, ...]:
        # In full: another process may have another default.
        return (_rebuild_mesh, (*self.grid, dict(zip(self.names, self.links, strict=True)), self.flops, self.memory))

    def __repr__(self) -> str:
        plain = self.ranks == tuple(range(self.size))
        return f"DeviceMesh({self.shape}, {self.names}{'' if plain else f', ranks={list(self.ranks)}'}{self._costs()})"

    def _repr_html_(self) -> str:
        """The grid of ranks: a line for each place on the axes but the last."""
        wide = self.shape[-1] if self.shape else 1
        rows = [[f"{', '.join(self.names[:-1])} \\ {self.names[-1]}" if self.names else "", *map(str, range(wide))]]
        for start in range(0, min(self.size, wide * _SHOWN_LINES), wide):
            place = _unravel(start // wide, self.shape[:-1])
            rows.append([", ".join(map(str, place)), *(f"rank {rank}" for rank in self.ranks[start : start + wide])])
        left = self.size // wide - (len(rows) - 1)
        return html_table(rows, caption=f"{self!r}{f' ({left} more lines)' if left else ''}")

    def _costs(self) -> str:
        """The links and rates that are not the defaults, as text of arguments of DeviceMesh."""
        if not self.linked:
            return ""
        usual = usual_machine(self.links)
        pairs = (("flops", self.flops, usual.flops), ("memory", self.memory, usual.memory))
        links = ", ".join(f"{name!r}: mf.{link}" for name, link in zip(self.names, self.links, strict=True))
        rates = "".join(f", {name}={plain(rate)}" for name, rate, known in pairs if rate != known)
        return f", links={{{links}}}{rates}"

    @property
    def is_bytes_only(self) -> bool:
        """Whether what is sent alone decides plans on it: its links take no time to start, nor is memory counted."""
        return all(link == BYTES_ONLY for link in self.links) and self.costs[1:] == (BYTES.flops, BYTES.memory)

    @property
    def costs(self) -> tuple[tuple[Link, ...], float, float]:
        """Links, operations and bytes of memory per second."""
        return self.links, self.flops, self.memory

    @property
    def grid(self) -> tuple[tuple[int, ...], tuple[str, ...], tuple[int, ...]]:
        """Shape, names and ranks: equal for meshes that differ only in links or flops."""
        return (self.shape, self.names, self.ranks)

    def link(self, axes: tuple[str, ...]) -> Link:
        """The link of a collective over these axes: the slowest of theirs; () means all axes of the mesh.

        Raises DefinitionError for names that the mesh does not have.
        """
        try:
            found = self._over.get(axes)
        except TypeError:  # of what is no name
            found = None
        if found is None and not isinstance(axes, tuple):
            raise user_error("the axes of a link", shown(axes), "a tuple of names", "Pass ('dp',), say.", caller_line())
        if found is None:
            for name in axes:
                self.axis_size(name)  # which raises for one that is not there
            over = [link for name, link in zip(self.names, self.links, strict=True) if not axes or name in axes]
            found = self._over[axes] = slowest(over)
        return found

    @property
    def size(self) -> int:
        """The number of ranks."""
        return len(self.ranks)

    @property
    def ndim(self) -> int:
        """The number of axes."""
        return len(self.shape)

    def plain(self) -> DeviceMesh:
        """The mesh in meshfuse's own form; a front end may have another."""
        return self

    def axis_size(self, name: str) -> int:
        """How many ranks there are along an axis. Raises DefinitionError for a name that the mesh does not have."""
        try:
            return self.shape[self.names.index(name)]
        except ValueError:
            raise user_error(
                f"no such axis of {self}",
                shown(name),
                f"one of {self.names}",
                "Name an axis of the mesh.",
                caller_line(),
            ) from None

    def coordinate(self, rank: int) -> tuple[int, ...]:
        """The place of a rank along every axis. Raises DefinitionError for a rank that the mesh does not have."""
        try:
            return self._coordinates[rank]
        except (KeyError, TypeError):
            raise user_error(
                f"no such rank of {self}",
                shown(rank),
                f"one of its {self.size} ranks",
                "See mesh.ranks.",
                caller_line(),
            ) from None

    def __contains__(self, rank: object) -> bool:
        try:
            return rank in self._coordinates
        except TypeError:  # what has no hash is no rank
            return False

    def digit(self, rank: int, axis: str, pre: int, size: int) -> int:
        """The place of a rank along a sub-axis, from 0 to `size` - 1.

        A mesh axis of n ranks is read as a number of three digits (pre, size, rest), pre * size * rest = n; the
        sub-axis is the middle one. With pre = 1 and size = n it is the whole axis.
        """
        try:
            place = self.names.index(axis)
            step, left = divmod(self.shape[place], pre * size)
            if not left:
                return self._coordinates[rank][place] // step % size
        except (ValueError, KeyError, TypeError):
            self.axis_size(axis)  # which raises for an axis that is not there, as the next does for a rank
            self.coordinate(rank)
            raise
        raise user_error(
            f"a split over axis {axis!r} of {self}", f"{size} parts{f' after {pre}' if pre != 1 else ''}",
            f"as many as the axis is large ({self.shape[place]}), or a divisor", f"Write Split({self.shape[place]}, "
            f"{axis!r}).", caller_line(),
        )  # fmt: skip

    def parallel_axis(self, kind: ParallelType) -> str:
        """The name of the axis that `ParallelType.mesh_x`, `mesh_y` or `mesh_z` means.

        Raises DefinitionError for other types, and where the mesh has too few axes.
        """
        axes = (ParallelType.mesh_x, ParallelType.mesh_y, ParallelType.mesh_z)
        place = next((n for n, axis in enumerate(axes, 1) if axis is kind), None)
        if place is None:
            raise user_error("a mesh axis by its parallel type", shown(kind),
                             "mesh_x, mesh_y or mesh_z of ParallelType", "mesh_x is the last axis.",
                             caller_line())  # fmt: skip
        if place > self.ndim:
            raise user_error(
                f"{kind} on a mesh of {self.ndim} axes",
                f"axes {self.names}",
                f"a mesh of at least {place} axes",
                "Use a mesh with more axes or another parallel type.",
            )
        return self.names[-place]

    @functools.lru_cache(maxsize=65536)  # noqa: B019 - meshes are few and live as long as the program
    def group(self, rank: int, axes: tuple[tuple[str, int, int], ...]) -> tuple[int, ...]:
        """The ranks that differ from `rank` only along these sub-axes (axis, pre, size), in order, the first major."""
        return self._groups(axes)[self._group_key(rank, axes)]

    def _group_key(self, rank: int, axes: tuple[tuple[str, int, int], ...]) -> tuple[int, ...]:
        coordinate = list(self._coordinates[rank])
        for axis, pre, size in axes:
            place = self.names.index(axis)
            step = self.shape[place] // (pre * size)
            coordinate[place] -= self.digit(rank, axis, pre, size) * step
        return tuple(coordinate)

    @functools.lru_cache(maxsize=4096)  # noqa: B019
    def _groups(self, axes: tuple[tuple[str, int, int], ...]) -> dict[tuple[int, ...], tuple[int, ...]]:
        groups: dict[tuple[int, ...], list[tuple[tuple[int, ...], int]]] = {}
        for rank in self.ranks:
            digits = tuple(self.digit(rank, *axis) for axis in axes)
            groups.setdefault(self._group_key(rank, axes), []).append((digits, rank))
        return {key: tuple(rank for _, rank in sorted(found)) for key, found in groups.items()}


def mesh_of_text(text: str) -> DeviceMesh:
    """The mesh of a text such as "dp=2,tp=4".

    Raises ArgumentError for other texts, DefinitionError for other meshes.
    """
    axes = [part.partition("=")[::2] for part in text.split(",")]
    sizes = {name.strip(): size.strip() for name, size in axes}
    if len(sizes) < len(axes) or not all(n.isdecimal() and len(n) < _MOST_DIGITS and int(n) for n in sizes.values()):
        raise user_error("--mesh", shown(text), "different axes and their sizes, as in dp=2,tp=4", cls=ArgumentError)
    return DeviceMesh(tuple(map(int, sizes.values())), tuple(sizes))


def _rebuild_mesh(
    shape: tuple[int, ...],
    names: tuple[str, ...],
    ranks: tuple[int, ...],
    links: Mapping[str, Link],
    flops: float,
    memory: float,
) -> DeviceMesh:
    return DeviceMesh(shape, names, ranks=ranks, links=links, flops=flops, memory=memory)


def _unravel(place: int, shape: tuple[int, ...]) -> tuple[int, ...]:
    digits = []
    for size in reversed(shape):
        place, digit = divmod(place, size)
        digits.append(digit)
    return tuple(reversed(digits))


def _is_name(name: Any) -> bool:
    """Whether a mesh axis may have this name: a word without the signs that lists of axes are written with."""
    return isinstance(name, str) and name.isprintable() and name not in ("", "-") and not set(name) & {*_MARKS, " "}


def _check_mesh(shape: tuple[int, ...], names: tuple[str, ...], ranks: tuple[int, ...]) -> None:
    _check_shape(shape, ranks)
    _check_count(shape, names, ranks)
    if not all(map(_is_name, names)) or len(set(names)) != len(names) or STREAM in names:
        raise user_error(
            "a mesh needs one name per axis, each once, none of them 'stream'",
            f"names {shown(names)} for shape {shown(shape)}",
            f"{len(shape)} different words without any of {_MARKS!r}",
            "Name every axis.",
        )
    _check_ranks(ranks)


def _check_count(shape: tuple[int, ...], names: tuple[str, ...], ranks: tuple[int, ...]) -> None:
    # Who forgot a name of a shape never wrote the shape that is read here: the ranks are what was written.
    if len(names) != len(shape):
        raise user_error(
            "a mesh needs one name per axis",
            f"names {shown(names)} for the ranks {shown(list(ranks))}",
            f"{len(shape)} for shape {shown(shape)}",
            "Name every axis. As many numbers as names are a shape, others the ranks themselves.",
        )


def _check_shape(shape: tuple[int, ...], ranks: tuple[int, ...]) -> None:
    if any(size < 1 for size in shape) or not ranks:
        raise user_error(
            "a mesh has at least one rank along every axis",
            f"shape {shown(shape)}",
            "sizes >= 1",
            "Give other sizes.",
        )
    if math.prod(shape) != len(ranks):
        raise user_error(
            "a mesh needs as many ranks as its shape holds",
            f"{len(ranks)} for shape {shown(shape)}",
            f"{math.prod(shape)}",
            "Correct the shape or the ranks.",
        )


def _check_ranks(ranks: tuple[int, ...]) -> None:
    repeated = sorted(rank for rank, times in Counter(ranks).items() if times > 1)
    if repeated or min(ranks) < 0 or max(ranks) > _LARGEST_RANK:
        odd = "negative" if min(ranks) < 0 else "too large"
        raise user_error(
            "a mesh holds each rank once, none negative",
            f"ranks {shown(list(ranks))}",
            "different ranks >= 0, of 32 bits",
            f"Remove the repeated ranks {shown(repeated)}; a shape needs a name for each of its axes."
            if repeated
            else f"Remove the {odd} ranks.",
        )
