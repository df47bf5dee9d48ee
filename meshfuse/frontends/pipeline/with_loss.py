"""A model and its loss as one module whose result is the loss alone."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from typing import Any

import torch
from torch import nn
from torch.utils import _pytree as pytree

from ...errors import SourceLine, user_error
from ..calls import Arguments
from ..capture import Stores, captured
from ..captured_graph import Captured
from ..kv_caches import INNER

TARGET = "target"  # What errors and `inputs=` call the loss function's second argument.


class WithLoss(nn.Module):
    """Calls loss(model(*args), target) with the last positional argument as the target; without a loss the model has
    to return one: a number, or a tuple, dict or output of transformers with one in it."""

    def __init__(self, module: nn.Module, loss: Callable[[Any, Any], torch.Tensor] | None) -> None:
        super().__init__()
        self._loss = loss
        setattr(self, INNER, module)

    def argument_names(self, names: Sequence[str], count: int) -> list[str]:
        """What so many positional arguments are called, by the names of the model's own; with a loss the last one is
        the target."""
        return list(names) if self._loss is None else [*names[: max(count - 1, 0)], TARGET]

    def forward(self, *args: Any, **kwargs: Any) -> torch.Tensor:
        model = getattr(self, INNER)
        if self._loss is None:
            return _number_in(model(*args, **kwargs))
        return self._loss(model(*args[:-1], **kwargs), args[-1])


def _number_in(result: Any) -> torch.Tensor:
    """The loss in a model's results; some other result where there is none, which `captured_loss` finds."""
    if isinstance(result, torch.Tensor):
        found = [result]
    elif getattr(result, "loss", None) is not None:
        found = [result.loss]
    else:
        found = list(result.values() if hasattr(result, "values") else result)
    numbers = [value for value in found if isinstance(value, torch.Tensor) and not value.ndim]
    return numbers[0] if numbers else found[0]


def captured_loss(
    module: WithLoss, arguments: Arguments, device: torch.device, dtype: torch.dtype | None, line: SourceLine,
    dynamic: Mapping[str, Sequence[int]] | None = None, instead: Mapping[int, int] | None = None,
    stores: Stores = "refused",
) -> Captured:  # fmt: skip
    """The joint graph of a loss for these arguments. Raises DefinitionError for a loss that has dims.

    dtype: of floating point parameters and arguments; None for their own.
    dynamic: by name of an argument the dims whose sizes the graph leaves open. instead: others for some of these.
    stores: what becomes of attributes that the forward sets.
    """
    args, kwargs = pytree.tree_unflatten(arguments.whole(dynamic or {}, device, dtype, instead), arguments.call.tree)
    with torch.enable_grad():
        found = captured(module, args, kwargs, device, line, scalars_only=True, dtype=dtype, given=arguments.text,
                         stores=stores)  # fmt: skip
    value = found.of_kind("result")[0][0].meta["val"]
    if value.ndim:
        shape = [int(n) for n in value.shape]
        raise user_error(
            "step: the loss of the model", f"a result of shape {shape}", "a tensor without dims",
            "Return a loss, or pass loss= to mf.parallelize: a function of the model's result and a target.", line,
        )  # fmt: skip
    return found
