"""Parts of a segment as torch code: what runs where nvFuser does not, and what stands beside it in tests."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from typing import Any

import torch

from ...executor.bind import text_scope
from ...host_ir.instructions import Kernel
from ...host_ir.lower import scalar_text
from ...ops.factories import RANDOM_STATE
from ...ops.local import LocalCall
from ...resharding.insert import Compute
from ...segmentation import Segment, SegmentedDefinition
from .segment import scalar_inputs


def part_kernel(segmented: SegmentedDefinition, part: Segment, rank: int, name: str) -> Kernel:
    """The part's text: parameters are its inputs, then scalars, then what random numbers follow from."""
    graph = segmented.resharded.graph
    lines = list(_lines(segmented, part, rank))
    states = [state for state in RANDOM_STATE if any(state in line for line in lines)]
    params = (*(f"v{v}" for v in part.inputs), *(f"s{i}" for i in scalar_inputs(graph, part)), *states)
    ops = {graph.nodes[c.node].call.op for c in part.computes}
    functions = tuple(sorted(((op.name, op.compute) for op in ops if op.compute is not None), key=lambda p: p[0]))
    return Kernel(name, params, tuple(lines), tuple(f"v{v}" for v in part.outputs), functions)


def _lines(segmented: SegmentedDefinition, part: Segment, rank: int) -> Iterator[str]:
    """The ops' lines, with intermediate values dropped after their last use."""
    last = {v: place for place, c in enumerate(part.computes) for v in (*c.inputs, *c.outputs)}
    for place, compute in enumerate(part.computes):
        yield from _op_lines(segmented, compute, rank)
        dead = [f"v{v}" for v, at in last.items() if at == place and v not in (*part.inputs, *part.outputs)]
        if dead:
            yield f"del {', '.join(dead)}"


def _op_lines(segmented: SegmentedDefinition, compute: Compute, rank: int) -> list[str]:
    graph = segmented.resharded.graph
    node, placed = graph.nodes[compute.node], compute.placement
    local = LocalCall(
        node.call, [f"v{v}" for v in compute.inputs], placed.operands, placed.results, rank,
        lambda value: scalar_text(graph, value), node.origin,
    )  # fmt: skip
    return local.statements([f"v{v}" for v in compute.outputs])


def bind_kernel(kernel: Kernel, device: torch.device) -> Callable[[list[Any]], tuple[Any, ...]]:
    """The text as a function of the list of its arguments, which gives all results in a tuple."""
    scope = text_scope(dict(kernel.functions), device)
    exec(compile("\n".join(kernel.source()), f"<meshfuse {kernel.name}>", "exec"), scope)
    function = scope[kernel.name]
    if len(kernel.results) == 1:
        return lambda arguments: (function(*arguments),)
    return lambda arguments: function(*arguments)
