"""Mixtures of experts without capacities: rows go from tokens to experts, and back, however many there are.

`moe_dispatch` gives *ragged* tensors [experts, tokens, ...]: a token has a row at those experts alone that it goes to.
Which these are only the numbers say. A rank has the rows of its experts as one tensor, and programs know no more of its
size than what is usual (`TensorType.rows`). Ragged tensors are computed on by ops that work on single elements and by
those of this file, and stay on the ranks where they are.

Where tokens and experts both lie over an axis, each row travels once to its expert and once back, by an all-to-all of
as many rows as there are (dropless, as in MegaBlocks: Gale et al. 2022). Ranks know each other's choice of experts by
then, which is a small part of the rows. A rank's rows are in the order of experts and tokens, however they came there.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

from ..dtypes import Category, DataType
from ..errors import user_error
from ..sharding.layout import Runs
from . import expert_rows
from .opdef import Call, Emit, Exchange, OpDef, Partial, Sample, flops_of_lookup
from .rules import FactorKind, Rule, RuleBuilder
from .shape_arithmetic import check_dtypes, check_ndim, check_same_size
from .values import Param, ParamKind, TensorType
from .vjp import Backward, Tensor, each

assert expert_rows is not None  # its import gives programs the kernels of these ops
K = ParamKind
_TOKENS, _EXPERTS = 0, 1  # The numbers of these factors in all rules here.
_NOT_NATIVE = "rows of experts are as many as the numbers say"


def _tensors(*names: str) -> tuple[Param, ...]:
    return tuple([Param(name, K.TENSOR) for name in names])


def _check_ragged(call: Call, *names: str) -> None:
    for name in names:
        found = call.type_of(name)
        if found is None or not found.rows:
            raise user_error(
                f"{call.op.name}: {name}", str(found), "rows of experts, as moe_dispatch gives them",
                "Call fd.ops.moe_dispatch first, and pass on what it returns.",
            )  # fmt: skip


def _members(runs: Runs) -> list[int]:
    return [i for a, b in runs for i in range(a, b)]


# to experts, and back --------------------------------------------------------------------------------------------


def _dispatch_infer(call: Call) -> tuple[TensorType, ...]:
    x, experts, count = call.types[0], call.types[1], call["num_experts"]
    check_ndim("moe_dispatch", "experts", experts, 2, 2)
    check_ndim("moe_dispatch", "x", x, 2, 3)
    check_same_size("moe_dispatch", "the numbers of tokens", x.shape[0], experts.shape[0])
    if x.ndim > 2:
        check_same_size("moe_dispatch", "the numbers of slots (dim 1)", x.shape[1], experts.shape[1])
    if experts.dtype.category is not Category.INTEGER:
        raise user_error("moe_dispatch: experts", str(experts), "integers", "Pass the numbers of experts.")
    if count < 1:
        raise user_error("moe_dispatch: num_experts", str(count), "1 or more", "Give the number of all experts.")
    rows = max(experts.shape[0] * experts.shape[1], 1)
    places = TensorType((count, x.shape[0]), DataType.Int, rows)
    return TensorType((count, x.shape[0], x.shape[-1]), x.dtype, rows), places


def _builder(
    ragged: TensorType, tokens: FactorKind = FactorKind.PASS, experts: FactorKind = FactorKind.PASS
) -> RuleBuilder:
    """A rule's first two factors: tokens and experts."""
    builder = RuleBuilder()
    builder.dim(ragged.shape[1], tokens)
    builder.dim(ragged.shape[0], experts)
    return builder


def _dispatch_rule(call: Call) -> Rule:
    """t h, t k -> e t h, e t."""
    x, experts = call.types
    builder = _builder(call.results[0])
    t, e, slots, h = (_TOKENS,), (_EXPERTS,), builder.blocked(experts.shape[1]), builder.factor(x.shape[-1])
    taken = (t, h) if x.ndim == 2 else (t, slots, h)
    return builder.build([taken, (t, slots)], [(e, t, h), (e, t)])


def _dispatch_emit(e: Emit) -> str:
    mine, count = _members(e.result_runs(0)[0]), e.call["num_experts"]
    return f"K.moe_dispatch({', '.join(e.operands)}, {mine}, {count})"


def _dispatch_vjp(b: Backward) -> Tensor:
    back = b.ops.moe_collect(b.grad, b["experts"])
    return back if b["x"].ndim > 2 else b.ops.sum(back, [1])


def _collect_infer(call: Call) -> tuple[TensorType, ...]:
    _check_ragged(call, "rows")
    rows, experts = call.types
    check_ndim("moe_collect", "experts", experts, 2, 2)
    check_same_size("moe_collect", "the numbers of tokens", rows.shape[1], experts.shape[0])
    return (TensorType((*experts.shape, rows.shape[-1]), rows.dtype),)


def _collect_rule(call: Call) -> Rule:
    """e t h, t k -> t k h, summed over e."""
    rows, experts = call.types
    builder = _builder(rows, experts=FactorKind.REDUCE)
    t, e, slots, h = (_TOKENS,), (_EXPERTS,), builder.blocked(experts.shape[1]), builder.factor(rows.shape[-1])
    return builder.build([(e, t, h), (t, slots)], [(t, slots, h)])


def _collect_emit(e: Emit) -> str:
    mine, count = _members(e.operand_runs(0)[0]), e.call.types[0].shape[0]
    return f"K.moe_collect({', '.join(e.operands)}, {mine}, {count})"


def _collect_vjp(b: Backward) -> Tensor:
    return b.ops.moe_dispatch(b.grad, b["experts"], b["rows"].type.shape[0])[0]


# products --------------------------------------------------------------------------------------------------------


def _linear_infer(call: Call) -> tuple[TensorType, ...]:
    _check_ragged(call, "rows", "expert")
    rows, _, weight = call.types
    check_ndim("moe_linear", "weight", weight, 3, 3)
    taken, made = (2, 1) if call["transposed"] else (1, 2)
    check_same_size("moe_linear", "the numbers of experts", rows.shape[0], weight.shape[0])
    check_same_size("moe_linear", "the contracted dims", rows.shape[2], weight.shape[taken])
    check_dtypes(Call(call.op, call.args, (rows, weight)))
    return (TensorType((*rows.shape[:2], weight.shape[made]), rows.dtype, rows.rows),)


def _linear_rule(call: Call) -> Rule:
    """e t h, e t, e h f -> e t f."""
    rows, _, _ = call.types
    builder = _builder(rows)
    t, e = (_TOKENS,), (_EXPERTS,)
    h, f = builder.reduction(rows.shape[2]), builder.factor(call.results[0].shape[2])
    weight = (e, f, h) if call["transposed"] else (e, h, f)
    return builder.build([(e, t, h), (e, t), weight], [(e, t, f)])


def _linear_emit(e: Emit) -> str:
    return f"K.moe_linear({', '.join(e.operands)}, {bool(e.call['transposed'])})"


def _linear_flops(call: Call) -> float:
    return 2.0 * call.results[0].numel * call.types[0].shape[2]


def _linear_rows(b: Backward) -> Tensor:
    return b.ops.moe_linear(b.grad, b["expert"], b["weight"], not b["transposed"])


def _linear_weight(b: Backward) -> Tensor:
    both = (b.grad, b["rows"]) if b["transposed"] else (b["rows"], b.grad)
    return b.ops.moe_weight_gradient(*both, b["expert"])


def _weight_infer(call: Call) -> tuple[TensorType, ...]:
    _check_ragged(call, "left", "right", "expert")
    left, right, _ = call.types
    check_dtypes(Call(call.op, call.args, (left, right)))
    return (TensorType((left.shape[0], left.shape[2], right.shape[2]), left.dtype),)


def _weight_rule(call: Call) -> Rule:
    """e t m, e t n, e t -> e m n, summed over t."""
    left, right, _ = call.types
    builder = _builder(left, tokens=FactorKind.REDUCE)
    t, e = (_TOKENS,), (_EXPERTS,)
    m, n = builder.factor(left.shape[2]), builder.factor(right.shape[2])
    return builder.build([(e, t, m), (e, t, n), (e, t)], [(e, m, n)])


def _weight_emit(e: Emit) -> str:
    return f"K.moe_weight_gradient({', '.join(e.operands)}, {e.result_shapes[0][0]})"


def _weight_flops(call: Call) -> float:
    return 2.0 * call.types[0].numel * call.types[1].shape[2]


# gates -----------------------------------------------------------------------------------------------------------


def _swiglu_infer(call: Call) -> tuple[TensorType, ...]:
    _check_ragged(call, *(param.name for param in call.op.params))
    rows = call.types[-1]
    if rows.shape[2] % 2:
        raise user_error("moe_swiglu: rows", str(rows), "a last dim of gate and up, of one size", "Pass both at once.")
    half = rows._replace(shape=(*rows.shape[:2], rows.shape[2] // 2))
    return (half if len(call.types) == 1 else rows,)


def _swiglu_rule(call: Call) -> Rule:
    """e t (2 f) -> e t f; of the gradient e t f, e t (2 f) -> e t (2 f)."""
    rows = call.types[-1]
    builder = _builder(rows)
    t, e, both, f = (_TOKENS,), (_EXPERTS,), builder.blocked(2), builder.dim(rows.shape[2] // 2)
    narrow, wide = (e, t, f), (e, t, (*both, *f))
    return builder.build(*(([wide], [narrow]) if len(call.types) == 1 else ([narrow, wide], [wide])))


def moe_combine(fd: Any, rows: Any, experts: Any, scores: Any) -> Any:
    """[tokens, width]: for each token the sum of its rows times their scores, [tokens, slots]: always in one order."""
    weighted = fd.ops.mul(fd.ops.moe_collect(rows, experts), fd.ops.broadcast(scores, [False, False, True]))
    return fd.ops.sum(weighted, [1])


_N = 3
_TOKENS_IN, _CHOICE = TensorType((6, 4), DataType.Float), TensorType((6, 2), DataType.Int)
_PLACES = TensorType((_N, 6), DataType.Int, 12)


def _rows(width: int) -> TensorType:
    return TensorType((_N, 6, width), DataType.Float, 12)


def _sample(*args: Any) -> Callable[[], list[Sample]]:
    return lambda: [Sample(args)]


OPS = (
    OpDef(
        "moe_dispatch", (*_tensors("x", "experts"), Param("num_experts", K.INT)), _dispatch_infer, _dispatch_rule,
        _dispatch_emit, flops=flops_of_lookup, samples=_sample(_TOKENS_IN, _CHOICE, _N), nvfuser=_NOT_NATIVE,
        on_rows=True, vjp=each(x=_dispatch_vjp), exchange=Exchange(_TOKENS, _EXPERTS, "dispatch", choice=1),
        about="(rows, expert): the rows of tokens at the experts, [tokens, slots], that they go to; x is "
        "[tokens, width], or [tokens, slots, width] with a row for every slot",
    ),
    OpDef(
        "moe_collect", _tensors("rows", "experts"), _collect_infer, _collect_rule, _collect_emit,
        Partial.FIRST, flops_of_lookup, _sample(_rows(4), _CHOICE), nvfuser=_NOT_NATIVE, on_rows=True,
        vjp=each(rows=_collect_vjp), exchange=Exchange(_TOKENS, _EXPERTS, "collect", choice=1),
        about="[tokens, slots, width]: rows of experts back at their tokens",
    ),
    OpDef(
        "moe_linear", (*_tensors("rows", "expert", "weight"), Param("transposed", K.BOOL, False)), _linear_infer,
        _linear_rule, _linear_emit, Partial.FIRST, _linear_flops,
        _sample(_rows(4), _PLACES, TensorType((_N, 4, 5), DataType.Float)), nvfuser=_NOT_NATIVE, on_rows=True,
        uses_library=True, vjp=each(rows=_linear_rows, weight=_linear_weight),
        about="rows times the matrices of their experts, [experts, in, out], or [experts, out, in] if `transposed`",
    ),
    OpDef(
        "moe_weight_gradient", _tensors("left", "right", "expert"), _weight_infer, _weight_rule, _weight_emit,
        Partial.EACH, _weight_flops, _sample(_rows(4), _rows(5), _PLACES), nvfuser=_NOT_NATIVE, on_rows=True,
        uses_library=True,
        vjp=each(
            left=lambda b: b.ops.moe_linear(b["right"], b["expert"], b.grad, True),
            right=lambda b: b.ops.moe_linear(b["left"], b["expert"], b.grad, False),
        ),
        about="[experts, m, n]: for each expert the product of its rows of `left` and of `right`",
    ),
    OpDef(
        "moe_swiglu", _tensors("rows"), _swiglu_infer, _swiglu_rule, lambda e: f"K.moe_swiglu({e.operands[0]})",
        samples=_sample(_rows(4)), nvfuser=_NOT_NATIVE, on_rows=True,
        vjp=each(rows=lambda b: b.ops.moe_swiglu_bwd(b.grad, b["rows"])),
        about="silu(gate) * up, for rows of gate and up one behind the other",
    ),
    OpDef(
        "moe_swiglu_bwd", _tensors("grad", "rows"), _swiglu_infer, _swiglu_rule,
        lambda e: f"K.moe_swiglu_bwd({', '.join(e.operands)})", samples=_sample(_rows(2), _rows(4)),
        nvfuser=_NOT_NATIVE, on_rows=True, about="the gradient of `moe_swiglu` by its rows",
    ),
)  # fmt: skip

EXPERT_COMPOSITES: dict[str, Callable[..., Any]] = {"moe_combine": moe_combine}
