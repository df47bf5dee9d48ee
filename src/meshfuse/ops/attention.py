"""Scaled dot product attention: sdpfa_fwd and sdpfa_bwd.

q is [b, h, s, e] or, as nvFuser has it after sharding heads by hand, [d, b, h, s, e]; k and v may have fewer
heads (grouped-query attention): each head of theirs then serves as many consecutive heads of q.
"""

from __future__ import annotations

import math

from ..dtypes import DataType
from ..errors import user_error
from . import native_forms
from .base import Call, DimFactors, Emit, OpDef, Param, ParamKind, Rule, RuleBuilder, Sample, TensorType
from .factories import stream_text
from .shapes import UNKNOWN, check_ndim, check_same_size

K = ParamKind


def _checked(call: Call) -> tuple[TensorType, TensorType, TensorType]:
    """(q, k, v). Raises DefinitionError where they do not fit together."""
    types = [call.type_of(name) for name in ("query", "key", "value")]
    q, k, v = (t for t in types if t is not None)
    name = call.op.name
    for t, what in ((q, "query"), (k, "key"), (v, "value")):
        check_ndim(name, what, t, 4, 5)
        check_ndim(name, what, t, q.ndim, q.ndim)
    for d in range(q.ndim - 3):
        check_same_size(name, f"query's and key's dim {d}", q.shape[d], k.shape[d])
    for d in range(q.ndim - 1):
        check_same_size(name, f"key's and value's dim {d}", k.shape[d], v.shape[d])
    check_same_size(name, "query's and key's last dims", q.shape[-1], k.shape[-1])
    _check_heads(name, q, k)
    return q, k, v


def _check_heads(name: str, q: TensorType, k: TensorType) -> None:
    heads, shared = q.shape[-3], k.shape[-3]
    if UNKNOWN not in (heads, shared) and (heads % shared if shared else heads):
        raise user_error(
            f"{name}: heads of query and key",
            f"{heads} and {shared}",
            "a multiple of the key's heads",
            "Check the operands' shapes.",
        )


def _fwd_infer(call: Call) -> tuple[TensorType, ...]:
    q, _, v = _checked(call)
    state = (TensorType((2,), DataType.UInt64), TensorType((), DataType.UInt64))
    return (
        TensorType((*q.shape[:-1], v.shape[-1]), q.dtype),
        TensorType(q.shape[:-1], DataType.Float),
        *state,
    )


class _Dims:
    """The factors of attention's dims: lead* (kv heads, group) s e, and s_k; forward is local in s."""

    def __init__(self, call: Call, forward: bool):
        q, k, v = _checked(call)
        self.builder = builder = RuleBuilder()
        self.lead = builder.dims(q.shape[:-3])
        shared, group = k.shape[-3], q.shape[-3] // max(k.shape[-3], 1)
        self.kv_heads = builder.factor(shared)
        grouped = builder.factor(group) if forward else self._whole(group)
        self.heads = (*self.kv_heads, *grouped)
        self.rows = builder.factor(q.shape[-2]) if forward else builder.blocked(q.shape[-2])
        columns = builder.blocked(k.shape[-2])
        inner, value = builder.blocked(q.shape[-1]), builder.blocked(v.shape[-1])
        self.q: DimFactors = (*self.lead, self.heads, self.rows, inner)
        self.k: DimFactors = (*self.lead, self.kv_heads, columns, inner)
        self.v: DimFactors = (*self.lead, self.kv_heads, columns, value)
        self.out: DimFactors = (*self.lead, self.heads, self.rows, value)
        self.scores: DimFactors = (*self.lead, self.heads, self.rows, columns)
        self.sizes = (*q.shape[:-1], k.shape[-2])

    def _whole(self, size: int) -> tuple[int, ...]:
        return self.builder.blocked(size) if size > 1 else ()

    def state(self) -> tuple[DimFactors, DimFactors]:
        return ((self.builder.blocked(2),), ())

    def added(self, t: TensorType) -> DimFactors:
        """The factors of a bias or mask, which broadcasts to the scores."""
        offset = len(self.scores) - t.ndim
        return tuple(
            self.scores[offset + d] if n == self.sizes[offset + d] else () for d, n in enumerate(t.shape)
        )


def _fwd_rule(call: Call) -> Rule:
    """Batch, heads and rows pass through; keys, values and the embedding are needed whole."""
    dims = _Dims(call, forward=True)
    added = [dims.added(t) for name in ("bias", "mask") if (t := call.type_of(name)) is not None]
    return dims.builder.build([dims.q, dims.k, dims.v, *added], [dims.out, dims.out[:-1], *dims.state()])


def _rows_text(e: Emit, result: int, shape: tuple[int, ...]) -> str:
    return f"({e.result_runs(result)[: len(shape)]}, {list(shape)})"


def _options_text(e: Emit) -> list[str]:
    return [str(None) if e.call[name] is None else e.scalar(name) for name in ("dropout_p", "is_causal")]


def _scale_text(e: Emit) -> str:
    return str(None) if e.call["scale"] is None else e.scalar("scale")


def _fwd_emit(e: Emit) -> str:
    operands = [str(e.operand(name)) for name in ("query", "key", "value", "bias", "mask")]
    rows = _rows_text(e, 1, e.call.results[1].shape)
    return f"K.sdpfa_fwd({', '.join([*operands, *_options_text(e), _scale_text(e), rows, stream_text(e)])})"


def _bwd_infer(call: Call) -> tuple[TensorType, ...]:
    return _checked(call)


def _bwd_rule(call: Call) -> Rule:
    """Batch and the heads of k and v pass through: gradients of k and v sum over rows and over a group's
    heads.
    """
    dims = _Dims(call, forward=False)
    saved = [dims.out, dims.q, dims.k, dims.v, dims.out, dims.out[:-1]]
    state = [tuple(dims.builder.blocked(n) for n in t.shape) for t in call.types[6:]]
    return dims.builder.build([*saved, *state], [dims.q, dims.k, dims.v])


def _bwd_emit(e: Emit) -> str:
    first = [str(e.operand(name)) for name in ("grad_output", "query", "key", "value", "output", "logsumexp")]
    state = [str(e.operand(name)) for name in ("philox_seed", "philox_offset")]
    rows = _rows_text(e, 0, e.call.results[0].shape[:-1])
    return f"K.sdpfa_bwd({', '.join([*first, *_options_text(e), *state, _scale_text(e), rows])})"


def _score_count(call: Call) -> float:
    q, k, _ = _checked(call)
    return float(math.prod(q.shape[:-1]) * k.shape[-2])


def _fwd_flops(call: Call) -> float:
    """Two matrix products."""
    return 4.0 * _score_count(call) * call.results[0].shape[-1]


def _bwd_flops(call: Call) -> float:
    """Five matrix products."""
    return 10.0 * _score_count(call) * call.results[0].shape[-1]


def _qkv(q: tuple[int, ...], kv: tuple[int, ...]) -> tuple[TensorType, ...]:
    return (TensorType(q, DataType.Float), TensorType(kv, DataType.Float), TensorType(kv, DataType.Float))


def _fwd_samples() -> list[Sample]:
    plain, grouped = _qkv((2, 4, 6, 8), (2, 4, 5, 8)), _qkv((2, 6, 4, 8), (2, 3, 4, 8))
    stacked = _qkv((3, 2, 4, 6, 8), (3, 2, 4, 6, 8))
    bias, mask = TensorType((2, 4, 6, 5), DataType.Float), TensorType((6, 5), DataType.Bool)
    return [
        Sample(plain),
        Sample(_qkv((2, 4, 6, 8), (2, 4, 6, 8)), {"is_causal": True}),
        Sample((*plain, bias, mask)),
        Sample(grouped, {"is_causal": True, "scale": 0.3}),
        Sample(grouped, {"dropout_p": 0.4}),
        Sample(stacked, {"is_causal": True}),
    ]


def _bwd_sample(q: tuple[int, ...], kv: tuple[int, ...], dropout: float, causal: bool) -> Sample:
    query, key, value = _qkv(q, kv)
    saved = (query, TensorType(q[:-1], DataType.Float), dropout, causal)
    state = (TensorType((2,), DataType.UInt64), TensorType((), DataType.UInt64))
    return Sample(
        (query, query, key, value, *saved, *state, 0.5), values={5: (2.0, 3.0, 2.5), 6: (5, 1), 7: (2,)}
    )


def _bwd_samples() -> list[Sample]:
    return [
        _bwd_sample((2, 4, 6, 8), (2, 4, 6, 8), 0.0, True),
        _bwd_sample((2, 6, 4, 8), (2, 3, 5, 8), 0.3, False),
        _bwd_sample((3, 2, 4, 4, 8), (3, 2, 4, 4, 8), 0.0, False),
    ]


_QKV = tuple(Param(name, K.TENSOR) for name in ("query", "key", "value"))
OPS = (
    OpDef(
        "sdpfa_fwd",
        (
            *_QKV,
            Param("bias", K.OPTIONAL_TENSOR, None),
            Param("mask", K.OPTIONAL_TENSOR, None),
            *(Param(name, K.OPTIONAL_SCALAR, None) for name in ("dropout_p", "is_causal", "scale")),
        ),
        _fwd_infer,
        _fwd_rule,
        _fwd_emit,
        flops=_fwd_flops,
        samples=_fwd_samples,
        nvfuser=native_forms.sdpfa_fwd,
    ),
    OpDef(
        "sdpfa_bwd",
        (
            Param("grad_output", K.TENSOR),
            *_QKV,
            Param("output", K.TENSOR),
            Param("logsumexp", K.TENSOR),
            Param("dropout_p", K.SCALAR),
            Param("is_causal", K.SCALAR),
            Param("philox_seed", K.TENSOR),
            Param("philox_offset", K.TENSOR),
            Param("scale", K.OPTIONAL_SCALAR, None),
        ),
        _bwd_infer,
        _bwd_rule,
        _bwd_emit,
        flops=_bwd_flops,
        samples=_bwd_samples,
        nvfuser=native_forms.sdpfa_bwd,
    ),
)
