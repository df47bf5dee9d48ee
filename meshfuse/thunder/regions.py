"""Which symbols of a trace become definitions: a trace as single symbols and regions, in an order that may run.

Values of a trace are whole tensors, or local ones: what a cut weight is before its `mesh_split`, what `mesh_local`
makes, and what Thunder computes of these. Ops on local values stay torch's.
"""

# pyright: reportMissingImports=false

from __future__ import annotations

from collections import defaultdict
from collections.abc import Callable, Collection, Container, Iterator, Sequence
from dataclasses import dataclass
from typing import Any

from thunder.core.prims import OpTags, PrimIDs
from thunder.core.proxies import TensorProxy
from thunder.core.symbol import BoundSymbolTag

from .prims import MeshPrims

_SIDE_EFFECTS = (PrimIDs.COPY_, PrimIDs.UPDATE_ALIASES, PrimIDs.RETURN, PrimIDs.SINK, PrimIDs.PRINT)


@dataclass(frozen=True, slots=True, eq=False)
class Region:
    """Symbols that become one definition, with the tensors that they read and those that are read of them."""

    bsyms: tuple[Any, ...]
    inputs: tuple[TensorProxy, ...]
    outputs: tuple[TensorProxy, ...]


@dataclass(frozen=True, slots=True)
class Partition:
    """A trace as symbols and regions in order.

    outside: names of the tensors that symbols outside of regions read, the trace's results among them.
    """

    items: tuple[Any, ...]
    outside: frozenset[str]

    @property
    def regions(self) -> tuple[Region, ...]:
        return tuple(item for item in self.items if isinstance(item, Region))


def partition(bsyms: Sequence[Any], can_fuse: Callable[[Any], bool], taken: Container[Any] = ()) -> Partition:
    """Cut a trace in as few regions as its order of needs allows; forward and backward have their own.

    taken: collectives of Thunder's that regions have as well, with what belongs to them.
    """
    local = local_names(bsyms)

    def fuses(bsym: Any) -> bool:
        return is_annotation(bsym) or bsym in taken or (can_fuse(bsym) and not _reads(bsym, local))

    groups = [group for part in _parts(bsyms) for group in _grouped(part, fuses)]
    kept = _kept(groups)
    outside = frozenset(
        x.name for (_, bsyms), is_kept in zip(groups, kept, strict=True) if not is_kept
        for bsym in bsyms for x in bsym.flat_proxy_args
    )  # fmt: skip
    return Partition(tuple(_items(_split_in_place(groups, kept, outside), kept, outside)), outside)


def is_annotation(bsym: Any) -> bool:
    """Whether a symbol goes from local tensors to whole ones, or back."""
    return bsym.sym.id in (MeshPrims.MESH_SPLIT, MeshPrims.MESH_LOCAL)


def local_names(bsyms: Sequence[Any]) -> set[str]:
    """The names of all local values."""
    found: set[str] = set()
    for bsym in reversed(bsyms):  # what a mesh_split is made of
        if bsym.sym.id is MeshPrims.MESH_SPLIT or (bsym.sym.id is not MeshPrims.MESH_LOCAL and _makes(bsym, found)):
            found.update(x.name for x in _tensors(bsym.flat_proxy_args))
    for bsym in bsyms:  # what is made of a mesh_local
        if bsym.sym.id is MeshPrims.MESH_LOCAL or (bsym.sym.id is not MeshPrims.MESH_SPLIT and _reads(bsym, found)):
            found.update(x.name for x in bsym.flat_proxy_outs)
    return found


def _tensors(proxies: Sequence[Any]) -> list[TensorProxy]:
    return [x for x in proxies if isinstance(x, TensorProxy)]


def _reads(bsym: Any, names: set[str]) -> bool:
    return any(x.name in names for x in bsym.flat_proxy_args)


def _makes(bsym: Any, names: set[str]) -> bool:
    return any(x.name in names for x in bsym.flat_proxy_outs)


def _parts(bsyms: Sequence[Any]) -> Iterator[list[Any]]:
    """Stretches within which symbols may change places: forward, then backward, each cut at side effects."""
    for backward in (False, True):
        part: list[Any] = []
        for bsym in bsyms:
            if _is_backward(bsym) == backward:
                part.append(bsym)
                if _has_side_effects(bsym):
                    yield part
                    part = []
        yield part


def _is_backward(bsym: Any) -> bool:
    return BoundSymbolTag.BACKWARD in bsym.tags or bsym.sym.id in (PrimIDs.GET_GRAD, PrimIDs.RETURN)


def _has_side_effects(bsym: Any) -> bool:
    return bsym.sym.id in _SIDE_EFFECTS or OpTags.IN_PLACE in (bsym.sym.tags or ())


def _grouped(bsyms: Sequence[Any], fuses: Callable[[Any], bool]) -> Iterator[tuple[bool, list[Any]]]:
    """(whether it is a region, its symbols): in turn all symbols of one kind that can run by then."""
    waiting, missing = list(bsyms), _counts(bsyms)
    kinds = {id(bsym): fuses(bsym) for bsym in bsyms}
    region = False
    while waiting:
        taken = _ready(waiting, missing, lambda bsym, region=region: kinds[id(bsym)] == region)
        if taken:
            yield region, taken
        done = {id(bsym) for bsym in taken}
        waiting = [bsym for bsym in waiting if id(bsym) not in done]
        region = not region


def _counts(bsyms: Sequence[Any]) -> dict[str, int]:
    """By name how many symbols still have to make it: a symbol that returns an argument makes nothing."""
    found: dict[str, int] = defaultdict(int)
    for bsym in bsyms:
        for name in _made(bsym):
            found[name] += 1
    return found


def _made(bsym: Any) -> set[str]:
    read = {x.name for x in bsym.flat_proxy_args}
    return {x.name for x in bsym.flat_proxy_outs} - read


def _ready(waiting: Sequence[Any], missing: dict[str, int], wanted: Callable[[Any], bool]) -> list[Any]:
    """The symbols that can run, in order, of those wanted; side effects wait for all before them."""
    taken: list[Any] = []
    for place, bsym in enumerate(waiting):
        blocked = any(missing[x.name] for x in bsym.flat_proxy_args)
        if wanted(bsym) and not blocked and not (_has_side_effects(bsym) and len(taken) < place):
            taken.append(bsym)
            for name in _made(bsym):
                missing[name] -= 1
    return taken


def _kept(groups: Sequence[tuple[bool, list[Any]]]) -> list[bool]:
    """Which groups are regions: not those of one op on what is whole already, nor those without a tensor to read."""
    made: set[str] = set()
    kept = []
    for region, bsyms in groups:
        region = region and _is_worth_it(bsyms, made)
        kept.append(region)
        if region:
            made.update(x.name for bsym in bsyms for x in bsym.flat_proxy_outs)
    return kept


def _is_worth_it(bsyms: Sequence[Any], made: set[str]) -> bool:
    names = {x.name for bsym in bsyms for x in _tensors(bsym.flat_proxy_args)}
    own = {name for bsym in bsyms for name in _made(bsym)}
    if any(map(is_annotation, bsyms)):
        return True
    return bool(names - own) and (len(bsyms) > 1 or bool(names & made))


def _split_in_place(
    groups: Sequence[tuple[bool, list[Any]]], kept: Sequence[bool], outside: Collection[str]
) -> list[list[Any]]:
    """The symbols of each group, where each region makes the whole weights that it reads of local ones by itself: what
    goes on to the backward is the latter. A mesh_split does nothing but say what a tensor is.
    """
    every = [bsym for _, bsyms in groups for bsym in bsyms if bsym.sym.id is MeshPrims.MESH_SPLIT]
    free = {bsym.output.name: bsym for bsym in every if bsym.output.name not in outside}
    found = []
    for (_, bsyms), is_kept in zip(groups, kept, strict=True):
        own = [bsym for bsym in bsyms if bsym not in free.values()] if is_kept else bsyms
        found.append(list(_with_splits(own, free)) if is_kept else own)
    return found


def _with_splits(bsyms: Sequence[Any], free: dict[str, Any]) -> Iterator[Any]:
    """The symbols, with each mesh_split in front of the first that reads its result."""
    written: set[str] = set()
    for bsym in bsyms:
        for x in bsym.flat_proxy_args:
            if x.name in free and x.name not in written:
                written.add(x.name)
                yield free[x.name]
        yield bsym


def _items(groups: Sequence[list[Any]], kept: Sequence[bool], outside: Collection[str]) -> Iterator[Any]:
    readers: dict[str, set[int]] = defaultdict(set)
    for number, bsyms in enumerate(groups):
        for bsym in bsyms:
            for x in bsym.flat_proxy_args:
                readers[x.name].add(number)
    for number, bsyms in enumerate(groups):
        if not kept[number]:
            yield from bsyms
        elif bsyms:
            yield _region(bsyms, {name for name, found in readers.items() if found - {number}}, outside)


def _region(bsyms: Sequence[Any], read_by_others: set[str], outside: Collection[str]) -> Region:
    made = {name: None for bsym in bsyms for name in _made(bsym)}
    free = {b.output.name for b in bsyms if b.sym.id is MeshPrims.MESH_SPLIT and b.output.name not in outside}
    read = {x.name: x for bsym in bsyms for x in _tensors(bsym.flat_proxy_args) if x.name not in made}
    outs = {x.name: x for bsym in bsyms for x in _tensors(bsym.flat_proxy_outs) if x.name in made}
    ends = [x for name, x in outs.items() if name in read_by_others and name not in free]
    return Region(tuple(bsyms), tuple(read.values()), tuple(ends))
