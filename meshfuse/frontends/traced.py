"""The definition that a graph of somebody else's is translated to: its ops have the lines and names of that graph."""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence
from typing import Any

import torch

from ..compiler import graph_to_plan
from ..definition import applying
from ..definition.tensor_view import TensorView
from ..dtypes import DataType
from ..errors import SourceLine
from ..executor.argument_shapes import compile_shapes
from ..fusion_definition import FusionDefinition
from ..graph import Graph
from ..ops.opdef import OpDef
from ..ops.values import TensorType
from ..report.plan_warning import MAX_WIRE, bound


def _max_wire() -> float:
    """The bound on what a rank sends that the environment sets.

    Without one there are no warnings of plans: the annotations are not the user's, who has `explain` for their prices.
    """
    found = bound(MAX_WIRE, None)
    return math.inf if found is None else found


class TracedDefinition(FusionDefinition):
    """A definition whose ops are not written by a script.

    at: the line that ops get from now on.
    takes_over: whether it takes over the plan of a definition that differs in sizes alone, however much they differ.
    """

    at: SourceLine
    _seed: int

    def __init__(
        self, *, max_memory: float | None = None, search: str | None = None, takes_over: bool = False
    ) -> None:  # fmt: skip
        self.at, self._seed = SourceLine("", 0), 0
        super().__init__(0, max_memory=max_memory, search=search, max_wire=_max_wire())
        self._programs.near = math.inf if takes_over else 1.0

    def seed_with(self, seed: int) -> None:
        """Draw the next run's random numbers by this seed alone."""
        self._seed = self._execution.seed.given = seed
        self._execution.steps["simulated"] = 0

    def leave_ranks(self) -> None:
        """Forget the groups that its programs were bound to; the next run binds them to those of its thread's world."""
        self._execution.leave_ranks()

    def new_input(self, shape: Sequence[int], dtype: DataType, line: SourceLine, rows: int = 0) -> TensorView:
        """A new input tensor of this line, which may have a name; ragged, with so many rows of experts, if there are
        any."""
        made = self.recording.new_input(TensorType(tuple(shape), dtype, rows), line, None)
        return TensorView(self, made)

    def graph(self, line: SourceLine) -> Graph:
        """What is planned, with the sizes that it was written with."""
        self._complete()
        return graph_to_plan(self.recording, compile_shapes(self.recording, (), line), {})

    def _check_output(self, number: int, line: SourceLine) -> None:
        """All may be handed from one half of a step to the other."""

    def _apply(self, op: OpDef, args: Sequence[Any], kwargs: Mapping[str, Any], line: SourceLine) -> Any:
        return applying.apply(self, op, args, kwargs, self.at)

    def _random_state(self, device: torch.device, step: int) -> tuple[int, int]:
        return self._seed, 0
