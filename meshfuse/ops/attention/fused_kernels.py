"""Attention by torch's fused kernels: one on the CPU; on CUDA, cuDNN's, flash attention and the memory-efficient one.

Tensors are [*b, h, s, e], and the log-sum-exp [*b, h, s] is of natural logarithms after the scale. Several consecutive
heads of q may share one of k and v, which is then repeated: a copy of k and v is little beside scores in memory.
(Dao et al. 2022; Rabe & Staats 2021.)
"""

from __future__ import annotations

import functools
from collections.abc import Sequence
from typing import Any

import torch
import torch.nn.functional as F
from torch._subclasses.fake_tensor import FakeTensor
from torch.nn.attention import SDPBackend

_DTYPES = (torch.float32, torch.bfloat16, torch.float16)
# CUDA kernels: the widest heads of flash attention and of cuDNN's backward; widths, biases and the memory-efficient
# kernel's log-sum-exp are padded to multiples of these.
_WIDEST, _CUDNN, _WIDTHS, _BIAS, _ROWS = 256, 128, 8, 16, 32
# From this many multiplications of queries and keys on, cuDNN saves more device time than it costs host time.
_LEAST_PRODUCT = 2**32
_aten = torch.ops.aten
_Outcome = tuple[torch.Tensor, torch.Tensor]
_Gradients = tuple[torch.Tensor, torch.Tensor, torch.Tensor]


def can_fuse(q: torch.Tensor, k: torch.Tensor, v: torch.Tensor, dropout_p: float) -> bool:
    """Whether there is a fused kernel for attention between these, of all rows and columns."""
    if not (q.dtype == k.dtype == v.dtype and q.dtype in _DTYPES and q.shape[-1] == v.shape[-1]):
        return False
    if dropout_p or min(*q.shape, *k.shape, 1) == 0:
        return False
    if q.device.type == "cpu":
        return True
    return q.device.type == "cuda" and torch.version.hip is None and _has_flash(q.device)


@functools.cache
def _has_flash(device: torch.device) -> bool:
    """Before Ampere there is neither BFloat16 nor flash attention."""
    return torch.cuda.get_device_capability(device) >= (8, 0)


def attend(
    q: torch.Tensor, k: torch.Tensor, v: torch.Tensor, addend: torch.Tensor | None, is_causal: bool, scale: float
) -> _Outcome:
    """(output, log-sum-exp). `addend` is added to the scores; with it `is_causal` must be False.

    A row that sees nothing gets zeros, and -inf as its log-sum-exp.
    """
    form = _attend_cuda if q.device.type == "cuda" else _attend_cpu
    flat = None if addend is None else _flat(_dense(addend.expand(*q.shape[:-1], k.shape[-2])))
    dense_q, dense_k, dense_v = (_flat(_dense(_for_every_head(x, q))) for x in (q, k, v))
    out, lse = form(dense_q, dense_k, dense_v, flat, is_causal, scale)
    if addend is not None:
        blind = (addend == float("-inf")).all(-1).expand(q.shape[:-1]).reshape(lse.shape)
        lse = lse.masked_fill(blind, float("-inf"))
        if q.device.type == "cuda":  # The CPU's kernel gives zeros itself.
            out = out.masked_fill(blind.unsqueeze(-1), 0.0)
    return out.reshape(q.shape), lse.reshape(q.shape[:-1])


def attend_bwd(
    grad: torch.Tensor,
    q: torch.Tensor,
    k: torch.Tensor,
    v: torch.Tensor,
    out: torch.Tensor,
    logsumexp: torch.Tensor,
    addend: torch.Tensor | None,
    is_causal: bool,
    scale: float,
) -> _Gradients:
    """The gradients of q, k and v. With an addend, `is_causal` must be False."""
    form = _backward_cuda if q.device.type == "cuda" else _backward_cpu
    shared = [_for_every_head(x, q) for x in (k, v)]
    flat = [_flat(_dense(x)) for x in (grad, q, *shared, out)]
    added = None if addend is None else _flat(_dense(addend.expand(*q.shape[:-1], k.shape[-2])))
    sums = logsumexp.float()
    if addend is not None:  # Of a row that sees nothing, for probabilities of 0.
        sums = sums.masked_fill(sums == float("-inf"), float("inf"))
    made = form(flat, sums.reshape(-1, *sums.shape[-2:]), added, is_causal, scale)
    grad_q, *others = (g.reshape(x.shape) for g, x in zip(made, (q, *shared), strict=True))
    grad_k, grad_v = (_summed_by_head(g, x) for g, x in zip(others, (k, v), strict=True))
    return grad_q, grad_k, grad_v


def _dense(x: torch.Tensor) -> torch.Tensor:
    """The tensor with its last dim dense in memory: fused kernels read it so, whatever its stride."""
    return x if x.stride(-1) == 1 else x.contiguous()


def _flat(x: torch.Tensor) -> torch.Tensor:
    """The tensor with its leading dims merged with the batch, 4-D in all."""
    return x.reshape(-1, *x.shape[-3:])


def _for_every_head(x: torch.Tensor, q: torch.Tensor) -> torch.Tensor:
    """k or v with a head for each of q's."""
    shared = q.shape[-3] // x.shape[-3]
    return x if shared == 1 else x.repeat_interleave(shared, -3)


def _summed_by_head(grad: torch.Tensor, x: torch.Tensor) -> torch.Tensor:
    """The gradient of k or v from those by q's heads. Halves are summed in float32, as torch's sums are."""
    return grad if grad.shape == x.shape else grad.unflatten(-3, (x.shape[-3], -1)).sum(-3)


# the CPU ----------------------------------------------------------------------------------------------------------


def _attend_cpu(
    q: torch.Tensor, k: torch.Tensor, v: torch.Tensor, addend: torch.Tensor | None, is_causal: bool, scale: float
) -> _Outcome:
    return _aten._scaled_dot_product_flash_attention_for_cpu(q, k, v, 0.0, is_causal, attn_mask=addend, scale=scale)


def _backward_cpu(
    flat: Sequence[torch.Tensor], lse: torch.Tensor, addend: torch.Tensor | None, is_causal: bool, scale: float
) -> _Gradients:
    given = [x.contiguous() for x in flat]
    return _aten._scaled_dot_product_flash_attention_for_cpu_backward(
        *given, lse, 0.0, is_causal, attn_mask=addend, scale=scale
    )


# CUDA -------------------------------------------------------------------------------------------------------------


def _is_flash(q: torch.Tensor, k: torch.Tensor, is_causal: bool) -> bool:
    """Whether flash attention computes this.

    Its causal mask ends in the last row and column, ours begins in the first: they agree for as many rows as columns.
    """
    square = q.shape[-2] == k.shape[-2] or not is_causal
    return q.dtype != torch.float32 and q.shape[-1] <= _WIDEST and square


def _is_cudnn(q: torch.Tensor, k: torch.Tensor, v: torch.Tensor, is_causal: bool, scale: float) -> bool:
    """Whether to use cuDNN in place of flash attention: torch prefers it, and the product is large.

    On Hopper it takes half to two thirds of the time, but more time of the host. The log-sum-exp is the same: forward
    and backward may decide differently.
    """
    if isinstance(q, FakeTensor) or q.shape[-1] > _CUDNN:  # Both results have the same strides.
        return False
    if q.numel() * k.shape[-2] < _LEAST_PRODUCT:
        return False
    return _aten._fused_sdp_choice(q, k, v, None, 0.0, is_causal, scale=scale) == SDPBackend.CUDNN_ATTENTION.value


def _attend_cuda(
    q: torch.Tensor, k: torch.Tensor, v: torch.Tensor, addend: torch.Tensor | None, is_causal: bool, scale: float
) -> _Outcome:
    rows, width = q.shape[-2:]
    q, k, v = (_padded(x, _WIDTHS) for x in (q, k, v))
    if addend is None and _is_flash(q, k, is_causal):
        if _is_cudnn(q, k, v, is_causal, scale):
            out, lse, *_ = _aten._scaled_dot_product_cudnn_attention(q, k, v, None, True, 0.0, is_causal, scale=scale)
            lse = lse.reshape(q.shape[:-1])
        else:
            out, lse, *_ = _aten._scaled_dot_product_flash_attention(q, k, v, 0.0, is_causal, scale=scale)
    else:
        bias = _readable(addend)
        out, lse, *_ = _aten._scaled_dot_product_efficient_attention(q, k, v, bias, True, 0.0, is_causal, scale=scale)
    return out[..., :width], lse[..., :rows]


def _readable(addend: torch.Tensor | None) -> torch.Tensor | None:
    """The addend with room behind its rows: the kernel reads it by vectors, also beyond the end of a row."""
    return None if addend is None else _padded(addend, _BIAS)[..., : addend.shape[-1]]


def _backward_cuda(
    flat: Sequence[torch.Tensor], lse: torch.Tensor, addend: torch.Tensor | None, is_causal: bool, scale: float
) -> _Gradients:
    width = flat[0].shape[-1]
    grad, q, k, v, out = (_padded(x, _WIDTHS) for x in flat)
    state = torch.empty((), dtype=torch.int64, device=q.device)  # of random numbers; none are drawn
    if addend is None and _is_flash(q, k, is_causal):
        sizes, lse = (q.shape[-2], k.shape[-2]), lse.contiguous()
        if _is_cudnn(q, k, v, is_causal, scale):
            none = (None, None, None)
            made = _aten._scaled_dot_product_cudnn_attention_backward(
                grad, q, k, v, out, lse.unsqueeze(-1), state, state, *none, *sizes, 0.0, is_causal, scale=scale
            )
        else:
            made = _aten._scaled_dot_product_flash_attention_backward(
                grad, q, k, v, out, lse, None, None, *sizes, 0.0, is_causal, state, state, scale=scale
            )
    else:
        wanted, sums = [True, True, True, False], _padded(lse, _ROWS, float("inf"))
        # The kernel ignores the strides of the output: it expects [b, s, h, e] in memory.
        out = out.transpose(1, 2).contiguous().transpose(1, 2)
        made = _aten._scaled_dot_product_efficient_attention_backward(
            grad, q, k, v, _readable(addend), out, sums, state, state, 0.0, wanted, is_causal, scale=scale
        )[:3]
    grad_q, grad_k, grad_v = (g[..., :width] for g in made)
    return grad_q, grad_k, grad_v


def _padded(x: torch.Tensor, multiple: int, value: Any = 0.0) -> torch.Tensor:
    """The tensor with its last dim filled up to a multiple, dense in memory."""
    lacking = -x.shape[-1] % multiple
    return F.pad(x, (0, lacking), value=value) if lacking else x
