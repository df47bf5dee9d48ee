"""Factor rules: which factors each dim of an op's operands and results is made of."""

from __future__ import annotations

import enum
import functools
from collections.abc import Collection, Sequence
from dataclasses import dataclass


class FactorKind(enum.Enum):
    """What sharding a factor of an op does.

    PASS: each rank computes its part of the result. REDUCE: each rank computes its term of a reduction; a result that
    has the factor among its dims (of an op with several results) is computed in parts. BLOCK: the op needs the factor
    whole.
    """

    PASS = "pass-through"
    REDUCE = "reduction"
    BLOCK = "blocked"


@dataclass(frozen=True, slots=True)
class Factor:
    """One dimension of an op's iteration space: its size, its kind and, where it is reduced, the reduction."""

    size: int
    kind: FactorKind = FactorKind.PASS
    reduce: str = "sum"


# For every dim of a tensor the factors that it is made of, major to minor; () for a dim of size 1 that is repeated.
DimFactors = tuple[tuple[int, ...], ...]


@dataclass(frozen=True, slots=True, eq=False)
class Rule:
    """An op's factor rule: which factors each dim of its operands and results is made of (as in GSPMD and Shardy).

    A matmul [m, k] x [k, n] has the factors m, n (both pass through) and k (reduced)::

        operands ((m,), (k,)), ((k,), (n,))   results ((m,), (n,))
    """

    factors: tuple[Factor, ...]
    operands: tuple[DimFactors, ...]
    results: tuple[DimFactors, ...]

    def __str__(self) -> str:
        def side(tensors: Sequence[DimFactors]) -> str:
            return ", ".join(" ".join("".join(map(letter, dim)) or "1" for dim in dims) or "()" for dims in tensors)

        marks = [f"{letter(i)}:{f.kind.value}" for i, f in enumerate(self.factors) if f.kind is not FactorKind.PASS]
        return f"{side(self.operands)} -> {side(self.results)}" + (f"  ({', '.join(marks)})" if marks else "")


def letter(factor: int) -> str:
    """The letter that texts have for a factor's number."""
    return chr(ord("a") + factor) if factor < 26 else f"f{factor}"


class RuleBuilder:
    """Collects the factors of a rule. Its methods give the factors of a dim, as a tuple of their numbers."""

    def __init__(self) -> None:
        self._factors: list[Factor] = []

    def factor(self, size: int, kind: FactorKind = FactorKind.PASS, reduce: str = "sum") -> tuple[int, ...]:
        """A new factor of a dim. () for size 1, where there is nothing to shard; a blocked one is made at any size."""
        return () if size == 1 and kind is not FactorKind.BLOCK else self.dim(size, kind, reduce)

    def dim(self, size: int, kind: FactorKind = FactorKind.PASS, reduce: str = "sum") -> tuple[int, ...]:
        """A new factor that is all of a dim, of whatever size: the only row of a batch may lie on one rank of many."""
        self._factors.append(Factor(size, kind, reduce))
        return (len(self._factors) - 1,)

    def blocked(self, size: int) -> tuple[int, ...]:
        """A new factor that must be whole."""
        return self.factor(size, FactorKind.BLOCK)

    def reduction(self, size: int, reduce: str = "sum") -> tuple[int, ...]:
        """A new factor that the op reduces: if it is sharded the result is partial."""
        return self.factor(size, FactorKind.REDUCE, reduce)

    def dims(
        self,
        shape: Sequence[int],
        chosen: Collection[int] = (),
        kind: FactorKind = FactorKind.PASS,
        reduce: str = "sum",
    ) -> DimFactors:
        """A new factor for every dim: of this kind for the dims in `chosen`, pass-through for the others.

        A dim of size 1 that is reduced has none: there is nothing to reduce.
        """
        return tuple(self.factor(n, kind, reduce) if d in chosen else self.dim(n) for d, n in enumerate(shape))

    def build_summed(self, operands: Sequence[DimFactors], results: Sequence[DimFactors]) -> Rule:
        """As `build`, with every factor that passes through and that no result has reduced by sum."""
        kept = {f for dims in results for dim in dims for f in dim}
        for place, factor in enumerate(self._factors):
            if place not in kept and factor.kind is FactorKind.PASS:
                self._factors[place] = Factor(factor.size, FactorKind.REDUCE)
        return self.build(operands, results)

    def build(self, operands: Sequence[DimFactors], results: Sequence[DimFactors]) -> Rule:
        """The rule in which the dims of operands and results are made of these factors."""
        return _rule(tuple(self._factors), tuple(operands), tuple(results))


# Equal rules are one object, so that what follows from a rule is worked out once for all calls that have it.
_rule = functools.lru_cache(maxsize=1 << 13)(Rule)
