"""The graph of an autograd context in one process, to be looked at: by torch's names, as its nodes show themselves.

What is sent and received has no nodes of torch's engine here. `Sent` and `Received` stand for them.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any

import torch

Next = tuple[tuple[Any, int], ...]


@dataclass(frozen=True, slots=True, eq=False)
class Received:
    """A message that came: where the graph of this process ends. Equal to the nodes of the tensors that it brought."""

    leaves: Sequence[torch.Tensor]
    next_functions: Next = ()

    def name(self) -> str:
        """As torch names it."""
        return "torch::distributed::autograd::RecvRpcBackward"

    def __eq__(self, other: object) -> bool:
        return other is self or any(leaf is mine for leaf in _leaves_before(other) for mine in self.leaves)

    def __hash__(self) -> int:
        return id(self)


@dataclass(frozen=True, slots=True, eq=False)
class Sent:
    """A message that tensors were sent by. received: by the id of a leaf the message that has brought it."""

    tensors: Sequence[torch.Tensor]
    received: Mapping[int, Received]

    def name(self) -> str:
        """As torch names it."""
        return "torch::distributed::autograd::SendRpcBackward"

    @property
    def next_functions(self) -> Next:
        """What its tensors follow from."""
        return tuple((_shown(_node_of(tensor), self.received), tensor.output_nr) for tensor in self.tensors)


@dataclass(frozen=True, slots=True, eq=False)
class Node:
    """A node of torch's between them."""

    node: Any
    received: Mapping[int, Received]

    def name(self) -> str:
        """As torch names it."""
        return self.node.name()

    @property
    def next_functions(self) -> Next:
        """What it follows from."""
        return tuple((_shown(node, self.received), place) for node, place in self.node.next_functions)


def _shown(node: Any, received: Mapping[int, Received]) -> Any:
    """A node, in a form that ends where messages came; None, and those of leaves, stay as they are."""
    came = [received[id(leaf)] for leaf in _leaves_before(node) if id(leaf) in received]
    return came[0] if came else node if node is None or hasattr(node, "variable") else Node(node, received)


def _leaves_before(node: Any) -> list[torch.Tensor]:
    return [before.variable for before, _ in getattr(node, "next_functions", ()) if hasattr(before, "variable")]


def _node_of(tensor: torch.Tensor) -> Any:
    """What a tensor follows from: of a leaf the node that accumulates its gradient, which a copy of it leads to."""
    if tensor.grad_fn is not None:
        return tensor.grad_fn
    with torch.enable_grad():
        copy: Any = tensor.clone().grad_fn
    return copy.next_functions[0][0]
