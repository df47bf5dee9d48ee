"""From segments and moves to the program of one rank."""

from __future__ import annotations

import functools
import re
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from typing import Any

from ..graph import Graph
from ..ops.base import FactorKind, ScalarRef
from ..ops.local import LocalCall, plain_text
from ..resharding.insert import Compute, Set, Value
from ..resharding.moves import wire_elements
from ..scalars import inputs_of
from ..segmentation import Segment, SegmentedDefinition
from ..sharding import layout as lay
from .communicate import MoveContext, lower_move
from .instructions import Communication, Instruction, Kernel, Launch
from .liveness import with_frees
from .program import HostProgram

# A Python expression of tensors, which torch computes into new memory.
_ARITHMETIC = re.compile(r"v\d+ = \(\w+ [-+*/] [\w.]+\)")


def lower_to_host_ir(segmented: SegmentedDefinition, rank: int, digest: str) -> HostProgram:
    """The program of a rank: its kernels, its part in every collective, and where each buffer's life ends."""
    return _Lowering(segmented, rank, digest).run()


@dataclass(slots=True)
class _Lowering:
    segmented: SegmentedDefinition
    rank: int
    digest: str
    instructions: list[Instruction] = field(default_factory=list)
    names: dict[int, str] = field(default_factory=dict)
    fresh: set[int] = field(default_factory=set)

    @property
    def graph(self) -> Graph:
        return self.segmented.resharded.graph

    @property
    def values(self) -> Sequence[Value]:
        return self.segmented.resharded.values

    def run(self) -> HostProgram:
        self._name_inputs()
        readers = _reader_counts(self.segmented)
        self.fresh = _fresh_values(self.segmented)
        for part in self.segmented.parts:
            if isinstance(part, Segment):
                self._launch(part)
            else:
                self._communicate(part, part.source in self.fresh and readers[part.source] == 1)
        resharded = self.segmented.resharded
        outputs = tuple(self._name(v) if self.rank in self.values[v].sharding.mesh else None for v in resharded.outputs)
        body = with_frees(self.instructions, keep={*filter(None, outputs)})
        return HostProgram(self.rank, self._params(), tuple(body), outputs, self.digest)

    def _name_inputs(self) -> None:
        """An input that is whole on several meshes is a value on each, and one argument."""
        first: dict[int, str] = {}
        for v in self.segmented.resharded.inputs:
            self.names[v] = first.setdefault(self.values[v].tensor, f"v{v}")

    def _name(self, value: int) -> str:
        return self.names.get(value, f"v{value}")

    def _params(self) -> tuple[str, ...]:
        graph = self.graph
        values = iter(self.segmented.resharded.inputs)
        return tuple(f"s{ref.id}" if isinstance(ref, ScalarRef) else f"v{next(values)}" for ref in graph.inputs)

    # kernels --------------------------------------------------------------------------------------------------

    def _launch(self, part: Segment) -> None:
        if self.rank not in part.computes[0].placement.results[0].mesh:
            return
        lines = self._kernel_lines(part)
        scalars = [f"s{i}" for i in sorted({i for c in part.computes for i in self._scalars(c)})]
        inputs = tuple(dict.fromkeys(map(self._name, part.inputs)))
        outputs = tuple(f"v{v}" for v in part.outputs)
        params = (*inputs, *scalars, *(name for name in ("seed", "offset") if _mentions(lines, name)))
        kernel = Kernel(part.name, params, tuple(lines), outputs, self._functions(part))
        self.instructions.append(Launch(kernel, params, outputs))

    def _functions(self, part: Segment) -> tuple[tuple[str, Callable[..., Any]], ...]:
        """What the ops' lines call as OP.name."""
        ops = {self.graph.nodes[c.node].call.op for c in part.computes}
        found = sorted((op.name, op.compute) for op in ops if op.compute is not None)
        assert len({name for name, _ in found}) == len(found), "two ops of one name"
        return tuple(found)

    def _kernel_lines(self, part: Segment) -> list[str]:
        """The ops' lines, with intermediate values dropped after their last use."""
        last = {v: place for place, compute in enumerate(part.computes) for v in (*compute.inputs, *compute.outputs)}
        kept = {*part.inputs, *part.outputs}
        lines: list[str] = []
        for place, compute in enumerate(part.computes):
            lines += self._op_lines(compute)
            if _ARITHMETIC.fullmatch(lines[-1]):
                self.fresh.add(compute.outputs[-1])
            dead = [f"v{v}" for v, end in last.items() if end == place and v not in kept]
            if dead and place + 1 < len(part.computes):
                lines.append(f"del {', '.join(dead)}")
        return lines

    def _op_lines(self, compute: Compute) -> list[str]:
        node = self.graph.nodes[compute.node]
        local = LocalCall(
            node.call, [self._name(v) for v in compute.inputs], compute.placement.operands, compute.placement.results,
            self.rank, functools.partial(scalar_text, self.graph), node.origin,
        )  # fmt: skip
        return local.statements([f"v{out}" for out in compute.outputs])

    def _scalars(self, compute: Compute) -> set[int]:
        found: set[int] = set()
        for arg in self.graph.nodes[compute.node].call.args:
            if isinstance(arg, ScalarRef):
                found |= inputs_of(arg, self.graph.scalars)
        return found

    # moves ----------------------------------------------------------------------------------------------------

    def _communicate(self, step: Set, fresh: bool) -> None:
        value = self.values[step.source]
        tensor = self.graph.tensors[value.tensor]
        if self.rank not in step.move.src.mesh and self.rank not in step.move.dst.mesh:
            return
        wire = wire_elements(step.move, tensor.type.shape, self.rank) * tensor.type.dtype.itemsize
        about = Communication(
            step.move.kind.value,
            ",".join(map(str, step.move.axes)),
            tensor.label,
            wire,
            step.why,
            step.line,
            str(step.move),
        )
        context = MoveContext(
            self.rank,
            step.move,
            tensor.type,
            self._name(step.source),
            f"v{step.target}",
            about,
            fresh,
            f"w{step.target}",
        )
        self.instructions.extend(lower_move(context))


def scalar_text(graph: Graph, value: Any) -> str:
    """Python text of a scalar: a number, an input's name or an expression of them."""
    if not isinstance(value, ScalarRef):
        return plain_text(value)
    made = graph.scalars[value.id]
    if made.op == "input":
        return f"s{value.id}"
    if made.op == "const":
        return plain_text(made.operands[0])
    if made.op == "size":
        tensor, dim = made.operands
        return str(graph.shape(tensor.id)[dim])
    operands = ", ".join(scalar_text(graph, operand) for operand in made.operands)
    if made.op == "cast":
        return f"{('bool', 'int', 'float', 'complex')[made.dtype.category]}({operands})"
    return f"S[{made.op!r}]({operands})"


def _mentions(lines: Sequence[str], name: str) -> bool:
    return any(name in line for line in lines)


def _reader_counts(segmented: SegmentedDefinition) -> dict[int, int]:
    """How many ops, moves and outputs read each value."""
    counts: dict[int, int] = dict.fromkeys(segmented.resharded.outputs, 1)
    for step in segmented.resharded.steps:
        for v in step.inputs if isinstance(step, Compute) else (step.source,):
            counts[v] = counts.get(v, 0) + 1
    return counts


def _fresh_values(segmented: SegmentedDefinition) -> set[int]:
    """Values in memory of their own: results that an op has summed over."""
    graph, found = segmented.resharded.graph, set()
    for part in segmented.parts:
        for compute in part.computes if isinstance(part, Segment) else ():
            if _sums_locally(graph, compute):
                found.update(compute.outputs)
    return found


def _sums_locally(graph: Graph, compute: Compute) -> bool:
    rule = graph.nodes[compute.node].rule
    layouts = compute.placement.layouts
    return any(
        f.kind is FactorKind.REDUCE and lay.axes(layout) for f, layout in zip(rule.factors, layouts, strict=True)
    )
