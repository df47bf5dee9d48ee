"""One op on one rank for one chunk of a loop: its local geometry, and its text."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

from ..ops.local import LocalCall
from ..reshard.steps import restricted
from ..sharding.layout import Runs
from .collectives import local_shape


@dataclass(frozen=True, slots=True)
class ChunkCall(LocalCall):
    """A call on one rank for one chunk: `operand_only` and `result_only` are (dim, indices) of the chunk in each."""

    operand_only: tuple[tuple[int, Runs] | None, ...] = ()
    result_only: tuple[tuple[int, Runs] | None, ...] = ()

    @property
    def operand_shapes(self) -> tuple[tuple[int, ...], ...]:
        return tuple(local_shape(self.operand_runs(i)) for i in range(len(self.call.types)))

    @property
    def result_shapes(self) -> tuple[tuple[int, ...], ...]:
        return tuple(local_shape(self.result_runs(i)) for i in range(len(self.call.results)))

    def operand_runs(self, operand: int) -> tuple[Runs, ...]:
        runs = self.operand_shardings[operand].runs(self.call.types[operand].shape, self.rank)
        return restricted(runs, self.operand_only[operand])

    def result_runs(self, result: int) -> tuple[Runs, ...]:
        runs = self.result_shardings[result].runs(self.call.results[result].shape, self.rank)
        return restricted(runs, self.result_only[result])

    def lines(self, targets: Sequence[str], filled: Sequence[str]) -> list[str]:
        """Python that makes the results; those in `filled` are written into tensors of these names."""
        if len(targets) == 1 and filled and (text := self.into(targets[0])) is not None:
            return text
        names = [f"{t}_new" if t in filled else t for t in targets]
        return [*self.statements(names), *(f"{t}.copy_({t}_new)" for t in filled)]
