"""Functions of torch that read numbers of tensors while they run, as others that do not, for Dynamo to trace instead.

An index without dims (`x[i]`), `torch.cov`, losses that look at their arguments, and batch norm's cumulative average.
"""

from __future__ import annotations

import math
import operator
from collections.abc import Callable, Iterator, Sequence
from contextlib import ExitStack, contextmanager
from typing import Any
from unittest import mock

import torch
import torch.nn.functional as F
from torch._dynamo.utils import CleanupHook
from torch._dynamo.variables.base import VariableTracker
from torch._dynamo.variables.builtin import BuiltinVariable
from torch._dynamo.variables.lists import TupleVariable
from torch._dynamo.variables.tensor import TensorVariable
from torch._dynamo.variables.torch import TorchInGraphFunctionVariable
from torch.nn.modules.batchnorm import _BatchNorm

from .aten.ctc import ctc_nll

_PLACES = (torch.int64, torch.int32, torch.int16, torch.int8)  # bools and bytes are masks

# Indices


def _is_place(index: Any) -> bool:
    return isinstance(index, torch.Tensor) and index.ndim == 0 and index.dtype in _PLACES


def _dims_of(index: Any) -> int:
    """How many dims of a tensor an index is of."""
    if index is None or isinstance(index, bool):
        return 0
    is_mask = isinstance(index, torch.Tensor) and index.dtype in (torch.bool, torch.uint8)
    return index.ndim if is_mask else 1


def _numbered(x: torch.Tensor, key: tuple[Any, ...]) -> list[tuple[int, Any]]:
    """Every index with the dim that it begins at."""
    found, dim = [], 0
    rest = x.ndim - sum([_dims_of(index) for index in key if index is not ...])
    for index in key:
        found.append((dim, index))
        dim += rest if index is ... else _dims_of(index)
    return found


def _not_negative(index: torch.Tensor, n: int) -> torch.Tensor:
    return torch.where(index < 0, index + n, index).long()


def taken(x: torch.Tensor, key: Any) -> torch.Tensor:
    """x[key], where some tensors of the key have no dims: these are looked up, and the 0th row is left."""
    key, rest = key if isinstance(key, tuple) else (key,), []
    for dim, index in _numbered(x, key):
        if _is_place(index):
            x = x.index_select(dim, _not_negative(index, x.shape[dim]).view(1))
        rest.append(0 if _is_place(index) else index)
    return x[tuple(rest)]


def put(x: torch.Tensor, key: Any, value: Any) -> None:
    """x[key] = value, where some tensors of the key have no dims: all rows are written, and all but these as they are.

    Other tensors of the key must have no dims either.
    """
    key = key if isinstance(key, tuple) else (key,)
    whole = tuple([slice(None) if _is_place(index) else index for index in key])
    before, dim = x[whole], 0
    added: list[int] = []
    is_written: Any = None
    for at, index in _numbered(x, key):
        if _is_place(index):
            n = x.shape[at]
            here = torch.arange(n, device=x.device) == _not_negative(index, n)
            here = here.view([n if d == dim else 1 for d in range(before.ndim)])
            is_written = here if is_written is None else is_written & here
            added.append(dim)
        dim += _dims_kept(x, key, index)
    if isinstance(value, torch.Tensor) and value.ndim:
        value = value.expand([n for d, n in enumerate(before.shape) if d not in added])
        for d in added:
            value = value.unsqueeze(d)
    x[whole] = torch.where(is_written, value, before).to(x.dtype)


def _dims_kept(x: torch.Tensor, key: tuple[Any, ...], index: Any) -> int:
    """How many dims of the result an index of `put` makes."""
    if index is ...:
        return x.ndim - sum([_dims_of(other) for other in key if other is not ...])
    return 0 if isinstance(index, int) else 1


# Functions


def cov(
    x: torch.Tensor, *, correction: int = 1, fweights: torch.Tensor | None = None,
    aweights: torch.Tensor | None = None,
) -> torch.Tensor:  # fmt: skip
    """torch.cov, without its checks of weights."""
    rows = x.view(1, -1) if x.ndim < 2 else x
    if not (rows.is_floating_point() or rows.is_complex()):
        rows = rows.to(torch.get_default_dtype())
    weights = fweights if aweights is None else aweights if fweights is None else fweights * aweights
    if weights is None:
        count: Any = rows.shape[1]
        middle = rows.mean(1, keepdim=True)
    else:
        count = weights.sum()
        middle = (rows * weights).sum(1, keepdim=True) / count
    lost: Any = correction
    if aweights is not None and weights is not None and correction:
        lost = correction * (weights * aweights).sum() / count
    apart = rows - middle
    weighted = apart if weights is None else apart * weights
    divisor = (count - lost).clamp(min=0) if isinstance(count - lost, torch.Tensor) else max(count - lost, 0)
    return (apart @ weighted.to(apart.dtype).transpose(0, 1).conj() / divisor).squeeze()


def corrcoef(x: torch.Tensor) -> torch.Tensor:
    found = cov(x)
    if not found.ndim:
        return found / found
    size = torch.sqrt(torch.real(found.diagonal()) if found.is_complex() else found.diagonal())
    found = found / size.unsqueeze(1) / size.unsqueeze(0)
    if found.is_complex():
        return torch.complex(torch.real(found).clamp(-1, 1), torch.imag(found).clamp(-1, 1))
    return found.clamp(-1, 1)


def gaussian_nll_loss(
    input: torch.Tensor, target: torch.Tensor, var: Any, full: bool = False, eps: float = 1e-6,
    reduction: str = "mean",
) -> torch.Tensor:  # fmt: skip
    """torch's, which raises for a negative variance: here it counts as the least one. Its gradient passes the bound."""
    if not isinstance(var, torch.Tensor):
        var = torch.full_like(input, var)
    if var.shape != input.shape:
        if input.shape[:-1] == var.shape:
            var = var.unsqueeze(-1)
        elif input.ndim != var.ndim or sum([b for a, b in zip(input.shape, var.shape, strict=True) if a != b]) != 1:
            raise ValueError("var is of incorrect size")
    var = var + (var.clamp(min=eps) - var).detach()
    found = 0.5 * (torch.log(var) + (input - target) ** 2 / var)
    return _reduced(found + 0.5 * math.log(2 * math.pi) if full else found, reduction)


def _reduced(loss: torch.Tensor, reduction: str) -> torch.Tensor:
    if reduction not in ("none", "mean", "sum"):
        raise ValueError(f"{reduction} is not valid")
    return loss if reduction == "none" else loss.mean() if reduction == "mean" else loss.sum()


def ctc_loss(
    log_probs: torch.Tensor, targets: torch.Tensor, input_lengths: Any, target_lengths: Any, blank: int = 0,
    reduction: str = "mean", zero_infinity: bool = False,
) -> torch.Tensor:  # fmt: skip
    """torch's, of items of the batch that ranks have whole."""
    is_one = log_probs.ndim == 2
    items = log_probs.unsqueeze(1) if is_one else log_probs
    places = targets.view(1, -1) if is_one and targets.ndim == 1 else targets
    steps, lengths = _lengths(input_lengths, items), _lengths(target_lengths, items)
    loss = ctc_nll(items, places.long(), steps, lengths, blank, zero_infinity)
    loss = torch.where(torch.isinf(loss), 0.0, loss) if zero_infinity else loss
    if reduction == "mean":
        loss = loss / lengths.clamp(min=1).to(loss.dtype)
    return _reduced(loss.squeeze(0) if is_one else loss, reduction)


def _lengths(given: Any, items: torch.Tensor) -> torch.Tensor:
    if not isinstance(given, torch.Tensor):
        given = torch.tensor(given, device=items.device)
    return given.long().view(-1)


_TORCHS = _BatchNorm.forward


def batch_norm(self: Any, input: torch.Tensor) -> torch.Tensor:
    """The forward of batch norm, whose cumulative average divides by a count that is a tensor."""
    if self.momentum is not None or not self.training or not self.track_running_stats:
        return _TORCHS(self, input)
    self._check_input_dim(input)
    self.num_batches_tracked.add_(1)
    with torch.no_grad():
        share = 1.0 / self.num_batches_tracked.to(self.running_mean.dtype)
        dims = [d for d in range(input.ndim) if d != 1]
        for kept, new in ((self.running_mean, input.mean(dims)), (self.running_var, input.var(dims, correction=1))):
            kept.copy_(kept * (1 - share) + new * share)
    return F.batch_norm(input, None, None, self.weight, self.bias, True, 0.0, self.eps)


# In Dynamo

_OTHERS: dict[Any, Callable[..., Any]] = {
    torch.cov: cov, torch.corrcoef: corrcoef, F.gaussian_nll_loss: gaussian_nll_loss, F.ctc_loss: ctc_loss,
    torch.ctc_loss: ctc_loss,
}  # fmt: skip


def _inlined(function: Callable[..., Any]) -> Callable[..., Any]:
    """A handler of Dynamo's that traces this function in the place of torch's."""

    def handle(_: Any, tx: Any, *args: Any, **kwargs: Any) -> Any:
        return tx.inline_user_function_return(VariableTracker.build(tx, function), list(args), kwargs)

    return handle


def _of_tensor(function: Callable[..., Any]) -> Callable[..., Any]:
    def handle(self: Any, tx: Any, *args: Any, **kwargs: Any) -> Any:
        return tx.inline_user_function_return(VariableTracker.build(tx, function), [self, *args], kwargs)

    return handle


def _tensors_in(key: Any) -> list[TensorVariable]:
    parts: Sequence[Any] = key.items if isinstance(key, TupleVariable) else [key]
    return [part for part in parts if isinstance(part, TensorVariable)]


def _has_place(key: Any) -> bool:
    return any([part.ndim == 0 and part.dtype in _PLACES for part in _tensors_in(key)])


def _putting(original: Callable[..., Any]) -> Callable[..., Any]:
    def handle(self: Any, tx: Any, key: Any, value: Any) -> Any:
        is_ours = _has_place(key) and not any([part.ndim for part in _tensors_in(key)])
        return (_of_tensor(put) if is_ours else original)(self, tx, key, value)

    return handle


def _taking(original: Callable[..., Any]) -> Callable[..., Any]:
    """Calls of builtin functions, of which an index without dims is ours."""

    def handle(self: Any, tx: Any, args: Sequence[Any], kwargs: Any) -> Any:
        if self.fn is operator.getitem and isinstance(args[0], TensorVariable) and _has_place(args[1]):
            return _of_tensor(taken)(args[0], tx, args[1])
        return original(self, tx, args, kwargs)

    return handle


@contextmanager
def others_traced() -> Iterator[None]:
    """In this context Dynamo traces the other functions."""
    handlers = TorchInGraphFunctionVariable._get_handlers()
    new = {function: _inlined(other) for function, other in _OTHERS.items()}
    methods = {
        "method___setitem__": _putting(TensorVariable.method___setitem__),
        "method_cov": _of_tensor(cov), "method_corrcoef": _of_tensor(corrcoef),
    }  # fmt: skip
    with ExitStack() as stack:
        stack.enter_context(mock.patch.dict(handlers, new))
        stack.enter_context(mock.patch.object(_BatchNorm, "forward", batch_norm))
        taking = _taking(BuiltinVariable.call_function)
        stack.enter_context(mock.patch.object(BuiltinVariable, "call_function", taking))
        for name, method in methods.items():
            stack.enter_context(mock.patch.object(TensorVariable, name, method, create=True))
        yield


@contextmanager
def globals_removed() -> Iterator[None]:
    """Afterwards remove the global variables that Dynamo makes in a forward's module: they keep the model alive."""
    original, made = CleanupHook.create, list[CleanupHook]()

    def noted(scope: dict[str, Any], name: str, value: Any) -> CleanupHook:
        made.append(original(scope, name, value))
        return made[-1]

    with mock.patch.object(CleanupHook, "create", staticmethod(noted)):
        try:
            yield
        finally:
            for hook in made:
                if hook.name in hook.scope:
                    hook()
