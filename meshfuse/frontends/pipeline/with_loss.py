"""A model and its loss as one module whose result is the loss alone."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import torch
from torch import nn

from ...errors import SourceLine, user_error
from ..kv_caches import INNER

TARGET = "target"  # What errors and `inputs=` call the loss function's second argument.


class WithLoss(nn.Module):
    """Calls loss(model(*args), target) with the last positional argument as the target; without a loss the model has
    to return one: a number, or a tuple, dict or output of transformers with one in it."""

    def __init__(self, module: nn.Module, loss: Callable[[Any, Any], torch.Tensor] | None) -> None:
        super().__init__()
        self._loss = loss
        setattr(self, INNER, module)

    def forward(self, *args: Any, **kwargs: Any) -> torch.Tensor:
        model = getattr(self, INNER)
        if self._loss is None:
            return _number_in(model(*args, **kwargs))
        return self._loss(model(*args[:-1], **kwargs), args[-1])


def _number_in(result: Any) -> torch.Tensor:
    """The loss in a model's results; some other result where there is none, which `check_loss` finds."""
    if isinstance(result, torch.Tensor):
        found = [result]
    elif getattr(result, "loss", None) is not None:
        found = [result.loss]
    else:
        found = list(result.values() if hasattr(result, "values") else result)
    numbers = [value for value in found if isinstance(value, torch.Tensor) and not value.ndim]
    return numbers[0] if numbers else found[0]


def check_loss(value: torch.Tensor, line: SourceLine) -> None:
    """Raises DefinitionError for a loss that has dims."""
    if value.ndim:
        shape = [int(n) for n in value.shape]
        raise user_error(
            "step: the loss of the model", f"a result of shape {shape}", "a tensor without dims",
            "Return a loss, or pass loss= to mf.parallelize: a function of the model's result and a target.", line,
        )  # fmt: skip
