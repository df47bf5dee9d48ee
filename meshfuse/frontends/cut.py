"""A joint graph cut into a forward and a backward half.

The forward half is what the results need. The backward half is everything else; of what it reads of the forward, some
is saved and some is computed again: what `torch.utils.checkpoint` marks, and what follows from saved tensors and inputs
by views and ops on single elements.
"""

from __future__ import annotations

import operator
from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

import torch
from torch.utils.checkpoint import CheckpointPolicy

from .captured_graph import Captured

Node = torch.fx.Node
_AGAIN = (CheckpointPolicy.MUST_RECOMPUTE, CheckpointPolicy.PREFER_RECOMPUTE)


@dataclass(frozen=True, slots=True)
class Cut:
    """Nodes of the two halves, each in the graph's order.

    forward: what the results and mutations need.
    saved: nodes of the forward whose values the backward reads.
    again: nodes of the forward that are computed once more, before the backward.
    backward: the other nodes that gradients need.
    reads: inputs of the graph that `again` and `backward` read.
    """

    forward: tuple[Node, ...]
    saved: tuple[Node, ...]
    again: tuple[Node, ...]
    backward: tuple[Node, ...]
    reads: tuple[Node, ...]


def cut(graph: Captured, arguments: Mapping[Node, tuple[Any, ...]], thrifty: bool = False) -> Cut:
    """Cut a joint graph. `arguments` replaces those of some nodes.

    thrifty: save memory rather than time: all that works on single elements is computed again.
    """
    read = Reads(arguments)
    nodes = [node for node in graph.module.graph.nodes if node.op == "call_function"]
    ends = [node for node, source in graph.outputs if source.kind != "gradient" and node is not None]
    gradients = [node for node, source in graph.outputs if source.kind == "gradient" and node is not None]
    forward = read.ancestors(ends)
    forward |= {node for node in nodes if node.target is operator.getitem and node.args[0] in forward}
    needed = read.ancestors(gradients, stop=forward)
    backward = tuple(node for node in nodes if node in needed and node not in forward)
    wanted = {x for node in backward for x in read(node)} | set(gradients)
    choice = _Choice(read, [node for node in nodes if node in forward], thrifty)
    saved, again = choice.made([x for x in wanted if x in forward and x.op == "call_function"])
    reads = {x for node in (*again, *backward) for x in read(node)} | wanted
    return Cut(
        tuple(node for node in nodes if node in forward), tuple(saved), tuple(again), backward,
        tuple(node for node, _ in graph.inputs if node in reads),
    )  # fmt: skip


class Reads:
    """What nodes read: tensors and sizes, by their arguments."""

    def __init__(self, arguments: Mapping[Node, tuple[Any, ...]]) -> None:
        self._arguments = arguments

    def __call__(self, node: Node) -> Sequence[Node]:
        if node not in self._arguments:
            return node.all_input_nodes
        return [arg for arg in self._arguments[node] if isinstance(arg, Node)]

    def ancestors(self, ends: Iterable[Node], stop: set[Node] | frozenset[Node] = frozenset()) -> set[Node]:
        """These nodes and all that they need; nothing behind those in `stop`."""
        found, waiting = set[Node](), list(ends)
        while waiting:
            node = waiting.pop()
            if node not in found:
                found.add(node)
                waiting += () if node in stop else self(node)
        return found


def in_turn(again: Sequence[Node], nodes: Sequence[Node], read: Callable[[Node], Iterable[Node]]) -> list[Node]:
    """Nodes in their order, with those of `again` that each needs right before it."""
    left, found = set(again), list[Node]()

    def provide(node: Node) -> None:
        waiting = [(node, False)]
        while waiting:
            here, is_ready = waiting.pop()
            if is_ready:
                found.append(here)
            elif here in left:
                left.discard(here)
                waiting.append((here, True))
                waiting += [(x, False) for x in read(here)]

    for node in nodes:
        for needed in read(node):
            provide(needed)
        found.append(node)
    for node in again:
        provide(node)
    return found


class _Choice:
    """What is saved of the forward, and what is computed again."""

    def __init__(self, read: Reads, forward: Sequence[Node], thrifty: bool) -> None:
        self._thrifty = thrifty
        self._read, self._order = read, {node: place for place, node in enumerate(forward)}
        self._saved: set[Node] = set()
        self._again: set[Node] = set()

    def made(self, wanted: Sequence[Node]) -> tuple[list[Node], list[Node]]:
        """(saved, computed again) for what the backward reads."""
        for node in sorted((n for n in wanted if not self._is_cheap(n)), key=self._order.__getitem__):
            self._provide(node)
        for node in sorted((n for n in wanted if self._is_cheap(n)), key=self._order.__getitem__):
            if not self._follows(node):
                self._provide(_shown_by(node))
            self._repeat(node)
        self._again -= self._saved
        order = self._order.__getitem__
        return sorted(self._saved, key=order), sorted(self._again, key=order)

    def _provide(self, node: Node) -> None:
        """Save a node; one that is marked is computed again from what it needs."""
        waiting = [node]
        while waiting:
            here = waiting.pop()
            if here.op != "call_function" or here in self._saved or here in self._again:
                continue
            if here.target is operator.getitem and not _is_marked(here):
                self._saved.add(here)
            elif _is_marked(here) or is_size(here):
                self._again.add(here)
                waiting += self._read(here)
            else:
                self._saved.add(here)

    def _follows(self, node: Node) -> bool:
        """Whether a node is there at no cost: from saved tensors and inputs by cheap ops alone."""
        waiting, seen = [node], set[Node]()
        while waiting:
            here = waiting.pop()
            if here in seen or here.op != "call_function" or here in self._saved or here in self._again:
                continue
            if not (self._is_cheap(here) or is_size(here)):
                return False
            seen.add(here)
            waiting += self._read(here)
        return True

    def _is_cheap(self, node: Node) -> bool:
        """Whether a node is a view, a cast or a factory, or works on single bools and integers, such as masks."""
        if node.target is operator.getitem or draws(node):
            return False
        if node.target is torch.ops.meshfuse.leave_attention.default:
            return bool(node.args[1])
        is_pointwise = torch.Tag.pointwise in getattr(node.target, "tags", ())
        value = node.meta.get("val")
        is_light = isinstance(value, torch.Tensor) and not value.is_floating_point()
        return base_name(node) in _CHEAP or (is_pointwise and (is_light or self._thrifty))

    def _repeat(self, node: Node) -> None:
        waiting = [node]
        while waiting:
            here = waiting.pop()
            if here.op == "call_function" and here not in self._saved and here not in self._again:
                self._again.add(here)
                waiting += self._read(here)


def _shown_by(node: Node) -> Node:
    """The tensor of which a node is a view, or the node itself: of several views of one tensor it is what is saved."""
    while is_view(node) and node.all_input_nodes[0].op == "call_function":
        node = node.all_input_nodes[0]
    return node


def is_size(node: Node) -> bool:
    """Whether a node is a number, and no tensor."""
    return not isinstance(node.meta.get("val"), (torch.Tensor, tuple, list))


def _is_marked(node: Node) -> bool:
    """Whether torch.utils.checkpoint wants a node computed again.

    What one checkpointed region hands to another is saved; random numbers are drawn once.
    """
    if node.meta.get("recompute") not in _AGAIN or draws(node):
        return False
    region = node.meta.get("ac_graph_id")
    return not any(user.meta.get("ac_graph_id", region) != region and _marked(user) for user in node.users)


def _marked(node: Node) -> bool:
    return node.meta.get("recompute") in _AGAIN


def draws(node: Node) -> bool:
    """Whether a node draws random numbers, or is one of the results of one that does."""
    source = node.args[0] if node.target is operator.getitem else node
    tags = getattr(getattr(source, "target", None), "tags", ())
    return torch.Tag.nondeterministic_seeded in tags


def is_view(node: Node) -> bool:
    """Whether a node has all elements of one tensor, in another shape."""
    return base_name(node) in _VIEWS


def base_name(node: Node) -> str:
    """The name of a node's op, without its overload."""
    return str(node.target).removeprefix("aten.").partition(".")[0]


_VIEWS = frozenset((
    "view", "_unsafe_view", "reshape", "permute", "t", "transpose", "unsqueeze", "squeeze", "expand", "alias", "detach",
))  # fmt: skip
_CHEAP = _VIEWS | frozenset((
    "slice", "select", "split", "split_with_sizes", "unbind", "clone", "_to_copy", "full", "zeros", "ones",
    "full_like", "zeros_like", "ones_like", "arange", "scalar_tensor", "new_zeros", "new_ones", "new_full", "empty",
))  # fmt: skip
