"""Windows that slide along dims, as of convolutions and pooling: their factors, and their blocks with halos.

Along one dim element m of the result reads the operand's elements m stride - before + dilation t, for t below the size
of the window; beyond the operand's ends stands a fill. Read backwards, the same geometry spreads each element of a
gradient over the elements that its window read. Where a sharded dim lies in blocks, ranks exchange the edges of these
(`halo.py`), and the blocks become part of the batch.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

from ..errors import user_error
from .blocks import block_size
from .halo import in_blocks, whole_again
from .opdef import Writing
from .rules import FactorKind, RuleBuilder
from .shape_arithmetic import UNKNOWN, one_dim_widths
from .values import TensorRef

DimFactors = tuple[int, ...]


@dataclass(frozen=True, slots=True)
class Window:
    """A window along one dim: its size (in taps), stride and dilation, and the fill before and after the dim."""

    size: int
    stride: int = 1
    before: int = 0
    after: int = 0
    dilation: int = 1

    @property
    def reach(self) -> int:
        """From its first tap to its last."""
        return self.dilation * (self.size - 1)

    @property
    def is_patch(self) -> bool:
        """Whether windows lie side by side, and nothing is filled in."""
        return self.dilation == 1 and self.stride == self.size and self.before == 0 and self.after <= 0

    def results(self, n: int) -> int:
        """How many windows a dim of size n has; -1 for an open size."""
        return (
            UNKNOWN if UNKNOWN in (n, self.size) else (n + self.before + self.after - self.reach - 1) // self.stride + 1
        )


def check_windows(op: str, windows: Sequence[Window]) -> None:
    """Raises DefinitionError for sizes, strides and dilations below 1, and negative padding."""
    for window in windows:
        least = {"kernel": window.size, "stride": window.stride, "dilation": window.dilation}
        for what, value in least.items():
            if value < 1 and (what, value) != ("kernel", UNKNOWN):
                raise user_error(f"{op}: {what}", str(value), "1 or more", "Pass a positive number.")
        if window.before < 0:
            raise user_error(f"{op}: padding", str(window.before), "0 or more", "Slice what is to be left out.")


def per_dim(op: str, what: str, given: Sequence[Any], dims: int) -> tuple[Any, ...]:
    """An option with a value for each spatial dim; one value counts for all. Raises DefinitionError otherwise."""
    if len(given) == 1:
        return tuple(given) * dims
    if len(given) != dims:
        raise user_error(f"{op}: {what}", str(list(given)), f"one number, or {dims}", "Give one per spatial dim.")
    return tuple(given)


def window_factors(builder: RuleBuilder, n: int, m: int, window: Window) -> tuple[DimFactors, DimFactors]:
    """The factors of a dim of size n, and of the dim of its m windows.

    With n = m stride, a dim is made of steps that both have. They pass where windows are patches.
    """
    if n != m * window.stride:
        return builder.blocked(n), builder.blocked(m)
    steps = builder.dim(m) if window.is_patch else builder.factor(m, FactorKind.BLOCK)
    inside = builder.blocked(window.stride) if window.stride > 1 else ()
    return (*steps, *inside), steps


# blocks of a sharded dim ------------------------------------------------------------------------------------------


@dataclass(frozen=True, slots=True)
class Blocks:
    """A dim in blocks, as what an op's distributed form works on.

    dim: the spatial dim. count: the number of blocks. inputs, results: how many elements of the operand, and how many
    windows, a block begins with. window: that of the op on a block, which finds all that it reads in the block.
    """

    dim: int
    count: int
    inputs: int
    results: int
    window: Window

    def merged(self, r: Writing, x: TensorRef) -> TensorRef:
        """[n, c, .., blocks, size, ..] as [n blocks, c, .., size, ..]."""
        shape = r.type(x).shape
        order = [0, self.dim, *(d for d in range(1, len(shape)) if d != self.dim)]
        moved = r.call("permute", x, order)
        found = r.type(moved).shape
        return r.call("reshape", moved, (found[0] * found[1], *found[2:]))

    def split(self, r: Writing, x: TensorRef, n: int) -> TensorRef:
        """The inverse of `merged`, for n elements of the dim in all."""
        shape = r.type(x).shape
        parts = r.call("reshape", x, (shape[0] // self.count, self.count, *shape[1:]))
        order = [0, *(d + 1 for d in range(1, self.dim)), 1, *range(self.dim + 1, len(shape) + 1)]
        return whole_again(r, r.call("permute", parts, order), self.dim, n)

    def starts(self, r: Writing, ndim: int, step: int, images: int) -> TensorRef:
        """By block its number times `step`, as a tensor that broadcasts to [n blocks, c, ..] of this many dims."""
        numbers = r.call("iota", self.count, 0, step)
        repeated = r.call("expand", r.call("broadcast", numbers, [True, False]), (images, self.count))
        return r.call("reshape", repeated, (images * self.count, *(1,) * (ndim - 1)))


def input_blocks(dim: int, sizes: tuple[int, int], window: Window, count: int) -> Blocks:
    """Blocks of windows with the elements that these read; `sizes` are those of the operand, n, and of its windows, m.

    All elements that are read are in some block, also behind the last window's first.
    """
    n, m = sizes
    read = min(n, (m - 1) * window.stride - window.before + window.reach + 1)
    results = max(block_size(m, count), block_size(read, count * window.stride))
    return Blocks(dim, count, results * window.stride, results,
                  Window(window.size, window.stride, 0, 0, window.dilation))  # fmt: skip


def with_halo(r: Writing, x: TensorRef, blocks: Blocks, before: int, fill: Any) -> TensorRef:
    """The operand's blocks with all that their windows read: [n, c, .., blocks, size, ..]."""
    window = blocks.window
    read = (blocks.results - 1) * window.stride + window.reach + 1
    after = max(0, read - before - blocks.inputs)
    x = in_blocks(r, x, blocks.dim, blocks.count, blocks.inputs, (before, after), fill)
    return resized(r, x, blocks.dim + 1, 0, read)


def result_blocks(dim: int, sizes: tuple[int, int], window: Window, count: int) -> tuple[Blocks, tuple[int, int], int]:
    """(blocks, halo, start) for what is spread: `sizes` are those of the operand, n, and of its windows, m.

    Each block of the operand's elements needs windows of its own and `halo` more before and after these. What they
    spread begins `start` elements before the block.
    """
    n, m = sizes
    results = max(block_size(m, count), block_size(n, count * window.stride))
    inputs = results * window.stride
    early = max(0, -(-(window.reach - window.before) // window.stride))
    late = max(0, (inputs - 1 + window.before) // window.stride - (results - 1))
    start = early * window.stride + window.before
    whole = Window(window.size, window.stride, 0, 0, window.dilation)
    return Blocks(dim, count, inputs, results, whole), (early, late), start


def resized(r: Writing, x: TensorRef, dim: int, start: int, size: int) -> TensorRef:
    """Elements `start` on of a dim, `size` of them, with zeros where it has no more."""
    shape = r.type(x).shape
    if (start, size) == (0, shape[dim]):
        return x
    if start + size <= shape[dim]:
        first, last = [0] * len(shape), list(shape)
        first[dim], last[dim] = start, start + size
        return r.call("slice", x, first, last)
    return r.call("pad", x, one_dim_widths(len(shape), dim, -start, start + size - shape[dim]))
