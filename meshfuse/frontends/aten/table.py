"""The table of aten ops: for each the function that writes it in ops of a definition.

A rule is called with a `Translation` and the op's arguments, in which tensors are TensorViews and sizes are ints. It
returns a TensorView, or a tuple with one entry per result of the op. What it returns is cast to the type that the
graph says, so a rule need not follow torch's promotion.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

import torch

from ...definition.tensor_view import TensorView
from ...dtypes import DataType, from_torch
from ..sizes import Sizes
from ..spread import Spread

Rule = Callable[..., Any]
RULES: dict[Any, Rule] = {}
# Rules of ops that other packages register, by qualified name: these need not be imported.
NAMED: dict[str, Rule] = {}
aten = torch.ops.aten


def rule(*targets: Any) -> Callable[[Rule], Rule]:
    """Enter a function for these op overloads."""

    def enter(function: Rule) -> Rule:
        for target in targets:
            assert target not in RULES, target
            RULES[target] = function
        return function

    return enter


def named_rule(*names: str) -> Callable[[Rule], Rule]:
    """Enter a function for ops of other packages, by qualified name: "transformers::grouped_mm_fallback"."""

    def enter(function: Rule) -> Rule:
        NAMED.update(dict.fromkeys(names, function))
        return function

    return enter


@dataclass(slots=True)
class Translation:
    """What a rule sees of the node that it writes.

    fd: the definition that is written.
    results: the node's results as the graph describes them (fake tensors), a tuple of them where there are several.
    sizes: the numbers of the graph's symbolic sizes.
    spread: of attention how it lies on the mesh; None for as the planner finds.
    taken: the first operand as the graph describes it; None where it is no tensor of the graph.
    """

    fd: Any
    results: Any
    sizes: Sizes
    spread: Spread | None = None
    taken: Any = None

    @property
    def ops(self) -> Any:
        return self.fd.ops

    @property
    def result(self) -> Any:
        """The only result, or the first."""
        return self.results[0] if isinstance(self.results, (tuple, list)) else self.results

    @property
    def dtype(self) -> DataType:
        return from_torch(self.result.dtype)

    @property
    def shape(self) -> list[int]:
        return self.sizes.shape(self.result)

    def cast(self, x: TensorView, dtype: Any) -> TensorView:
        """The tensor in another type; itself where it has that type."""
        wanted = dtype if isinstance(dtype, DataType) else from_torch(dtype)
        return x if x.dtype is wanted else self.ops.cast(x, wanted)

    def computing(self, x: TensorView) -> TensorView:
        """The tensor in the type that torch computes in: float32 for those of 16 bits."""
        return self.cast(x, DataType.Float) if x.dtype.is_reduced_float else x

    def reshape(self, x: TensorView, shape: Any) -> TensorView:
        """The tensor in another shape; itself where it has that shape."""
        wanted = [int(n) for n in shape]
        return x if list(x.type.shape) == wanted else self.ops.reshape(x, wanted)

    def expand(self, x: TensorView, shape: Any) -> TensorView:
        """The tensor broadcast to a shape; itself where it has that shape."""
        wanted = [int(n) for n in shape]
        return x if list(x.type.shape) == wanted else self.ops.expand(x, wanted)

    def full(self, value: Any, shape: Any, dtype: DataType) -> TensorView:
        """A tensor of one number."""
        return self.ops.full([int(n) for n in shape], value, dtype)

    def unsqueeze(self, x: TensorView, dim: int) -> TensorView:
        """The tensor with a new dim of size 1."""
        place = dim % (x.ndim + 1)
        return self.ops.broadcast(x, [d == place for d in range(x.ndim + 1)])

    def along(self, x: TensorView, dim: int, ndim: int) -> TensorView:
        """A tensor of one dim as dim `dim` of one that has `ndim`."""
        return x if ndim == 1 else self.ops.broadcast(x, [d != dim % ndim for d in range(ndim)])


def dims_of(dims: Any, ndim: int) -> list[int]:
    """An op's `dim` argument as a list; None and an empty list stand for all."""
    if dims is None or (isinstance(dims, (list, tuple)) and not dims):
        return list(range(ndim))
    return [d % ndim for d in dims] if isinstance(dims, (list, tuple)) else [dims % ndim]
