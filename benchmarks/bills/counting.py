"""The bytes that ranks send, counted a second time: by the transport, from the buffers that programs hand to it."""

from __future__ import annotations

import math
from dataclasses import dataclass, field
from fractions import Fraction
from typing import Any

import torch

import meshfuse as mf
from meshfuse.compiler import CompiledProgram
from meshfuse.dtypes import Category
from meshfuse.executor.bind import BoundProgram, bind_program
from meshfuse.executor.simulate import Hub, SimulatedGroup, SimulatedWork, Simulation
from meshfuse.host_ir import HostProgram
from meshfuse.ops.values import TensorRef, TensorType
from meshfuse.sharding.data import shard
from meshfuse.testing.calls import torch_dtype


@dataclass(slots=True)
class Meter:
    """Bytes sent by all ranks, exactly."""

    total: Fraction = field(default_factory=Fraction)

    def add(self, tensor: torch.Tensor, elements: Fraction | int) -> None:
        self.total += Fraction(elements) * tensor.element_size()


class CountedGroup(SimulatedGroup):
    """A simulated group that counts what its rank sends, collectives as rings."""

    def __init__(self, hub: Hub, ranks: tuple[int, ...], rank: int, meter: Meter):
        super().__init__(hub, ranks, rank)
        self.meter = meter

    def all_reduce(self, tensor: torch.Tensor, op: str) -> SimulatedWork:
        self.meter.add(tensor, Fraction(2 * (self.size - 1), self.size) * tensor.numel())
        return super().all_reduce(tensor, op)

    def all_gather(self, out: torch.Tensor, tensor: torch.Tensor) -> SimulatedWork:
        self.meter.add(tensor, (self.size - 1) * tensor.numel())
        return super().all_gather(out, tensor)

    def all_to_all(self, out: torch.Tensor, tensor: torch.Tensor, out_sizes: Any, in_sizes: Any) -> SimulatedWork:
        self.meter.add(tensor, sum(in_sizes) - in_sizes[self.index])
        return super().all_to_all(out, tensor, out_sizes, in_sizes)

    def send(self, tensor: torch.Tensor, target: int) -> SimulatedWork:
        self.meter.add(tensor, tensor.numel())
        return super().send(tensor, target)


class CountedSimulation(Simulation):
    """The simulator with counting groups."""

    def __init__(self, compiled: CompiledProgram, meter: Meter):
        self.meter = meter
        super().__init__([compiled.host_program(rank) for rank in compiled.ranks], torch.device("cpu"))

    def _bind(self, program: HostProgram, device: torch.device) -> BoundProgram:
        def group(ranks: tuple[int, ...]) -> CountedGroup:
            return CountedGroup(self.hub, ranks, program.rank, self.meter)

        return bind_program(program, group, device, True)


def random_inputs(fd: mf.FusionDefinition, seed: int = 0) -> list[torch.Tensor]:
    """Global inputs for the sizes as defined: small normal numbers, and indices below 8."""
    generator = torch.Generator().manual_seed(seed)
    kinds = [fd.recording.tensors[ref.id].type for ref in fd.recording.inputs]
    return [_random(ttype, generator) for ttype in kinds]


def _random(ttype: TensorType, generator: torch.Generator) -> torch.Tensor:
    if ttype.dtype.category < Category.FLOAT:
        return torch.randint(0, 8, ttype.shape, generator=generator)
    return (torch.randn(ttype.shape, generator=generator) / math.sqrt(ttype.shape[-1])).to(torch_dtype(ttype))


def executed_bytes(fd: mf.FusionDefinition, inputs: list[torch.Tensor]) -> float:
    """Run every rank's program on these global inputs: the bytes that the ranks sent, the mean over them."""
    compiled, meter = fd.compile(), Meter()
    shardings = compiled.sharded.shardings
    refs = [ref for ref in fd.recording.inputs if isinstance(ref, TensorRef)]
    arguments = {
        rank: [
            shard(t, shardings[ref.id], rank) if ref.id in fd.recording.annotations else t
            for ref, t in zip(refs, inputs, strict=True)
        ]
        for rank in compiled.ranks
    }
    CountedSimulation(compiled, meter).run(arguments, 0, 0)
    return float(meter.total / len(compiled.ranks))
