"""A definition that a strategy is writing, and what is known of its tensors' values."""

from __future__ import annotations

import math
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from typing import Any

from hypothesis import strategies as st

from ..definition.tensor_view import TensorView
from ..dtypes import DataType
from ..fusion_definition import FusionDefinition
from .examples import Example, examples_of

SIZES = (1, 2, 3, 4, 5, 6, 7, 8, 9, 12)
# Elements of the largest tensor unless told otherwise, and the magnitude from which on values are squashed.
MAX_NUMEL, MAX_BOUND = 400, 1e4
# The types of inputs, the widest of each kind more often.
DTYPES = (
    *(DataType.Double,) * 4, DataType.Float, DataType.Half, DataType.BFloat16,
    DataType.Int, DataType.Int, DataType.Int32, DataType.Bool, DataType.ComplexDouble, DataType.ComplexFloat,
)  # fmt: skip
# The largest numbers whose sums are the same in every order, with a few binary digits behind the point.
_EXACT = {DataType.Float: 4096.0, DataType.Half: 16.0, DataType.BFloat16: 4.0}
KINDS = ("bool", "int", "float", "complex")


@dataclass(frozen=True, slots=True)
class Var:
    """A tensor of the definition.

    Its values are at most `bound`; `exact` ones are the same in every order of summing.
    """

    tv: TensorView
    shape: tuple[int, ...]
    kind: str
    bound: float = 4.0
    exact: bool = False

    @property
    def ndim(self) -> int:
        return len(self.shape)


Test = Callable[[Var], bool]


_WIDEST = {
    "bool": DataType.Bool, "int": DataType.Int, "float": DataType.Double, "complex": DataType.ComplexDouble,
}  # fmt: skip


@dataclass(slots=True)
class DefinitionWriter:
    """Draws operands and appends ops. `vars` are the tensors so far; `sizes` and `dtypes` are for new inputs.

    No tensor has more than `max_numel` elements. With `open_sizes` some sizes of inputs are left open (-1).
    """

    draw: st.DrawFn
    fd: FusionDefinition = field(default_factory=FusionDefinition)
    vars: list[Var] = field(default_factory=list)
    sizes: tuple[int, ...] = SIZES
    max_numel: int = MAX_NUMEL
    dtypes: tuple[DataType, ...] = (DataType.Double, DataType.Int, DataType.Bool)
    open_sizes: bool = False

    def choose(self, options: Sequence[Any]) -> Any:
        return options[0] if len(options) == 1 else self.draw(st.sampled_from(options))

    def flag(self) -> bool:
        return self.draw(st.booleans())

    def size(self) -> int:
        return self.choose(self.sizes)

    def dim(self, x: Var) -> int:
        return self.draw(st.integers(0, x.ndim - 1)) if x.ndim > 1 else 0

    def input(
        self,
        shape: Sequence[int],
        kind: str = "float",
        bound: float = 4.0,
        dtype: DataType | None = None,
        example: Example | None = None,
    ) -> Var:
        """A new input, of one of the kind's dtypes unless one is given."""
        chosen = dtype or self.choose([d for d in self.dtypes if KINDS[d.category] == kind] or [_WIDEST[kind]])
        shown = [-1 if n > 1 and self.open_sizes and self.flag() else n for n in shape]
        tv = self.fd.define_tensor(shown, dtype=chosen)
        var = self.add(tv, shape, kind, bound, example is None or example.domain is None)
        if example is not None:
            examples_of(self.fd)[tv.id] = example
        return var

    def add(self, tv: Any, shape: Sequence[int], kind: str, bound: float, exact: bool) -> Var:
        exact = exact and bound <= _EXACT.get(tv.dtype, float("inf"))
        var = Var(tv, tuple(shape), kind, max(bound, 1.0), exact)
        self.vars.append(var)
        examples_of(self.fd)[tv.id] = Example(var.shape)
        return var

    def like(self, x: Var, name: str, *args: Any, **facts: Any) -> Var:
        """A new tensor fd.ops.name(x, *args), with the same facts as x but for those given."""
        known = {"shape": x.shape, "kind": x.kind, "bound": x.bound, "exact": x.exact} | facts
        return self.add(self.fd.call(name, (x.tv, *args)), **known)

    def sizes_of(self, shape: Sequence[int]) -> Any:
        """A shape as ops take it: numbers, or a vector of scalars of the definition."""
        return list(shape) if self.draw(st.integers(0, 3)) < 3 else self.fd.define_vector(list(shape))

    def number(self, value: float) -> Any:
        """A number as ops take it: itself, or a constant of the definition."""
        return value if self.draw(st.integers(0, 3)) < 3 else self.fd.define_scalar(value)

    def pick(self, test: Test = lambda _: True) -> Var | None:
        """A tensor that passes the test, mostly one of the last, as programs are to be deep; None where there is none.

        Seeds of random numbers (UInt64) are left out, as torch does not compute with them.
        """
        fitting = [v for v in reversed(self.vars) if v.tv.dtype is not DataType.UInt64 and test(v)]
        return self.choose([*fitting[:3] * 4, *fitting]) if fitting else None

    def float(self, test: Test = lambda _: True) -> Var:
        """A float tensor that passes the test, or a new input."""
        found = self.pick(lambda v: v.kind == "float" and test(v))
        found = found or self.input([self.size() for _ in range(2)])
        return self.tamed(found, MAX_BOUND)

    def tamed(self, x: Var, limit: float) -> Var:
        """x, or its tanh where it may be above the limit."""
        return x if x.bound <= limit else self.like(x, "tanh", bound=1.0, exact=False)

    def broadcastable(self, x: Var, kind: str = "float") -> Var:
        """A tensor that x can be combined with: one that there is, or a new input with some of its dims."""
        found = self.pick(lambda v: v.kind == kind and v is not x and self._fits(v.shape, x.shape))
        if found is not None and self.flag():
            return self.tamed(found, MAX_BOUND)
        shape = [1 if self.draw(st.integers(0, 3)) == 3 else n for n in x.shape]
        keep = self.draw(st.integers(0, len(shape))) if shape else 0
        return self.input(shape[len(shape) - keep :] if keep else shape, kind)

    def _fits(self, a: Sequence[int], b: Sequence[int]) -> bool:
        """Whether the shapes broadcast to one that is not too large."""
        pairs = list(zip(reversed(a), reversed(b), strict=False))
        return all(m == n or 1 in (m, n) for m, n in pairs) and math.prod(joint(a, b)) <= self.max_numel


def joint(*shapes: Sequence[int]) -> tuple[int, ...]:
    """The shape to which these shapes broadcast."""
    ndim = max(map(len, shapes))
    full = [(1,) * (ndim - len(s)) + tuple(s) for s in shapes]
    return tuple(max(sizes) for sizes in zip(*full, strict=True))


Block = Callable[[DefinitionWriter], None]
