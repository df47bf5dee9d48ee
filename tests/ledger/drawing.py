"""Random choices that are the same on every version of Python, and the program that they write."""

from __future__ import annotations

import math
import random
from collections.abc import Callable, Sequence
from typing import TypeVar

import meshfuse as mf

T = TypeVar("T")
Tensor = mf.TensorView
# Dims of inputs. Planning needs no data: sizes are those at which moving something costs something.
SMALL, LARGE, UNEVEN = (4, 6, 8, 12, 16), (64, 96, 128, 256, 1024), (3, 5, 7, 10, 30, 50, 100, 333)
MOST_ELEMENTS = 1 << 26
FLOAT, INT, BOOL = mf.DataType.Float, mf.DataType.Int, mf.DataType.Bool
HALVES = (mf.DataType.BFloat16, mf.DataType.Half)
FLOATS = (FLOAT, FLOAT, FLOAT, mf.DataType.Double, *HALVES)


class Draws:
    """Choices that follow from a seed.

    Of Python's random numbers only `random()` is promised to be the same in later versions.
    """

    def __init__(self, seed: int):
        self._random = random.Random(seed).random

    def below(self, n: int) -> int:
        return int(self._random() * n)

    def choice(self, options: Sequence[T]) -> T:
        return options[self.below(len(options))]

    def chance(self, probability: float) -> bool:
        return self._random() < probability

    def sample(self, options: Sequence[T], count: int) -> list[T]:
        """So many different places of a list, in a random order."""
        left = list(options)
        return [left.pop(self.below(len(left))) for _ in range(min(count, len(left)))]


class Writer:
    """A definition that is being written.

    tensors: those that ops may read next, of all types.
    ring: the number of ranks that attention in a ring goes round.
    """

    def __init__(self, draws: Draws, ring: int, search: str):
        self.draws, self.ring = draws, ring
        self.fd = mf.FusionDefinition(search=search)
        self.ops = self.fd.ops
        self.dtype = draws.choice(FLOATS)
        palette = draws.choice((SMALL, LARGE, LARGE, LARGE, UNEVEN, (*LARGE, *UNEVEN)))
        self.sizes = [draws.choice(palette) for _ in range(3)]
        self.tensors: list[Tensor] = []
        self.inputs: list[Tensor] = []

    def size(self) -> int:
        return self.draws.choice(self.sizes)

    def input(self, shape: Sequence[int], dtype: mf.DataType | None = None) -> Tensor:
        found = self.fd.define_tensor(list(shape), dtype=self.dtype if dtype is None else dtype)
        self.inputs.append(found)
        self.tensors.append(found)
        return found

    def add(self, *made: Tensor) -> None:
        """Results of an op, which others may read."""
        self.tensors += map(self.narrowed, made)

    def narrowed(self, x: Tensor) -> Tensor:
        """x in the program's type, where that is half precision, which pointwise ops widen."""
        return self.ops.cast(x, self.dtype) if x.dtype is FLOAT and self.dtype in HALVES else x

    def pick(self, test: Callable[[Tensor], bool]) -> Tensor | None:
        """A tensor that passes a test, mostly one of the last; None where there is none."""
        fitting = [t for t in reversed(self.tensors) if test(t)]
        return self.draws.choice([*fitting[:2] * 4, *fitting]) if fitting else None

    def float(self, low: int = 0, high: int = 4) -> Tensor:
        """A tensor of the program's floats with so many dims, or a new input."""
        found = self.pick(lambda t: t.dtype is self.dtype and low <= t.ndim <= high)
        if found is not None:
            return found
        return self.input([self.size() for _ in range(max(low, min(2, high)))])

    def dim(self, x: Tensor) -> int:
        return self.draws.below(x.ndim)

    def dims(self, x: Tensor) -> list[int]:
        """One dim or more."""
        return sorted(self.draws.sample(range(x.ndim), 1 + self.draws.below(x.ndim)))

    def beside(self, x: Tensor, dtype: mf.DataType | None = None) -> Tensor:
        """A tensor that broadcasts to x's shape: one that is there, or an input."""
        wanted = self.dtype if dtype is None else dtype
        found = self.pick(lambda t: t is not x and t.dtype is wanted and broadcasts(shape(t), shape(x)))
        if found is not None and self.draws.chance(0.7):
            return found
        full = shape(x)
        return self.input(full[self.draws.below(len(full)) :] if full else [], wanted)

    def fits(self, *sizes: int) -> bool:
        return math.prod(sizes) <= MOST_ELEMENTS


def shape(x: Tensor) -> tuple[int, ...]:
    """The sizes of a tensor, which are all known here."""
    return tuple(x.type.shape)


def broadcasts(one: Sequence[int], to: Sequence[int]) -> bool:
    """Whether a shape broadcasts to another without changing it."""
    return len(one) <= len(to) and all(m in (1, n) for m, n in zip(reversed(one), reversed(to), strict=False))


def divisors(n: int) -> list[int]:
    return [d for d in range(1, n + 1) if n % d == 0]
