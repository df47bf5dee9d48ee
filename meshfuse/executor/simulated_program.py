"""A compiled program on simulated ranks: global tensors in, global tensors out."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any

import torch

from ..compiler import CompiledProgram
from ..definition.builder import DefinitionBuilder
from ..ops.values import TensorRef
from ..sharding.data import shard, unshard
from .arguments import Inputs
from .simulate import Simulation, check_equal_replicas


@dataclass(frozen=True, slots=True)
class SimulatedProgram:
    """A compiled program with all its ranks' programs bound."""

    compiled: CompiledProgram
    simulation: Simulation

    def arguments(self, fd: DefinitionBuilder, given: Inputs) -> dict[int, list[Any]]:
        """Every rank's arguments, from global ones."""
        return {rank: self._arguments_of(rank, fd, given) for rank in self.compiled.ranks}

    def _arguments_of(self, rank: int, fd: DefinitionBuilder, given: Inputs) -> list[Any]:
        shardings = self.compiled.sharded.shardings
        out: list[Any] = []
        for ref in fd.inputs:
            if not isinstance(ref, TensorRef):
                out.append(given.scalars[ref.id])
            elif fd.placed(ref.id) is not None and rank in shardings[ref.id].mesh:
                out.append(shard(given.tensors[ref.id], shardings[ref.id], rank))
            else:
                out.append(given.tensors[ref.id])
        return out

    def run(
        self, arguments: Mapping[int, list[Any]], seed: int, step: int, check_replicas: bool
    ) -> list[torch.Tensor]:  # fmt: skip
        """The global outputs for every rank's arguments; random numbers follow from seed and step.

        Raises AssertionError where, with `check_replicas`, two replicas of a shard of an output differ.
        """
        results, graph = self.simulation.run(arguments, seed, step), self.compiled.graph
        out = []
        for place, sharding in enumerate(self.compiled.output_shardings()):
            tensor = graph.outputs[place]
            shards = {rank: results[rank][place] for rank in sharding.mesh.ranks}
            out.append(unshard(shards, sharding, graph.shape(tensor)))
            if check_replicas:
                check_equal_replicas(graph.tensors[tensor].label, shards, sharding)
        return out
