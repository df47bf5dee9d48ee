"""Functions of torch that are captured as others, whose ops have rules."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from contextlib import ExitStack, contextmanager
from typing import Any
from unittest import mock

import torch
import torch.nn.functional as F
from torch._library.simple_registry import singleton
from torch.overrides import TorchFunctionMode

from . import sdpa
from .aten.indexing import no_sparse_gradient

_BAG = F.embedding_bag


def _embedding_bag(
    input: torch.Tensor, weight: torch.Tensor, offsets: torch.Tensor | None = None, max_norm: float | None = None,
    norm_type: float = 2, scale_grad_by_freq: bool = False, mode: str = "mean", sparse: bool = False,
    per_sample_weights: torch.Tensor | None = None, include_last_offset: bool = False, padding_idx: int | None = None,
) -> torch.Tensor:  # fmt: skip
    """torch's embedding_bag, in ops that have rules and gradients: of bags of one size a matrix of embeddings is
    reduced, of several sizes embeddings are added to their bags.

    Maxima of bags of several sizes, or with padding, stay torch's.
    """
    if mode == "max" and (padding_idx is not None or input.ndim != 2 or not input.shape[1]):
        return _BAG(
            input, weight, offsets, max_norm, norm_type, scale_grad_by_freq, mode, sparse, per_sample_weights,
            include_last_offset, padding_idx,
        )  # fmt: skip
    if sparse and weight.requires_grad and torch.is_grad_enabled():
        raise no_sparse_gradient()
    rows = F.embedding(input, weight, padding_idx, max_norm, norm_type, scale_grad_by_freq)
    if mode == "max":
        return rows.max(1)[0]
    if per_sample_weights is not None:
        rows = rows * per_sample_weights.unsqueeze(-1)
    is_counted = torch.ones_like(input) if padding_idx is None else (input != padding_idx % weight.shape[0]).long()
    rows = rows if padding_idx is None else rows * is_counted.unsqueeze(-1)
    total = _of_bags(rows, input.ndim, offsets, include_last_offset)
    if mode == "sum":
        return total
    return total / _of_bags(is_counted, input.ndim, offsets, include_last_offset).clamp(min=1).unsqueeze(-1)


def _of_bags(rows: torch.Tensor, ndim: int, offsets: torch.Tensor | None, is_last_given: bool) -> torch.Tensor:
    """The sums of rows of each bag: of a matrix' rows, or from each offset to the next one."""
    if ndim == 2:
        return rows.sum(1)
    assert offsets is not None
    bags = offsets[:-1] if is_last_given else offsets
    places = torch.arange(len(rows), device=rows.device)
    bag = (places.unsqueeze(1) >= bags).sum(1) - 1
    return rows.new_zeros((len(bags), *rows.shape[1:])).index_add(0, bag, rows)


_OTHERS: dict[Any, Callable[..., Any]] = {sdpa.TORCHS: sdpa.as_one_op, _BAG: _embedding_bag}


def with_both_branches(module: torch.nn.Module) -> None:
    """Have both branches of every torch.cond be computed, and the results of one be chosen: ranks cannot branch."""
    for graph in [part for part in module.modules() if isinstance(part, torch.fx.GraphModule)]:
        found = graph.graph.find_nodes(op="call_function", target=torch.ops.higher_order.cond)
        for node in found:
            node.target = _chosen
        if found:
            graph.recompile()


def _chosen(predicate: Any, then: Callable[..., Any], otherwise: Callable[..., Any], operands: Sequence[Any]) -> Any:
    pairs = zip(then(*operands), otherwise(*operands), strict=True)
    return tuple([torch.where(predicate, a, b) if isinstance(a, torch.Tensor) else a for a, b in pairs])


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
