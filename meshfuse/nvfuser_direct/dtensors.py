"""DTensors in and out of nvFuser's definitions."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

from ..errors import caller_line, shown, user_error
from .definition import FusionDefinition
from .multidevice import Sharding


def execute_with_dtensors(fd: FusionDefinition, in_dtensors: Sequence[Any]) -> list[Any]:
    """Execute on DTensors; returns DTensors on the inputs' mesh, with its dim names.

    Raises ArgumentError where an input's placements are not as annotated.
    """
    if not isinstance(fd, FusionDefinition):
        raise user_error("execute_with_dtensors", shown(fd), "a FusionDefinition", "Pass one, then its DTensors.",
                         caller_line())  # fmt: skip
    outputs = fd.execute(in_dtensors)
    pairs = zip(outputs, fd.fec.get_output_shardings(), strict=True)
    return [out if out is None or not sharding.ones else _with_ones(out, sharding) for out, sharding in pairs]


def _with_ones(out: Any, sharding: Sharding) -> Any:
    """The DTensor with the same placement, also written over mesh axes of one rank."""
    from torch.distributed.tensor import DTensor, Shard

    names, ones = sharding.core.mesh.names, sharding.ones
    placements = [Shard(ones[name]) if name in ones else p for name, p in zip(names, out.placements, strict=True)]
    return DTensor.from_local(
        out.to_local(), out.device_mesh, placements, run_check=False, shape=out.shape, stride=out.stride()
    )
