"""Ops and reshards done in chunks, as a stream on a dim or `fd.overlap` asks.

A loop holds an op (or several in a row), the reshards that bring its operands and those that take its results away. Cut
along one dim, one chunk's collective runs while the next chunk is computed (Wang et al., "Overlap Communication with
Dependent Computation via Decomposition in Large Deep Learning Models", ASPLOS 2023). In a ring every rank begins with
its own shard, and shards, or sums of them, travel from rank to rank.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from typing import Literal

from ..graph import Stream
from ..mesh import DeviceMesh
from ..resharding import Compute, Reshard, ReshardedDefinition, Statement
from ..sharding import layout as lay
from .chunked_dims import ChunkedDim

ChunkedDims = Mapping[int, ChunkedDim]
# What travels round: the shards of an operand, or sums.
RingKind = Literal["gather", "scatter"]


@dataclass(frozen=True, slots=True)
class ChunkLoop:
    """Steps that are done chunk by chunk.

    `cuts` says how each of the tensors that are cut is cut. `ring` is None where every chunk has a collective, "gather"
    where shards of an operand travel round, "scatter" where sums do. `requested` is the tensor that the user named, at
    the line of `stream`.
    """

    id: int
    statements: tuple[Statement, ...]
    cuts: ChunkedDims
    chunks: int
    ring: RingKind | None
    requested: int
    stream: Stream

    @property
    def mesh(self) -> DeviceMesh:
        """The mesh of all its steps."""
        return statement_mesh(self.statements[0])

    @property
    def computes(self) -> tuple[Compute, ...]:
        return tuple(s for s in self.statements if isinstance(s, Compute))

    @property
    def reshards(self) -> tuple[Reshard, ...]:
        return tuple(s for s in self.statements if isinstance(s, Reshard))

    @property
    def inputs(self) -> tuple[int, ...]:
        """The values that come from outside the loop."""
        made = set(self.outputs)
        return tuple(dict.fromkeys(v for s in self.statements for v in s.inputs if v not in made))

    @property
    def outputs(self) -> tuple[int, ...]:
        """All values that the loop makes."""
        return tuple(v for s in self.statements for v in s.outputs)

    def only(self, tensor: int, chunk: int) -> tuple[int, lay.Runs]:
        """(dim, indices of it) of a chunk of a tensor."""
        cut = self.cuts[tensor]
        return cut.dim, cut.chunks[chunk]

    @property
    def filled(self) -> list[int]:
        """The chunks that are not empty."""
        cut = next(iter(self.cuts.values()))
        return [number for number, runs in enumerate(cut.chunks) if runs]


@dataclass(frozen=True, slots=True)
class OverlappedDefinition:
    """The statements of a resharded definition, some of them in loops.

    `refused` has the reason for each tensor whose stream could not be used.
    """

    resharded: ReshardedDefinition
    parts: tuple[Statement | ChunkLoop, ...]
    refused: Mapping[int, str]

    @property
    def loops(self) -> tuple[ChunkLoop, ...]:
        return tuple(part for part in self.parts if isinstance(part, ChunkLoop))

    def verify(self) -> None:
        """Assert that every statement is there once, after what it reads."""
        statements = [s for part in self.parts for s in (part.statements if isinstance(part, ChunkLoop) else (part,))]
        assert len(statements) == len(self.resharded.statements)
        known = set(self.resharded.inputs)
        for statement in statements:
            assert known.issuperset(statement.inputs) and known.isdisjoint(statement.outputs)
            known.update(statement.outputs)

    def fingerprint(self) -> str:
        """A text that is equal only for equal definitions with equal loops, in the same order."""
        order = [part.outputs for part in self.parts] if self.loops else []
        return f"{self}\n{self.resharded.fingerprint()}\n{order}"

    def __str__(self) -> str:
        graph = self.resharded.graph
        lines = []
        for loop in self.loops:
            cut = loop.cuts[loop.requested]
            how = f" in a ring ({loop.ring})" if loop.ring else ""
            names = ", ".join(self.resharded.name_of(statement) for statement in loop.statements)
            label = graph.tensors[loop.requested].label
            count = f"{loop.chunks} chunk{'s' * (loop.chunks != 1)}"
            lines.append(f"loop {loop.id}: {count} of {cut}{how}: {names}  # asked of {label}")
        for tensor, why in self.refused.items():
            lines.append(f"{graph.tensors[tensor].label}: {why}")
        return "\n".join(lines)


def statement_mesh(statement: Statement) -> DeviceMesh:
    """The mesh that a statement runs on; for a transfer the one that it sends from."""
    return statement.placement.results[0].mesh if isinstance(statement, Compute) else statement.step.src.mesh
