"""How one captured attention lies on the mesh under context parallelism."""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

from ..definition import annotating
from ..definition.annotation import layouts_of_spec
from ..definition.tensor_view import TensorView
from ..errors import SourceLine
from ..mesh import DeviceMesh
from ..sharding.layout import Split

ROWS = -2  # The dim of rows of a query, key or value.


@dataclass(frozen=True, slots=True)
class Spread:
    """How one attention lies on the mesh.

    rows: the axes that rows are cut over outside of attention.
    round: of these, those along which keys and values travel in a ring; along the others heads are cut inside.
    is_zigzag: whether the ring takes rows in zig-zag order.
    batch: the axes of the batch.
    heads: those of heads outside of attention.
    counts: the numbers of heads of the query, and of keys.
    """

    mesh: DeviceMesh
    line: SourceLine
    rows: tuple[str, ...]
    round: tuple[str, ...]
    is_zigzag: bool
    batch: Any
    heads: tuple[str, ...]
    counts: tuple[int, int]

    @property
    def ring(self) -> int:
        """The number of ranks that keys and values travel through; 0 where there is no ring."""
        return math.prod([self.mesh.axis_size(axis) for axis in self.round]) if self.round else 0

    @property
    def split(self) -> tuple[str, ...]:
        """The axes that heads are cut over inside of attention, and rows outside."""
        return tuple([axis for axis in self.rows if axis not in self.round])

    def __str__(self) -> str:
        heads = f"all rows of some heads, over {_listed(self.split)}"
        if not self.round:
            return heads
        zigzag = ", rows in zig-zag order" if self.is_zigzag else ""
        around = f"in a ring of {self.ring} over {_listed(self.round)}{zigzag}"
        return f"{around}; {heads}" if self.split else around

    def entered(self, fd: Any, x: TensorView) -> TensorView:
        """A query, key, value or gradient [batch, heads, rows, width], as attention takes it."""
        x = self._outside(fd, x)
        if self.is_zigzag:
            x = self._outside(fd, fd.ops.zigzag(x, ROWS, self.ring))
        return self._inside(fd, fd.ops.set(x)) if self.split else x

    def left(self, fd: Any, x: TensorView) -> TensorView:
        """What attention makes, as all else takes it: the inverse of `entered`."""
        x = self._inside(fd, x) if self.round else x
        x = self._outside(fd, fd.ops.set(x)) if self.split else x
        return self._outside(fd, fd.ops.unzigzag(x, ROWS, self.ring)) if self.is_zigzag else x

    def _outside(self, fd: Any, view: TensorView) -> TensorView:
        return self._place(fd, view, self.heads, self.rows)

    def _inside(self, fd: Any, view: TensorView) -> TensorView:
        return self._place(fd, view, (*self.heads, *self.split), self.round)

    def _place(self, fd: Any, view: TensorView, heads: tuple[str, ...], rows: tuple[str, ...]) -> TensorView:
        """Annotate a tensor, if nobody has; returns it, or of an input, which lies as it is passed, another one."""
        recording = fd.recording
        view = fd.ops.set(view) if view.id in recording.input_tensors() else view
        if not recording.is_annotated(view.id):
            spec = (self.batch, self._heads(view.type.shape[-3], heads), list(rows) or None, None)[-view.ndim :]
            layouts = layouts_of_spec(view.label, self.mesh, spec, view.ndim, self.line)
            annotating.annotate(recording, view.id, self.mesh, layouts, self.line)
        return view

    def _heads(self, n: int, axes: tuple[str, ...]) -> Any:
        """How a dim of heads is cut over axes, where each of the key's heads is shared by a group of the query's.

        Axes that the key's heads do not divide among them cut groups: all ranks of a group then have its key.
        """
        queries, left = self.counts
        if queries == left:
            return list(axes) or None
        outer: list[Split] = []
        inner: list[Split] = []
        for axis in axes:
            ranks = self.mesh.axis_size(axis)
            part = 1 if inner else math.gcd(left, ranks)
            outer += [Split(part, axis)] if part > 1 else []
            inner += [Split(ranks // part, axis, part)] if part < ranks else []
            left //= part
        groups = [Split(left)] if inner and left > 1 else []
        return ([*outer, *groups, *inner] if n == queries else outer) or None


def _listed(axes: Sequence[str]) -> str:
    return " and ".join(axes)
