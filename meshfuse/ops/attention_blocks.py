"""What attention's distributed forms are made of: its blocks of columns, and each gradient by itself."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

from ..dtypes import DataType
from .attention_rules import (
    STATE,
    AttentionDims,
    checked_types,
    operands_text,
    options_text,
    scale_text,
    score_flops,
    scores_text,
    statistic_dtype,
    with_operands,
)
from .blocks import block_size
from .factories import stream_text
from .opdef import Call, Emit, OpDef, Sample, Writing
from .rules import DimFactors, FactorKind, Rule
from .shape_arithmetic import check_positive
from .values import Param, ParamKind, TensorRef, TensorType

K = ParamKind
_NOT_NATIVE = "nvFuser's attention needs keys and values whole"


def _block_infer(call: Call) -> tuple[TensorType, ...]:
    q, _, v = checked_types(call)
    check_positive(call.op.name, "blocks", call["blocks"])
    dtype = statistic_dtype(q.dtype)
    rows = (call["blocks"], *q.shape[:-1])
    return (TensorType((*rows, v.shape[-1]), dtype), TensorType(rows, dtype), *STATE)


def _block(call: Call) -> int:
    """How many columns a block has."""
    columns = checked_types(call)[1].shape[-2]
    return min(columns, block_size(columns, call["blocks"]))


def _block_rule(call: Call) -> Rule:
    """As sdpfa_fwd, but the blocks of columns are a dim of the results, and pass through."""
    blocks, passes = call["blocks"], FactorKind.PASS
    block = _block(call)
    dims = AttentionDims(call, passes, passes, [(blocks, passes), (block, FactorKind.BLOCK)])
    outer = dims.columns[:-1]
    operands = [dims.q, dims.k, dims.v, *dims.added(call)]
    return dims.builder.build(operands, [(outer, *dims.out), (outer, *dims.out[:-1]), *dims.state()])


def _block_emit(e: Emit) -> str:
    numbers, *rows = e.result_runs(1)
    where = [scores_text(e, rows, 1), stream_text(e), str(_block(e.call)), str(numbers)]
    return f"K.block_attention({', '.join([*operands_text(e), *options_text(e), scale_text(e), *where])})"


def _is_columns(r: Writing, operands: Sequence[TensorRef], dim: int) -> bool:
    """Whether the dim is the scores' columns: the rows of k and v, or the last dim of a bias or mask."""
    ndim = r.type(operands[r.operand]).ndim
    return r.operand > 0 and dim == (ndim - 2 if r.operand < 3 else ndim - 1)


def distributed_fwd(
    r: Writing, call: Call, operands: tuple[TensorRef, ...], dim: int, blocks: int
) -> Sequence[TensorRef] | None:
    """Attention to each block of keys and values where it is, merged by the online softmax.

    Outputs and their log-sum-exps travel instead of keys and values (Rabe & Staats 2021; Liu et al. 2023, Ring
    Attention; for one row and long keys Flash-Decoding, Dao et al. 2023).
    """
    if not blocks or not _is_columns(r, operands, dim):
        return None
    out, lse, seed, offset = r.call("block_attention", *with_operands(call, operands), blocks)
    top = r.call("max", lse, [0])
    top = r.call("where", r.call("isfinite", top), top, 0.0)
    weight = r.call("exp", r.call("sub", lse, top))
    total = r.call("sum", weight, [0])
    merged = r.call("sum", r.call("mul", out, _column(r, weight)), [0])
    seen = r.call("where", r.call("eq", total, 0.0), 1.0, total)
    output = r.call("truediv", merged, _column(r, seen))
    logsumexp = r.call("add", r.call("log", total), top)
    pairs = zip((output, logsumexp), call.results, strict=False)
    return [*(r.call("cast", made, kind.dtype) for made, kind in pairs), seed, offset]


def _column(r: Writing, x: TensorRef) -> TensorRef:
    """The tensor with a last dim of size 1 added."""
    return r.call("broadcast", x, [False] * r.type(x).ndim + [True])


def backward_rule(call: Call, group: FactorKind, rows: FactorKind, columns: FactorKind, of: str) -> Rule:
    """The rule of a backward pass that gives the gradients of the tensors in `of`: some of q, k and v."""
    dims = AttentionDims(call, group, rows, [(checked_types(call)[1].shape[-2], columns)])
    saved = [dims.out, dims.q, dims.k, dims.v, dims.out, dims.out[:-1]]
    state = [tuple(dims.builder.blocked(n) for n in t.shape) for t in call.types[6:8]]
    more = [dims.out[:-1]] * len(call.types[8:])
    results: dict[str, DimFactors] = {"q": dims.q, "k": dims.k, "v": dims.v}
    return dims.builder.build([*saved, *state, *more], [results[name] for name in of])


def backward_text(e: Emit, kernel: str) -> str:
    """Python text of a call of a kernel, on all that a backward of attention reads."""
    names = ("grad_output", "query", "key", "value", "output", "logsumexp")
    state = [str(e.operand(name)) for name in ("philox_seed", "philox_offset")]
    operands = [str(e.operand(name)) for name in names]
    scores = scores_text(e, e.operand_runs(5), 2)
    more = [str(e.operand(name)) for name in e.call.op.places if name == "grad_logsumexp"]
    return f"K.{kernel}({', '.join([*operands, *options_text(e), *state, scale_text(e), scores, *more])})"


def _q_rule(call: Call) -> Rule:
    """Rows and heads pass through; columns are summed over."""
    return backward_rule(call, FactorKind.PASS, FactorKind.PASS, FactorKind.REDUCE, "q")


def _kv_rule(call: Call) -> Rule:
    """Columns pass through; rows and the heads of a group are summed over."""
    return backward_rule(call, FactorKind.REDUCE, FactorKind.REDUCE, FactorKind.PASS, "kv")


def qkv_types(q: tuple[int, ...], kv: tuple[int, ...]) -> tuple[TensorType, ...]:
    """Types of float operands of these shapes: q, and then k and v."""
    return (TensorType(q, DataType.Float), TensorType(kv, DataType.Float), TensorType(kv, DataType.Float))


def _bwd_sample(q: tuple[int, ...], kv: tuple[int, ...], dropout: float, causal: bool) -> Sample:
    query, key, value = qkv_types(q, kv)
    saved = (query, TensorType(q[:-1], DataType.Float), dropout, causal)
    return Sample((query, query, key, value, *saved, *STATE, 0.5), values={5: (2.0, 3.0, 2.5), 6: (5, 1), 7: (2,)})


def backward_samples() -> list[Sample]:
    return [
        _bwd_sample((2, 4, 6, 8), (2, 4, 6, 8), 0.0, True),
        _bwd_sample((2, 6, 4, 8), (2, 3, 5, 8), 0.3, False),
        _bwd_sample((3, 2, 4, 4, 8), (3, 2, 4, 4, 8), 0.0, False),
    ]


def _split_samples() -> list[Sample]:
    """The samples of the backward, and one whose log-sum-exp has a gradient too."""
    *_, last = found = backward_samples()
    return [*found, Sample((*last.args, last.args[5]), values={**last.values, 8: (0.5, -1.0)})]


def _block_sample(q: tuple[int, ...], kv: tuple[int, ...], blocks: int, *added: TensorType, **options: Any) -> Sample:
    return Sample((*qkv_types(q, kv), *added), {"blocks": blocks, **options})


def _block_samples() -> list[Sample]:
    bias, mask = TensorType((2, 4, 6, 7), DataType.Float), TensorType((6, 7), DataType.Bool)
    return [
        _block_sample((2, 4, 6, 8), (2, 4, 7, 8), 3, bias, mask),
        _block_sample((2, 6, 4, 8), (2, 3, 4, 8), 2, is_causal=True, scale=0.3),
        _block_sample((2, 6, 4, 8), (2, 3, 5, 8), 4, dropout_p=0.4),
        _block_sample((3, 2, 4, 4, 8), (3, 2, 4, 4, 8), 6, is_causal=True),
    ]


QKV = tuple(Param(name, K.TENSOR) for name in ("query", "key", "value"))
BACKWARD_PARAMS = (
    Param("grad_output", K.TENSOR),
    *QKV,
    Param("output", K.TENSOR),
    Param("logsumexp", K.TENSOR),
    Param("dropout_p", K.OPTIONAL_SCALAR),
    Param("is_causal", K.OPTIONAL_SCALAR),
    Param("philox_seed", K.TENSOR),
    Param("philox_offset", K.TENSOR),
    Param("scale", K.OPTIONAL_SCALAR, None),
)
# Each gradient by itself also takes a gradient of the log-sum-exp.
SPLIT_PARAMS = (*BACKWARD_PARAMS, Param("grad_logsumexp", K.OPTIONAL_TENSOR, None))
FORWARD_PARAMS = (
    *QKV,
    Param("bias", K.OPTIONAL_TENSOR, None),
    Param("mask", K.OPTIONAL_TENSOR, None),
    *(Param(name, K.OPTIONAL_SCALAR, None) for name in ("dropout_p", "is_causal", "scale")),
)


def drops(call: Call) -> bool:
    """`draws` of attention: whether it has dropout, which may depend on a scalar of the call."""
    return call["dropout_p"] not in (None, 0)


OPS = (
    OpDef(
        "block_attention",
        (*FORWARD_PARAMS, Param("blocks", K.INT, 1)),
        _block_infer,
        _block_rule,
        _block_emit,
        flops=lambda call: score_flops(call, 2),
        samples=_block_samples,
        nvfuser=_NOT_NATIVE,
        about="attention on each block of keys by itself",
        draws=drops,
    ),
    OpDef(
        "sdpfa_bwd_q",
        SPLIT_PARAMS,
        lambda call: checked_types(call)[:1],
        _q_rule,
        lambda e: backward_text(e, "sdpfa_bwd_q"),
        flops=lambda call: score_flops(call, 3),
        samples=_split_samples,
        nvfuser=_NOT_NATIVE,
        about="attention's gradient by the query",
    ),
    OpDef(
        "sdpfa_bwd_kv",
        SPLIT_PARAMS,
        lambda call: checked_types(call)[1:],
        _kv_rule,
        lambda e: backward_text(e, "sdpfa_bwd_kv"),
        flops=lambda call: score_flops(call, 4),
        samples=_split_samples,
        nvfuser=_NOT_NATIVE,
        about="attention's gradients by key and value",
    ),
)
