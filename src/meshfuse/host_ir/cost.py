"""How long kernels and communications take, as a model: what the schedule goes by and the timeline plays."""

from __future__ import annotations

import math
from collections.abc import Iterable, Mapping
from dataclasses import dataclass, field
from typing import NamedTuple

from ..dtypes import DataType
from ..mesh import DeviceMesh
from .instructions import Collective, Kernel, SendRecv


class Speed(NamedTuple):
    """Of a mesh axis: bytes per second that a rank sends along it, and seconds to start a message."""

    bandwidth: float
    latency: float


_NETWORK = Speed(50e9, 4e-6)


@dataclass(frozen=True, slots=True)
class CostModel:
    """Seconds from facts: operations and bytes per second of a rank, seconds to start a kernel, speeds of axes.

    Each op of a kernel takes the longer of its operations and its bytes (the roofline: Williams et al. 2009); a
    communication starts once per step and then sends its bytes (Hockney 1994). Axes that `axes` does not name have the
    speed `network`.
    """

    flops: float = 300e12
    memory: float = 1.5e12
    start: float = 4e-6
    network: Speed = _NETWORK
    axes: Mapping[str, Speed] = field(default_factory=dict)

    @classmethod
    def of(cls, meshes: Iterable[DeviceMesh]) -> CostModel:
        """What the links and rates of the meshes say; the default of all that they leave open."""
        linked = [mesh for mesh in meshes if mesh.linked]
        speeds: dict[str, Speed] = {}
        for mesh in linked:
            for name, link in zip(mesh.names, mesh.links, strict=True):
                old = speeds.get(name, Speed(link.bandwidth, link.latency))
                speeds[name] = Speed(min(old.bandwidth, link.bandwidth), max(old.latency, link.latency))
        return cls(flops=min(mesh.flops for mesh in linked), axes=speeds) if linked else cls()

    def kernel(self, kernel: Kernel) -> float:
        """Seconds of one launch."""
        return self.start + sum(max(flops / self.flops, nbytes / self.memory) for flops, nbytes in kernel.work)

    def communication(self, call: Collective | SendRecv) -> float:
        """Seconds from the moment that all have issued it to its end."""
        speed = self.speed(call.about.axes)
        if isinstance(call, SendRecv):
            return speed.latency + payload_bytes(call) / speed.bandwidth
        steps = math.ceil(math.log2(len(call.group))) * (2 if call.kind == "all_reduce" else 1)
        return steps * speed.latency + call.about.wire / speed.bandwidth

    def speed(self, axes: str) -> Speed:
        """The speed of a communication over axes as texts name them ("dp,tp:(2)4"): the slowest of theirs."""
        found = [self.axes[name] for name in axis_names(axes) if name in self.axes]
        if not found:
            return self.network
        return Speed(min(s.bandwidth for s in found), max(s.latency for s in found))


def directions(call: Collective | SendRecv) -> tuple[str, ...]:
    """The ways of a rank's link that a communication takes: messages one, collectives both."""
    if isinstance(call, SendRecv):
        return ("out",) if call.kind == "send" else ("in",)
    return ("in", "out")


def axis_names(axes: str) -> list[str]:
    """The mesh axes in a communication's text, sub-axes by the name of the whole."""
    return [part.partition(":")[0] for part in axes.split(",") if part]


def payload_bytes(call: Collective | SendRecv) -> int:
    """The bytes that a rank gives to a communication."""
    count, dtype = call.payload
    return count * _ITEMSIZE[dtype]


_ITEMSIZE = {kind.value: kind.itemsize for kind in DataType}
