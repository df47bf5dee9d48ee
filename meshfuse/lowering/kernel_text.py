"""What a kernel's text has beside the lines of its ops: scalars, functions, and where values are used last."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any

from .. import scalars
from ..errors import SourceLine
from ..graph import Graph, Node
from ..ops.factories import RANDOM_STATE
from ..ops.local import plain_text
from ..ops.values import ScalarRef
from ..resharding import Compute
from .segments import Segment


def scalar_text(graph: Graph, value: Any) -> str:
    """Python text of a scalar: a number, an input's name or an expression of them."""
    if not isinstance(value, ScalarRef):
        return plain_text(value)
    return scalars.scalar_text(value, graph.scalars, lambda tensor, dim: graph.shape(tensor.id)[dim], plain_text)


def scalar_inputs(graph: Graph, computes: Sequence[Compute]) -> list[int]:
    """The scalar inputs that these ops read, ascending, as a host program passes them."""
    if not graph.scalars:
        return []
    refs = {arg for c in computes for arg in graph.nodes[c.node].call.args if isinstance(arg, ScalarRef)}
    return sorted({i for ref in refs for i in scalars.inputs_of(ref, graph.scalars)})


def scalar_params(graph: Graph, computes: Sequence[Compute], lines: Sequence[str]) -> tuple[str, ...]:
    """The names of the scalars that these ops read, and of the random state where a line draws from it."""
    text = "\n".join(lines)
    states = [name for name in RANDOM_STATE if name in text]
    return (*[f"s{i}" for i in scalar_inputs(graph, computes)], *states)


def functions(graph: Graph, computes: Sequence[Compute]) -> tuple[tuple[str, Callable[..., Any]], ...]:
    """The functions that the ops' lines call as OP.name."""
    ops = {graph.nodes[c.node].call.op for c in computes}
    found = sorted((op.name, op.compute) for op in ops if op.compute is not None)
    assert len({name for name, _ in found}) == len(found), "two ops of one name"
    return tuple(found)


def origin(node: Node) -> tuple[str, SourceLine]:
    """The op and the user's line, for errors of torch."""
    return node.call.op.name, node.line


def dying(part: Segment) -> list[list[str]]:
    """For each op of a segment the names that neither later ops of it nor others read."""
    last = {v: place for place, compute in enumerate(part.computes) for v in (*compute.inputs, *compute.outputs)}
    kept = {*part.inputs, *part.outputs}
    dead: list[list[str]] = [[] for _ in part.computes]
    for v, place in last.items():
        if v not in kept:
            dead[place].append(f"v{v}")
    return dead
