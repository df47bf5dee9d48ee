"""nvFuser's multi-device names: meshes, the communicator, cutting tensors, and shardings of outputs."""

from __future__ import annotations

from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any

import torch

from .. import mesh as core
from ..argument_checks import as_int
from ..definition.namespaces import Fusion as CoreFusion
from ..errors import ArgumentError, SourceLine, caller_line, shown, user_error
from ..executor.shards import shard_tensor
from ..mesh import ParallelType
from ..runtime.world import World
from ..sharding.layout import Split
from ..sharding.value import Sharding as CoreSharding
from .active import NvfuserDefinition, definition_of
from .enums import CommunicatorBackend

__all__ = [
    "Communicator",
    "DeviceMesh",
    "MultiDeviceExecutor",
    "MultiDeviceExecutorParams",
    "Sharding",
    "shard_tensor",
]


class DeviceMesh(core.DeviceMesh):
    """Ranks in a grid, from a list, a range, nested lists or a tensor; its last axis is mesh_x.

    Raises DefinitionError for ranks that occur twice.
    """

    __slots__ = ()

    def __init__(self, devices: Any):
        super().__init__(devices)

    def __repr__(self) -> str:
        return f"DeviceMesh{_braces(self.shape, list(self.ranks))}"

    def __reduce__(self) -> tuple[Any, ...]:
        return (DeviceMesh, (torch.tensor(self.ranks, device="cpu").reshape(self.shape),))

    def plain(self) -> core.DeviceMesh:
        """The same mesh as one of meshfuse's own."""
        return core.DeviceMesh(self.shape, self.names, ranks=self.ranks)

    def shard_tensor(self, tensor: torch.Tensor, axis: int, device_id: int | None = None) -> torch.Tensor:
        """This rank's chunk of dim `axis` of a global tensor, or that of rank `device_id`.

        Chunks are those of torch.chunk: the last may be short. Raises ArgumentError for a mesh of several axes, where
        the tensor is not dense or has no such dim, and for a `device_id` that is no int.
        """
        line = caller_line()
        place = Communicator.instance().rank() if device_id is None else as_int(device_id)
        if place is None:
            raise user_error("DeviceMesh.shard_tensor: device_id", shown(device_id), "an int",
                             "Pass a rank, or None for this process' own.", line, ArgumentError)  # fmt: skip
        return shard_tensor(tensor, self._chunks(tensor, axis, line), place if place in self else self.ranks[0])

    def _chunks(self, tensor: Any, axis: Any, line: SourceLine) -> CoreSharding:
        """The sharding of a tensor that is cut along dim `axis` alone."""
        shape = tuple(tensor.shape) if isinstance(tensor, torch.Tensor) and not tensor.is_nested else None
        dim, ndim = as_int(axis), len(shape or ())
        if shape is None or self.ndim != 1 or dim is None or not -ndim <= dim < ndim:
            found = type(tensor).__name__ if shape is None else f"shape {list(shape)}"
            raise user_error(
                "DeviceMesh.shard_tensor",
                f"dim {shown(axis)} of {found} on {self!r}",
                "an existing dim of a dense tensor and a mesh of one axis",
                "Annotate a tensor and cut by it: multidevice.shard_tensor(t, tv).",
                line,
                ArgumentError,
            )
        dims: list[tuple[Split, ...]] = [()] * ndim
        dims[dim] = (Split(self.size, self.names[0]),)
        return CoreSharding.make(self.plain(), dims, shape)


def _braces(shape: tuple[int, ...], ranks: list[int]) -> str:
    """Ranks in rows, as nvFuser prints a mesh: {{0 1}{2 3}}."""
    if len(shape) <= 1:
        return "{" + " ".join(map(str, ranks)) + "}"
    step = len(ranks) // shape[0]
    rows = (_braces(shape[1:], ranks[i : i + step]) for i in range(0, len(ranks), step))
    return "{" + "".join(rows) + "}"


def of_core(mesh: core.DeviceMesh) -> DeviceMesh:
    """A mesh of meshfuse's in nvFuser's form."""
    return DeviceMesh(torch.tensor(mesh.ranks, device="cpu").reshape(mesh.shape))


class Communicator:
    """This process among its peers, as its launcher says. There is one: `Communicator.instance()`."""

    _instance: Communicator | None = None

    @classmethod
    def instance(cls) -> Communicator:
        if cls._instance is None:
            cls._instance = cls()
        return cls._instance

    def size(self) -> int:
        """The number of ranks."""
        return World.current().size

    def rank(self) -> int:
        return World.current().rank

    def local_size(self) -> int:
        """The number of ranks on this machine."""
        return World.current().local_size

    def local_rank(self) -> int:
        return World.current().local_rank

    def barrier(self) -> None:
        """Wait for all ranks. RankTimeout where one does not come."""
        World.current().barrier()

    def is_available(self) -> bool:
        """True: a single process is a world of size 1."""
        return True


@dataclass(frozen=True, slots=True)
class Sharding:
    """How an output lies on a mesh, as `fd.fec.get_output_shardings()` gives it.

    `ones` has the dims bound to mesh axes of one rank, which are not in `core`.
    """

    core: CoreSharding
    ones: Mapping[str, int] = field(default_factory=dict)

    @property
    def mesh(self) -> DeviceMesh:
        return of_core(self.core.mesh)

    def axis_sharded_on(self, parallel_type: ParallelType) -> int:
        """The dim that is split over nvFuser's parallel type.

        -1 where the output is whole along it, and for a type that is no mesh axis.
        """
        names = self.core.mesh.names
        place = {ParallelType.mesh_x: 1, ParallelType.mesh_y: 2, ParallelType.mesh_z: 3}.get(parallel_type)
        if place is None or place > len(names):
            return -1
        axis = names[-place]
        dims = (d for d, layout in enumerate(self.core.dims) if any(split.axis == axis for split in layout))
        return next(dims, self.ones.get(axis, -1))

    def __repr__(self) -> str:
        return f"Sharding({self.core} on {self.mesh!r})"


@dataclass(slots=True)
class MultiDeviceExecutorParams:
    """nvFuser's options of its overlapping executor. They order its work and change no value."""

    use_allocation_cache: bool = False
    backend_type: CommunicatorBackend = CommunicatorBackend.nccl
    offset_stream_indexing_by_rank: bool = False
    inter_stream_synchronization: bool = False
    number_of_streams: int = 4


class MultiDeviceExecutor:
    """Runs a fusion's definition; its `str` is this rank's program, once it has run."""

    def __init__(self, fusion: CoreFusion, params: MultiDeviceExecutorParams | None = None):
        self.definition = definition_of(fusion, "MultiDeviceExecutor")
        self.params = params or MultiDeviceExecutorParams()

    def run(self, args: Iterable[Any]) -> list[torch.Tensor]:
        """This rank's shards of the outputs from its shards of the inputs."""
        return self.definition.execute(list(args))

    def __str__(self) -> str:
        return self.definition._program_text()


def execute_with_dtensors(fd: NvfuserDefinition, in_dtensors: Sequence[Any]) -> list[Any]:
    """Execute on DTensors; returns DTensors on the inputs' mesh, with its dim names.

    Raises ArgumentError where an input's placements are not as annotated.
    """
    if not hasattr(type(fd), "fec"):  # meshfuse's own have none
        raise user_error("execute_with_dtensors", shown(fd), "a FusionDefinition", "Pass one, then its DTensors.",
                         caller_line())  # fmt: skip
    outputs = fd.execute(in_dtensors)
    pairs = zip(outputs, fd.fec.get_output_shardings(), strict=True)
    return [out if out is None or not sharding.ones else _with_ones(out, sharding) for out, sharding in pairs]


def _with_ones(out: Any, sharding: Sharding) -> Any:
    """The DTensor with the same placement, also written over mesh axes of one rank."""
    from torch.distributed.tensor import DTensor, Shard  # torch may lack it

    names, ones = sharding.core.mesh.names, sharding.ones
    placements = [Shard(ones[name]) if name in ones else p for name, p in zip(names, out.placements, strict=True)]
    return DTensor.from_local(
        out.to_local(), out.device_mesh, placements, run_check=False, shape=out.shape, stride=out.stride()
    )
