"""The mesh of ranks a program runs on, its named axes and its groups."""

from __future__ import annotations

import enum
import functools
import math
from collections.abc import Iterable, Mapping, Sequence
from typing import Any

from .costs import DEFAULT_FLOPS, DEFAULT_LINK, MACHINES, RATES, Link, Machine, is_rate, plain, slowest
from .errors import caller_line, located, user_error

_DEFAULT_NAMES = ("w", "v", "u", "z", "y", "x")
STREAM = "stream"
_MOST_RANKS = 1 << 20
_MOST_AXES = 64


class ParallelType(enum.Enum):
    """What a factor of a dim is bound to, in nvFuser's words; mesh_x is the last axis of a mesh.

    Those after `stream` order the work inside a kernel: they are accepted and change nothing.
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

    `DeviceMesh((2, 4), ("dp", "tp"))` is ranks 0..7 in that shape; `DeviceMesh(array)` and
    `DeviceMesh(array, names)` take the ranks themselves from a list, a range or a torch tensor (nvFuser's
    form). Unnamed axes are called x (the last), y, z. Raises DefinitionError for ranks or names that occur
    twice.

    `links` says how fast each axis is, and so which of several plans is the fastest: one `Link` for all axes, one
    per axis (`{"dp": Link(25e9, 20e-6), "tp": Link(450e9, 5e-6)}`), a `Machine` or the name of one in
    `meshfuse.costs.MACHINES` ("dgx-h100"). `flops` is a rank's operations per second. A definition may annotate
    some tensors on the mesh with links and others on the same mesh without: the links hold for all.
    """

    __slots__ = (
        "_coordinates", "_hash", "_over", "flops", "linked", "links", "names", "ranks", "shape", "uniform",
    )  # fmt: skip

    shape: tuple[int, ...]
    names: tuple[str, ...]
    ranks: tuple[int, ...]
    links: tuple[Link, ...]
    flops: float
    linked: bool
    uniform: bool

    def __init__(
        self, devices: Any, names: Sequence[str] | None = None, *, ranks: Iterable[int] | None = None,
        links: Link | Machine | str | Mapping[str, Link] | None = None, flops: float | None = None,
    ):  # fmt: skip
        names = (names,) if isinstance(names, str) else names
        line = caller_line()
        with located(line):
            shape, flat = _read_devices(devices, names, ranks)
            names = tuple(names) if names is not None else _DEFAULT_NAMES[-len(shape) :]
            _check_mesh(shape, names, flat)
        self.shape, self.names, self.ranks = shape, names, flat
        self.linked = links is not None or flops is not None
        self._over: dict[tuple[str, ...], Link] = {}
        coordinates = {rank: _unravel(place, shape) for place, rank in enumerate(flat)}
        with located(line):
            self.links, self.flops = _read_costs(self, coordinates, links, flops)
        self.uniform = len(set(self.links)) == 1
        self._hash = hash((shape, names, flat, self.links, self.flops))
        self._coordinates = coordinates

    def __setattr__(self, name: str, value: object) -> None:
        if hasattr(self, "_coordinates"):
            raise AttributeError(f"DeviceMesh is immutable: cannot set {name!r}")
        object.__setattr__(self, name, value)

    def __eq__(self, other: object) -> bool:
        if self is other:
            return True
        if not isinstance(other, DeviceMesh) or self._hash != other._hash:
            return False
        return self.grid == other.grid and (self.links, self.flops) == (other.links, other.flops)

    def __hash__(self) -> int:
        return self._hash

    def __reduce__(self) -> tuple[Any, ...]:
        links = dict(zip(self.names, self.links, strict=True)) if self.linked else None
        return (_rebuild_mesh, (*self.grid, links, self.flops if self.linked else None))

    def __repr__(self) -> str:
        plain = self.ranks == tuple(range(self.size))
        return f"DeviceMesh({self.shape}, {self.names}{'' if plain else f', ranks={list(self.ranks)}'}{self._costs()})"

    def _costs(self) -> str:
        """What is said of links and rate, as arguments."""
        rate = f", flops={plain(self.flops)}" if self.flops != DEFAULT_FLOPS else ""
        if all(link == DEFAULT_LINK for link in self.links):
            return rate
        links = ", ".join(f"{name!r}: mf.{link}" for name, link in zip(self.names, self.links, strict=True))
        return f", links={{{links}}}{rate}"

    @property
    def grid(self) -> tuple[tuple[int, ...], tuple[str, ...], tuple[int, ...]]:
        """Shape, names and ranks: equal for meshes that differ in their links only."""
        return (self.shape, self.names, self.ranks)

    def link(self, axes: tuple[str, ...]) -> Link:
        """The link of a collective over these axes (all of the mesh, if none is named): the slowest of theirs."""
        try:
            found = self._over.get(axes)
        except TypeError:  # of what is no name
            found = None
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
        return len(self.shape)

    def axis_size(self, name: str) -> int:
        """How many ranks there are along an axis. Raises DefinitionError for a name that the mesh has not."""
        try:
            return self.shape[self.names.index(name)]
        except ValueError:
            raise user_error(
                f"no such axis of {self}",
                repr(name),
                f"one of {self.names}",
                "Name an axis of the mesh.",
                caller_line(),
            ) from None

    def coordinate(self, rank: int) -> tuple[int, ...]:
        """The place of a rank along every axis. Raises DefinitionError for a rank that the mesh has not."""
        try:
            return self._coordinates[rank]
        except (KeyError, TypeError):
            raise user_error(
                f"no such rank of {self}", repr(rank), f"one of its {self.size} ranks", "See mesh.ranks.", caller_line()
            ) from None

    def __contains__(self, rank: object) -> bool:
        try:
            return rank in self._coordinates
        except TypeError:  # what has no hash is no rank
            return False

    def digit(self, rank: int, axis: str, pre: int, size: int) -> int:
        """The place of a rank along a sub-axis: `size` steps, after `pre` more major ones, of a mesh axis."""
        try:
            place = self.names.index(axis)
            return self._coordinates[rank][place] // (self.shape[place] // (pre * size)) % size
        except (ValueError, KeyError, TypeError):
            self.axis_size(axis)  # which raises for an axis that is not there, as the next does for a rank
            self.coordinate(rank)
            raise

    def parallel_axis(self, kind: ParallelType) -> str:
        """The name of the axis that nvFuser's DIDx, DIDy or DIDz means."""
        axes = (ParallelType.mesh_x, ParallelType.mesh_y, ParallelType.mesh_z)
        place = next((n for n, axis in enumerate(axes, 1) if axis is kind), None)
        if place is None:
            raise user_error("a mesh axis by its parallel type", repr(kind), "mesh_x, mesh_y or mesh_z of ParallelType",
                             "mesh_x is the last axis.", caller_line())  # fmt: skip
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
        """The ranks that differ from `rank` only along (axis, pre, size) sub-axes, first axis major."""
        return tuple(r for _, r in sorted(self._groups(axes)[self._group_key(rank, axes)]))

    def _group_key(self, rank: int, axes: tuple[tuple[str, int, int], ...]) -> tuple[int, ...]:
        coordinate = list(self._coordinates[rank])
        for axis, pre, size in axes:
            place = self.names.index(axis)
            step = self.shape[place] // (pre * size)
            coordinate[place] -= self.digit(rank, axis, pre, size) * step
        return tuple(coordinate)

    @functools.lru_cache(maxsize=4096)  # noqa: B019
    def _groups(
        self, axes: tuple[tuple[str, int, int], ...]
    ) -> dict[tuple[int, ...], list[tuple[tuple[int, ...], int]]]:
        groups: dict[tuple[int, ...], list[tuple[tuple[int, ...], int]]] = {}
        for rank in self.ranks:
            digits = tuple(self.digit(rank, *axis) for axis in axes)
            groups.setdefault(self._group_key(rank, axes), []).append((digits, rank))
        return groups


def _rebuild_mesh(
    shape: tuple[int, ...],
    names: tuple[str, ...],
    ranks: tuple[int, ...],
    links: Mapping[str, Link] | None = None,
    flops: float | None = None,
) -> DeviceMesh:
    return DeviceMesh(shape, names, ranks=ranks, links=links, flops=flops)


def _read_costs(
    mesh: DeviceMesh, coordinates: Mapping[int, tuple[int, ...]], links: Any, flops: float | None
) -> tuple[tuple[Link, ...], float]:
    """A link per axis and the rate of a rank, from any of the forms they may be given in."""
    links = MACHINES.get(links, links) if isinstance(links, str) else links
    rate = flops if flops is not None else links.flops if isinstance(links, Machine) else DEFAULT_FLOPS
    if not is_rate(rate):
        raise user_error(
            "a mesh's flops", repr(flops), f"operations per second, {RATES}", "flops=989e12 is an H100 in bfloat16."
        )
    if links is None or isinstance(links, Link):
        return (links or DEFAULT_LINK,) * len(mesh.shape), float(rate)
    if isinstance(links, Machine):
        return tuple(links.link(_lines(coordinates, axis)) for axis in range(len(mesh.shape))), float(rate)
    return _links_by_axis(mesh, links), float(rate)


def _lines(coordinates: Mapping[int, tuple[int, ...]], axis: int) -> Iterable[list[int]]:
    """The groups of ranks that differ in one coordinate only."""
    groups: dict[tuple[int, ...], list[int]] = {}
    for rank, place in coordinates.items():
        groups.setdefault((*place[:axis], *place[axis + 1 :]), []).append(rank)
    return groups.values()


def _links_by_axis(mesh: DeviceMesh, links: Any) -> tuple[Link, ...]:
    named = isinstance(links, Mapping) and all(isinstance(link, Link) for link in links.values())
    if not named:
        raise user_error(
            "a mesh's links", repr(links),
            f"a Link, a Link for each of {mesh.names}, a Machine or one of {', '.join(map(repr, MACHINES))}",
            'links={"tp": Link(450e9, 5e-6)} gives bytes per second and seconds.',
        )  # fmt: skip
    idle = {name: DEFAULT_LINK for name, size in zip(mesh.names, mesh.shape, strict=True) if size == 1}
    if not set(links) <= set(mesh.names) or not set(mesh.names) <= {*links, *idle}:
        raise user_error(
            "a mesh's links", f"links of {tuple(links)}", f"one for each axis {mesh.names}", "Give each axis a link."
        )
    found = {**idle, **links}
    return tuple(found[name] for name in mesh.names)


def _unravel(place: int, shape: tuple[int, ...]) -> tuple[int, ...]:
    digits = []
    for size in reversed(shape):
        place, digit = divmod(place, size)
        digits.append(digit)
    return tuple(reversed(digits))


def _read_devices(
    devices: Any, names: Sequence[str] | None, ranks: Iterable[int] | None
) -> tuple[tuple[int, ...], tuple[int, ...]]:
    """(shape, ranks in row-major order) from any of the forms a mesh may be given in."""
    if names is not None and not isinstance(names, (str, list, tuple)):
        raise user_error("a mesh needs one name per axis", repr(names), "a list of names", "Pass ('dp', 'tp'), say.")
    _bounded(_count(devices))
    nested = _values(devices) if hasattr(devices, "tolist") else devices
    nested = [nested] if isinstance(nested, int) else list(nested) if _is_list(nested) else nested
    flat_ints = _is_list(nested) and all(isinstance(entry, int) for entry in nested)
    is_shape = names is not None and flat_ints and len(names) == len(nested) and not hasattr(devices, "tolist")
    if is_shape or ranks is not None:
        shape = tuple(_rank(n) for n in nested) if flat_ints else ()
        given = () if ranks is None else _flatten(_listed(ranks))[1]
        return shape, given if ranks is not None else tuple(range(_bounded(math.prod(shape))))
    return _flatten(nested)


def _values(devices: Any) -> Any:
    """The ranks that a tensor or an array holds."""
    kind = "meta" if getattr(devices, "is_meta", False) else str(getattr(devices, "layout", "torch.strided"))
    if kind != "torch.strided":
        raise user_error("a mesh is made of ranks", f"a {kind} tensor", "a dense one of ints", "Pass the ranks.")
    return devices.tolist()


def _count(devices: Any) -> int:
    """How many entries there are to look at, without looking at them."""
    if hasattr(devices, "tolist"):
        return math.prod(devices.shape)
    return len(devices) if _is_list(devices) else 1


def _listed(ranks: Any) -> Any:
    """`ranks=` as a list; what is no iterable as it is, for the error to tell."""
    if not isinstance(ranks, Iterable) or isinstance(ranks, (str, bytes)):
        return ranks if not isinstance(ranks, int) else repr(ranks)
    try:
        if hasattr(ranks, "__len__"):
            _bounded(len(ranks))  # type: ignore[arg-type]
        return list(ranks)
    except TypeError:  # such as a tensor of no dims
        return repr(ranks)


def _is_list(value: Any) -> bool:
    return isinstance(value, (list, tuple, range))


def _rank(value: Any) -> int:
    found = as_int(value)
    if found is None:
        raise user_error(
            "a mesh is made of ranks",
            f"{value!r} ({type(value).__name__})",
            "ints in a list, nested lists or a tensor",
            "Pass a shape and names, or the ranks.",
        )
    return found


def is_text(text: str) -> bool:
    """Whether a text can be written to a file: half of a surrogate pair cannot."""
    return not any("\ud800" <= letter <= "\udfff" for letter in text)


def as_int(value: Any) -> int | None:
    """The int that a Python int or numpy integer stands for; None for anything else, bools included."""
    if isinstance(value, bool) or not hasattr(value, "__index__"):
        return None
    try:
        return value.__index__()
    except TypeError:
        return None


def _bounded(count: int) -> int:
    if count > _MOST_RANKS:
        raise user_error("a mesh", f"{count} ranks", f"at most {_MOST_RANKS}", "Give a smaller shape.")
    return count


def _flatten(nested: Any, depth: int = 0) -> tuple[tuple[int, ...], tuple[int, ...]]:
    if not _is_list(nested):
        return (), (_rank(nested),)
    if depth == _MOST_AXES:  # such as a list that holds itself
        raise user_error("a mesh", "lists in lists without end", f"at most {_MOST_AXES} axes", "Pass a flat list.")
    rows = [_flatten(row, depth + 1) for row in nested]
    if len({shape for shape, _ in rows}) > 1:
        raise user_error(
            "a mesh must be a full grid", "rows of different lengths", "equal rows", "Pad or split the mesh."
        )
    inner = rows[0][0] if rows else ()
    return (len(rows), *inner), tuple(rank for _, flat in rows for rank in flat)


def _check_mesh(shape: tuple[int, ...], names: tuple[str, ...], ranks: tuple[int, ...]) -> None:
    if any(size < 1 for size in shape) or not ranks:
        raise user_error(
            "a mesh has at least one rank along every axis",
            f"shape {shape}",
            "sizes >= 1",
            "Give other sizes.",
        )
    if math.prod(shape) != len(ranks):
        raise user_error(
            "a mesh needs as many ranks as its shape holds",
            f"{len(ranks)} for shape {shape}",
            f"{math.prod(shape)}",
            "Correct the shape or the ranks.",
        )
    texts = all(isinstance(name, str) and name and is_text(name) for name in names)
    if not texts or len(names) != len(shape) or len(set(names)) != len(names) or STREAM in names:
        raise user_error(
            "a mesh needs one name per axis, each once, none of them 'stream'",
            f"names {names} for shape {shape}",
            f"{len(shape)} different strings",
            "Name every axis.",
        )
    repeated = sorted({rank for rank in ranks if ranks.count(rank) > 1}) if len(set(ranks)) != len(ranks) else []
    if repeated or min(ranks) < 0:
        raise user_error(
            "a mesh holds each rank once, none negative",
            f"ranks {list(ranks)}",
            "different ranks >= 0",
            f"Remove the repeated ranks {repeated}." if repeated else "Remove the negative ranks.",
        )
