"""What the ops of attention share: parameters, checks, samples, the factors of their dims, texts of lowerings."""

from __future__ import annotations

import math
from collections.abc import Sequence

from ...dtypes import DataType
from ...errors import user_error
from ..opdef import Call, Emit
from ..rules import DimFactors, FactorKind, RuleBuilder
from ..shape_arithmetic import UNKNOWN, agree, broadcasts_to, check_ndim, check_same_size
from ..values import Param, ParamKind, TensorRef, TensorType

K = ParamKind
QKV = tuple(Param(name, K.TENSOR) for name in ("query", "key", "value"))
# What is added to the scores: a mask of bools lets a score be seen where it is True, one of numbers is added.
ADDED = (Param("bias", K.OPTIONAL_TENSOR, None), Param("mask", K.OPTIONAL_TENSOR, None))
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
    *ADDED,
)
FORWARD_PARAMS = (
    *QKV,
    *ADDED,
    *(Param(name, K.OPTIONAL_SCALAR, None) for name in ("dropout_p", "is_causal", "scale")),
)
# The types of the random state that attention returns: seed and offset.
STATE = (TensorType((2,), DataType.UInt64), TensorType((), DataType.UInt64))


def checked_types(call: Call) -> tuple[TensorType, TensorType, TensorType]:
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
    _check_others(call, (*q.shape[:-1], k.shape[-2]), (*q.shape[:-1], v.shape[-1]))
    return q, k, v


def _check_others(call: Call, scores: tuple[int, ...], out: tuple[int, ...]) -> None:
    """Raises DefinitionError unless the other operands fit these shapes of the scores and the output."""
    given = {name: t for name in call.op.places if (t := call.type_of(name)) is not None}
    for name in ("bias", "mask"):
        if name in given:
            _check_added(call.op.name, name, given[name], scores)
    for name, shape in (("grad_output", out), ("output", out), ("logsumexp", out[:-1]), ("grad_logsumexp", out[:-1])):
        if name in given:
            _check_shape(call.op.name, name, given[name], shape)
    if "philox_seed" in given and call["dropout_p"] not in (None, 0):
        _check_state(call)


def statistic_dtype(dtype: DataType) -> DataType:
    """The type of a log-sum-exp, and of outputs while they are merged: Double for Double operands, else Float."""
    return DataType.Double if dtype is DataType.Double else DataType.Float


def _check_added(name: str, what: str, t: TensorType, scores: Sequence[int]) -> None:
    """Raises DefinitionError unless a bias or mask broadcasts to the scores."""
    if not broadcasts_to(t.shape, scores):
        raise user_error(
            f"{name}: {what}", str(t), f"a shape that broadcasts to {list(scores)}", "Broadcast or reshape it."
        )


def _check_state(call: Call) -> None:
    """Raises DefinitionError for a random state of the wrong shape. Without dropout it is not checked."""
    for what, wanted in zip(("philox_seed", "philox_offset"), STATE, strict=True):
        if (t := call.type_of(what)) is not None:
            _check_shape(call.op.name, what, t, wanted.shape)


def _check_shape(name: str, what: str, t: TensorType, shape: tuple[int, ...]) -> None:
    if not agree(t.shape, shape):
        raise user_error(f"{name}: shape of {what}", str(list(t.shape)), str(list(shape)),
                         "Pass what the forward gives, and a gradient of that shape.")  # fmt: skip


def _check_heads(name: str, q: TensorType, k: TensorType) -> None:
    heads, shared = q.shape[-3], k.shape[-3]
    if UNKNOWN not in (heads, shared) and (heads % shared if shared else heads):
        raise user_error(
            f"{name}: heads of query and key",
            f"{heads} and {shared}",
            "a multiple of the key's heads",
            "Check the operands' shapes.",
        )


class AttentionDims:
    """The factors of attention's dims: lead* (kv heads, group) rows, columns (major to minor), inner and value.

    A group of consecutive heads of q shares one head of k and v. `columns` are the sizes and kinds of the factors of
    k's and v's rows. `ring`: the number of blocks of rows, the most major factor of q's rows and of k's and v's.
    """

    def __init__(
        self,
        call: Call,
        group: FactorKind,
        rows: FactorKind,
        columns: Sequence[tuple[int, FactorKind]],
        ring: int = 1,
    ):
        q, k, v = checked_types(call)
        self.builder = builder = RuleBuilder()
        self.lead = builder.dims(q.shape[:-3])
        shared, count = k.shape[-3], q.shape[-3] // max(k.shape[-3], 1)
        self.kv_heads = builder.factor(shared)
        self.heads = (*self.kv_heads, *(builder.factor(count, group) if count > 1 else ()))
        blocks = builder.factor(ring)
        self.rows = (*blocks, *builder.factor(q.shape[-2] // ring, rows))
        self.columns = (*blocks, *(f for size, kind in columns for f in builder.factor(size, kind)))
        inner, value = builder.blocked(q.shape[-1]), builder.blocked(v.shape[-1])
        self.q: DimFactors = (*self.lead, self.heads, self.rows, inner)
        self.k: DimFactors = (*self.lead, self.kv_heads, self.columns, inner)
        self.v: DimFactors = (*self.lead, self.kv_heads, self.columns, value)
        self.out: DimFactors = (*self.lead, self.heads, self.rows, value)
        self.scores: DimFactors = (*self.lead, self.heads, self.rows, self.columns)
        self.sizes = (*q.shape[:-1], k.shape[-2])

    def state(self) -> tuple[DimFactors, DimFactors]:
        """The random state: seed and offset."""
        return ((self.builder.blocked(2),), ())

    def added(self, call: Call) -> list[DimFactors]:
        """The factors of a bias and a mask, which broadcast to the scores."""
        return [self._broadcast(t) for t in added_types(call)]

    def _broadcast(self, t: TensorType) -> DimFactors:
        offset = len(self.scores) - t.ndim
        return tuple(self.scores[offset + d] if n == self.sizes[offset + d] else () for d, n in enumerate(t.shape))


def added_types(call: Call) -> list[TensorType]:
    """The types of the bias and the mask, of those that are given."""
    return [t for name in ("bias", "mask") if (t := call.type_of(name)) is not None]


def scores_text(e: Emit, rows: Sequence[object], key: int) -> str:
    """Text of (runs, global sizes) of the rank's part of the scores; operand `key` has the columns."""
    q, k, _ = checked_types(e.call)
    runs = (*rows, e.operand_runs(key)[-2])
    return f"({runs}, {[*q.shape[:-1], k.shape[-2]]})"


def operands_text(e: Emit) -> list[str]:
    """Texts of the tensors that the forward pass takes, "None" for each that is not given."""
    return [*(str(e.operand(name)) for name in ("query", "key", "value")), *added_text(e)]


def added_text(e: Emit) -> list[str]:
    """Texts of the bias and the mask, "None" for each that is not given."""
    return [str(e.operand(name)) for name in ("bias", "mask")]


def options_text(e: Emit) -> list[str]:
    """Texts of dropout_p and is_causal."""
    return [str(None) if e.call[name] is None else e.scalar(name) for name in ("dropout_p", "is_causal")]


def scale_text(e: Emit) -> str:
    """Text of the scale; "None" for the kernel's default."""
    return str(None) if e.call["scale"] is None else e.scalar("scale")


def score_flops(call: Call, products: int) -> float:
    """Operations of this many matrix products of the scores' size."""
    q, k, v = checked_types(call)
    return 2.0 * products * math.prod(q.shape[:-1]) * k.shape[-2] * v.shape[-1]


def with_operands(call: Call, operands: Sequence[TensorRef]) -> list[object]:
    """The arguments of a call with these tensors."""
    given = iter(operands)
    return [next(given) if isinstance(arg, TensorRef) else arg for arg in call.args]


def qkv_types(q: tuple[int, ...], kv: tuple[int, ...]) -> tuple[TensorType, ...]:
    """Types of float operands of these shapes: q, and then k and v."""
    return (TensorType(q, DataType.Float), TensorType(kv, DataType.Float), TensorType(kv, DataType.Float))


def drops(call: Call) -> bool:
    """`draws` of attention: whether it may have dropout."""
    return call["dropout_p"] not in (None, 0)
