"""One op on one rank: the rank's parts of its tensors, which its lowering to torch reads, and the resulting text."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Any

from ..sharding.layout import Runs, digits
from ..sharding.value import Sharding
from .opdef import Call
from .values import ScalarRef, TensorRef

ScalarText = Callable[[Any], str]


def plain_text(value: Any) -> str:
    """Python text of a number that is not a scalar of the definition."""
    assert not isinstance(value, ScalarRef)
    if isinstance(value, complex):
        return f"complex({plain_text(value.real)}, {plain_text(value.imag)})"
    if (isinstance(value, float) and value != value) or value in (float("inf"), float("-inf")):
        return f'float("{value}")'
    return repr(value)


@dataclass(frozen=True, slots=True)
class LocalCall:
    """A call on one rank, with the shardings that it is computed in. Implements `ops.opdef.Emit`."""

    call: Call
    operands: Sequence[str]
    operand_shardings: Sequence[Sharding]
    result_shardings: Sequence[Sharding]
    rank: int
    scalar_text: ScalarText = plain_text
    number: int = 0

    @property
    def operand_shapes(self) -> tuple[tuple[int, ...], ...]:
        pairs = zip(self.operand_shardings, self.call.types, strict=True)
        return tuple(s.local_shape(t.shape, self.rank) for s, t in pairs)

    @property
    def result_shapes(self) -> tuple[tuple[int, ...], ...]:
        pairs = zip(self.result_shardings, self.call.results, strict=True)
        return tuple(s.local_shape(t.shape, self.rank) for s, t in pairs)

    def scalar(self, name: str) -> str:
        return self.scalar_text(self.call[name])

    def operand(self, name: str) -> str | None:
        return self.operands[self.call.first_operand(name)] if isinstance(self.call[name], TensorRef) else None

    def operand_runs(self, operand: int) -> tuple[Runs, ...]:
        return self.operand_shardings[operand].runs(self.call.types[operand].shape, self.rank)

    def result_runs(self, result: int) -> tuple[Runs, ...]:
        return self.result_shardings[result].runs(self.call.results[result].shape, self.rank)

    def salt(self) -> int:
        return self.number

    def leads(self) -> bool:
        made = self.result_shardings[0]
        return not any(digits(made.partial, made.mesh, self.rank))

    def into(self, target: str) -> list[str] | None:
        """Python statements that write the result into an existing tensor; None for ops that make their own."""
        made = self.call.op.into(self, target) if self.call.op.into is not None else None
        return None if made is None else [made]

    def statements(self, targets: Sequence[str]) -> list[str]:
        """Python statements that assign the results to these names."""
        texts = self.text()
        if len(texts) == len(targets):
            return [f"{target} = {text}" for target, text in zip(targets, texts, strict=True)]
        return [f"{', '.join(targets)} = {texts[0]}"]

    def text(self) -> tuple[str, ...]:
        """Python text of every result, or a single text of a tuple of them."""
        made = self.call.op.emit(self)
        return (made,) if isinstance(made, str) else tuple(made)
