"""The forms in which `DeviceMesh` takes ranks and links."""

from __future__ import annotations

import math
from collections.abc import Iterable, Mapping, Sequence
from typing import Any, NamedTuple

from .argument_checks import as_int
from .costs import BYTES, MACHINES, RATES, Link, Machine, is_rate
from .default_machine import default_machine
from .errors import shown, user_error

# More is a mistake, and an error before anything of such a size is made.
_MOST_RANKS, _MOST_AXES = 1 << 20, 64


def read_devices(
    devices: Any, names: Sequence[str] | None, ranks: Iterable[int] | None
) -> tuple[tuple[int, ...], tuple[int, ...]]:
    """(shape, ranks in row-major order) from any form in which a mesh may be given."""
    if names is not None and not isinstance(names, (str, list, tuple)):
        raise user_error("a mesh needs one name per axis", shown(names), "a list of names", "Pass ('dp', 'tp'), say.")
    _bounded(_count(devices))
    nested = _values(devices) if hasattr(devices, "tolist") else devices
    nested = list(nested) if _is_list(nested) else nested if as_int(nested) is None else [nested]
    if ranks is not None:
        return _shape(nested), _flatten(_listed(ranks))[1]
    if names is not None and isinstance(devices, tuple):
        _check_names(nested, names)
    if names is None or _holds_ranks(devices) or not _is_list(nested) or len(names) != len(nested):
        return _flatten(nested)
    # A list of rank 0 alone is a world of one; a shape of no ranks is none.
    if ([as_int(size) for size in nested] == [0] and not isinstance(devices, tuple)) or any(map(_is_list, nested)):
        return _flatten(nested)
    shape = _shape(nested)
    return shape, tuple(range(_bounded(math.prod(shape))))


def _check_names(sizes: Sequence[Any], names: Sequence[str]) -> None:
    """Raises DefinitionError for a tuple of ints, which is a shape, with fewer names than that has axes."""
    shape = [as_int(size) for size in sizes]
    if len(names) < len(shape) and None not in shape:
        raise user_error(
            "a mesh needs one name per axis", f"names {shown(names)} for the shape {shown(tuple(shape))}",
            f"{len(shape)} names", f"Name every axis, or pass the ranks in a list: {shown(shape)}.",
        )  # fmt: skip


def _holds_ranks(devices: Any) -> bool:
    """Whether these are ranks and never a shape, however many names there are: tensors, arrays with dims, ranges."""
    return isinstance(devices, range) or (hasattr(devices, "tolist") and as_int(devices) is None)


def _shape(given: Any) -> tuple[int, ...]:
    return tuple(map(_rank, given)) if _is_list(given) else (_rank(given),)


def _values(devices: Any) -> Any:
    """The ranks in a tensor or an array."""
    kind = "meta" if getattr(devices, "is_meta", False) else str(getattr(devices, "layout", "torch.strided"))
    if kind != "torch.strided":
        raise user_error("a mesh is made of ranks", f"a {kind} tensor", "a dense one of ints", "Pass the ranks.")
    return devices.tolist()


def _count(devices: Any) -> int:
    """The number of entries, which are not looked at."""
    if hasattr(devices, "tolist"):
        return math.prod(devices.shape) if hasattr(devices, "shape") else len(devices)
    return len(devices) if _is_list(devices) else 1


def _listed(ranks: Any) -> Any:
    """`ranks=` as a list; what cannot be listed is returned as it is, for an error to show."""
    if not isinstance(ranks, Iterable) or isinstance(ranks, (str, bytes)):
        return ranks if not isinstance(ranks, int) else shown(ranks)
    try:
        if hasattr(ranks, "__len__"):
            _bounded(len(ranks))  # type: ignore[arg-type]
        return list(ranks)
    except TypeError:  # such as a tensor of no dims
        return shown(ranks)


def _is_list(value: Any) -> bool:
    return isinstance(value, (list, tuple, range))


def _rank(value: Any) -> int:
    found = as_int(value)
    if found is None:
        raise user_error(
            "a mesh is made of ranks",
            f"{shown(value)} ({type(value).__name__})",
            "ints in a list, nested lists or a tensor",
            "Pass a shape and names, or the ranks.",
        )
    return found


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


class Costs(NamedTuple):
    """A link per axis, and the operations and the bytes of memory per second of a rank."""

    links: tuple[Link, ...]
    flops: float
    memory: float


def read_costs(
    axes: Mapping[str, int], coordinates: Mapping[int, tuple[int, ...]], links: Any, flops: float | None,
    memory: float | None,
) -> Costs:  # fmt: skip
    """The costs of a mesh, from any form in which they may be given; `axes` are the axes' sizes.

    Raises DefinitionError for other forms, and for links of axes that the mesh does not have.
    """
    links = MACHINES.get(links, links) if isinstance(links, str) else links
    links = default_machine() if links is None else links
    found = _links_by_axis(axes, coordinates, links)
    usual = links if isinstance(links, Machine) else usual_machine(found)
    flops, memory = usual.flops if flops is None else flops, usual.memory if memory is None else memory
    for name, given, example in (("flops", flops, "flops=989e12 is an H100 in bfloat16."),
                                 ("memory", memory, "memory=3.35e12 is an H100.")):  # fmt: skip
        if not is_rate(given):
            what = "operations" if name == "flops" else "bytes"
            raise user_error(f"a mesh's {name}", shown(given), f"{what} per second, {RATES}", example)
    return Costs(found, float(flops), float(memory))


def usual_machine(links: Sequence[Link]) -> Machine:
    """The machine whose rates a mesh has that is given links alone."""
    return BYTES if all(link.is_bytes_only for link in links) else default_machine()


def _lines(coordinates: Mapping[int, tuple[int, ...]], axis: int) -> Iterable[list[int]]:
    """The groups of ranks that differ in coordinate `axis` only."""
    groups: dict[tuple[int, ...], list[int]] = {}
    for rank, place in coordinates.items():
        groups.setdefault((*place[:axis], *place[axis + 1 :]), []).append(rank)
    return groups.values()


def _links_by_axis(axes: Mapping[str, int], coordinates: Mapping[int, tuple[int, ...]], links: Any) -> tuple[Link, ...]:
    if isinstance(links, Link) or (isinstance(links, Machine) and links.inside == links.between):
        return (links if isinstance(links, Link) else links.inside,) * len(axes)
    if isinstance(links, Machine):
        return tuple(links.link(_lines(coordinates, axis)) for axis in range(len(axes)))
    return _named_links(axes, links)


def _named_links(axes: Mapping[str, int], links: Any) -> tuple[Link, ...]:
    named = isinstance(links, Mapping) and all(isinstance(link, Link) for link in links.values())
    if not named:
        raise user_error(
            "a mesh's links", shown(links),
            f"a Link, a Link for each of {tuple(axes)}, a Machine or one of {', '.join(map(repr, MACHINES))}",
            'links={"tp": Link(450e9, 5e-6)} gives bytes per second and seconds.',
        )  # fmt: skip
    idle = {name: default_machine().inside for name, size in axes.items() if size == 1}
    if not set(links) <= set(axes) or not set(axes) <= {*links, *idle}:
        raise user_error(
            "a mesh's links",
            f"links of {shown(tuple(links))}",
            f"one for each axis {tuple(axes)}",
            "Give each axis a link.",
        )
    found = {**idle, **links}
    return tuple(found[name] for name in axes)
