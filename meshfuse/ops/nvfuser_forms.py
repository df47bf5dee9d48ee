"""Lowerings to nvFuser of ops that take more than the nvFuser function of the same name."""

from __future__ import annotations

from typing import Any

from ..dtypes import DataType
from .nvfuser_lowering import (
    cast,
    is_whole,
)
from .opdef import NvfuserEmit, ToTorch

# Ours are a function of the seed and the global index, the same on every mesh (see `kernels.random`).
RANDOM = "nvFuser's random numbers depend on how the tensor is cut and scheduled"


def _check_attention(n: NvfuserEmit) -> None:
    q, k, v = (n.call.type_of(name) for name in ("query", "key", "value"))
    assert q is not None and k is not None and v is not None
    if not q.dtype.is_reduced_float:
        raise ToTorch("nvFuser's flash attention is of Half and BFloat16 only")
    if q.ndim != 4:
        raise ToTorch(f"nvFuser's attention is of 4 dims, this one's of {q.ndim}")
    if q.shape[-3] != k.shape[-3] or q.shape[-1] != v.shape[-1]:
        raise ToTorch("nvFuser's attention wants heads and widths of query, key and value to be equal")
    if n.number("dropout_p") not in (None, 0, 0.0):
        raise ToTorch(RANDOM)
    if n.call["is_causal"] not in (None, False) and q.shape[-2] != k.shape[-2]:
        raise ToTorch("flash attention's causal mask ends in the last row and column, torch's begins in the first")


def sdpfa_fwd(n: NvfuserEmit) -> Any:
    """A bias or mask gets the scores' number of dims.

    A causal mask needs all rows, as nvFuser counts from the first.
    """
    _check_attention(n)
    if n.call["is_causal"] not in (None, False) and not is_whole(n, 0, len(n.operand_shapes[0]) - 2):
        raise ToTorch("the causal mask of some of the rows")
    options = {name: n.number(name) for name in ("dropout_p", "is_causal", "scale")}
    return n.plain(**options, bias=_as_scores(n, "bias"), mask=_as_scores(n, "mask"))


def _as_scores(n: NvfuserEmit, name: str) -> Any:
    found, tensor, ndim = n.call.type_of(name), n.operand(name), n.call.types[0].ndim
    if found is None or found.ndim == ndim:
        return tensor
    return n.ops.broadcast(tensor, [d < ndim - found.ndim for d in range(ndim)])


def sdpfa_bwd(n: NvfuserEmit) -> Any:
    _check_attention(n)
    dropout, causal = n.number("dropout_p") or 0.0, n.number("is_causal") or False
    rows, columns = len(n.operand_shapes[5]) - 1, len(n.operand_shapes[2]) - 2
    if causal and not (is_whole(n, 5, rows) and is_whole(n, 2, columns)):
        raise ToTorch("the causal mask of some of the scores")
    # Unlike the forward op, nvFuser's backward has no scale of its own.
    scale = n.operand_shapes[1][-1] ** -0.5 if n.call["scale"] is None else n.number("scale")
    lse = cast(n, n.operands[5], n.call.types[5].dtype, DataType.Float)  # Read as Float, whatever it is.
    return n.plain(logsumexp=lse, dropout_p=float(dropout), is_causal=causal, scale=scale)
