"""The definition that a graph of somebody else's is translated to: its ops have the lines and names of that graph."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from typing import Any

import torch

from ..definition import applying, inputs
from ..definition.tensor_view import TensorView
from ..errors import SourceLine
from ..fusion_definition import FusionDefinition
from ..ops.opdef import OpDef

# Gives (seed, offset) of a program's random numbers at a step, on a device.
Draws = Callable[[torch.device, int], "tuple[int, int]"]


class TracedDefinition(FusionDefinition):
    """A definition whose ops are not written by a script.

    at: the line that ops get from now on.
    draws: where its random numbers come from; None for a seed of its own.
    """

    at: SourceLine
    draws: Draws | None

    def __init__(self, draws: Draws | None = None, *, max_memory: float | None = None) -> None:
        self.at, self.draws = SourceLine("", 0), draws
        super().__init__(max_memory=max_memory)

    def new_input(self, shape: Sequence[int], dtype: Any, line: SourceLine) -> TensorView:
        """A new input tensor of this line, which may have a name."""
        ref = inputs.define_tensor(self.recording, list(shape), None, dtype, None, None, False, line)
        return TensorView(self, ref)

    def _apply(self, op: OpDef, args: Sequence[Any], kwargs: Mapping[str, Any], line: SourceLine) -> Any:
        return applying.apply(self, op, args, kwargs, self.at)

    def _random_state(self, device: torch.device, step: int) -> tuple[int, int]:
        return super()._random_state(device, step) if self.draws is None else self.draws(device, step)
