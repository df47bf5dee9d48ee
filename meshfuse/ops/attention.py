"""Scaled dot product attention: sdpfa_fwd and sdpfa_bwd.

q is [b, h, s, e] or, as nvFuser has it after sharding heads by hand, [d, b, h, s, e]; k and v may have fewer
heads (grouped-query attention): each head of theirs then serves as many consecutive heads of q.
"""

from __future__ import annotations

from ..dtypes import DataType
from ..gradients.attention import SDPFA_BWD, SDPFA_FWD
from . import nvfuser_forms
from .attention_blocks import (
    BACKWARD_PARAMS,
    FORWARD_PARAMS,
    backward_rule,
    backward_samples,
    backward_text,
    distributed_fwd,
    drops,
    qkv_types,
)
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
)
from .factories import stream_text
from .opdef import Call, Emit, OpDef, Sample
from .rules import FactorKind, Rule
from .values import TensorType


def _fwd_infer(call: Call) -> tuple[TensorType, ...]:
    q, _, v = checked_types(call)
    out = TensorType((*q.shape[:-1], v.shape[-1]), q.dtype)
    return (out, TensorType(q.shape[:-1], statistic_dtype(q.dtype)), *STATE)


def _fwd_rule(call: Call) -> Rule:
    """Batch, heads and rows pass through; keys, values and the embedding are needed whole."""
    columns = (checked_types(call)[1].shape[-2], FactorKind.BLOCK)
    dims = AttentionDims(call, FactorKind.PASS, FactorKind.PASS, [columns])
    operands = [dims.q, dims.k, dims.v, *dims.added(call)]
    return dims.builder.build(operands, [dims.out, dims.out[:-1], *dims.state()])


def _fwd_emit(e: Emit) -> str:
    scores = scores_text(e, e.result_runs(1), 1)
    return f"K.sdpfa_fwd({', '.join([*operands_text(e), *options_text(e), scale_text(e), scores, stream_text(e)])})"


def _bwd_rule(call: Call) -> Rule:
    """Batch and heads of k and v pass through; rows, columns and a group's heads do for one gradient or another.

    Rows and a group's heads pass through to the gradient of q, which sums over columns. Columns pass through to the
    gradients of k and v, which sum over rows and a group's heads. That is because the saved log-sum-exp makes every
    score independent (Dao 2023, FlashAttention-2).
    """
    return backward_rule(call, FactorKind.REDUCE, FactorKind.REDUCE, FactorKind.REDUCE, "qkv")


def _fwd_samples() -> list[Sample]:
    plain, grouped = qkv_types((2, 4, 6, 8), (2, 4, 5, 8)), qkv_types((2, 6, 4, 8), (2, 3, 4, 8))
    stacked = qkv_types((3, 2, 4, 6, 8), (3, 2, 4, 6, 8))
    bias, mask = TensorType((2, 4, 6, 5), DataType.Float), TensorType((6, 5), DataType.Bool)
    return [
        Sample(plain),
        Sample(qkv_types((2, 4, 6, 8), (2, 4, 6, 8)), {"is_causal": True}),
        Sample((*plain, bias, mask)),
        Sample(grouped, {"is_causal": True, "scale": 0.3}),
        Sample(grouped, {"dropout_p": 0.4}),
        Sample(stacked, {"is_causal": True}),
    ]


OPS = (
    OpDef(
        "sdpfa_fwd",
        FORWARD_PARAMS,
        _fwd_infer,
        _fwd_rule,
        _fwd_emit,
        flops=lambda call: score_flops(call, 2),
        samples=_fwd_samples,
        nvfuser=nvfuser_forms.sdpfa_fwd,
        vjp=SDPFA_FWD,
        uses_library=True,
        scheduler="expr_eval",
        laid_out_like=(0,),
        distributed=distributed_fwd,
        about="scaled dot product attention: output, log-sum-exp of the rows, and the random state",
        draws=drops,
    ),
    OpDef(
        "sdpfa_bwd",
        BACKWARD_PARAMS,
        checked_types,
        _bwd_rule,
        lambda e: backward_text(e, "sdpfa_bwd"),
        flops=lambda call: score_flops(call, 5),
        samples=backward_samples,
        nvfuser=nvfuser_forms.sdpfa_bwd,
        vjp=SDPFA_BWD,
        uses_library=True,
        scheduler="expr_eval",
        laid_out_like=(1, 2, 3),
        about="the gradients of `sdpfa_fwd` by query, key and value",
    ),
)
