"""Parameters as they lie on ranks: DTensors on real ranks, whole plain tensors where ranks are simulated."""

from __future__ import annotations

import os
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field, replace
from datetime import timedelta
from typing import Any

import torch
import torch.distributed as dist
from torch import nn

from ..definition.annotation import layouts_of_spec
from ..errors import ArgumentError, SourceLine, user_error
from ..executor.dtensor import placements_of
from ..executor.spmd import sum_of_bits
from ..host_ir import digest_of
from ..mesh import DeviceMesh
from ..runtime.environment import interface_of
from ..runtime.world import World
from ..sharding.data import shard
from ..sharding.value import Sharding
from .fsdp import without_axes
from .plans import ModulePlan, Spec


@dataclass(frozen=True, slots=True)
class Place:
    """How a tensor lies: its sharding, and for DTensors torch's mesh and placements; without these it is whole."""

    sharding: Sharding
    torch_mesh: Any = None
    placements: tuple[Any, ...] = ()
    _specs: dict[tuple[Any, ...], Any] = field(default_factory=dict, compare=False, repr=False)

    def wrapped(self, local: torch.Tensor, shape: Sequence[int]) -> torch.Tensor:
        """A rank's shard as the tensor that a user sees."""
        if self.torch_mesh is None:
            return local
        return dtensor_of(local, self.spec(tuple(shape), local.dtype))

    def spec(self, shape: tuple[int, ...], dtype: torch.dtype) -> Any:
        """What a DTensor of this shape says of itself."""
        found = self._specs.get((shape, dtype))
        if found is None:
            found = self._specs[shape, dtype] = _spec(self.torch_mesh, self.placements, shape, dtype)
        return found

    def part(self, whole: torch.Tensor) -> torch.Tensor:
        """This rank's shard of a whole tensor; itself where ranks are simulated."""
        return whole if self.torch_mesh is None else shard(whole, self.sharding, World.current().rank)

    def local_shape(self, shape: Sequence[int]) -> tuple[int, ...]:
        """The shape of this rank's shard."""
        if self.torch_mesh is None:
            return tuple(shape)
        runs = self.sharding.runs(shape, World.current().rank)
        return tuple(sum(b - a for a, b in part) for part in runs)


def dtensor_of(local: torch.Tensor, spec: Any) -> torch.Tensor:
    """What from_local makes, without its checks."""
    from torch.distributed.tensor import DTensor

    return DTensor.__new__(DTensor, local, spec, requires_grad=False)  # Its __init__ does nothing, in three wrappers.


def _spec(torch_mesh: Any, placements: tuple[Any, ...], shape: tuple[int, ...], dtype: torch.dtype) -> Any:
    """What a DTensor says of itself."""
    from torch.distributed.tensor._dtensor_spec import DTensorSpec, TensorMeta

    return DTensorSpec(torch_mesh, placements, TensorMeta(torch.Size(shape), dense_strides(shape), dtype))


def dense_strides(shape: Sequence[int]) -> tuple[int, ...]:
    """Row-major strides."""
    strides, step = [0] * len(shape), 1
    for dim in reversed(range(len(shape))):
        strides[dim], step = step, step * shape[dim]
    return tuple(strides)


def placed(name: str, sharding: Sharding, shape: Sequence[int], torch_mesh: Any, line: SourceLine) -> Place:
    """Where a DTensor of this sharding lies. Raises ArgumentError where torch has no placements for that."""
    placements = placements_of(sharding, tuple(shape))
    uneven = any(_is_cut_unevenly(layout, n) for layout, n in zip(sharding.dims, shape, strict=True))
    if placements is None or uneven:
        raise user_error(
            f"{name} of shape {list(shape)} cannot be a DTensor", f"{sharding} on {sharding.mesh}",
            "whole axes; where several cut one dim, they must divide it", "Cut another dim.", line, ArgumentError,
        )  # fmt: skip
    return Place(sharding, torch_mesh, placements)


class Places:
    """Where tensors of a module lie, on real ranks or on simulated ones.

    shapes: the global shapes of parameters, by name.
    unset: the memory of parameters that were on meta, until something runs.
    """

    def __init__(self, plan: ModulePlan, device: torch.device, torch_mesh: Any, line: SourceLine) -> None:
        self.plan, self.device, self.line = plan, device, line
        self.shapes: dict[str, tuple[int, ...]] = {}
        self.unset: list[torch.Tensor] = []
        self.is_simulated = World.current().size == 1
        self.torch_mesh = torch_mesh

    def of_parameter(self, name: str, shape: Sequence[int]) -> Place:
        """Where a parameter lies. Raises ArgumentError where torch has no placements for that."""
        spec = self.plan.spec(name, len(shape))
        return self.of_spec(name, spec, shape)

    def of_spec(self, name: str, spec: Spec, shape: Sequence[int]) -> Place:
        """Where a tensor of this spec lies."""
        layouts = layouts_of_spec(name, self.plan.mesh, spec, len(shape), self.line)
        return self.of_sharding(name, Sharding.make(self.plan.mesh, layouts, tuple(shape)), shape)

    def of_sharding(self, name: str, sharding: Sharding, shape: Sequence[int]) -> Place:
        """Where a tensor of this sharding lies."""
        return Place(sharding) if self.torch_mesh is None else placed(name, sharding, shape, self.torch_mesh, self.line)

    def of_terms(self, name: str, axes: Sequence[str]) -> Place:
        """Where a parameter's gradient lies of which ranks along these axes have terms."""
        shape = self.shapes[name]
        found = self.of_spec(name, without_axes(self.plan.spec(name, len(shape)), axes), shape)
        if found.torch_mesh is None:
            return found
        from torch.distributed.tensor import Partial

        pairs = zip(self.plan.mesh.names, found.placements, strict=True)
        return replace(found, placements=tuple(Partial() if axis in axes else placed for axis, placed in pairs))


def _is_cut_unevenly(layout: Any, n: int) -> bool:
    """Whether several axes cut a dim that they do not divide: torch then cuts in turn."""
    ranks, axes = 1, 0
    for split in layout:
        if split.bound:
            ranks, axes = ranks * (split.size or 1), axes + 1
    return axes > 1 and n % ranks != 0


def place_mesh_of(mesh: DeviceMesh, given: Any, device: torch.device, without: str = "") -> Any:
    """torch's mesh of the same ranks, that which was given if there is one; None where ranks are simulated.

    without: an axis of which this rank has one coordinate; None where there is no other.
    """
    if World.current().size == 1:
        return None
    found = given if hasattr(given, "get_group") else torch_mesh_of(mesh, device)
    kept = tuple(name for name in mesh.names if name != without)
    return (found[kept] if kept else None) if without else found


def torch_mesh_of(mesh: DeviceMesh, device: torch.device) -> Any:
    """torch's mesh of the same ranks; torch's default process group is made if there is none."""
    from torch.distributed.device_mesh import DeviceMesh as TorchMesh

    if not dist.is_initialized():
        join_default_group(World.current(), device)
    ranks = torch.tensor(mesh.ranks).reshape(mesh.shape)
    return TorchMesh(device.type, ranks, mesh_dim_names=mesh.names)


def join_default_group(world: World, device: torch.device, seconds: float | None = None) -> None:
    """Make torch's default process group of the world's ranks, which may have been made and left before.

    seconds: the limit of its waits; None for torch's own.
    """
    backend = "nccl" if device.type == "cuda" else "gloo"
    if world.place.one_host:
        os.environ.setdefault("GLOO_SOCKET_IFNAME", "lo")
    elif name := interface_of(world.place.own_address):
        os.environ.setdefault("GLOO_SOCKET_IFNAME", name)
    if world.default_groups:
        _forget_meshes()
    # The keys by which ranks found each other before are still in the store.
    store = dist.PrefixStore(f"meshfuse.dtensor/{world.default_groups}", world.store)
    world.default_groups += 1
    limit = None if seconds is None else timedelta(seconds=seconds)
    dist.init_process_group(backend, store=store, rank=world.rank, world_size=world.size, timeout=limit)


def _forget_meshes() -> None:
    """Clear what torch keeps of ops on DTensors: by equal meshes, and so with the groups that are gone."""
    from torch.distributed.tensor import _redistribute, debug

    debug._clear_python_sharding_prop_cache()
    debug._clear_fast_path_sharding_prop_cache()
    kept: Any = getattr(_redistribute, "_gen_transform_infos", None)
    if hasattr(kept, "cache_clear"):
        kept.cache_clear()


def connect_again(places: Places) -> None:
    """Let torch's mesh, and all DTensors on it, use the groups of this thread's world; the old ones are gone."""
    if places.torch_mesh is not None:
        places.torch_mesh.__dict__.update(torch_mesh_of(places.plan.mesh, places.device).__dict__)


def check_world(mesh: DeviceMesh, line: SourceLine, who: str = "parallelize") -> None:
    """Raises ArgumentError where the mesh is not that of the ranks which a launcher started."""
    size = World.current().size
    if size > 1 and sorted(mesh.ranks) != list(range(size)):
        raise user_error(
            f"{who}: a mesh of other ranks than the job has", f"{mesh}", f"all of the ranks 0 to {size - 1}",
            f"Start {len(mesh.ranks)} ranks, or make the mesh of these.", line, ArgumentError,
        )  # fmt: skip


def show_unset(module: nn.Module, places: Places) -> None:
    """Fill parameters that nobody has loaded or initialised with NaN, so that what is computed of them shows it.

    Before the first call, and not when they are made: a model on meta that is only planned takes no memory.
    """
    unset = {local.data_ptr(): local for local in places.unset if local.view(-1)[0].isnan()}
    places.unset.clear()
    for parameter in module.parameters() if unset else ():
        found = unset.get(getattr(parameter, "_local_tensor", parameter).data_ptr())
        if found is not None:
            found.fill_(float("nan"))


def place_parameters(module: nn.Module, places: Places) -> dict[str, Place]:
    """Put this rank's shards in the place of all parameters, by name; buffers move to the device.

    Parameters on meta get memory without numbers.
    """
    places.shapes.update((name, tuple(p.shape)) for name, p in module.named_parameters())
    found = {name: places.of_parameter(name, p.shape) for name, p in module.named_parameters()}
    made: dict[int, nn.Parameter] = {}
    for name, parameter in module.named_parameters():
        made[id(parameter)] = _cut(parameter, found[name], places)
    for part in module.modules():
        for name, parameter in part._parameters.items():
            if parameter is not None:
                part._parameters[name] = made[id(parameter)]
        for name, buffer in part._buffers.items():
            if buffer is not None and not buffer.is_meta:
                part._buffers[name] = buffer.to(places.device)
    return found


def in_parts(module: nn.Module, placed: Mapping[str, Place], tensors: dict[str, Any], prefix: str) -> None:
    """Have this rank's parts stand for whole plain tensors of parameters, by the names that state dicts have."""
    places = {
        id(p): placed[name] for name, p in module.named_parameters() if name in placed and hasattr(p, "placements")
    }
    for name, parameter in module.named_parameters(prefix.removesuffix("."), remove_duplicate=False):
        whole: Any = tensors.get(name)
        place = places.get(id(parameter))
        if place is not None and type(whole) in (torch.Tensor, nn.Parameter) and whole.shape == parameter.shape:
            tensors[name] = place.wrapped(place.part(whole.detach()).to(parameter.device).clone(), whole.shape)


def check_placed(module: nn.Module, placed: Mapping[str, Place], line: SourceLine) -> None:
    """Raises ArgumentError for parameters on real ranks that nobody has put there."""
    for name, parameter in module.named_parameters():
        place = placed.get(name)
        if place is None or (place.torch_mesh is not None and not hasattr(parameter, "placements")):
            raise user_error(
                f"parameter {name} is not one that {type(module).__name__} was parallelized with",
                f"shape {list(parameter.shape)}", "the parameters that it had then, as DTensors of the ranks",
                "Add adapters, replace modules, tie and untie weights before mf.parallelize.", line, ArgumentError,
            )  # fmt: skip


def _unset(shape: Sequence[int], dtype: torch.dtype, places: Places) -> torch.Tensor:
    """A tensor that is to be loaded or initialised; its first number says that it is not."""
    if not (dtype.is_floating_point or dtype.is_complex):
        return torch.zeros(tuple(shape), dtype=dtype, device=places.device)
    made = torch.empty(tuple(shape), dtype=dtype, device=places.device)
    if made.numel():
        made.view(-1)[0] = float("nan")
        places.unset.append(made)
    return made


def _cut(parameter: nn.Parameter, place: Place, places: Places) -> nn.Parameter:
    if place.torch_mesh is None and not parameter.is_meta and parameter.device == places.device:
        return parameter
    shape = tuple(parameter.shape)
    if parameter.is_meta:
        local = _unset(place.local_shape(shape), parameter.dtype, places)
    else:
        local = place.part(parameter.detach()).to(places.device).clone()
    return nn.Parameter(place.wrapped(local, shape), requires_grad=parameter.requires_grad)


def check_same_weights(module: nn.Module, ranks: Sequence[int], who: str) -> None:
    """Raises RankError where ranks have different parameters: they would be parts of different models.

    who: those ranks in words.
    """
    world = World.current()
    if world.size == 1:
        return
    real = [(name, p) for name, p in module.named_parameters() if not p.is_meta]
    text = "\n".join(f"{name}: {tuple(p.shape)} {p.dtype}, a sum of bits of {sum_of_bits(p)}" for name, p in real)
    do = f"Call torch.manual_seed with the same number on {who} before the model is made, or load it."
    what = "the parameters of the module"
    world.rendezvous.check_same(digest_of(text), what, tuple(ranks), lambda: text, do)
