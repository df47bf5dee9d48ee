"""What every op of the table means, in plain torch on whole tensors in float64, without meshfuse.

A new op has its own in its `OpDef`, as `reference`.
"""

from __future__ import annotations

import math
from collections.abc import Callable
from typing import Any

import torch
import torch.nn.functional as F

from attention_references import merged_attention, ring_attention, ring_attention_bwd
from meshfuse.ops import OPS

_SAME = (
    "abs acos acosh asin asinh atan atanh bitwise_not ceil cos cosh erf erfc erfinv exp exp2 expm1 floor "
    "frac imag isfinite isinf isnan isneginf isposinf isreal lgamma log log10 log1p log2 logical_not "
    "neg real reciprocal relu round rsqrt sigmoid sign signbit sin sinh sqrt tan tanh trunc"
)
_SAME_BINARY = (
    "add sub mul atan2 bitwise_and bitwise_or bitwise_xor bitwise_left_shift bitwise_right_shift eq fmod gcd "
    "ge gt le logical_and logical_or lt maximum minimum ne nextafter pow remainder complex matmul"
)


def _on_tensors(function: Callable[..., torch.Tensor]) -> Callable[..., torch.Tensor]:
    """The function with numbers made tensors."""
    return lambda *args: function(
        *(a if isinstance(a, torch.Tensor) else torch.tensor(a, dtype=args[0].dtype) for a in args)
    )


def _dims(x: torch.Tensor, dims: Any) -> list[int]:
    return list(range(x.ndim)) if dims is None else [dims] if isinstance(dims, int) else list(dims)


def _reduce(step: Callable[..., Any]) -> Callable[..., torch.Tensor]:
    """A reduction over many dims from one over a single dim."""

    def reduce(x: torch.Tensor, dims: Any, keepdim: bool, dtype: Any, _: bool = False) -> torch.Tensor:
        found = sorted((d % x.ndim for d in _dims(x, dims)), reverse=True)
        for d in found:
            x = step(x, d)
        for d in reversed(found) if keepdim else ():
            x = x.unsqueeze(d)
        return x

    return reduce


def _extreme(name: str) -> Callable[..., torch.Tensor]:
    """The extreme over all dims at once, whose gradient equal elements share alike."""
    return lambda x, dims, keepdim, _, empty: getattr(torch, name)(x, _dims(x, dims), keepdim)


def _slice(x: torch.Tensor, starts: Any, stops: Any, strides: Any, _: Any) -> torch.Tensor:
    strides = strides or [1] * x.ndim
    return x[tuple(slice(a, b, s) for a, b, s in zip(starts, stops, strides, strict=True))]


def _expand(x: torch.Tensor, shape: Any) -> torch.Tensor:
    return x.expand(*shape)


def _in_dim(x: torch.Tensor, shape: Any, dims: Any) -> torch.Tensor:
    view = [1] * len(shape)
    for d, n in zip(dims, x.shape, strict=True):
        view[d] = n
    return torch.broadcast_to(x.view(view), tuple(shape))


def _broadcast(x: torch.Tensor, flags: Any) -> torch.Tensor:
    for d, new in enumerate(flags):
        x = x.unsqueeze(d) if new else x
    return x


def _logical_right_shift(a: torch.Tensor, b: Any) -> torch.Tensor:
    b = torch.as_tensor(b)
    pairs = torch.stack(torch.broadcast_tensors(a, b)).flatten(1).T.tolist()
    found = [(x & (2**64 - 1)) >> shift for x, shift in pairs]
    return torch.tensor([f - 2**64 if f >= 2**63 else f for f in found]).reshape(a.shape)


def _linear(x: torch.Tensor, weight: torch.Tensor, bias: Any) -> torch.Tensor:
    if weight.ndim < 3:
        return F.linear(x, weight, bias)
    out = torch.einsum("bsk,dnk->dbsn", x, weight)
    return out if bias is None else out + bias[:, None, None]


def _scan(name: str) -> Callable[..., torch.Tensor]:
    def scan(x: torch.Tensor, dim: int, init: Any) -> torch.Tensor:
        wide = x if x.is_complex() else x.double()
        parts = list(wide.unbind(dim))
        steps = {"cumsum": torch.add, "cumprod": torch.mul, "cummax": torch.maximum, "cummin": torch.minimum}
        last = None if init is None else torch.full_like(parts[0], init)
        for i, part in enumerate(parts):
            last = part if last is None else steps[name](last, part)
            parts[i] = last
        return torch.stack(parts, dim).to(x.dtype)

    return scan


def _cumulative_extreme(name: str) -> Callable[..., torch.Tensor]:
    """torch's own, beginning with a number: of equal elements the last one counts, and the number before all."""

    def scan(x: torch.Tensor, dim: int, init: Any) -> torch.Tensor:
        found = getattr(torch, name)(x.double(), dim).values
        if init is not None:
            is_beaten = found < init if name == "cummax" else found > init
            found = torch.where(is_beaten, torch.tensor(float(init), dtype=torch.float64), found)
        return found.to(x.dtype)

    return scan


def _sum_after(x: torch.Tensor, dim: int) -> torch.Tensor:
    return _scan("cumsum")(x.flip(dim), dim, None).flip(dim)


def _variance(x: torch.Tensor, dims: Any, correction: int, keepdim: bool) -> torch.Tensor:
    x = x.double()
    centred = x - x.mean(_dims(x, dims), keepdim=True)
    count = math.prod(x.shape[d] for d in _dims(x, dims))
    return (centred**2).sum(_dims(x, dims), keepdim=keepdim) / (count - correction)


def _welford(x: torch.Tensor, dims: Any) -> tuple[torch.Tensor, ...]:
    mean = x.mean(_dims(x, dims))
    count = math.prod(x.shape[d] for d in _dims(x, dims))
    return mean, _variance(x, dims, 0, False) * count, torch.full(mean.shape, count)


def _take(x: torch.Tensor, index: torch.Tensor, dim: int) -> torch.Tensor:
    sizes = list(torch.broadcast_shapes(*(t.select(dim, 0).unsqueeze(dim).shape for t in (x, index))))
    sizes[dim] = x.shape[dim]
    x, sizes[dim] = x.expand(sizes), index.shape[dim]
    return torch.gather(x, dim, index.expand(sizes))


def _index_select(x: torch.Tensor, index: torch.Tensor, dim: int) -> torch.Tensor:
    return torch.stack([x.select(dim, int(i)) for i in index.flatten()], dim)


def _embedding(
    index: torch.Tensor, weight: torch.Tensor, _: Any, max_norm: Any, norm_type: Any, *rest: Any
) -> torch.Tensor:
    return F.embedding(index, weight.clone(), None, max_norm, norm_type or 2.0)


def _scatter(x: torch.Tensor, index: torch.Tensor, src: Any, dim: int) -> torch.Tensor:
    out = x.clone()
    for place in torch.cartesian_prod(*(torch.arange(n) for n in index.shape)).tolist():
        target = list(place)
        target[dim] = int(index[tuple(place)])
        out[tuple(target)] = src[tuple(place)] if isinstance(src, torch.Tensor) else src
    return out


def _topk(x: torch.Tensor, k: int, dim: int, largest: bool, _: Any) -> tuple[torch.Tensor, torch.Tensor]:
    order = torch.sort(x, dim=dim, descending=largest, stable=True)
    return order.values.narrow(dim, 0, k), order.indices.narrow(dim, 0, k)


def _iota(length: int, start: Any, step: Any, _: Any) -> torch.Tensor:
    return torch.tensor([(start or 0) + i * (1 if step is None else step) for i in range(length)])


def _block_pick(early: Any, late: Any, first: int) -> torch.Tensor:
    """Of either a number may stand in the place, also as a tensor without dims."""
    tensor = max((t for t in (early, late) if isinstance(t, torch.Tensor)), key=torch.Tensor.dim)
    index = torch.arange(tensor.shape[0]).view(-1, *[1] * (tensor.ndim - 1))
    return torch.where(index < first, early, late).to(tensor.dtype)


def _grouped_mm(a: torch.Tensor, b: torch.Tensor, offsets: torch.Tensor) -> torch.Tensor:
    """Rows and columns after the last group are of none, and zero."""
    starts, ends = [0, *offsets.tolist()[:-1]], offsets.tolist()
    spans = list(enumerate(zip(starts, ends, strict=True)))
    if b.ndim == 3:
        return torch.cat([*(a[s:e] @ b[g] for g, (s, e) in spans), a[ends[-1] :] @ b[0] * 0])
    if a.ndim == 3:
        return torch.cat([*(a[g] @ b[:, s:e] for g, (s, e) in spans), a[0] @ b[:, ends[-1] :] * 0], 1)
    return torch.stack([a[:, s:e] @ b[s:e] for _, (s, e) in spans])


def _scaled_mm(a: Any, b: Any, scale_a: Any, scale_b: Any, alpha: Any, bias: Any, beta: Any, *_: Any) -> torch.Tensor:
    for x in (0, 1):
        scale, t = (scale_a, a) if x == 0 else (scale_b, b)
        if scale.ndim == 2:
            grid = [torch.arange(n) * m // n for n, m in zip(t.shape, scale.shape, strict=True)]
            scale = scale[grid[0]][:, grid[1]]
        a, b = (a * scale, b) if x == 0 else (a, b * scale)
    out = (a @ b) * (1.0 if alpha is None else alpha)
    return out if bias is None else out + bias * (1.0 if beta is None else beta)


def _blocks(x: torch.Tensor, dim: int, blocks: int) -> list[torch.Tensor]:
    """The blocks of a dim, the last ones short or empty."""
    size = max(1, -(-x.shape[dim] // blocks))
    starts = [min(i * size, x.shape[dim]) for i in range(blocks)]
    return [x.narrow(dim, a, min(size, x.shape[dim] - a)) for a in starts]


def _block_scan(name: str) -> Callable[..., torch.Tensor]:
    scan = _scan(name)
    return lambda x, dim, blocks: torch.cat(
        [scan(p, dim, None) if p.shape[dim] else p for p in _blocks(x, dim, blocks)], dim
    )


def _block_total(name: str, empty: float) -> Callable[..., torch.Tensor]:
    def total(x: torch.Tensor, dim: int, blocks: int) -> torch.Tensor:
        reduce = {"sum": torch.sum, "prod": torch.prod, "max": torch.amax, "min": torch.amin}[name]
        parts = _blocks(x, dim, blocks)
        return torch.stack([reduce(p, dim) if p.shape[dim] else p.sum(dim) * 0 + empty for p in parts], dim)

    return total


def _block_repeat(x: torch.Tensor, dim: int, size: int, blocks: int) -> torch.Tensor:
    index = torch.arange(size) // max(1, -(-size // blocks))
    return x.index_select(dim, index)


def _block_moments(x: torch.Tensor, dims: list[int], dim: int, blocks: int) -> torch.Tensor:
    """Block by block by torch's own variance; zeros for an empty one."""
    found = []
    for part in _blocks(x, dim, blocks):
        count = math.prod(part.shape[d] for d in dims)
        mean = part.sum(dims, keepdim=True) / max(count, 1)
        squares = torch.var(part, dims, correction=0, keepdim=True) * count if count else mean
        found.append(torch.stack([mean, squares]))
    return torch.stack(found)


def _block_merge(moments: torch.Tensor, counts: list[int]) -> tuple[torch.Tensor, torch.Tensor]:
    """Pairwise, as Chan's formula merges two sets."""
    count, mean, squares = 0, torch.zeros_like(moments[0, 0]), torch.zeros_like(moments[0, 0])
    for (other_mean, other_squares), other in zip(moments, counts, strict=True):
        if other:
            apart, total = other_mean - mean, count + other
            squares = squares + other_squares + apart**2 * (count * other / total)
            mean, count = mean + apart * (other / total), total
    return mean, squares


def _block_topk(x: torch.Tensor, k: int, dim: int, largest: bool, blocks: int) -> tuple[torch.Tensor, torch.Tensor]:
    """Block by block; what a short block lacks comes last in the order, at the places after its end."""
    size = max(1, -(-x.shape[dim] // blocks))
    last = float("-inf") if largest else float("nan")
    if not x.is_floating_point():
        last = torch.iinfo(x.dtype).min if largest else torch.iinfo(x.dtype).max
    values, places = [], []
    for number, part in enumerate(_blocks(x, dim, blocks)):
        lacking = list(x.shape)
        lacking[dim] = size - part.shape[dim]
        full = torch.cat([part, torch.full(lacking, last, dtype=x.dtype)], dim)
        top, place = _topk(full, k, dim, largest, None)
        values.append(top)
        places.append(place + number * size)
    return torch.cat(values, dim), torch.cat(places, dim)


def _contract(a: torch.Tensor, b: torch.Tensor, dims: int) -> torch.Tensor:
    return torch.tensordot(a, b, (list(range(dims)), list(range(dims))))


def _take_bwd(grad: torch.Tensor, index: torch.Tensor, dim: int, size: int) -> torch.Tensor:
    """By a one-hot product."""
    hot = (index.movedim(dim, -1)[..., None] == torch.arange(size)).to(grad.dtype)
    return torch.einsum("...m,...mn->...n", grad.movedim(dim, -1), hot).movedim(-1, dim)


def _select_bwd(grad: torch.Tensor, index: int, dim: int, size: int) -> torch.Tensor:
    hot = (torch.arange(size) == index % size).to(grad.dtype)
    return (grad[..., None] * hot).movedim(-1, dim)


def _embedding_bwd(grad: torch.Tensor, index: torch.Tensor, rows: int) -> torch.Tensor:
    hot = (index.reshape(-1, 1) == torch.arange(rows)).to(grad.dtype)
    return hot.T @ grad.reshape(-1, grad.shape[-1])


REFERENCES: dict[str, Callable[..., Any]] = {
    **{name: op.reference for name, op in OPS.items() if op.reference is not None},
    **{name: getattr(torch, name) for name in _SAME.split()},
    **{name: _on_tensors(getattr(torch, name)) for name in _SAME_BINARY.split()},
    "erfcinv": lambda x: torch.erfinv(1 - x),
    "silu": lambda x: x / (1 + torch.exp(-x)),
    "div": lambda a, b: a / b,
    "truediv": lambda a, b: a / b,
    "mod": lambda a, b: a - b * torch.trunc(a / b).to(a.dtype),
    "logical_right_shift": _logical_right_shift,
    "where": torch.where,
    "addcmul": lambda a, b, c, value: a + value * b * c,
    "clamp": torch.clamp,
    "lerp": torch.lerp,
    "threshold": F.threshold,
    "cast": lambda x, _: x,
    "set": lambda x: x,
    "segment_set": lambda x: x,
    "sum": _reduce(torch.sum),
    "prod": _reduce(torch.prod),
    "max": _extreme("amax"),
    "min": _extreme("amin"),
    "var": _variance,
    "var_mean": lambda x, dims, *rest: (_variance(x, dims, *rest), x.mean(_dims(x, dims), keepdim=rest[1])),
    "welford": _welford,
    **{name: _scan(name) for name in ("cumsum", "cumprod")},
    **{name: _cumulative_extreme(name) for name in ("cummax", "cummin")},
    "cumsum_bwd": _sum_after,
    "block_cumsum_bwd": lambda x, dim, n: torch.cat([_sum_after(part, dim) for part in _blocks(x, dim, n)], dim),
    **{f"block_{name}": _block_scan(name) for name in ("cumsum", "cumprod", "cummax", "cummin")},
    "block_sum": _block_total("sum", 0.0),
    "block_prod": _block_total("prod", 1.0),
    "block_max": _block_total("max", float("-inf")),
    "block_min": _block_total("min", float("inf")),
    "block_repeat": _block_repeat,
    "block_topk": _block_topk,
    "block_moments": _block_moments,
    "block_merge": _block_merge,
    "linear": _linear,
    "contract": _contract,
    "take_along_axis_bwd": _take_bwd,
    "embedding_bwd": _embedding_bwd,
    "select_bwd": _select_bwd,
    "sum_to": lambda x, shape: x.sum_to_size(tuple(shape)),
    "sized": lambda x, shape: x.expand(tuple(shape)),
    "reshape": lambda x, shape: x.reshape(tuple(shape)),
    "broadcast": _broadcast,
    "broadcast_in_dim": _in_dim,
    "expand": _expand,
    "squeeze": lambda x, dims, _: x.squeeze(tuple(dims)),
    "permute": lambda x, dims: x.permute(*dims),
    "stride_order": lambda x, _: x,
    "slice": _slice,
    "reorder_blocks": lambda x, dim, order: torch.cat([x.tensor_split(len(order), dim)[i] for i in order], dim),
    "pad": lambda x, widths, value: F.pad(x, list(widths), value=value or 0),
    "cat": lambda tensors, dim, _: torch.cat(tensors, dim),
    "take_along_axis": _take,
    "gather": lambda x, index, dim: torch.gather(x, dim, index),
    "index_select": _index_select,
    "select": lambda x, index, dim: x.select(dim, index),
    "embedding_fwd": _embedding,
    "scatter": _scatter,
    "argsort": lambda x, dim, descending, _: torch.sort(x, dim=dim, descending=descending, stable=True).indices,
    "topk": _topk,
    "full": lambda shape, value, _: torch.full(tuple(shape), value),
    "iota": _iota,
    "triu": torch.triu,
    "ring_attention": ring_attention,
    "ring_attention_bwd": ring_attention_bwd,
    "block_pick": _block_pick,
    "block_keep": lambda x, first, late: _block_pick(0.0, x, first) if late else _block_pick(x, 0.0, first),
    "attention_merge": merged_attention,
    "grouped_mm": _grouped_mm,
    "scaled_mm": _scaled_mm,
}
# Random numbers have no reference; test_random.py tests them. The others run with NVIDIA's kernels only.
RANDOM = frozenset(("uniform", "normal", "rand_like", "randn_like"))
NVIDIA_ONLY = frozenset(
    (
        "scaled_grouped_mm",
        "cutlass_nvfp4_grouped_mm",
        "nv_block_quantize",
        "nv_grouped_block_quantize",
        "preprocess_grouped_matmul_input_sf",
    )
)
