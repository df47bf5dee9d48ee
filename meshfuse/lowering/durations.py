"""How long kernels and communications take, as a model, for the schedule and for the timeline."""

from __future__ import annotations

import math
from collections.abc import Iterable, Mapping
from dataclasses import dataclass, field

from ..costs import BYTES_ONLY_MEMORY, DEVICE_FLOPS, DEVICE_LINK, DEVICE_MEMORY, Link, slowest
from ..dtypes import DataType
from ..mesh import DeviceMesh
from .instructions import CommunicationCall, Kernel, SendRecv


@dataclass(frozen=True, slots=True)
class CostModel:
    """A rank's operations and bytes of memory per second, its seconds to start a kernel, and the speeds of mesh axes.

    Each op of a kernel takes the longer of its operations and its bytes (the roofline: Williams et al. 2009). A
    communication takes a start per step and then its bytes (Hockney 1994). Axes that `axes` does not name have the
    speed `network`.
    """

    flops: float = DEVICE_FLOPS
    memory: float = DEVICE_MEMORY
    start: float = 4e-6
    network: Link = DEVICE_LINK
    axes: Mapping[str, Link] = field(default_factory=dict)

    @classmethod
    def of(cls, meshes: Iterable[DeviceMesh]) -> CostModel:
        """The model that the links and rates of these meshes give; defaults where bytes alone decide."""
        timed = [mesh for mesh in meshes if not mesh.is_bytes_only]
        speeds: dict[str, Link] = {}
        for mesh in timed:
            for name, link in zip(mesh.names, mesh.links, strict=True):
                speeds[name] = slowest((speeds.get(name, link), link))
        if not timed:
            return cls()
        memory = min(DEVICE_MEMORY if mesh.memory == BYTES_ONLY_MEMORY else mesh.memory for mesh in timed)
        return cls(min(mesh.flops for mesh in timed), memory, axes=speeds)

    def kernel(self, kernel: Kernel) -> float:
        """Seconds of one launch of a kernel."""
        return self.start + sum(max(flops / self.flops, nbytes / self.memory) for flops, nbytes in kernel.work)

    def communication(self, call: CommunicationCall) -> float:
        """Seconds of a communication, from when all ranks have issued it."""
        speed = self.speed(call.about.axes)
        if isinstance(call, SendRecv):
            return speed.latency + payload_bytes(call) / speed.bandwidth
        steps = math.ceil(math.log2(len(call.group))) * (2 if call.kind == "all_reduce" else 1)
        return steps * speed.latency + call.about.wire / speed.bandwidth

    def speed(self, axes: str) -> Link:
        """The speed of a communication over axes, named as texts do ("dp,tp:(2)4"): that of the slowest."""
        found = [self.axes[name] for name in axis_names(axes) if name in self.axes]
        return slowest(found) if found else self.network


def directions(call: CommunicationCall) -> tuple[str, ...]:
    """The directions of a rank's link that a communication takes: one for a message, both for a collective."""
    if isinstance(call, SendRecv):
        return ("out",) if call.kind == "send" else ("in",)
    return ("in", "out")


def axis_names(axes: str) -> list[str]:
    """The mesh axes in a communication's text; a sub-axis counts as its axis."""
    return [part.partition(":")[0] for part in axes.split(",") if part]


def payload_bytes(call: CommunicationCall) -> int:
    """The bytes that a rank passes to a communication."""
    count, dtype = call.payload
    return count * _ITEMSIZE[dtype]


_ITEMSIZE = {dtype.value: dtype.itemsize for dtype in DataType}
