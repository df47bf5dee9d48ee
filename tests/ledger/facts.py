"""An entry of the ledger: facts of a compiled program that stay the same when our own code is renamed.

A rank's digest is made of the communications that it issues (kind, group, element counts, dtype), the kernels that it
launches (their ops with local shapes) and its waits, in their order. Names of instructions, buffers, kernels and
classes are no part of it, nor are copies between kernels and communications, which may be instructions of their own or
done in kernels. Which elements of inputs and outputs each rank holds is a digest of its own.

Everything that is read of meshfuse's classes is read in this file.
"""

from __future__ import annotations

import ast
import hashlib
from collections import Counter
from collections.abc import Iterator
from typing import Any

import meshfuse as mf
from meshfuse.compiler import CompiledProgram
from meshfuse.host_ir import HostProgram
from meshfuse.lowering.instructions import Collective, Communication, Kernel, Launch, SendRecv, Wait
from meshfuse.lowering.segments import Segment
from meshfuse.resharding import Compute

Entry = dict[str, Any]
Fact = tuple[object, ...]


def entry_of(fd: mf.FusionDefinition) -> Entry:
    """What the ledger keeps of a definition, of its sizes as defined."""
    bill, compiled = fd.bill(), fd.compile()
    return {
        "bytes": _number(bill.total),
        "seconds": float(f"{bill.seconds:.6g}"),
        "collectives": dict(sorted(Counter(entry.collective for entry in bill.entries).items())),
        "held": _short([(rank, *_held(compiled, rank)) for rank in compiled.ranks]),
        "ranks": _by_digest({rank: _short([*_Steps(compiled, rank).facts()]) for rank in compiled.ranks}),
    }


def _number(value: float) -> float:
    """Bytes, which are whole numbers on most meshes, and a mean over ranks on the others."""
    return int(value) if value == int(value) else round(float(value), 3)


def _by_digest(found: dict[int, str]) -> dict[str, str]:
    """The digests of all ranks, each once: to the ranks that have it."""
    ranks: dict[str, list[str]] = {}
    for rank, text in sorted(found.items()):
        ranks.setdefault(text, []).append(str(rank))
    return {text: ",".join(names) for text, names in ranks.items()}


def _short(facts: list[Fact]) -> str:
    """A short name for these facts."""
    return hashlib.sha256(repr(facts).encode()).hexdigest()[:10]


def _held(compiled: CompiledProgram, rank: int) -> Iterator[Fact]:
    """The global indices of each input and output that a rank holds."""
    resharded = compiled.resharded
    for value in (*resharded.inputs, *resharded.outputs):
        sharding, shape = resharded.values[value].sharding, resharded.type_of(value).shape
        yield sharding.runs(shape, rank) if rank in sharding.mesh else ()


class _Steps:
    """The steps of one rank's program as facts."""

    def __init__(self, compiled: CompiledProgram, rank: int):
        self.compiled, self.rank = compiled, rank
        self.segments = {part.name: part for part in compiled.segmented.parts if isinstance(part, Segment)}
        self.issued: dict[str, int] = {}

    def facts(self) -> Iterator[Fact]:
        program: HostProgram = self.compiled.host_program(self.rank)
        for ins in program.instructions:
            if isinstance(ins, Collective):
                yield self._issue(ins.work, ins.kind, ins.group, ins.payload, _arguments(ins.text), _kinds(ins.about))
            elif isinstance(ins, SendRecv):
                yield self._issue(ins.work, ins.kind, ins.group, ins.payload, ins.peer, _kinds(ins.about))
            elif isinstance(ins, Wait):
                yield "wait", self.issued[ins.work]
            elif isinstance(ins, Launch):
                yield self._kernel(ins.kernel)

    def _issue(self, work: str, *facts: object) -> Fact:
        """A communication; its waits name it by its place among them."""
        self.issued[work] = len(self.issued)
        return facts

    def _kernel(self, kernel: Kernel) -> Fact:
        segment = self.segments.get(kernel.name)
        if segment is not None:
            return ("kernel", *map(self._op, segment.computes))
        # A chunk of a loop is one op; how large the chunk is shows in its work.
        return "chunk", kernel.origins[0][0], [[float(f"{n:.6g}") for n in work] for work in kernel.work]

    def _op(self, compute: Compute) -> Fact:
        call, placement = self.compiled.graph.nodes[compute.node].call, compute.placement
        sides = ((call.types, placement.operands), (call.results, placement.results))
        shapes = [
            [sharding.local_shape(ttype.shape, self.rank) for ttype, sharding in zip(*side, strict=True)]
            for side in sides
        ]
        return call.op.name, shapes


def _arguments(call: str) -> list[object]:
    """The arguments of a call on a group that are no buffers: counts by peer, the reduction, the root."""
    (expression,) = ast.parse(call).body
    assert isinstance(expression, ast.Expr) and isinstance(expression.value, ast.Call)
    return [ast.literal_eval(arg) for arg in expression.value.args if not isinstance(arg, ast.Name)]


def _kinds(about: Communication) -> list[str]:
    """The kinds of the moves that one call does."""
    return [part.kind for part in about.parts or (about,)]
