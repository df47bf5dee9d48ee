"""A joint graph of aten ops, and what its inputs and outputs are. `capture` makes it."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field
from typing import Any

import torch
from torch.utils import _pytree as pytree

from .forward_changes import Kept
from .forward_reads import NOTHING_READ, ForwardReads, ReadTensor
from .size_guards import NO_GUARDS, SizeGuards


def differentiable(dtype: torch.dtype) -> bool:
    """Whether tensors of this type have gradients."""
    return dtype.is_floating_point or dtype.is_complex


@dataclass(frozen=True, slots=True)
class Source:
    """What an input of the graph is, or what an output is of.

    kind: "parameter", "buffer", "constant", "argument" or "tangent" of an input; of an output "result", "mutation" or
        "gradient".
    name: of a parameter or buffer its full name, of a constant its attribute of the graph's module; else "".
    place: of an argument its place among all leaves of (args, kwargs); of a result or its tangent that among results.
    of: of a mutation or gradient, the kind of its input.
    """

    kind: str
    name: str = ""
    place: int = -1
    of: str = ""

    def of_input(self) -> Source:
        """The input that a mutation or a gradient belongs to."""
        return Source(self.of, self.name, self.place)


@dataclass(frozen=True, slots=True)
class Captured:
    """A joint graph. `inputs` are its placeholders, `outputs` the nodes that it returns, each with its source.

    results: the tree of the forward's results.
    fixed: by place the results that are no tensors, such as numbers, which may be symbolic sizes.
    numbers_only: whether only results without dims have a gradient.
    reads: what the forward read beside its arguments.
    sizes: what has to hold of sizes that the graph leaves open.
    kept: attributes that are set after each call, whose values stand behind the forward's results in a pair.
    live: by name the constants that are read anew at each call, and where.
    detached: the places of results that need no gradient.
    """

    module: torch.fx.GraphModule
    inputs: tuple[tuple[torch.fx.Node, Source], ...]
    outputs: tuple[tuple[Any, Source], ...]
    results: pytree.TreeSpec
    numbers_only: bool
    reads: ForwardReads = NOTHING_READ
    fixed: Mapping[int, Any] = field(default_factory=dict)
    sizes: SizeGuards = NO_GUARDS
    kept: tuple[Kept, ...] = ()
    live: Mapping[str, ReadTensor] = field(default_factory=dict)
    detached: frozenset[int] = frozenset()

    def fed_by(self) -> dict[Source, frozenset[int]]:
        """By gradient the places of the results whose gradients it is made of."""
        fed: dict[torch.fx.Node, frozenset[int]] = {n: frozenset((s.place,)) for n, s in self.of_kind("tangent")}
        for node in self.module.graph.nodes:
            if node not in fed:
                fed[node] = frozenset().union(*(fed[read] for read in node.all_input_nodes))
        return {source: fed[node] for node, source in self.of_kind("gradient") if node is not None}

    def states(self) -> frozenset[int]:
        """The places of results that are kept and need no gradient: the next call may read them, whole and plain."""
        first = self.results.child(0).num_leaves if self.kept else self.results.num_leaves
        return frozenset(place for place in self.detached if place >= first)

    def of_kind(self, kind: str) -> list[tuple[Any, Source]]:
        """The inputs or outputs of a kind."""
        return [(node, source) for node, source in (*self.inputs, *self.outputs) if source.kind == kind]
