"""Classes of programs that roll a split dim: stages, round grids, places before a token; figures as in `general`."""

from __future__ import annotations

import functools
import itertools
from collections.abc import Sequence

from layers import Sizes, Tensor, floats
from programs import TP8, X4_Y2, Fd, gradients, outputs, split

from .known import Classes

CLASSES = Classes()
known = CLASSES.known


def part(fd: Fd, x: Tensor, dim: int, start: int, stop: int) -> Tensor:
    starts, stops = [0] * x.ndim, list(x.type.shape)
    starts[dim], stops[dim] = start, stop
    return fd.ops.slice(x, starts, stops)


def rolled(fd: Fd, x: Tensor, by: int, dim: int) -> Tensor:
    """As torch.roll."""
    n = x.type.shape[dim]
    by %= n
    return fd.ops.cat([part(fd, x, dim, n - by, n), part(fd, x, dim, 0, n - by)], dim) if by else x


def total(parts: Sequence[Tensor]) -> Tensor:
    return functools.reduce(lambda a, b: a + b, parts)


def stages(fd: Fd, s: Sizes, rounds: int) -> tuple[Tensor, Tensor, Tensor]:
    """A stage per rank, and what goes from each to the next: states, weights, and the states after some rounds."""
    states, weights = floats(fd, 8, s.length, s.width), floats(fd, 8, s.width, s.width)
    split(fd, TP8, *((t, ["tp", None, None]) for t in (states, weights)))
    made = fd.ops.relu(fd.ops.matmul(states, weights))
    for _ in range(rounds):
        made = fd.ops.relu(fd.ops.matmul(rolled(fd, made, 1, 0), weights))
    return states, weights, made


@known(6.29, 6.29)
def states_that_go_from_stage_to_stage(fd: Fd, s: Sizes) -> None:
    """Each rank's state to the next rank: an all-to-all and back takes nearly twice that."""
    outputs(fd, stages(fd, s, 3)[-1])


@known(12.58, 12.58)
def states_that_go_from_stage_to_stage_backward(fd: Fd, s: Sizes) -> None:
    _, weights, made = stages(fd, s, 3)
    (found,) = gradients(fd, made, [weights])
    split(fd, TP8, (found, ["tp", None, None]))


@known(0.0369, 0.0246)
def derivatives_on_a_round_grid(fd: Fd, s: Sizes) -> None:
    """The Laplacian of fourth order: two rows or columns from each neighbour."""
    x = floats(fd, 4 * s.length, 4 * s.length)
    steps = itertools.product((0, 1), ((1, 4 / 3), (-1, 4 / 3), (2, -1 / 12), (-2, -1 / 12)))
    y = total([rolled(fd, x, by, dim) * c for dim, (by, c) in steps]) - x * 5.0
    outputs(fd, y)
    split(fd, X4_Y2, (x, ["x", "y"]), (y, ["x", "y"]))


@known(5.53, 2.098)
def attention_to_places_before_backward(fd: Fd, s: Sizes) -> None:
    """To the token itself, and 8 and 16 before it: 16 rows of keys and of values, and of their gradients."""
    q, k, v = (floats(fd, s.batch, s.length, s.heads, s.head) for _ in range(3))
    ks, vs = ([rolled(fd, t, 8 * i, 1) for i in range(3)] for t in (k, v))
    ops, spread = fd.ops, [False, False, False, True]
    scores = ops.softmax(ops.cat([ops.broadcast(ops.sum(q * t, [3]), spread) for t in ks], 3), 3)
    mixed = total([t * part(fd, scores, 3, i, i + 1) for i, t in enumerate(vs)])
    made = gradients(fd, mixed, [q, k, v])
    split(fd, TP8, *((t, [None, "tp", None, None]) for t in (q, k, v, *made)))
