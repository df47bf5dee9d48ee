"""Classes of programs in which what a split sequence costs comes long after it is read; figures as in `general`."""

from __future__ import annotations

from layers import Sizes, Tensor, floats
from programs import TP8, Fd, outputs, split

from .known import Classes

CLASSES = Classes()
known = CLASSES.known


def part(fd: Fd, x: Tensor, start: int, stop: int) -> Tensor:
    """These columns."""
    return fd.ops.slice(x, [*([0] * (x.ndim - 1)), start], [*x.type.shape[:-1], stop])


def short_convolution(fd: Fd, x: Tensor, w: Tensor) -> Tensor:
    """Causal, with four rows per channel."""
    batch, length, width = x.type.shape
    made = None
    for i in range(4):
        row = fd.ops.reshape(fd.ops.slice(w, [i, 0], [i + 1, width]), [width])
        before = (
            fd.ops.pad(fd.ops.slice(x, [0, 0, 0], [batch, length - i, width]), [0, 0, i, 0]) * row if i else x * row
        )
        made = before if made is None else made + before
    assert made is not None
    return made


def scanned(fd: Fd, u: Tensor, step: Tensor, rates: Tensor, into: Tensor, out: Tensor) -> Tensor:
    """A state space's sums along the sequence: u, step [B, S, E], rates [E, N], into, out [B, S, N]."""
    ops, last, third = fd.ops, [False, False, False, True], [False, False, True, False]
    decay = ops.cumsum(ops.broadcast(step, last) * ops.exp(rates) * -0.001, 1)
    terms = ops.broadcast(step * u, last) * ops.broadcast(into, third) * ops.exp(ops.neg(decay))
    return ops.sum(ops.cumsum(terms, 1) * ops.exp(decay) * ops.broadcast(out, third), [3])


@known(939.87, 1.836)
def state_space_block_of_a_split_sequence(fd: Fd, s: Sizes) -> None:
    """As in Mamba: x goes to the batch before the first product, some forty ops before the first sum along it."""
    ops, wide, low, states = fd.ops, 2 * s.width, s.head, s.head // 4
    x, inner, taps = floats(fd, s.batch, s.length, s.width), floats(fd, s.width, 2 * wide), floats(fd, 4, wide)
    down, up, rates = floats(fd, wide, low + 2 * states), floats(fd, low, wide), floats(fd, wide, states)
    both = ops.matmul(x, inner)
    u = ops.silu(short_convolution(fd, part(fd, both, 0, wide), taps))
    made = ops.matmul(u, down)
    step = ops.sigmoid(ops.matmul(part(fd, made, 0, low), up))
    into, out = (part(fd, made, low + i * states, low + (i + 1) * states) for i in range(2))
    y = scanned(fd, u, step, rates, into, out) * ops.silu(part(fd, both, wide, 2 * wide))
    outputs(fd, ops.matmul(y, floats(fd, wide, s.width)))
    split(fd, TP8, (x, [None, "tp", None]))
