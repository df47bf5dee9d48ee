"""DTensors in, DTensors out: torch's placements as shardings, and shardings as placements."""

from __future__ import annotations

import functools
import itertools
from collections.abc import Collection, Sequence
from dataclasses import dataclass
from typing import Any, NamedTuple

import torch

from ..compiler import CompiledProgram
from ..definition.checks import mesh_of_torch
from ..definition.recording import Recording
from ..errors import ArgumentError, SourceLine, user_error
from ..mesh import DeviceMesh
from ..ops.values import TensorRef
from ..reshard.search import plan
from ..runtime.world import World
from ..sharding.layout import Layout, Split
from ..sharding.strided import Cut, cut_of, cuts_of_layout, factors_of, in_factors, layout_as_cut, without_single_ranks
from ..sharding.value import Sharding


@dataclass(frozen=True, slots=True)
class OutputSpec:
    """What makes a DTensor of a local output: the torch mesh, the placements and the global shape."""

    mesh: Any
    placements: tuple[Any, ...]
    shape: tuple[int, ...]


class GivenDTensor(NamedTuple):
    """What a DTensor tells of an input: its global shape, and how its dims are cut, if not as they are annotated."""

    shape: tuple[int, ...]
    cut: tuple[Layout, ...] | None


def is_dtensor(value: Any) -> bool:
    return isinstance(value, torch.Tensor) and hasattr(value, "placements") and hasattr(value, "to_local")


def local_parts(inputs: Sequence[Any]) -> list[Any]:
    """The inputs with this rank's own tensor in the place of each DTensor; autograd records nothing of them."""
    with torch.no_grad():
        return [settled(value.to_local()) if is_dtensor(value) else value for value in inputs]


def settled(local: torch.Tensor) -> torch.Tensor:
    """The tensor, once a collective of torch that still makes it (AsyncCollectiveTensor) is done."""
    wait = getattr(local, "wait", None)
    return local if wait is None else wait()


def dtensors_of(recording: Recording, inputs: Sequence[Any], line: SourceLine) -> dict[int, GivenDTensor]:
    """What the DTensors among the inputs tell, by tensor.

    Raises ArgumentError where placements are not as annotated, or torch numbers the ranks otherwise.
    """
    found = dict[int, GivenDTensor]()
    for ref, value in zip(recording.inputs, inputs, strict=False):
        if isinstance(ref, TensorRef) and is_dtensor(value):
            found[ref.id] = GivenDTensor(tuple(value.shape), _checked_cut(recording, ref.id, value, line))
    if found:
        World.current().check_number(line)
    return found


def _checked_cut(recording: Recording, tensor: int, value: Any, line: SourceLine) -> tuple[Layout, ...] | None:
    """How torch has cut the dims; None where that is as annotated."""
    made, annotation = recording.tensors[tensor], recording.placed(tensor)
    shape = tuple(value.shape)
    if len(shape) != made.type.ndim:
        return None  # The check of all arguments has a better error.
    if any(n not in (-1, m) for n, m in zip(made.type.shape, shape, strict=True)):
        raise user_error(
            f"tensor {made.label} (defined at {made.line}) has the wrong global shape", str(list(shape)),
            str(list(made.type.shape)), "Pass a DTensor of this shape.", line, ArgumentError,
        )  # fmt: skip
    mesh = mesh_of_torch(value.device_mesh)
    if annotation is None:
        wanted = Sharding.replicated(mesh, len(shape))
    else:
        wanted = annotation.sharding(made.name, shape).placement(shape)
    given = sharding_of(mesh, tuple(value.placements), shape)
    if given is not None and same_elements(given, wanted, shape):
        return None
    if given is None or not _same_axes(given, wanted, shape):
        raise user_error(
            f"tensor {made.label} (defined at {made.line}) is passed with other placements",
            f"{tuple(value.placements)} of shape {list(shape)} on {mesh}", f"{wanted} on {wanted.mesh}",
            "Redistribute the DTensor, or annotate the tensor so (fd.from_pytorch(dtensor) does).", line,
            ArgumentError,
        )  # fmt: skip
    return _renamed(given, wanted.mesh)


def _same_axes(given: Sharding, wanted: Sharding, shape: tuple[int, ...]) -> bool:
    """Whether the same axes cut the same dims in the same order, so that chunks differ by their edges alone."""
    if _grid(given.mesh) != _grid(wanted.mesh) or None in map(factors_of, given.dims):
        return False
    return same_elements(in_factors(given, shape), wanted, shape)


def _renamed(given: Sharding, mesh: DeviceMesh) -> tuple[Layout, ...]:
    """The layouts by the names that another mesh of the same grid has for the axes."""
    names = dict(zip(given.mesh.names, mesh.names, strict=True))
    return tuple([tuple([s._replace(axis=names.get(s.axis or "", s.axis)) for s in layout]) for layout in given.dims])


def sharding_of(mesh: DeviceMesh, placements: tuple[Any, ...], shape: tuple[int, ...]) -> Sharding | None:
    """The sharding that placements mean; None for any but Replicate, Shard and _StridedShard."""
    from torch.distributed.tensor import Replicate, Shard
    from torch.distributed.tensor.placement_types import _StridedShard

    if not {*map(type, placements)} <= {Shard, _StridedShard, Replicate}:
        return None
    dims: list[list[Cut]] = [[] for _ in shape]
    for axis, size, placement in zip(mesh.names, mesh.shape, placements, strict=True):
        cut = cut_of(Split(size, axis), placement)
        if cut is not None:
            dims[placement.dim % len(shape)].append(cut)
    return Sharding(mesh, [_named(tuple(cuts), n) for cuts, n in zip(dims, shape, strict=True)])


def _named(cuts: tuple[Cut, ...], n: int) -> Layout:
    """The layout of a dim that these cut, with axes of one rank where torch's placements name them."""
    made, named = layout_as_cut(cuts, n), tuple([cut.split for cut in cuts])
    return named if without_single_ranks(named) == made else made


@functools.lru_cache(maxsize=4096)
def same_elements(a: Sharding, b: Sharding, shape: tuple[int, ...]) -> bool:
    """Whether both shardings give every rank the same elements, whatever their axes are called."""
    same_ranks = set(a.mesh.ranks) == set(b.mesh.ranks)
    return same_ranks and all(a.runs(shape, rank) == b.runs(shape, rank) for rank in a.mesh.ranks)


def placements_of(
    sharding: Sharding, shape: Sequence[int], strided: Collection[Layout] | None = None
) -> tuple[Any, ...] | None:
    """torch's placements, one per mesh axis; None for sub-axes and what is unreduced.

    `strided`: the layouts whose axes may be in another order than the mesh's (`_StridedShard`); None for any.
    """
    from torch.distributed.tensor import Replicate

    names = sharding.mesh.names
    placements: list[Any] = [Replicate() for _ in names]
    for dim, layout in enumerate(sharding.dims):
        cuts = _whole_cuts(sharding.mesh, layout)
        if cuts is None or (strided is not None and layout not in strided and any(cut.chunks > 1 for cut in cuts)):
            return None
        for cut in cuts:
            placements[names.index(cut.split.axis or "")] = _shard(dim, cut.chunks)
    return tuple(placements) if not sharding.partial else None


def _shard(dim: int, chunks: int) -> Any:
    """torch's placement of an axis that cuts so many chunks of a dim."""
    from torch.distributed.tensor import Shard
    from torch.distributed.tensor.placement_types import _StridedShard

    return Shard(dim) if chunks == 1 else _StridedShard(dim, split_factor=chunks)


def placeable(sharding: Sharding, shape: tuple[int, ...], layouts: Collection[Layout]) -> Sharding:
    """The sharding itself if torch's placements can say it; else one that they can say.

    Of these it is one with the smallest shards, and of several such the one that takes least to reach. Axes stand in
    the mesh's order, or as the inputs have them, whose layouts are `layouts`: many of torch's ops take no other.
    """
    if placements_of(sharding, shape, layouts) is not None:
        return sharding
    mesh, reduced = sharding.mesh, sharding.reduced()
    axes = [Split(n, name) for n, name in zip(mesh.shape, mesh.names, strict=True)]
    found = list[tuple[int, float, Sharding]]()
    for places in itertools.product((None, *range(len(shape))), repeat=len(axes)):
        dims = [[axis for axis, place in zip(axes, places, strict=True) if place == dim] for dim in range(len(shape))]
        made = Sharding.make(mesh, [tuple(dim) for dim in dims], shape)
        path = plan(reduced, made, shape, 1) if placements_of(made, shape) is not None else None
        if path is not None:
            found.append((made.max_local_numel(shape), path.seconds, made))
    return min(found, key=lambda way: way[:2])[2]


def as_dtensor(sharding: Sharding, shape: tuple[int, ...]) -> Sharding:
    """The sharding as a DTensor with its placements has it; itself where no placements say it."""
    found = [_whole_cuts(sharding.mesh, layout) for layout in sharding.dims]
    if None in found:
        return sharding
    made = [layout_as_cut(cuts or (), n) for cuts, n in zip(found, shape, strict=True)]
    pairs = zip(sharding.dims, made, strict=True)
    return sharding.with_dims([old if without_single_ranks(old) == new else new for old, new in pairs])


def _whole_cuts(mesh: DeviceMesh, layout: Layout) -> tuple[Cut, ...] | None:
    """The cuts that a layout of whole axes means; None for others."""
    whole = all(split.size == mesh.axis_size(split.axis or "") for split in layout if split.bound)
    return cuts_of_layout(layout, mesh.names) if whole else None


def output_specs(compiled: CompiledProgram, inputs: Sequence[Any], line: SourceLine) -> list[OutputSpec]:
    """How each output becomes a DTensor on the inputs' torch mesh. Raises ArgumentError where none can."""
    meshes = {_grid(mesh_of_torch(v.device_mesh)): v.device_mesh for v in inputs if is_dtensor(v)}
    graph, specs = compiled.graph, []
    for tensor, planned in zip(graph.outputs, compiled.output_shardings(), strict=True):
        made, shape = graph.tensors[tensor], graph.shape(tensor)
        sharding = planned if graph.annotations else _whole_beside(inputs, planned)
        placements, mesh = placements_of(sharding, shape), meshes.get(_grid(sharding.mesh))
        assert placements is None or as_dtensor(sharding, shape) == sharding
        if placements is None or mesh is None:
            needed = "placements that DTensor has" if mesh else f"one of {[*meshes.values()]}"
            raise user_error(
                f"output {made.label} (made at {made.line}) cannot be a DTensor",
                f"{sharding} of shape {list(shape)} on {sharding.mesh}", needed,
                "Annotate the output otherwise, or pass plain shards.", line, ArgumentError,
            )  # fmt: skip
        specs.append(OutputSpec(mesh, placements, shape))
    return specs


def _whole_beside(inputs: Sequence[Any], sharding: Sharding) -> Sharding:
    """What is whole on the one axis of the world, where nothing says a mesh, as on the first DTensor's mesh."""
    mesh = next(mesh_of_torch(value.device_mesh) for value in inputs if is_dtensor(value))
    same = set(mesh.ranks) == set(sharding.mesh.ranks)
    return Sharding.replicated(mesh, sharding.ndim) if same and not sharding.used() else sharding


def _grid(mesh: DeviceMesh) -> tuple[tuple[int, ...], tuple[int, ...]]:
    return mesh.shape, mesh.ranks


def wrap_outputs(outputs: Sequence[Any], specs: Sequence[OutputSpec]) -> list[Any]:
    """The outputs as DTensors; None where the rank is not part of an output's mesh."""
    pairs = zip(outputs, specs, strict=True)
    with torch.no_grad():
        return [None if local is None else _wrapped(local, spec) for local, spec in pairs]


def _wrapped(local: torch.Tensor, spec: OutputSpec) -> Any:
    from torch.distributed.tensor import DTensor

    return DTensor.from_local(
        local, spec.mesh, spec.placements, run_check=False, shape=torch.Size(spec.shape),
        stride=_strides(local, spec.shape),
    )  # fmt: skip


def _strides(local: torch.Tensor, shape: Sequence[int]) -> tuple[int, ...]:
    """The strides of a dense global tensor whose dims have the memory order of the local one's."""
    order = sorted(range(len(shape)), key=lambda d: (-local.stride(d), d))
    strides, step = [0] * len(shape), 1
    for dim in reversed(order):
        strides[dim], step = step, step * shape[dim]
    return tuple(strides)
