"""Thunder's own collectives over an axis of the executor's mesh, taken into regions as reshards.

A trace is one rank's program. Along the axes of data parallelism its tensors differ from rank to rank, and a definition
has only tensors that are one for all. Regions are therefore planned on the mesh of tensor parallelism alone, and then
written on the whole mesh with the places that this plan gives: every tensor is said to be equal along the other axes,
and nothing but the collectives moves along these (`moves_alone` checks that). A gather is a `set` to the whole tensor,
and a reduction is a sum over a new dim, of which each rank has its own row.
"""

# pyright: reportMissingImports=false

from __future__ import annotations

from collections import defaultdict
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any

import torch.distributed as dist
from thunder.core.prims import PrimIDs
from thunder.core.proxies import TensorProxy
from thunder.distributed.prims import DistributedReduceOps
from thunder.distributed.prims import PrimIDs as DistPrims

from ..compiler import CompiledProgram
from ..mesh import DeviceMesh
from ..resharding import Reshard
from ..runtime.world import World
from ..sharding.layout import Split
from ..sharding.value import Sharding
from .prims import Layout, MeshPrims
from .regions import Partition, local_names

# By id of a symbol the prim that it is. Thunder's torch executor has claimed them when regions are made.
_KINDS = {
    "torch_all_gather_prim_impl": DistPrims.ALL_GATHER, "torch_all_reduce_prim_impl": DistPrims.ALL_REDUCE,
    "torch_reduce_scatter_prim_impl": DistPrims.REDUCE_SCATTER, "torch_wait_prim_impl": DistPrims.WAIT,
}  # fmt: skip


def kind_of(bsym: Any) -> DistPrims | None:
    """Which of Thunder's collectives, or its wait, a symbol is; None for any other."""
    found = _KINDS.get(bsym.sym.id, bsym.sym.id)
    return found if found in _KINDS.values() else None


@dataclass(frozen=True, slots=True)
class Move:
    """A collective along an axis: `dim` is gathered, or scattered; None for an all-reduce."""

    axis: str
    dim: int | None
    gathers: bool


@dataclass(frozen=True, slots=True)
class Taken:
    """The collectives that are taken in, and what that says of local tensors.

    moves: by id of the bound symbol.
    others: ids of what is taken in with them: waits, and ops on a gradient between its `mesh_local` and its reduction.
    planned: by name, local tensors as a plan without the collectives has them.
    placed: the same on the whole mesh, as ranks have them.
    """

    moves: dict[int, Move] = field(default_factory=dict)
    others: set[int] = field(default_factory=set)
    planned: dict[str, Layout] = field(default_factory=dict)
    placed: dict[str, Layout] = field(default_factory=dict)

    def __contains__(self, bsym: Any) -> bool:
        return id(bsym) in self.moves or id(bsym) in self.others


@dataclass(frozen=True, slots=True)
class WholeMesh:
    """The executor's mesh: all axes, those of Thunder's data parallelism among them."""

    mesh: DeviceMesh

    def axis_of(self, group: Any) -> str | None:
        """The axis that a process group of torch's goes along from this rank; None where there is none."""
        rank, ranks = World.current().rank, tuple(dist.get_process_group_ranks(group))
        lines = {name: self.mesh.group(rank, ((name, 1, self.mesh.axis_size(name)),)) for name in self.mesh.names}
        return next((name for name, line in lines.items() if line == ranks and len(line) > 1), None)

    def lifted(self, sharding: Sharding) -> Sharding:
        """A sharding over some of the axes, on the whole mesh."""
        return Sharding(self.mesh, sharding.dims)

    def split(self, layout: Layout, axis: str, dim: int | None) -> Layout:
        """The layout on the whole mesh, with a dim split along the axis as well."""
        lifted = self.lifted(layout.sharding)
        if dim is None:
            return layout._replace(sharding=lifted)
        more = Split(self.mesh.axis_size(axis), axis)
        dims = [(*old, more) if d == dim else old for d, old in enumerate(lifted.dims)]
        return layout._replace(sharding=Sharding.make(self.mesh, dims, layout.shape))

    def placed(self, plan: Mapping[str, Sharding], parts: Partition, taken: Taken) -> dict[str, Sharding]:
        """A plan on the whole mesh, by name; local tensors lie as their ranks have them."""
        known = {b.args[0].name: b.args[1] for region in parts.regions for b in region.bsyms if _splits(b)}
        found = {name: self.lifted(sharding) for name, sharding in {**plan, **known}.items()}
        return found | {name: layout.sharding for name, layout in taken.placed.items()}

    def taken(self, bsyms: Sequence[Any], mesh: DeviceMesh) -> Taken:
        """The collectives of a trace that can be taken in; `mesh` is that of its annotations."""
        readers, makers = defaultdict(list), {}
        for bsym in bsyms:
            makers.update({x.name: bsym for x in bsym.flat_proxy_outs})
            for x in bsym.flat_proxy_args:
                readers[x.name].append(bsym)
        found = Taken()
        for bsym in bsyms:
            axis = self._axis(bsym, mesh)
            waits = readers[bsym.output.name] if axis is not None else []
            if axis is not None and [kind_of(w) for w in waits] == [DistPrims.WAIT]:
                self._take(found, bsym, waits[0], axis, (readers, makers, mesh, local_names(bsyms)))
        return found

    def _axis(self, bsym: Any, mesh: DeviceMesh) -> str | None:
        """The axis of a collective that can be taken in; None for any other symbol."""
        if kind_of(bsym) in (None, DistPrims.WAIT):
            return None
        reduces = [arg for arg in bsym.flat_args if isinstance(arg, DistributedReduceOps)]
        group = next(arg for arg in bsym.flat_args if isinstance(arg, dist.ProcessGroup))
        axis = self.axis_of(group)
        is_sum = all(op is DistributedReduceOps.SUM for op in reduces)
        return axis if is_sum and (len(mesh.ranks) == 1 or axis not in mesh.names) else None

    def _take(self, found: Taken, bsym: Any, wait: Any, axis: str, trace: tuple[Any, ...]) -> None:
        readers, makers, mesh, local_to_ranks = trace
        source, result = bsym.args[0], wait.output
        dim = None if kind_of(bsym) is DistPrims.ALL_REDUCE else (_dim_of(bsym) or 0)
        gathers = kind_of(bsym) is DistPrims.ALL_GATHER
        whole, local = (result, source) if gathers else (source, result)
        between = [] if gathers else list(_between(source, makers))
        plain = Layout(Sharding.replicated(mesh, whole.ndim), tuple(whole.shape), local.name)
        layout = _layout_of(readers[result.name] if gathers else [*between, makers.get(_first(source, makers))])
        if layout is None and whole.name in local_to_ranks:
            return  # It is cut, and something stands between it and what says how.
        layout = plain if layout is None else layout
        found.moves[id(bsym)] = Move(axis, dim, gathers)
        found.others.update(map(id, (wait, *between)))
        found.planned[local.name] = layout
        found.placed[local.name] = self.split(layout, axis, dim)


def _splits(bsym: Any) -> bool:
    return bsym.sym.id is MeshPrims.MESH_SPLIT


def _dim_of(bsym: Any) -> int | None:
    """The dim of a gather or a scatter."""
    given = [arg for arg in bsym.args[1:] if isinstance(arg, int) and not isinstance(arg, bool)]
    return given[0] if given else bsym.kwargs.get("dim")


def _between(x: TensorProxy, makers: dict[str, Any]) -> Iterator[Any]:
    """The ops that a gradient has gone through since its `mesh_local`: divisions by a number."""
    bsym = makers.get(x.name)
    while bsym is not None and _divides(bsym):
        yield bsym
        bsym = makers.get(bsym.flat_proxy_args[0].name)


def _divides(bsym: Any) -> bool:
    """Whether a symbol divides a tensor by a number."""
    name = getattr(bsym.sym.id, "name", bsym.sym.id)
    return name in (PrimIDs.DIV.name, "torch.true_divide", "torch.div") and len(bsym.flat_proxy_args) == 1


def _first(x: TensorProxy, makers: dict[str, Any]) -> str:
    """The name of what a gradient is before those divisions."""
    between = list(_between(x, makers))
    return between[-1].flat_proxy_args[0].name if between else x.name


def _layout_of(bsyms: Sequence[Any]) -> Layout | None:
    """What the annotation among some symbols says."""
    kinds = (MeshPrims.MESH_SPLIT, MeshPrims.MESH_LOCAL)
    return next((Layout(*b.args[1:]) for b in bsyms if b is not None and b.sym.id in kinds), None)


def moves_alone(compiled: CompiledProgram, axes: set[str], moved: set[int], rank: int) -> bool:
    """Whether no other tensors than these are split, summed or sent along the axes of a whole mesh."""
    resharded = compiled.resharded
    for value in resharded.values:
        used = {s.axis for layout in (*value.sharding.dims, value.sharding.partial) for s in layout}
        if value.tensor not in moved and used & axes:
            return False
    for step in resharded.statements:
        if isinstance(step, Reshard) and resharded.values[step.source].tensor not in moved:
            mesh = resharded.values[step.source].sharding.mesh
            places = [mesh.names.index(axis) for axis in axes]
            group = step.step.group(rank) if rank in mesh else ()
            if len({tuple(mesh.coordinate(r)[p] for p in places) for r in group}) > 1:
                return False
    return True
