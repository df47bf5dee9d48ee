"""Attention masks that depend on positions alone: causal ones and those that hide nothing are seen to be such.

Models of Hugging Face always pass a mask of bools, made of comparisons of positions. Attention that knows it to be
causal needs no mask in memory, and skips what is hidden.
"""

from __future__ import annotations

import operator
from typing import Any

import torch

from .cut import draws
from .sdpa import BACKWARD, FORWARD
from .sizes import Sizes

_LARGEST = 1 << 26  # Elements of a mask that is worked out.
_MASK, _CAUSAL = {FORWARD: 3, BACKWARD: 4}, {FORWARD: 5, BACKWARD: 10}


def recognised(graph: torch.fx.Graph, sizes: Sizes) -> dict[torch.fx.Node, tuple[Any, ...]]:
    """By node of attention its arguments without the mask, where the mask says no more than `is_causal` does."""
    values = Positions(graph, sizes)
    found: dict[torch.fx.Node, tuple[Any, ...]] = {}
    for target, place in _MASK.items():
        for node in graph.find_nodes(op="call_function", target=target):
            mask = node.args[place]
            meaning = values.meaning(mask) if isinstance(mask, torch.fx.Node) else None
            if meaning is not None and (not node.args[_CAUSAL[target]] or not meaning):
                args = list(node.args)
                args[place], args[_CAUSAL[target]] = None, args[_CAUSAL[target]] or meaning
                found[node] = tuple(args)
    return found


class Positions:
    """The numbers of nodes that depend on no input, for the sizes at hand."""

    def __init__(self, graph: torch.fx.Graph, sizes: Sizes) -> None:
        self._sizes, self._module = sizes, graph.owning_module
        self._values: dict[torch.fx.Node, Any] = {}
        self._meanings: dict[torch.fx.Node, bool | None] = {}

    def meaning(self, node: torch.fx.Node) -> bool | None:
        """True for a mask that is causal, False for one that hides nothing, None for any other."""
        if node not in self._meanings:
            self._meanings[node] = self._meaning(node)
        return self._meanings[node]

    def _meaning(self, node: torch.fx.Node) -> bool | None:
        told = node.meta.get("val")
        if not isinstance(told, torch.Tensor) or told.dtype != torch.bool or told.ndim < 2:
            return None
        shape = self._sizes.shape(told)
        if torch.Size(shape).numel() > _LARGEST or not self._depends_on_positions(node):
            return None
        mask = self._value(node)
        if bool(mask.all()):
            return False
        rows, columns = shape[-2:]
        is_square = rows == columns
        causal = torch.ones(rows, columns, dtype=torch.bool, device=mask.device).tril()
        return True if is_square and bool((mask == causal).all()) else None

    def _depends_on_positions(self, node: torch.fx.Node) -> bool:
        waiting, seen = [node], set[torch.fx.Node]()
        while waiting:
            here = waiting.pop()
            if here in seen or not self._is_tensor(here):
                continue
            seen.add(here)
            if here.op != "call_function" or draws(here):
                return False
            waiting += here.all_input_nodes
        return True

    def _is_tensor(self, node: torch.fx.Node) -> bool:
        """Sizes are known, whatever they are made of."""
        return isinstance(node.meta.get("val"), (torch.Tensor, tuple, list))

    def _value(self, node: Any) -> Any:
        if isinstance(node, (tuple, list)):
            return [self._value(entry) for entry in node]
        if not isinstance(node, torch.fx.Node):
            return self._sizes.number(node)
        if not self._is_tensor(node):
            return self._sizes.number(node.meta["val"])
        if node not in self._values:
            args = self._value(node.args)
            kwargs = {key: self._value(value) for key, value in node.kwargs.items()}
            kwargs = {key: "cpu" if key == "device" else value for key, value in kwargs.items()}
            function = operator.getitem if node.target is operator.getitem else node.target
            assert callable(function)
            self._values[node] = function(*args, **kwargs)
        return self._values[node]
