"""A definition while a strategy writes it, and what is known of its tensors' values."""

from __future__ import annotations

import math
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from typing import Any

from hypothesis import strategies as st

from ..definition.tensor_view import TensorView
from ..dtypes import DataType
from ..fusion_definition import FusionDefinition

SIZES = (1, 2, 3, 4, 5, 6, 7, 8, 9, 12)
# Elements of the largest tensor unless told otherwise, and the magnitude from which on values are squashed.
MAX_NUMEL, MAX_BOUND = 400, 1e4


@dataclass(frozen=True, slots=True)
class Var:
    """A tensor of the definition. Values are at most `bound`; `exact` ones are the same in every order of summing."""

    tv: TensorView
    shape: tuple[int, ...]
    kind: str
    bound: float = 4.0
    exact: bool = False

    @property
    def ndim(self) -> int:
        return len(self.shape)


Test = Callable[[Var], bool]


@dataclass(slots=True)
class Writer:
    """Draws operands and appends ops. `vars` are the tensors so far, `sizes` those that inputs are made of.

    No tensor is made of more than `max_numel` elements.
    """

    draw: st.DrawFn
    fd: FusionDefinition = field(default_factory=FusionDefinition)
    vars: list[Var] = field(default_factory=list)
    sizes: tuple[int, ...] = SIZES
    max_numel: int = MAX_NUMEL

    def choose(self, options: Sequence[Any]) -> Any:
        return options[0] if len(options) == 1 else self.draw(st.sampled_from(options))

    def flag(self) -> bool:
        return self.draw(st.booleans())

    def size(self) -> int:
        return self.choose(self.sizes)

    def dim(self, x: Var) -> int:
        return self.draw(st.integers(0, x.ndim - 1)) if x.ndim > 1 else 0

    def input(
        self, shape: Sequence[int], kind: str = "float", bound: float = 4.0, dtype: DataType | None = None
    ) -> Var:
        """A new input, of the widest type of its kind unless another is given."""
        widest = {"float": DataType.Double, "int": DataType.Int, "bool": DataType.Bool}[kind]
        tv = self.fd.define_tensor(list(shape), dtype=dtype or widest)
        return self.add(tv, shape, kind, bound, True)

    def add(self, tv: Any, shape: Sequence[int], kind: str, bound: float, exact: bool) -> Var:
        var = Var(tv, tuple(shape), kind, max(bound, 1.0), exact)
        self.vars.append(var)
        return var

    def like(self, x: Var, name: str, *args: Any, **facts: Any) -> Var:
        """A new tensor fd.ops.name(x, *args), with x's facts but for those given."""
        known = {"shape": x.shape, "kind": x.kind, "bound": x.bound, "exact": x.exact} | facts
        return self.add(self.fd.call(name, (x.tv, *args)), **known)

    def pick(self, test: Test = lambda _: True) -> Var | None:
        """One of the last tensors that pass the test, mostly: programs are to be deep; None where there are none."""
        fitting = [v for v in reversed(self.vars) if test(v)]
        return self.choose([*fitting[:3] * 4, *fitting]) if fitting else None

    def float(self, test: Test = lambda _: True) -> Var:
        """A float tensor that passes the test, or failing that a new input."""
        found = self.pick(lambda v: v.kind == "float" and test(v))
        found = found or self.input([self.size() for _ in range(2)])
        return self.tamed(found, MAX_BOUND)

    def tamed(self, x: Var, limit: float) -> Var:
        """x, or its tanh where it may be larger than the limit."""
        return x if x.bound <= limit else self.like(x, "tanh", bound=1.0, exact=False)

    def broadcastable(self, x: Var, kind: str = "float") -> Var:
        """A tensor that x can be combined with; a new input of a part of its dims where there is none."""
        found = self.pick(lambda v: v.kind == kind and v is not x and self._fits(v.shape, x.shape))
        if found is not None and self.flag():
            return self.tamed(found, MAX_BOUND)
        shape = [1 if self.draw(st.integers(0, 3)) == 3 else n for n in x.shape]
        keep = self.draw(st.integers(0, len(shape))) if shape else 0
        return self.input(shape[len(shape) - keep :] if keep else shape, kind)

    def _fits(self, a: Sequence[int], b: Sequence[int]) -> bool:
        """True where the shapes broadcast to one that is not too large."""
        pairs = list(zip(reversed(a), reversed(b), strict=False))
        return all(m == n or 1 in (m, n) for m, n in pairs) and math.prod(joint(a, b)) <= self.max_numel


def joint(*shapes: Sequence[int]) -> tuple[int, ...]:
    """The shape that some shapes broadcast to."""
    ndim = max(map(len, shapes))
    full = [(1,) * (ndim - len(s)) + tuple(s) for s in shapes]
    return tuple(max(sizes) for sizes in zip(*full, strict=True))
