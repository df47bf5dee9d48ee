"""Classes of programs that read neighbours of a split dim: convolutions by hand, images, pooling; figures as in
`general`.
"""

from __future__ import annotations

import functools
import itertools
from collections.abc import Callable, Sequence

from layers import Sizes, Tensor, floats
from programs import X4_Y2, Fd, gradients, outputs, split

import meshfuse as mf

from .general import SP8
from .known import Classes

CLASSES = Classes()
known = CLASSES.known


def taps(fd: Fd, x: Tensor, dims: Sequence[int], reach: tuple[int, int]) -> list[Tensor]:
    """x shifted by -before to after along some dims, zeros coming in: slices of one pad."""
    shape, (before, after) = x.type.shape, reach
    padded = fd.ops.pad(x, [w for d in reversed(range(x.ndim)) for w in (reach if d in dims else (0, 0))])
    starts = itertools.product(*(range(before + after + 1) if d in dims else (0,) for d in range(x.ndim)))
    return [fd.ops.slice(padded, list(s), [a + n for a, n in zip(s, shape, strict=True)]) for s in starts]


def added(parts: Sequence[Tensor]) -> Tensor:
    return functools.reduce(lambda a, b: a + b, parts)


@known(0.72, 0.058)
def convolution_along_a_split_sequence(fd: Fd, s: Sizes) -> None:
    """Each rank's rows at both edges, once."""
    x = floats(fd, s.batch, s.length, s.width)
    weights = [floats(fd, s.width, s.width) for _ in range(3)]
    outputs(fd, added([fd.ops.matmul(t, w) for t, w in zip(taps(fd, x, [1], (1, 1)), weights, strict=True)]))
    split(fd, SP8, (x, [None, "sp", None]))


@known(1.81, 0.202)
def short_causal_convolution_backward(fd: Fd, s: Sizes) -> None:
    """Of four rows per channel: three rows forward, three of the gradient back, and the weights' gradient."""
    x, w = floats(fd, s.batch, s.length, s.width), floats(fd, 4, s.width)
    rows = [fd.ops.slice(w, [i, 0], [i + 1, s.width]) for i in range(4)]
    made = [t * fd.ops.reshape(row, [s.width]) for t, row in zip(taps(fd, x, [1], (3, 0)), rows, strict=True)]
    gradients(fd, added(made), [x, w])
    split(fd, SP8, (x, [None, "sp", None]))


@known(1.26, 0.132)
def blur_of_images_split_both_ways(fd: Fd, s: Sizes) -> None:
    """Nine taps: a row from above and below, then a column from left and right of each of the three."""
    x = floats(fd, s.batch, 64, 64, 64)
    outputs(fd, added(taps(fd, x, [1, 2], (1, 1))))
    split(fd, X4_Y2, (x, [None, "x", "y", None]))


@known(7.43, 0.23)
def convolution_of_images_as_one_product(fd: Fd, s: Sizes) -> None:
    """Nine taps next to each other, and one product."""
    x, w = floats(fd, s.batch, 64, 64, 64), floats(fd, 9 * 64, 64)
    outputs(fd, fd.ops.matmul(fd.ops.cat(taps(fd, x, [1, 2], (1, 1)), 3), w))
    split(fd, SP8, (x, [None, "sp", None, None]))


@known(14.86, 0.459)
def two_convolutions_over_split_rows(fd: Fd, s: Sizes) -> None:
    """Two rows per convolution and rank, not an all-to-all to the batch."""
    y = floats(fd, s.batch, 64, 64, s.head)
    split(fd, SP8, (y, [None, "sp", None, None]))
    for _ in range(2):
        y = convolved(fd, y, floats(fd, 9, s.head, s.head))
    outputs(fd, y)


@known(7.07, 0.115)
def strided_convolution_of_what_is_padded_before_its_relu(fd: Fd, s: Sizes) -> None:
    """The row above each rank's own."""
    x, w = floats(fd, s.batch, 64, 64, 64), floats(fd, 9, 64, 128)
    outputs(fd, convolved(fd, x, w, 2, fd.ops.relu))
    split(fd, SP8, (x, [None, "sp", None, None]))


@known(10.02, 0.745)
def its_backward(fd: Fd, s: Sizes) -> None:
    """That row, one of x's gradient back, and an AR of the weights' gradient."""
    x, w = floats(fd, s.batch, 64, 64, 64), floats(fd, 9, 64, 128)
    gradients(fd, convolved(fd, x, w, 2, fd.ops.relu), [x, w])
    split(fd, SP8, (x, [None, "sp", None, None]))


@known(1.26, 0.134)
def convolution_of_images_split_both_ways(fd: Fd, s: Sizes) -> None:
    """Rows from above and below, then columns with their corners: once for the nine weights."""
    x = floats(fd, s.batch, 64, 64, 64)
    outputs(fd, convolved(fd, x, floats(fd, 9, 64, 64)))
    split(fd, X4_Y2, (x, [None, "x", "y", None]))


@known(7.07, 0.115)
def overlapping_maxima_of_images(fd: Fd, s: Sizes) -> None:
    """Max pooling, 3 by 3 in steps of 2: the row above."""
    x = floats(fd, s.batch, 64, 64, 64)
    outputs(fd, functools.reduce(fd.ops.maximum, image_taps(fd, fd.ops.pad(x, [0, 0, 1, 1, 1, 1], -1e30), 2)))
    split(fd, SP8, (x, [None, "sp", None, None]))


@known(4.81, 0.137)
def convolution_behind_zeros_in_a_row_backward(fd: Fd, s: Sizes) -> None:
    """Two rows forward and two of the gradient back, whose zeros a `cat` put before it; an AR of the weights'."""
    x, w = floats(fd, s.batch, s.length, s.width), floats(fd, 3, s.width)
    padded = fd.ops.cat([fd.ops.full([s.batch, 2, s.width], 0.0, mf.DataType.Float), x], 1)
    at = [([0, i, 0], [s.batch, i + s.length, s.width]) for i in range(3)]
    rows = [fd.ops.reshape(fd.ops.slice(w, [i, 0], [i + 1, s.width]), [s.width]) for i in range(3)]
    made = [fd.ops.slice(padded, a, b) * row for (a, b), row in zip(at, rows, strict=True)]
    gradients(fd, added(made), [x, w])
    split(fd, SP8, (x, [None, "sp", None]))


def convolved(fd: Fd, x: Tensor, w: Tensor, step: int = 1, between: Callable[[Tensor], Tensor] = lambda x: x) -> Tensor:
    """A convolution by hand of 3 by 3: x [B, H, W, C] with w [9, C, D]."""
    _, c, d = w.type.shape
    taps = image_taps(fd, between(fd.ops.pad(x, [0, 0, 1, 1, 1, 1])), step)
    weights = [fd.ops.reshape(fd.ops.slice(w, [i, 0, 0], [i + 1, c, d]), [c, d]) for i in range(9)]
    return functools.reduce(fd.ops.add, map(fd.ops.matmul, taps, weights))


def image_taps(fd: Fd, padded: Tensor, step: int) -> list[Tensor]:
    """Nine slices in steps of [B, H + 2, W + 2, C]."""
    b, h, w, c = padded.type.shape
    at = [(i, j) for i, j in itertools.product(range(3), repeat=2)]
    return [fd.ops.slice(padded, [0, i, j, 0], [b, i + h - 2, j + w - 2, c], [1, step, step, 1]) for i, j in at]
