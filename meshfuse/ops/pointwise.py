"""Ops that work element by element: unary, binary and ternary, on tensors and scalars."""

from __future__ import annotations

import functools
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Any

from ..dtypes import Category, DataType
from ..errors import DtypeError, user_error
from ..gradients.pointwise import POINTWISE
from . import nvfuser_pointwise
from .docstrings import MEANINGS
from .opdef import Call, Emit, NvfuserEmit, OpDef, Partial, Sample
from .promotion import (
    Promotion,
    cast_text,
    complex_dtype,
    dtype_text,
    floating,
    keep,
    operand_dtypes,
    predicate,
    promoted,
    scalar_type,
    single_or_double,
    typed_operands,
)
from .rules import Rule, RuleBuilder
from .shape_arithmetic import broadcast_shapes, pointwise_rule_dims
from .values import Param, ParamKind, TensorType

K = ParamKind


@dataclass(frozen=True, slots=True)
class _Infer:
    promotion: Promotion
    real_result: bool = False
    accepts: tuple[Category, ...] = tuple(Category)

    def __call__(self, call: Call) -> tuple[TensorType, ...]:
        if not call.types:
            raise user_error(
                f"{call.op.name}: no tensor operand", "scalars only", "at least one tensor", "Pass a tensor."
            )
        shape = broadcast_shapes(call.op.name, [t.shape for t in call.types])
        found = operand_dtypes(call)
        self._check(call, found)
        promoted(found)  # Comparisons return Bool, but compare in a type that holds both operands' types.
        dtype = self.promotion(found)
        return (TensorType(shape, dtype.real if self.real_result else dtype),)

    def _check(self, call: Call, found: Sequence[DataType]) -> None:
        condition = call.type_of("condition") if "condition" in call.op.places else None
        if condition is not None and condition.dtype is not DataType.Bool:
            raise user_error(
                "where: condition",
                str(condition),
                "a Bool tensor",
                "Compare it: fd.ops.ne(condition, 0).",
                cls=DtypeError,
            )
        wrong = [d for d in found if d.category not in self.accepts]
        if wrong:
            kinds = " or ".join(("Bool", "integer", "floating point", "complex")[c] for c in self.accepts)
            raise user_error(f"{call.op.name}: operand type", wrong[0].name, f"{kinds} operands", "Cast the operand.",
                             cls=DtypeError)  # fmt: skip


def pointwise_rule(call: Call) -> Rule:
    """Every result dim is one pass-through factor, shared by all operands that have the dim."""
    builder = RuleBuilder()
    operands, result = pointwise_rule_dims(builder, call.results[0].shape, [t.shape for t in call.types])
    return builder.build(operands, [result])


@dataclass(frozen=True, slots=True)
class _TemplateEmit:
    """Fills a template of torch code with the operands, each cast to the type that the op computes in."""

    template: str
    compute: Promotion
    changes_type: bool = False

    def __call__(self, e: Emit) -> str:
        wanted = self.compute(operand_dtypes(e.call))
        texts = {param.name: _operand_text(e, param.name, wanted) for param in e.call.op.params}
        text, result = self.template.format(**texts), e.call.results[0].dtype
        if _raised(e.call, wanted):
            return f"({text}).to({dtype_text(result)})"
        return text if self.changes_type or result is wanted else cast_text(f"({text})", wanted, result)


def _raised(call: Call, wanted: DataType) -> bool:
    """Whether a number that does not count in promotion would raise torch's result type above `wanted`."""
    numbers = [
        arg for param, arg in zip(call.op.params, call.args, strict=True) if param.kind in (K.SCALAR, K.OPTIONAL_SCALAR)
    ]
    return any(scalar_type(n).category > wanted.category for n in numbers if n is not None)


def _operand_text(e: Emit, name: str, wanted: DataType) -> str:
    tensor, found = e.operand(name), e.call.type_of(name)
    if tensor is None or found is None:
        typed = name in typed_operands(e.call.op) and not any(e.call.type_of(n) for n in typed_operands(e.call.op))
        number = e.scalar(name)
        return f"torch.tensor({number}, dtype={dtype_text(wanted)}, device='cpu')" if typed else number
    return tensor if name == "condition" else cast_text(tensor, found.dtype, wanted)


def _samples(table: Sequence[Param], numbers: Sequence[Any], dtype: DataType) -> Sequence[Sample]:
    """Samples with all operands alike, one of them broadcast, one a number, and in half precision."""
    full, thin, flags = (
        TensorType(shape, d) for shape, d in (((6, 8), dtype), ((1, 8), dtype), ((6, 8), DataType.Bool))
    )
    names = [param.name for param in table if param.kind is K.TENSOR_OR_SCALAR]
    rows: list[list[Any]] = [[full] * len(names)]
    if len(names) > 1:
        rows += [[full, *[thin] * (len(names) - 1)], [*rows[0][:-1], 2 if dtype.category < Category.FLOAT else 2.5]]
    if dtype is DataType.Float:
        rows.append([TensorType((6, 8), DataType.Half)] * len(names))
    if names[0] == "condition":
        rows += [[full, 0.1, 2], [full, 3, 5]]
    found = [[flags if name == "condition" else t for name, t in zip(names, row, strict=True)] for row in rows]
    return [Sample((*row, *numbers)) for row in found]


# Open intervals that operands are drawn from in tests, where not all numbers will do.
_DOMAINS: dict[str, tuple[float, float]] = {
    "acosh": (1.1, 4.0),
    "erfcinv": (0.1, 1.9),
    "lgamma": (0.1, 5.0),
    **dict.fromkeys(("pow", "reciprocal"), (0.2, 3.0)),
    **dict.fromkeys(("acos", "asin", "atanh", "erfinv"), (-0.9, 0.9)),
    **dict.fromkeys(
        ("log", "log10", "log1p", "log2", "sqrt", "rsqrt", "div", "truediv", "mod", "fmod", "remainder"), (0.2, 4.0)
    ),
}


def _op(
    name: str,
    params: str,
    template: str,
    promotion: Promotion = keep,
    *,
    compute: Promotion | None = None,
    partial: Partial = Partial.NONE,
    dtype: DataType = DataType.Float,
    numbers: Sequence[Any] = (),
    real: bool = False,
    accepts: tuple[Category, ...] = tuple(Category),
    nvfuser: Callable[[NvfuserEmit], Any] = nvfuser_pointwise.arithmetic,
) -> OpDef:
    """A pointwise op. Its last parameters, one for each of `numbers` (their values in samples), take no tensor."""
    compute = compute or (keep if promotion is predicate else promotion)
    names = params.split()
    tensors = len(names) - len(numbers)
    table = tuple(Param(p, K.TENSOR_OR_SCALAR if i < tensors else K.OPTIONAL_SCALAR) for i, p in enumerate(names))
    return OpDef(
        name,
        table,
        _Infer(promotion, real, accepts),
        pointwise_rule,
        _TemplateEmit(template, compute, changes_type=promotion in (predicate, complex_dtype) or real),
        partial,
        samples=functools.partial(_samples, table, numbers, dtype),
        nvfuser=nvfuser,
        pieced=True,
        vjp=POINTWISE.get(name),
        domain=_DOMAINS.get(name),
        about=MEANINGS[name],
    )


def _unary(name: str, template: str = "", promotion: Promotion = floating, **options: Any) -> OpDef:
    return _op(name, "x", template or f"torch.{name}({{x}})", promotion, **options)


def _binary(name: str, template: str, promotion: Promotion = keep, **options: Any) -> OpDef:
    return _op(name, "a b", template, promotion, **options)


_COMPLEX, _INT = DataType.ComplexFloat, DataType.Int
_INTEGERS, _BITS = (Category.INTEGER,), (Category.BOOL, Category.INTEGER)
_FLOATING = (
    "acos acosh asin asinh atan atanh cos cosh erf erfc erfinv exp exp2 expm1 lgamma log log10 log1p log2 "
    "reciprocal rsqrt sigmoid sin sinh sqrt tan tanh"
)
UNARY = (
    *(_unary(name) for name in _FLOATING.split()),
    _unary("erfcinv", "torch.special.erfinv(1.0 - {x})"),
    _unary("silu", "F.silu({x})", promoted, compute=floating),
    _unary("abs", promotion=promoted, real=True),
    *(_unary(name, promotion=promoted) for name in ("ceil", "floor", "round", "sign", "trunc", "relu")),
    _unary("frac", "({x} - torch.trunc({x}))", promoted),
    _unary("neg", promotion=keep, partial=Partial.JOINT),
    _unary("bitwise_not", promotion=promoted, dtype=_INT, accepts=_BITS),
    _unary("logical_not", promotion=predicate),
    *(
        _unary(name, promotion=predicate)
        for name in ["isfinite", "isinf", "isnan", "isneginf", "isposinf", "isreal", "signbit"]
    ),
    _unary("real", "K.real({x})", promoted, dtype=_COMPLEX, real=True, partial=Partial.JOINT),
    _unary(
        "imag", "K.imag({x})", promoted, dtype=_COMPLEX, real=True, partial=Partial.JOINT, accepts=(Category.COMPLEX,)
    ),
)
BINARY = (
    _binary("add", "({a} + {b})", partial=Partial.JOINT),
    _binary("sub", "({a} - {b})", partial=Partial.JOINT),
    _binary("mul", "({a} * {b})", partial=Partial.EACH),
    _binary("div", "K.div({a}, {b})", partial=Partial.OVER),
    _binary("truediv", "({a} / {b})", floating, partial=Partial.OVER),
    _binary("maximum", "K.maximum({a}, {b})", partial=Partial.MAX),
    _binary("minimum", "K.minimum({a}, {b})", partial=Partial.MIN),
    *(_binary(name, f"K.{name}({{a}}, {{b}})") for name in ("pow", "remainder", "fmod")),
    _binary("mod", "K.mod({a}, {b})", dtype=_INT),
    _binary("gcd", "K.gcd({a}, {b})", dtype=_INT, accepts=_INTEGERS, nvfuser=nvfuser_pointwise.integral),
    _binary("atan2", "K.atan2({a}, {b})", floating),
    _binary("nextafter", "K.nextafter({a}, {b})", single_or_double, dtype=DataType.Double),
    *(
        _binary(f"bitwise_{name}", f"({{a}} {sign} {{b}})", dtype=_INT, accepts=_BITS)
        for name, sign in (("and", "&"), ("or", "|"), ("xor", "^"))
    ),
    *(
        _binary(
            f"bitwise_{name}_shift",
            f"K.shift_{name}({{a}}, {{b}})",
            dtype=_INT,
            accepts=_INTEGERS,
            nvfuser=nvfuser_pointwise.integral,
        )
        for name in ("left", "right")
    ),
    _binary(
        "logical_right_shift",
        "K.logical_right_shift({a}, {b})",
        dtype=_INT,
        accepts=_INTEGERS,
        nvfuser=nvfuser_pointwise.integral,
    ),
    *(
        _binary(f"logical_{name}", f"K.logical_{name}({{a}}, {{b}})", predicate, nvfuser=nvfuser_pointwise.logical)
        for name in ("and", "or")
    ),
    *(
        _binary(name, f"({{a}} {sign} {{b}})", predicate)
        for name, sign in (("eq", "=="), ("ne", "!="), ("lt", "<"), ("le", "<="), ("gt", ">"), ("ge", ">="))
    ),
    _binary(
        "complex",
        "K.complex({a}, {b})",
        complex_dtype,
        dtype=DataType.Double,
        compute=keep,
        accepts=(Category.FLOAT,),
        nvfuser=nvfuser_pointwise.complex_of,
    ),
)
TERNARY = (
    _op("where", "condition a b", "K.where({condition}, {a}, {b})", promoted, partial=Partial.PICKED),
    _op("addcmul", "a b c value", "({a} + {value} * ({b} * {c}))", numbers=(0.5,)),
    _op("clamp", "x min max", "torch.clamp({x}, {min}, {max})", promoted, numbers=(-0.5, 0.5)),
    _op("lerp", "start end weight", "K.lerp({start}, {end}, {weight})", nvfuser=nvfuser_pointwise.lerp),
    _op(
        "threshold",
        "x threshold value",
        "K.where({x} <= {threshold}, {value}, {x})",
        promoted,
        numbers=(0.1, 2.0),
    ),
)


def _cast_infer(call: Call) -> tuple[TensorType, ...]:
    return (TensorType(call.types[0].shape, call["dtype"]),)


def _cast_emit(e: Emit) -> str:
    return cast_text(e.operands[0], e.call.types[0].dtype, e.call["dtype"])


def _same_infer(call: Call) -> tuple[TensorType, ...]:
    return call.types


_ARG = Param("arg", K.TENSOR)
_EXAMPLE = TensorType((6, 8), DataType.Float)
COPIES = (
    OpDef(
        "cast",
        (_ARG, Param("dtype", K.DTYPE)),
        _cast_infer,
        pointwise_rule,
        _cast_emit,
        Partial.CAST,
        samples=lambda: [Sample((_EXAMPLE, DataType.Double)), Sample((_EXAMPLE, DataType.Int))],
        vjp=POINTWISE["cast"],
        pieced=True,
        about=MEANINGS["cast"],
    ),
    *(
        OpDef(
            name,
            (_ARG,),
            _same_infer,
            pointwise_rule,
            lambda e: e.operands[0],
            Partial.MOVE,
            samples=lambda: [Sample((_EXAMPLE,))],
            vjp=POINTWISE[name],
            pieced=True,
            is_view=True,
            about=MEANINGS[name],
        )
        for name in ("set", "segment_set")
    ),
)
OPS = (*UNARY, *BINARY, *TERNARY, *COPIES)
