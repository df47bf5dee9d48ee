"""Ops that work element by element: unary, binary and ternary, on tensors and scalars."""

from __future__ import annotations

import functools
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Any

from ..dtypes import DataType, promote, scalar_dtype
from ..errors import user_error
from .base import Call, Emit, OpDef, Param, ParamKind, Partial, Rule, RuleBuilder, Sample, TensorRef, TensorType
from .shapes import broadcast_shapes, pointwise_rule_dims

K = ParamKind
Promotion = Callable[[Sequence[DataType]], DataType]


def widen(dtype: DataType) -> DataType:
    """Arithmetic is done and returned in at least float32, as nvFuser does."""
    return DataType.Float if dtype.is_reduced_float else dtype


def keep(dtypes: Sequence[DataType]) -> DataType:
    """The promoted type: integers stay integers."""
    return widen(_promoted(dtypes))


def floating(dtypes: Sequence[DataType]) -> DataType:
    """The promoted type, but at least float32: for functions of a real number."""
    dtype = _promoted(dtypes)
    return DataType.Float if dtype.category < 2 else widen(dtype)


def predicate(_: Sequence[DataType]) -> DataType:
    return DataType.Bool


def _promoted(dtypes: Sequence[DataType]) -> DataType:
    out = dtypes[0]
    for dtype in dtypes[1:]:
        out = promote(out, dtype)
    return out


def operand_dtypes(call: Call) -> list[DataType]:
    """The types that take part in promotion. A scalar counts only where its category is above the tensors'."""
    tensors = [t.dtype for t in call.types[isinstance(call.args[0], TensorRef) and call.op.name == "where":]]
    top = max((d.category for d in tensors), default=-1)
    return tensors + [d for d in _scalar_dtypes(call) if d.category > top]


def _scalar_dtypes(call: Call) -> list[DataType]:
    kinds = (K.TENSOR_OR_SCALAR, K.SCALAR, K.OPTIONAL_SCALAR)
    values = [arg for param, arg in zip(call.op.params, call.args, strict=True) if param.kind in kinds]
    return [_default(scalar_dtype(v)) for v in values if v is not None and not isinstance(v, TensorRef)]


def _default(dtype: DataType) -> DataType:
    """A Python number beside a tensor is of the default precision of its category."""
    return {DataType.Double: DataType.Float, DataType.ComplexDouble: DataType.ComplexFloat}.get(dtype, dtype)


@dataclass(frozen=True, slots=True)
class _Infer:
    promotion: Promotion
    real_result: bool = False

    def __call__(self, call: Call) -> tuple[TensorType, ...]:
        if not call.types:
            raise user_error(f"{call.op.name}: no tensor operand", "scalars only", "at least one tensor", "Pass a tensor.")
        shape = broadcast_shapes(call.op.name, [t.shape for t in call.types])
        dtype = self.promotion(operand_dtypes(call))
        return (TensorType(shape, dtype.real if self.real_result else dtype),)


def pointwise_rule(call: Call) -> Rule:
    """Every result dim is one pass-through factor of all operands that have it."""
    builder = RuleBuilder()
    operands, result = pointwise_rule_dims(builder, call.results[0].shape, [t.shape for t in call.types])
    return builder.build(operands, [result])


def torch_dtype(dtype: DataType) -> str:
    """Python text of the torch dtype."""
    return f"torch.{dtype.value}"


def cast_text(name: str, found: DataType, wanted: DataType) -> str:
    """Python text of a tensor in another type; the name itself where it has that type."""
    return name if found is wanted else f"{name}.to({torch_dtype(wanted)})"


@dataclass(frozen=True, slots=True)
class _Emit:
    """Fills a template of torch code with the operands, cast to the type that the op computes in."""

    template: str
    compute: Promotion

    def __call__(self, e: Emit) -> str:
        wanted = self.compute(operand_dtypes(e.call))
        texts = {param.name: _operand_text(e, param.name, wanted) for param in e.call.op.params}
        text, result = self.template.format(**texts), e.call.results[0].dtype
        return text if result in (wanted, wanted.real, DataType.Bool) else cast_text(f"({text})", wanted, result)


def _operand_text(e: Emit, name: str, wanted: DataType) -> str:
    tensor, found = e.operand(name), e.call.type_of(name)
    if tensor is None or found is None:
        return e.scalar(name)
    return tensor if name == "condition" else cast_text(tensor, found.dtype, wanted)


def widened(dtypes: Sequence[DataType]) -> DataType:
    """The type that operands of a predicate are compared in."""
    return widen(_promoted(dtypes))


def _samples(table: Sequence[Param], numbers: Sequence[Any], dtype: DataType) -> Sequence[Sample]:
    full, thin = TensorType((6, 8), dtype), TensorType((1, 8), dtype)
    tensors = sum(param.kind is K.TENSOR_OR_SCALAR for param in table)
    rows = [(full,) * tensors, (full, *(thin,) * (tensors - 1))] if tensors > 1 else [(full,)]
    return [Sample((*row, *numbers)) for row in rows]


def _op(
    name: str, params: str, template: str, promotion: Promotion = keep, *, compute: Promotion | None = None,
    partial: Partial = Partial.NONE, dtype: DataType = DataType.Float, numbers: Sequence[Any] = (), real: bool = False,
) -> OpDef:  # fmt: skip
    """A pointwise op; its last parameters, one for each of the example `numbers`, take no tensor."""
    compute = compute or (widened if promotion is predicate else promotion)
    names = params.split()
    tensors = len(names) - len(numbers)
    table = tuple(Param(p, K.TENSOR_OR_SCALAR if i < tensors else K.SCALAR) for i, p in enumerate(names))
    return OpDef(
        name, table, _Infer(promotion, real), pointwise_rule, _Emit(template, compute), partial,
        samples=functools.partial(_samples, table, numbers, dtype),
    )  # fmt: skip


def _unary(name: str, template: str = "", promotion: Promotion = floating, **options: Any) -> OpDef:
    return _op(name, "x", template or f"torch.{name}({{x}})", promotion, **options)


def _binary(name: str, template: str, promotion: Promotion = keep, **options: Any) -> OpDef:
    return _op(name, "a b", template, promotion, **options)


_COMPLEX, _INT, _BOOL = DataType.ComplexFloat, DataType.Int, DataType.Bool
_FLOATING = (
    "acos acosh asin asinh atan atanh cos cosh erf erfc erfinv exp exp2 expm1 lgamma log log10 log1p log2 rsqrt "
    "sigmoid sin sinh sqrt tan tanh"
)
UNARY = (
    *(_unary(name) for name in _FLOATING.split()),
    _unary("erfcinv", "torch.special.erfinv(1.0 - {x})"),
    _unary("reciprocal", "torch.reciprocal({x})"),
    _unary("silu", "F.silu({x})"),
    _unary("abs", promotion=keep, real=True),
    *(_unary(name, promotion=keep) for name in ("ceil", "floor", "frac", "round", "sign", "trunc", "relu")),
    _unary("neg", promotion=keep, partial=Partial.JOINT),
    _unary("bitwise_not", promotion=keep, dtype=_INT),
    _unary("logical_not", promotion=predicate),
    *(_unary(name, promotion=predicate) for name in "isfinite isinf isnan isneginf isposinf isreal signbit".split()),
    _unary("real", "K.real({x})", keep, dtype=_COMPLEX, real=True, partial=Partial.JOINT),
    _unary("imag", "K.imag({x})", keep, dtype=_COMPLEX, real=True, partial=Partial.JOINT),
)
BINARY = (
    _binary("add", "({a} + {b})", partial=Partial.JOINT),
    _binary("sub", "({a} - {b})", partial=Partial.JOINT),
    _binary("mul", "({a} * {b})", partial=Partial.EACH),
    _binary("div", "K.div({a}, {b})", partial=Partial.FIRST),
    _binary("truediv", "({a} / {b})", floating, partial=Partial.FIRST),
    *(_binary(name, f"K.{name}({{a}}, {{b}})") for name in ("maximum", "minimum", "pow", "remainder", "fmod")),
    _binary("mod", "K.mod({a}, {b})", dtype=_INT),
    _binary("gcd", "K.gcd({a}, {b})", dtype=_INT),
    *(_binary(name, f"K.{name}({{a}}, {{b}})", floating) for name in ("atan2", "nextafter")),
    *(_binary(f"bitwise_{name}", f"({{a}} {sign} {{b}})", dtype=_INT) for name, sign in
      (("and", "&"), ("or", "|"), ("xor", "^"))),
    *(_binary(f"bitwise_{name}_shift", f"K.shift_{name}({{a}}, {{b}})", dtype=_INT) for name in ("left", "right")),
    _binary("logical_right_shift", "K.logical_right_shift({a}, {b})", dtype=_INT),
    *(_binary(f"logical_{name}", f"K.logical_{name}({{a}}, {{b}})", predicate) for name in ("and", "or")),
    *(_binary(name, f"({{a}} {sign} {{b}})", predicate) for name, sign in
      (("eq", "=="), ("ne", "!="), ("lt", "<"), ("le", "<="), ("gt", ">"), ("ge", ">="))),
    _binary("complex", "torch.complex({a}, {b})", compute=keep, promotion=lambda d: (
        DataType.ComplexDouble if _promoted(d) is DataType.Double else DataType.ComplexFloat)),
)  # fmt: skip
TERNARY = (
    _op("where", "condition a b", "K.where({condition}, {a}, {b})"),
    _op("addcmul", "a b c value", "({a} + {value} * ({b} * {c}))", numbers=(0.5,)),
    _op("clamp", "x min max", "torch.clamp({x}, {min}, {max})", numbers=(-0.5, 0.5)),
    _op("lerp", "start end weight", "K.lerp({start}, {end}, {weight})"),
    _op("threshold", "x threshold value", "F.threshold({x}, {threshold}, {value})", numbers=(0.1, 2.0)),
)


def _cast_infer(call: Call) -> tuple[TensorType, ...]:
    return (TensorType(call.types[0].shape, call["dtype"]),)


def _cast_emit(e: Emit) -> str:
    return cast_text(e.operands[0], e.call.types[0].dtype, e.call["dtype"])


def _same_infer(call: Call) -> tuple[TensorType, ...]:
    return call.types


_ARG = Param("arg", K.TENSOR)
_EXAMPLE = TensorType((6, 8), DataType.Float)
MOVES = (
    OpDef("cast", (_ARG, Param("dtype", K.DTYPE)), _cast_infer, pointwise_rule, _cast_emit, Partial.CAST,
          samples=lambda: [Sample((_EXAMPLE, DataType.Double)), Sample((_EXAMPLE, DataType.Int))]),
    *(OpDef(name, (_ARG,), _same_infer, pointwise_rule, lambda e: e.operands[0], Partial.MOVE,
            samples=lambda: [Sample((_EXAMPLE,))]) for name in ("set", "segment_set")),
)  # fmt: skip
OPS = (*UNARY, *BINARY, *TERNARY, *MOVES)
