"""Elementwise ops: type rule, factor rule, lowerings and samples that all of them share.

The ops are in `functions`, `arithmetic`, `logic` and `casts`.
"""

from __future__ import annotations

import functools
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Any

import torch

from ..dtypes import Category, DataType, scalar_dtype
from ..errors import DtypeError, user_error
from ..kernels.tensors import tensor_like
from .nvfuser_lowering import cast
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
    typed_operands,
)
from .rules import Rule, RuleBuilder
from .shape_arithmetic import broadcast_shapes, pointwise_rule_dims
from .values import Param, ParamKind, ScalarRef, TensorRef, TensorType
from .vjp import Vjp

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
    """One pass-through factor per result dim, shared by all operands that have the dim."""
    builder = RuleBuilder()
    operands, result = pointwise_rule_dims(builder, call.results[0].shape, [t.shape for t in call.types])
    return builder.build(operands, [result])


@dataclass(frozen=True, slots=True)
class _TemplateEmit:
    """Fills a template of torch code with the operands, each cast to the computation type."""

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
    """Whether a number that promotion ignores would raise torch's result type above `wanted`."""
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
    """Samples: operands of one shape, a broadcast operand, a number, half precision."""
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


# nvFuser ----------------------------------------------------------------------------------------------------------


def nvfuser_arithmetic(n: NvfuserEmit) -> Any:
    """Half and BFloat16 become Float beside complex operands: nvFuser has no complex type of half precision."""
    halves = (DataType.Half, DataType.BFloat16)
    return n.plain(**_recast(n, halves, DataType.Float)) if _meets_complex(n) else n.plain()


def nvfuser_integral(n: NvfuserEmit) -> Any:
    """A 0-d Bool becomes an integer beside integers, as nvFuser's shifts and gcd require."""
    return n.plain(**_recast(n, (DataType.Bool,), DataType.Int))


def _recast(n: NvfuserEmit, found: tuple[DataType, ...], wanted: DataType) -> dict[str, Any]:
    """The tensor operands of the types in `found`, cast to `wanted`; by parameter."""
    names = [p.name for p in n.call.op.params if isinstance(n.call[p.name], TensorRef)]
    types = {name: t for name in names if (t := n.call.type_of(name)) is not None}
    return {name: cast(n, n.operand(name), t.dtype, wanted) for name, t in types.items() if t.dtype in found}


def _meets_complex(n: NvfuserEmit) -> bool:
    numbers = [n.call[p.name] for p in n.call.op.params if p.kind is K.TENSOR_OR_SCALAR]
    found = [_number_type(v) for v in numbers if not isinstance(v, TensorRef)]
    return any(d.category is Category.COMPLEX for d in (*found, *(t.dtype for t in n.call.types)))


def _number_type(value: Any) -> DataType:
    return value.dtype or DataType.Double if isinstance(value, ScalarRef) else scalar_dtype(value)


# the ops ----------------------------------------------------------------------------------------------------------


def both_tensors(a: Any, b: Any) -> tuple[torch.Tensor, torch.Tensor]:
    """The operands of a kernel as tensors: a number may be passed for one of them."""
    return tensor_like(a, b), tensor_like(b, a)


def pointwise(
    name: str,
    params: str,
    template: str,
    promotion: Promotion,
    about: str,
    *,
    compute: Promotion | None = None,
    partial: Partial = Partial.NONE,
    dtype: DataType = DataType.Float,
    numbers: Sequence[Any] = (),
    real: bool = False,
    accepts: tuple[Category, ...] = tuple(Category),
    nvfuser: Callable[[NvfuserEmit], Any] = nvfuser_arithmetic,
    vjp: Vjp | None = None,
    domain: tuple[float, float] | None = None,
    jumps: bool = False,
) -> OpDef:
    """A pointwise op. Its last parameters, one for each of `numbers` (their values in samples), take no tensor.

    template: torch code with the parameters' names in braces. promotion: the result's type by the operands'.
    compute: the type that operands are cast to; `promotion` unless given. dtype: the operands' type in samples.
    real: the result of complex operands is real. accepts: categories of operands' types.
    """
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
        concat_distributive=True,
        vjp=vjp,
        domain=domain,
        jumps=jumps or promotion is predicate,
        about=about,
    )


def unary(name: str, about: str, template: str = "", promotion: Promotion = floating, **options: Any) -> OpDef:
    """A pointwise op on x; by default torch's function of that name."""
    return pointwise(name, "x", template or f"torch.{name}({{x}})", promotion, about, **options)


def binary(name: str, about: str, template: str, promotion: Promotion = keep, **options: Any) -> OpDef:
    """A pointwise op on a and b."""
    return pointwise(name, "a b", template, promotion, about, **options)
