"""Parts of attention's distributed forms: attention to blocks of columns, and each gradient by itself."""

from __future__ import annotations

import itertools
from collections.abc import Sequence
from typing import Any

import torch

from ...dtypes import Category, DataType
from ...errors import DefinitionError, DtypeError, user_error
from ...kernels.table import kernel
from ...sharding.layout import Runs
from ..blocks import block_size
from ..factories import stream_text
from ..opdef import Call, Emit, OpDef, Sample
from ..rules import FactorKind, Rule
from ..shape_arithmetic import check_positive
from ..values import Param, ParamKind, TensorType
from .operands import (
    BACKWARD_PARAMS,
    FORWARD_PARAMS,
    STATE,
    AttentionDims,
    checked_types,
    drops,
    operands_text,
    options_text,
    qkv_types,
    scale_text,
    score_flops,
    scores_text,
    statistic_dtype,
)
from .scaled_dot_product import (
    added_vjp,
    backward_operands,
    backward_rule,
    backward_samples,
    backward_text,
    masked_sample,
)
from .scores import (
    Saved,
    ScoreBlock,
    attend,
    key_and_value_gradients,
    options_of,
    query_gradient,
    score_gradients,
    softmax_gradients,
    state_tensors,
    widened,
)

K = ParamKind
_NOT_NATIVE = "nvFuser's attention needs keys and values whole"

# blocks of columns ------------------------------------------------------------------------------------------------


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
    """As sdpfa_fwd, with the blocks of columns as a dim of the results that passes through."""
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


@kernel
def block_attention(
    q: torch.Tensor,
    k: torch.Tensor,
    v: torch.Tensor,
    bias: Any,
    mask: Any,
    dropout_p: Any,
    is_causal: Any,
    scale: Any,
    place: tuple[Sequence[Runs], Sequence[int]],
    stream: tuple[int, ...],
    block: int,
    numbers: Runs,
) -> tuple[torch.Tensor, torch.Tensor, torch.Tensor, torch.Tensor]:
    """`sdpfa_fwd` on each of the rank's blocks of columns by itself: [blocks, *b, h, s, e] and [blocks, *b, h, s].

    `numbers` are the runs of the blocks' numbers. A block without columns gives zeros, and -inf as its log-sum-exp.
    """
    options, (runs, shape) = options_of(q, dropout_p, is_causal, scale), place
    q, k, v = widened(q), widened(k), widened(v)
    outs, sums, start = [], [], 0
    for number in itertools.chain.from_iterable(itertools.starmap(range, numbers)):
        first, last = (min(edge * block, shape[-1]) for edge in (number, number + 1))
        here, start = slice(start, start + last - first), start + last - first
        part = ScoreBlock((*runs[:-1], ((first, last),) if last > first else ()), shape)
        added = [_columns(x, here) for x in (bias, mask)]
        out, logsumexp = attend(q, k[..., here, :], v[..., here, :], *added, options, part, stream)
        outs.append(out)
        sums.append(logsumexp.to(out.dtype))
    made = _stacked(outs, (*q.shape[:-1], v.shape[-1]), q), _stacked(sums, q.shape[:-1], q)
    return *made, *state_tensors(stream, q.device)


def _columns(x: Any, here: slice) -> Any:
    """These columns of a bias or mask; all of it where its last dim broadcasts, None where there is none."""
    return x if x is None or x.shape[-1] == 1 else x[..., here]


def _stacked(parts: list[torch.Tensor], shape: Sequence[int], like: torch.Tensor) -> torch.Tensor:
    return torch.stack(parts) if parts else like.new_empty((0, *shape))


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


# each gradient by itself ------------------------------------------------------------------------------------------


def _q_rule(call: Call) -> Rule:
    """Rows and heads pass through; columns are summed over."""
    return backward_rule(call, FactorKind.PASS, FactorKind.PASS, FactorKind.REDUCE, "q")


@kernel
def sdpfa_bwd_q(*saved: Any) -> torch.Tensor:
    """The gradient of q, summed over the columns that this rank has."""
    s = Saved(*saved)
    return query_gradient(s, *score_gradients(s))


def _kv_rule(call: Call) -> Rule:
    """Columns pass through; rows and the heads of a group are summed over."""
    return backward_rule(call, FactorKind.REDUCE, FactorKind.REDUCE, FactorKind.PASS, "kv")


@kernel
def sdpfa_bwd_kv(*saved: Any) -> tuple[torch.Tensor, torch.Tensor]:
    """The gradients of k and v, summed over the rows and heads of q that this rank has."""
    s = Saved(*saved)
    return key_and_value_gradients(s, *score_gradients(s))


def _split_samples() -> list[Sample]:
    """The samples of the backward, and one whose log-sum-exp has a gradient too."""
    *found, last = backward_samples()
    more = Sample((*last.args, last.args[5]), values={**last.values, 10: (0.5, -1.0)})
    return [*found, more]


def _added_type(call: Call) -> TensorType:
    found = call.type_of("mask" if call["of_mask"] else "bias")
    if found is None or found.dtype.category < Category.FLOAT:
        raise user_error("sdpfa_bwd_added", str(found), "a bias, or a mask of numbers that is added",
                         "Pass what the gradient is of.", cls=DtypeError if found else DefinitionError)  # fmt: skip
    return found


def _added_infer(call: Call) -> tuple[TensorType, ...]:
    checked_types(call)
    return (_added_type(call),)


def _added_rule(call: Call) -> Rule:
    """Of batch, heads, rows and columns what the bias has passes through; it is summed over the others."""
    passes = FactorKind.PASS
    dims = AttentionDims(call, passes, passes, [(checked_types(call)[1].shape[-2], passes)])
    operands, added = backward_operands(call, dims), dims.added(call)
    return dims.builder.build_summed(operands, [added[-1] if call["of_mask"] else added[0]])


@kernel
def sdpfa_bwd_added(of_mask: bool, *saved: Any) -> torch.Tensor:
    """The gradient of the bias (of the mask with `of_mask`), summed over the dims in which it broadcasts."""
    s = Saved(*saved)
    like = s.mask if of_mask else s.bias
    assert like is not None
    return softmax_gradients(s)[0].sum_to_size(like.shape).to(like.dtype)


def _added_samples() -> list[Sample]:
    last = masked_sample()
    return [
        Sample((*last.args[:11], TensorType((2, 4, 6, 1), DataType.Float), last.args[12]), values=last.values),
        Sample((*last.args[:11], None, TensorType((1, 6, 7), DataType.Float), True), values=last.values),
    ]


# Each gradient by itself also takes a gradient of the log-sum-exp.
_SPLIT_PARAMS = (*BACKWARD_PARAMS, Param("grad_logsumexp", K.OPTIONAL_TENSOR, None))
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
        _SPLIT_PARAMS,
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
        _SPLIT_PARAMS,
        lambda call: checked_types(call)[1:],
        _kv_rule,
        lambda e: backward_text(e, "sdpfa_bwd_kv"),
        flops=lambda call: score_flops(call, 4),
        samples=_split_samples,
        nvfuser=_NOT_NATIVE,
        about="attention's gradients by key and value",
    ),
    OpDef(
        "sdpfa_bwd_added",
        (*BACKWARD_PARAMS, Param("of_mask", K.BOOL, False)),
        _added_infer,
        _added_rule,
        lambda e: backward_text(e, "sdpfa_bwd_added", str(e.call["of_mask"])),
        flops=lambda call: score_flops(call, 2),
        samples=_added_samples,
        nvfuser="nvFuser's backward takes neither bias nor mask",
        vjp=added_vjp,
        about="attention's gradient by its bias, or with `of_mask` by its mask of numbers",
    ),
)
