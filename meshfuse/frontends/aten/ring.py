"""Attention in a ring for any numbers of rows and columns: what its equal blocks lack is padded, and hidden."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

from ...definition.tensor_view import TensorView
from ...dtypes import DataType
from ..spread import Spread
from .table import Translation

_ROWS, _COLUMNS = -2, -1  # The dims of a bias or mask.


@dataclass(frozen=True, slots=True)
class Ring:
    """One attention in a ring.

    rows, columns: the numbers of the query's rows and of the keys.
    added: bias or mask, by its name.
    """

    t: Translation
    spread: Spread
    rows: int
    columns: int
    is_causal: bool
    scale: float | None
    added: dict[str, TensorView]

    def forward(self, qkv: Sequence[TensorView]) -> tuple[TensorView, TensorView]:
        """(output, log-sum-exp)."""
        out, lse = self.t.ops.ring_attention(*map(self._padded, qkv), *self._options(), **self._all_added())
        return self._cut(out, _ROWS, self.rows), self._cut(lse, -1, self.rows)

    def backward(self, saved: Sequence[TensorView], logsumexp: TensorView) -> tuple[TensorView, ...]:
        """The gradients of query, key and value. saved: the output's gradient, these three, and the output."""
        given = *map(self._padded, saved), self._padded(logsumexp, -1)
        made = self.t.ops.ring_attention_bwd(*given, *self._options(), **self._all_added())
        sizes = (self.rows, self.columns, self.columns)
        return tuple(self._cut(x, _ROWS, n) for x, n in zip(made, sizes, strict=True))

    def _options(self) -> tuple[Any, ...]:
        return self.spread.ring, self.is_causal, self.scale, self.spread.is_zigzag

    def _lacking(self, n: int) -> int:
        return -n % self.spread.ring

    def _padded(self, x: TensorView, dim: int = _ROWS, value: Any = 0.0) -> TensorView:
        """The tensor with rows at the end, so that each rank has as many."""
        lacking = self._lacking(x.type.shape[dim])
        return self.t.ops.pad(x, [*[0, 0] * (-dim - 1), 0, lacking], value) if lacking else x

    def _cut(self, x: TensorView, dim: int, n: int) -> TensorView:
        shape = list(x.type.shape)
        if shape[dim] == n:
            return x
        ends = [n if d == dim % x.ndim else size for d, size in enumerate(shape)]
        return self.t.ops.slice(x, [0] * x.ndim, ends)

    def _all_added(self) -> dict[str, TensorView]:
        """Bias and mask of all blocks. Keys that pad the last block are hidden: under a causal mask they are anyway."""
        found = {name: self._padded_added(x) for name, x in self.added.items()}
        if self._lacking(self.columns) and not self.is_causal and not self._hides(found.get("mask")):
            there = self.t.ops.lt(self.t.ops.iota(self.columns + self._lacking(self.columns)), self.columns)
            hidden = self.t.along(there, _COLUMNS, 4)
            found["mask"] = self.t.ops.bitwise_and(found["mask"], hidden) if "mask" in found else hidden
        return found

    def _hides(self, mask: TensorView | None) -> bool:
        """Whether a mask has columns of its own, of which those that were padded are False."""
        return mask is not None and mask.type.shape[_COLUMNS] > 1

    def _padded_added(self, x: TensorView) -> TensorView:
        value = False if x.dtype is DataType.Bool else 0.0
        for dim in (_COLUMNS, _ROWS):
            if x.ndim >= -dim and x.type.shape[dim] > 1:
                x = self._padded(x, dim, value)
        return x
