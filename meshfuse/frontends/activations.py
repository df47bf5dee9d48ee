"""The nodes of a captured graph that are the results of modules."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any

import torch

from .lines import module_paths

Node = torch.fx.Node


def outputs_of_modules(graph: torch.fx.Graph, specs: Mapping[str, Any], forward: Sequence[Node]) -> dict[Node, Any]:
    """By node the spec of the module whose result it is: of a module's nodes the last tensor that others read."""
    if not specs:
        return {}
    kept, found = set(forward), dict[str, Node]()
    for node in forward:
        paths = module_paths(node)
        for path in paths & specs.keys():
            if isinstance(node.meta.get("val"), torch.Tensor) and _leaves(node, path, kept):
                found[path] = node
    return {node: specs[path] for path, node in found.items()}


def _leaves(node: Node, path: str, forward: set[Node]) -> bool:
    """Whether something outside of the module reads a node in the forward."""
    return any(user.op == "output" or (user in forward and path not in module_paths(user)) for user in node.users)
