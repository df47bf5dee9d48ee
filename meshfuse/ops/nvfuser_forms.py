"""Lowerings to nvFuser of ops that take more than the nvFuser function of the same name."""

from __future__ import annotations

from typing import Any

from ..dtypes import DataType
from .nvfuser_lowering import (
    cast,
    is_whole,
    of_category,
)
from .opdef import NvfuserEmit, ToTorch

# Ours are a function of the seed and the global index, the same on every mesh (see `kernels.random`).
RANDOM = "nvFuser's random numbers depend on how the tensor is cut and scheduled"


def _listed(dims: Any, ndim: int) -> list[int]:
    return list(range(ndim)) if dims is None else [dims] if isinstance(dims, int) else list(dims)


def linear(n: NvfuserEmit) -> Any:
    """The bias is added once, by one of the ranks that hold terms of the result; a 1-D weight is a matmul."""
    bias = n.operand("bias") if n.leads() else None
    if n.call.types[1].ndim > 1:
        return n.plain(bias=bias)
    out = n.ops.matmul(n.operands[0], n.operands[1])
    dtype = n.call.results[0].dtype
    return out if bias is None else n.ops.cast(n.ops.add(out, bias), n.dtype(dtype))


def grouped_mm(n: NvfuserEmit) -> Any:
    """With offsets counted within the rank's own rows (columns, inner indices); the rank must hold every group."""
    a, b, offsets = n.call.types
    operand, dim = {(2, 3): (0, 0), (3, 2): (1, 1), (2, 2): (0, 1)}[a.ndim, b.ndim]
    runs = n.operand_runs(operand)[dim]
    stacked = [place for place, t in ((0, a), (1, b)) if t.ndim == 3]
    if len(runs) != 1 or any(not is_whole(n, place, 0) for place in stacked):
        raise ToTorch("the rank has some of the groups, or rows in pieces")
    if n.result_shapes[0] and n.call.results[0].ndim == 3 and n.result_shapes[0][0] != offsets.shape[0]:
        raise ToTorch("the rank has some of the groups")
    if is_whole(n, operand, dim):
        return n.plain()
    start, stop = runs[0]
    inside = n.ops.clamp(n.ops.sub(n.operands[2], start), n.val(0), n.val(stop - start))
    return n.plain(offsets=n.ops.cast(inside, n.dtype(offsets.dtype)))


def scaled_grouped_mm(n: NvfuserEmit) -> Any:
    """By an overload of nvFuser's grouped_mm."""
    call, names = n.call, ("mat1", "mat2", "offsets", "scale1", "scale2")
    options = {name: n.operand(name) for name in ("alpha", "bias", "beta") if n.operand(name) is not None}
    return n.ops.grouped_mm(
        *(n.operand(name) for name in names), **options, dtype=n.dtype(call["dtype"]),
        output_block_scale_size=call["output_block_scale_size"],
        output_block_scale_dtype=n.dtype(call["output_block_scale_dtype"]), output_gamma=call["output_gamma"],
    )  # fmt: skip


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


def squeeze(n: NvfuserEmit) -> Any:
    """Dims that hold repeated elements (squeeze_expanded) are read at index 0."""
    tensor, shape = n.operands[0], n.operand_shapes[0]
    dims = sorted({d % len(shape) for d in _listed(n.call["dims"], len(shape))})
    ones = [d for d in dims if shape[d] == 1]
    for d in reversed([d for d in dims if shape[d] != 1]):
        tensor, ones = n.ops.select(tensor, n.val(0), d), [one - (one > d) for one in ones]
    return n.ops.squeeze(tensor, ones) if ones else tensor


def pad(n: NvfuserEmit, widths: list[int]) -> Any:
    """With the value in the operand's category. nvFuser pads Bool with False only; for True the opposite is padded."""
    dtype, value, ops = n.call.types[0].dtype, n.number("value"), n.ops
    if value is None:
        return n.plain(pad_widths=widths)
    if dtype is not DataType.Bool:
        return n.plain(pad_widths=widths, value=of_category(n, "value", dtype))
    if not isinstance(value, (bool, int, float)):
        raise ToTorch("nvFuser pads Bool with constants only")
    if not value:
        return n.plain(pad_widths=widths, value=None)
    opposite = ops.pad(ops.logical_not(n.operands[0]), widths)
    return ops.logical_not(opposite)
