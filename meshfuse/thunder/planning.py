"""How the tensors between the regions of a trace lie: one plan of all regions, forward and backward."""

# pyright: reportMissingImports=false

from __future__ import annotations

from collections.abc import Iterable, Mapping
from typing import Any

from thunder.core.proxies import TensorProxy

from ..frontends.traced import TracedDefinition
from ..mesh import DeviceMesh
from ..runtime.world import World
from ..sharding.value import Sharding
from .collectives import Taken
from .prims import Layout, MeshPrims
from .regions import Partition, Region, is_annotation
from .translate import Translator

Locals = Mapping[str, Layout]  # of local tensors, by name of the proxy


def mesh_of(bsyms: Iterable[Any]) -> DeviceMesh:
    """The mesh that annotations of a trace are on; this rank alone where there are none."""
    found = (x.mesh for bsym in bsyms for x in bsym.flat_args if isinstance(x, Sharding))
    return next(found, None) or DeviceMesh([World.current().rank])


def locals_of(bsyms: Iterable[Any]) -> Locals:
    """What annotations say of local tensors."""
    found = {}
    for bsym in bsyms:
        if is_annotation(bsym):
            x, *layout = bsym.args
            local = x if bsym.sym.id is MeshPrims.MESH_SPLIT else bsym.output
            found[local.name] = Layout(*layout)
    return found


def planned(parts: Partition, mesh: DeviceMesh, taken: Taken) -> dict[str, Sharding]:
    """How each input and output of a region lies, by name of the proxy; with the collectives taken in, all tensors.

    What symbols outside of regions make or read is whole on every rank, but for local tensors, which lie as they are
    annotated. What only goes from region to region lies as the plan of them all leaves it.
    """
    known = {**locals_of(bsym for region in parts.regions for bsym in region.bsyms), **taken.planned}
    found = {name: layout.sharding for name, layout in known.items()}
    for region in parts.regions:
        for x in (*region.inputs, *region.outputs):
            found.setdefault(x.name, Sharding.replicated(mesh, x.ndim))
    if len(mesh.ranks) > 1 and len(parts.regions) > 1:
        found |= _between(parts, mesh, known, taken)
    return found


def _between(parts: Partition, mesh: DeviceMesh, known: Locals, taken: Taken) -> dict[str, Sharding]:
    """The shardings of what goes from region to region alone, in the plan of all; of all tensors with collectives."""
    joint = Translator(TracedDefinition(), taken=taken)
    inner: dict[str, int] = {}
    for region in parts.regions:
        for x in region.inputs:
            if x.name not in joint.values and x.name not in joint.locals:
                take(joint, x, known, Sharding.replicated(mesh, x.ndim))
        for bsym in region.bsyms:
            joint.write(bsym)
        inner |= _ended(joint, region, parts, known, mesh)
    shardings = joint.fd.compile().sharded.shardings
    every = {name: view.id for name, view in joint.values.items()} if taken.moves else {}
    kept = {**every, **inner}
    fixed = {*known, *parts.outside, *(x.name for region in parts.regions for x in region.inputs)}.difference(inner)
    return {name: shardings[view].reduced() for name, view in kept.items() if view in shardings and name not in fixed}


def _ended(joint: Translator, region: Region, parts: Partition, known: Locals, mesh: DeviceMesh) -> dict[str, int]:
    """Return what is read outside of regions; gives what is not, by name the tensor's number."""
    inner: dict[str, int] = {}
    for x in region.outputs:
        if x.name in known:
            joint.end(x, known[x.name].sharding)
        elif x.name in parts.outside:
            joint.values[x.name] = joint.end(x, Sharding.replicated(mesh, x.ndim))
        else:
            inner[x.name] = joint.values[x.name].id
    return inner


def take(to: Translator, x: TensorProxy, known: Locals, sharding: Sharding) -> None:
    """Make a proxy an input: a local one of the whole tensor that annotations say, any other one in its sharding."""
    if x.name in known:
        to.take_local(x, known[x.name])
    else:
        to.take(x, sharding)
