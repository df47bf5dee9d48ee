"""Copies that a kernel does beside its ops, done with nvFuser's functions by running their text on TensorViews."""

from __future__ import annotations

import math
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from typing import Any, NoReturn

import torch

from ...dtypes import Category, DataType, from_torch
from ...lowering.instructions import Instruction
from ...ops.nvfuser_lowering import sliced
from ...ops.opdef import ToTorch
from ...ops.values import TensorType

# nvFuser's function of two terms, and of all terms along a dim.
_TERMS: Mapping[str, tuple[str, str]] = {
    "sum": ("add", "sum"), "prod": ("mul", "prod"), "max": ("maximum", "max"), "min": ("minimum", "min"),
}  # fmt: skip


@dataclass(frozen=True, slots=True)
class Traced:
    """A TensorView with its local type, and those methods of torch's tensors that the text of copies calls."""

    fd: Any
    value: Any
    type: TensorType

    @property
    def ops(self) -> Any:
        return self.fd.ops

    def _made(self, value: Any, shape: Sequence[int]) -> Traced:
        return Traced(self.fd, value, TensorType(tuple(shape), self.type.dtype))

    def view(self, *shape: Any) -> Traced:
        """A reshape in row-major order; a single -1 makes the tensor flat."""
        new = list(shape if isinstance(shape[0], int) else shape[0])
        new = [math.prod(self.type.shape)] if new == [-1] else new
        return self if new == list(self.type.shape) else self._made(self.ops.reshape(self.value, new), new)

    reshape = view

    def new_empty(self, size: int) -> NoReturn:
        raise ToTorch("a copy of nothing")

    def movedim(self, source: int, target: int) -> Traced:
        order = list(range(len(self.type.shape)))
        order.insert(target, order.pop(source))
        return self._made(self.ops.permute(self.value, order), [self.type.shape[d] for d in order])

    def __getitem__(self, index: Any) -> Traced:
        starts, stops = zip(*_bounds(index, self.type.shape), strict=True)
        shape = [b - a for a, b in zip(starts, stops, strict=True)]
        if tuple(shape) == self.type.shape:
            return self
        val = self.fd.define_scalar
        return self._made(sliced(self.ops, val, self.value, self.type.shape, starts, stops), shape)


def _bounds(index: Any, shape: Sequence[int]) -> Iterator[tuple[int, int]]:
    """The start and stop of every dim."""
    parts = [] if index is ... else [*(index if isinstance(index, tuple) else (index,))]
    parts += [slice(None)] * (len(shape) - len(parts))
    for part, n in zip(parts, shape, strict=True):
        if not isinstance(part, slice) or part.step is not None:
            raise ToTorch("a copy of elements that are not in a row")
        yield (0, n) if part.stop is None else (part.start, part.stop)


class _Pieces:
    """A tensor as the pieces that have been put into it."""

    def __init__(self, shape: tuple[int, ...]):
        self.shape = shape
        self.found: list[tuple[list[tuple[int, int]], Traced]] = []

    def __setitem__(self, index: Any, value: Traced) -> None:
        self.found.append(([*_bounds(index, self.shape)], value))

    def joined(self) -> Traced:
        """The whole. Raises ToTorch where the pieces are not slices along one dim that make up all of it."""
        dims = [d for d, n in enumerate(self.shape) if any(box[d] != (0, n) for box, _ in self.found)]
        dim = dims[0] if dims else 0
        rows = sorted(self.found, key=lambda entry: entry[0][dim])
        edges = [edge for box, _ in rows for edge in box[dim]]
        if len(dims) > 1 or edges[1:-1:2] != edges[2::2] or (edges[0], edges[-1]) != (0, self.shape[dim]):
            raise ToTorch("a tensor that pieces are put into along several dims")
        parts = [value for _, value in rows]
        return parts[0] if len(parts) == 1 else _cat(parts, dim, self.shape)


def _cat(parts: Sequence[Traced], dim: int, shape: Sequence[int]) -> Traced:
    first = parts[0]
    return first._made(first.ops.cat([part.value for part in parts], dim), shape)


class _Memory:
    """What the text of copies calls as M."""

    def __init__(self, fd: Any, dtype: Callable[[DataType], Any]):
        self._fd, self._ops, self._dtype = fd, fd.ops, dtype

    def empty(self, shape: tuple[int, ...], dtype: torch.dtype) -> _Pieces:
        return _Pieces(shape)

    def full(self, *_: Any) -> NoReturn:
        raise ToTorch("a tensor that is a number where no piece is put")

    def clone(self, x: Traced) -> Traced:
        return Traced(self._fd, self._ops.set(x.value), x.type)

    def dense(self, x: Traced) -> Traced:
        return x

    def cat(self, parts: Sequence[Traced]) -> Traced:
        flat = [part.view(-1) for part in parts]
        return flat[0] if len(flat) == 1 else _cat(flat, 0, [sum(part.type.shape[0] for part in flat)])

    def combine(self, a: Traced, b: Traced, reduce: str) -> Traced:
        return self._reduced(getattr(self._ops, _TERMS[reduce][0])(a.value, b.value), a.type)

    def fold(self, terms: Traced, reduce: str) -> Traced:
        ttype, value = TensorType(terms.type.shape[1:], terms.type.dtype), terms.value
        if ttype.dtype.is_reduced_float:  # Its kernels reduce nothing in half precision.
            value = self._ops.cast(value, self._dtype(DataType.Float))
        return self._reduced(getattr(self._ops, _TERMS[reduce][1])(value, [0]), ttype)

    def _reduced(self, value: Any, ttype: TensorType) -> Traced:
        """The value in the type of its terms, which nvFuser may have widened."""
        if ttype.dtype.category is Category.BOOL:
            raise ToTorch("a reduction of Bool")
        return Traced(self._fd, self._ops.cast(value, self._dtype(ttype.dtype)), ttype)


def copied(
    fd: Any, dtype: Callable[[DataType], Any], steps: Sequence[Instruction], values: Mapping[str, Traced]
) -> dict[str, Traced]:
    """The values that copies make, by name. Raises ToTorch with the reason where nvFuser cannot express a copy."""
    scope: dict[str, Any] = {"M": _Memory(fd, dtype), "torch": torch, "K": _Refused()}
    made: dict[str, Any] = dict(values)
    for step in steps:
        exec(step.source(), scope, made)
    found = {name: v.joined() if isinstance(v, _Pieces) else v for name, v in made.items() if name not in values}
    if any(0 in v.type.shape for v in found.values()):
        raise ToTorch("a copy of nothing")
    return found


class _Refused:
    def __getattr__(self, name: str) -> NoReturn:
        raise ToTorch("a copy of elements that are not in a row")


def type_of(tensor: torch.Tensor) -> TensorType:
    """The local type of a tensor of torch."""
    return TensorType(tuple(tensor.shape), from_torch(tensor.dtype))
