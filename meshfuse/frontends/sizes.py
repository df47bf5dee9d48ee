"""The numbers of a graph's symbolic sizes."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import torch

from ..errors import user_error


class Sizes:
    """The numbers that stand for the symbols of a captured graph; a graph without symbols has none.

    `bind` learns them from the shapes of arguments.
    """

    def __init__(self) -> None:
        self._known: dict[Any, int] = {}
        self._found: dict[Any, Any] = {}  # By expression its number: most sizes of a graph are the same few.

    def bind(self, told: Sequence[Any], shape: Sequence[int]) -> None:
        """Learn the symbols of a shape as the graph tells it, from a concrete one."""
        for size, number in zip(told, shape, strict=True):
            if isinstance(size, torch.SymInt):
                expression = size.node.expr
                if expression.is_symbol:
                    self._known[expression] = int(number)
                    self._found.clear()

    def number(self, value: Any) -> Any:
        """The number of a symbolic value; any other value as it is."""
        if not isinstance(value, (torch.SymInt, torch.SymFloat, torch.SymBool)):
            return value
        expression = value.node.expr
        if expression not in self._found:
            self._found[expression] = self._substituted(expression)
        found = self._found[expression]
        if isinstance(value, torch.SymInt):
            return int(found)
        return float(found) if isinstance(value, torch.SymFloat) else bool(found)

    def _substituted(self, expression: Any) -> Any:
        found = expression.subs(self._known)
        if found.free_symbols:
            raise user_error(
                "a size that depends on numbers, or a number that is read from a tensor", f"{found}",
                "ones that follow from shapes",
                "Use torch.where, or multiply with the mask, in the place of a mask of bools as an index, nonzero and "
                "unique; and the tensor in the place of its .item().",
            )  # fmt: skip
        return found

    def shape(self, tensor: torch.Tensor) -> list[int]:
        """The sizes of a tensor of the graph."""
        return [self.number(n) for n in tensor.shape]

    def key(self) -> tuple[Any, ...]:
        """Equal for equal numbers."""
        return tuple(sorted((str(symbol), number) for symbol, number in self._known.items()))
