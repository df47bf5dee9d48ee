"""How one captured attention lies on the mesh under context parallelism."""

from __future__ import annotations

import math
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

    axis: that of the context.
    ring: the number of ranks that keys and values travel through; 0 where each rank has all rows of some heads.
    is_zigzag: whether the ring takes rows in zig-zag order.
    batch: the axes of the batch.
    heads: those of heads outside of attention.
    counts: the numbers of heads of the query, and of keys.
    """

    mesh: DeviceMesh
    line: SourceLine
    axis: str
    ring: int
    is_zigzag: bool
    batch: Any
    heads: tuple[str, ...]
    counts: tuple[int, int]

    def __str__(self) -> str:
        if not self.ring:
            return f"all rows of some heads, over {self.axis}"
        return f"in a ring of {self.ring} over {self.axis}{', rows in zig-zag order' if self.is_zigzag else ''}"

    def entered(self, fd: Any, x: TensorView) -> TensorView:
        """A query, key, value or gradient [batch, heads, rows, width], as attention takes it."""
        x = self._place(fd, x, self.heads, self.axis)
        if self.is_zigzag:
            return self._place(fd, fd.ops.zigzag(x, ROWS, self.ring), self.heads, self.axis)
        return x if self.ring else self._place(fd, fd.ops.set(x), (*self.heads, self.axis), None)

    def left(self, fd: Any, x: TensorView) -> TensorView:
        """What attention makes, as all else takes it: the inverse of `entered`."""
        x = self._place(fd, x, self.heads, self.axis) if self.ring else x
        if self.is_zigzag:
            return self._place(fd, fd.ops.unzigzag(x, ROWS, self.ring), self.heads, self.axis)
        return x if self.ring else self._place(fd, fd.ops.set(x), self.heads, self.axis)

    def _place(self, fd: Any, view: TensorView, heads: tuple[str, ...], rows: str | None) -> TensorView:
        """Annotate a tensor, if nobody has; returns it, or of an input, which lies as it is passed, another one."""
        recording = fd.recording
        view = fd.ops.set(view) if view.id in recording.input_tensors() else view
        if not recording.is_annotated(view.id):
            spec = (self.batch, self._heads(view.type.shape[-3], heads), rows, None)[-view.ndim :]
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
