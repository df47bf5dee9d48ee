"""The CTC loss: torch computes it on each rank's items of the batch. What it keeps of the forward it makes anew."""

from __future__ import annotations

from typing import Any

import torch

from .table import named_rule
from .torch_calls import Items, Shapes, torch_rule

_ATEN = torch.ops.aten


@torch.library.custom_op("meshfuse::ctc_nll", mutates_args=())
def ctc_nll(
    log_probs: torch.Tensor, targets: torch.Tensor, steps: torch.Tensor, lengths: torch.Tensor, blank: int,
    zero_infinity: bool,
) -> torch.Tensor:  # fmt: skip
    """The loss of each item. log_probs: [T, N, C]; targets [N, S], or those of all items in a row."""
    return _ctc_nll(log_probs, targets, steps, lengths, blank, zero_infinity)


@torch.library.custom_op("meshfuse::ctc_gradient", mutates_args=())
def ctc_gradient(
    grad: torch.Tensor, log_probs: torch.Tensor, targets: torch.Tensor, steps: torch.Tensor, lengths: torch.Tensor,
    blank: int, zero_infinity: bool,
) -> torch.Tensor:  # fmt: skip
    """The gradient of log_probs."""
    return _ctc_gradient(grad, log_probs, targets, steps, lengths, blank, zero_infinity)


def _ctc_nll(log_probs: torch.Tensor, *rest: Any) -> torch.Tensor:
    return _ATEN._ctc_loss.Tensor(log_probs, *rest)[0]


def _ctc_gradient(grad: torch.Tensor, log_probs: torch.Tensor, *rest: Any) -> torch.Tensor:
    loss, alpha = _ATEN._ctc_loss.Tensor(log_probs, *rest)
    *given, blank, zero_infinity = rest
    return _ATEN._ctc_loss_backward.Tensor(grad, log_probs, *given, loss, alpha, blank, zero_infinity)


@ctc_nll.register_fake
def _(log_probs: torch.Tensor, *_: Any) -> torch.Tensor:
    return log_probs.new_empty(log_probs.shape[1])


@ctc_gradient.register_fake
def _(grad: torch.Tensor, log_probs: torch.Tensor, *_: Any) -> torch.Tensor:
    return torch.empty_like(log_probs)


def _keep(ctx: Any, inputs: tuple[Any, ...], output: torch.Tensor) -> None:
    *tensors, ctx.blank, ctx.zero_infinity = inputs
    ctx.save_for_backward(*tensors)


def _backward(ctx: Any, grad: torch.Tensor) -> tuple[Any, ...]:
    found = ctc_gradient(grad, *ctx.saved_tensors, ctx.blank, ctx.zero_infinity)
    return found, None, None, None, None, None


ctc_nll.register_autograd(_backward, setup_context=_keep)


def _items(operands: Shapes, results: Shapes) -> Items:
    """Cut along the batch, where targets are not in a row."""
    *grads, _, targets, _, _ = operands
    n = "n" if len(targets) == 2 else "N"
    probabilities = ("T", n, "C")
    given = (probabilities, (n, "S") if len(targets) == 2 else ("S",), (n,), (n,))
    return Items((*[(n,) for _ in grads], *given), (probabilities,) if grads else ((n,),))


named_rule("meshfuse::ctc_nll")(torch_rule(_ctc_nll, _items))
named_rule("meshfuse::ctc_gradient")(torch_rule(_ctc_gradient, _items))
