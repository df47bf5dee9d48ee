"""Functions of torch that are captured as others, whose ops have rules."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from contextlib import ExitStack, contextmanager
from typing import Any
from unittest import mock

import torch
import torch.nn.functional as F
from torch._library.simple_registry import singleton
from torch.overrides import TorchFunctionMode

from . import sdpa

_BAG = F.embedding_bag


def _embedding_bag(
    input: torch.Tensor, weight: torch.Tensor, offsets: torch.Tensor | None = None, max_norm: float | None = None,
    norm_type: float = 2, scale_grad_by_freq: bool = False, mode: str = "mean", sparse: bool = False,
    per_sample_weights: torch.Tensor | None = None, include_last_offset: bool = False, padding_idx: int | None = None,
) -> torch.Tensor:  # fmt: skip
    """torch's embedding_bag; of bags of one size, the rows of a matrix, as a sum or mean of embeddings."""
    if input.ndim != 2 or mode == "max" or padding_idx is not None or max_norm is not None or scale_grad_by_freq:
        return _BAG(
            input, weight, offsets, max_norm, norm_type, scale_grad_by_freq, mode, sparse, per_sample_weights,
            include_last_offset, padding_idx,
        )  # fmt: skip
    rows = F.embedding(input, weight)
    if per_sample_weights is not None:
        rows = rows * per_sample_weights.unsqueeze(-1)
    return rows.sum(1) if mode == "sum" else rows.mean(1)


_OTHERS: dict[Any, Callable[..., Any]] = {sdpa.TORCHS: sdpa.as_one_op, _BAG: _embedding_bag}


class _Replacing(TorchFunctionMode):
    """Calls the other function; what torch calls inside of its functions goes past it."""

    def __torch_function__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        called: Any = _OTHERS.get(func, func)
        return called(*args, **(kwargs or {}))


@contextmanager
def _unchecked() -> Iterator[None]:
    """torch.linalg's checks of numbers have no place among the ops of a graph."""
    effect = singleton.find("aten::_linalg_check_errors").effect
    before = effect.effect
    effect.register(None)
    try:
        yield
    finally:
        effect.register(before)


@contextmanager
def others_captured() -> Iterator[None]:
    """In this context the other functions are called, whether by a model or by a function of torch's.

    Those that draw on a library of a device's, such as LSTMs, are written in ops of torch.
    """
    with ExitStack() as stack:
        for function, other in _OTHERS.items():
            stack.enter_context(mock.patch.object(F, function.__name__, other))
        stack.enter_context(torch.backends.mkldnn.flags(enabled=False))
        stack.enter_context(_unchecked())
        stack.enter_context(_Replacing())
        yield
