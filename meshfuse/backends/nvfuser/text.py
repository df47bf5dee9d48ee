"""Parts of a segment as torch code: they run where nvFuser does not, and are compared with it in tests."""

from __future__ import annotations

import re
from collections.abc import Callable, Iterator, Sequence
from dataclasses import replace
from typing import Any

import torch

from ...graph import Graph
from ...lowering.instructions import Kernel
from ...lowering.kernel_text import dying, functions, scalar_params, scalar_text
from ...lowering.op_text import OpText
from ...lowering.segments import Segment, SegmentedDefinition
from ..eager import text_scope
from .partition import Partition


def part_kernel(segmented: SegmentedDefinition, part: Partition, rank: int, name: str) -> Kernel:
    """The part as a kernel. Its parameters are the values that it takes, then scalars, then the random state."""
    graph, computes = segmented.resharded.graph, part.segment.computes
    lines = list(_lines(graph, part.segment, rank))
    params = (*part.takes, *scalar_params(graph, computes, lines))
    called = functions(graph, computes)
    return Kernel(name, params, tuple(lines), part.gives, called, unpacks=part.unpacks, packs=part.packs)


def _lines(graph: Graph, part: Segment, rank: int) -> Iterator[str]:
    """The ops' lines, with intermediate values dropped after their last use."""
    texts = OpText(rank, lambda value: scalar_text(graph, value))
    for compute, dead in zip(part.computes, dying(part), strict=True):
        node = graph.nodes[compute.node]
        yield from texts.lines(node, compute.placement, _names(compute.inputs), _names(compute.outputs))
        if dead:
            yield f"del {', '.join(dead)}"


def _names(values: Sequence[int]) -> list[str]:
    return [f"v{v}" for v in values]


def canonical(kernel: Kernel) -> str:
    """The kernel's code with its values numbered in the order in which they are met, and without its own name."""
    numbers: dict[str, str] = {}

    def renamed(found: re.Match[str]) -> str:
        return f"v{numbers.setdefault(found[1], str(len(numbers)))}"

    return re.sub(r"\bv(\d+)(?=\b|_)", renamed, "\n".join(replace(kernel, name="part").source()))


def bind_kernel(kernel: Kernel, device: torch.device) -> Callable[[list[Any]], tuple[Any, ...]]:
    """The text as a function of the list of its arguments, which gives all results in a tuple."""
    scope = text_scope(dict(kernel.functions), device)
    exec(compile("\n".join(kernel.source()), f"<meshfuse {kernel.name}>", "exec"), scope)
    function = scope[kernel.name]
    if len(kernel.results) == 1:
        return lambda arguments: (function(*arguments),)
    return lambda arguments: function(*arguments)
