"""Factor rules as text: `"b* m k, n k -> b* m n"`, one token per dim, the same letter for the same factor.

A token is a letter (or a word); `(h d)` for a dim that merges factors, major first; `1` for a dim of size 1; `b*` for
any number of dims in its place. Factors that only operands have are reduced. `t~` in an operand marks a dim along which
the op sees neighbours (a halo).
"""

from __future__ import annotations

import math
import re
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from typing import NamedTuple

from ..errors import user_error
from .rules import Rule, RuleBuilder
from .shape_arithmetic import UNKNOWN
from .values import TensorType

_TOKEN = re.compile(r"\(([^()]*)\)|(\w+)([*~]?)|(\S)")
_STAR = "*"


class Dim(NamedTuple):
    """One dim: the names of its factors, major first, and whether the op sees neighbours along it."""

    factors: tuple[str, ...]
    halo: bool = False


Dims = tuple[Dim, ...]


@dataclass(frozen=True, slots=True)
class Notation:
    """The dims of operands and results as they are written; `b*` is one dim with the factor `b*`."""

    text: str
    operands: tuple[Dims, ...]
    results: tuple[Dims, ...]

    def expanded(self, types: Sequence[TensorType]) -> Notation:
        """The notation for operands of these types, with `b*` written out as b0, b1, ..."""
        ranks: dict[str, int] = {}
        if len(types) != len(self.operands):
            raise user_error(f"rule {self.text!r}", f"{len(types)} tensors", f"{len(self.operands)}, as it has", "")
        for dims, ttype in zip(self.operands, types, strict=True):
            self._count(dims, ttype, ranks)
        sides = [tuple(_written_out(dims, ranks) for dims in side) for side in (self.operands, self.results)]
        return Notation(self.text, sides[0], sides[1])

    def _count(self, dims: Dims, ttype: TensorType, ranks: dict[str, int]) -> None:
        star = next((d.factors[0] for d in dims if _is_star(d)), None)
        extra = ttype.ndim - len([d for d in dims if not _is_star(d)])
        if extra < 0 or (star is None and extra) or (star and ranks.setdefault(star, extra) != extra):
            raise user_error(f"rule {self.text!r}: the operand {ttype} has the wrong number of dims", str(ttype.ndim),
                             f"those of '{_text(dims)}'", "Reshape the operand.")  # fmt: skip

    def letters(self) -> tuple[str, ...]:
        return tuple(dict.fromkeys(f for dims in (*self.operands, *self.results) for dim in dims for f in dim.factors))

    def sizes(self, types: Sequence[TensorType], given: Mapping[str, int]) -> dict[str, int]:
        """The size of every factor, -1 where it is open. Raises DefinitionError where operands disagree."""
        found = dict(given)
        pairs = [
            (dim.factors, n) for dims, ttype in zip(self.operands, types, strict=True)
            for dim, n in zip(dims, ttype.shape, strict=True)
        ]  # fmt: skip
        for factors, n in sorted(pairs, key=lambda pair: len(pair[0])):
            self._fit(factors, n, found)
        missing = [f for dims in self.results for dim in dims for f in dim.factors if f not in found]
        if missing:
            raise self._untold(missing[0])
        return found

    def _fit(self, factors: tuple[str, ...], n: int, found: dict[str, int]) -> None:
        """Learn the sizes of a dim's factors from the dim's size n."""
        untold = [f for f in factors if f not in found]
        if len(untold) > 1:
            raise self._untold(untold[-1])
        unknown = [f for f in factors if found.get(f, UNKNOWN) == UNKNOWN]
        known = math.prod(found[f] for f in factors if f not in unknown)
        if n == UNKNOWN or len(unknown) > 1:
            found.update((f, UNKNOWN) for f in untold)
            return
        if unknown:
            found[unknown[0]] = n // known if known else 0
            known *= found[unknown[0]]
        if known != n:
            raise user_error(f"rule {self.text!r}: sizes of {' '.join(factors) or '1'!r} differ",
                             f"{n} and {known}", "equal sizes", "Check the operands' shapes.")  # fmt: skip

    def _untold(self, factor: str) -> Exception:
        return user_error(f"rule {self.text!r}: the size of {factor!r}", "no operand that has it as a dim", "",
                          "Pass sizes=lambda call: {letter: size}.")  # fmt: skip

    def shapes(self, sizes: Mapping[str, int]) -> list[tuple[int, ...]]:
        """The results' shapes."""
        return [tuple(_size(dim, sizes) for dim in dims) for dims in self.results]

    def rule(self, sizes: Mapping[str, int], blocked: Sequence[str], reduce: str) -> Rule:
        """The factor rule of a call whose sizes are known."""
        builder, made = RuleBuilder(), {}
        kept = {f for dims in self.results for dim in dims for f in dim.factors}
        for f in self.letters():
            if f.rstrip("0123456789") + _STAR in blocked or f in blocked:
                made[f] = builder.blocked(sizes[f])
            else:
                made[f] = builder.dim(sizes[f]) if f in kept else builder.reduction(sizes[f], reduce)
        sides = [
            [tuple(tuple(i for f in dim.factors for i in made[f]) for dim in dims) for dims in side]
            for side in (self.operands, self.results)
        ]
        return builder.build(*sides)


def _is_star(dim: Dim) -> bool:
    return len(dim.factors) == 1 and dim.factors[0].endswith(_STAR)


def _written_out(dims: Dims, ranks: Mapping[str, int]) -> Dims:
    out: list[Dim] = []
    for dim in dims:
        name = dim.factors[0] if dim.factors else ""
        out += [Dim((f"{name[:-1]}{i}",)) for i in range(ranks.get(name, 0))] if _is_star(dim) else [dim]
    return tuple(out)


def _size(dim: Dim, sizes: Mapping[str, int]) -> int:
    found = 1
    for f in dim.factors:
        if sizes[f] == UNKNOWN:
            return UNKNOWN
        found *= sizes[f]
    return found


def _text(dims: Dims) -> str:
    return " ".join("(" + " ".join(d.factors) + ")" if len(d.factors) > 1 else "".join(d.factors) or "1" for d in dims)


def parse(text: str) -> Notation:
    """A rule from its text. Raises DefinitionError where it cannot be read."""
    if not isinstance(text, str) or text.count("->") != 1:
        raise user_error("a factor rule", repr(text), "'operand, ... -> result, ...'", "Write 'b* k, n k -> b* n'.")
    sides = [tuple(tuple(_dims(text, part)) for part in side.split(",")) if side.strip() else ()
             for side in text.split("->")]  # fmt: skip
    return Notation(text, sides[0], sides[1] or ((),))


def _dims(text: str, part: str) -> Iterator[Dim]:
    for merged, name, mark, wrong in _TOKEN.findall(part):
        if wrong or (mark and name == "1"):
            raise user_error(f"rule {text!r}", repr(wrong or name + mark), "letters, (h d), 1, b* and t~", "")
        if name:
            yield Dim(() if name == "1" else (name + (_STAR if mark == _STAR else ""),), mark == "~")
        else:
            yield Dim(tuple(merged.split()))
