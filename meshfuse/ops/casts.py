"""Casts, copies, complex numbers and their parts."""

from __future__ import annotations

from typing import Any

import torch

from ..dtypes import Category, DataType
from ..kernels.table import kernel
from .nvfuser_lowering import cast, repeated_to
from .opdef import Call, Emit, NvfuserEmit, OpDef, Partial, Sample
from .pointwise import binary, both_tensors, pointwise_rule, unary
from .promotion import cast_text, complex_dtype, keep, promoted
from .values import Param, ParamKind, TensorType
from .vjp import Backward, Tensor, each, elementwise

K = ParamKind


def _cast_infer(call: Call) -> tuple[TensorType, ...]:
    return (TensorType(call.types[0].shape, call["dtype"]),)


def _cast_emit(e: Emit) -> str:
    return cast_text(e.operands[0], e.call.types[0].dtype, e.call["dtype"])


_ARG = Param("arg", K.TENSOR)
_EXAMPLE = TensorType((6, 8), DataType.Float)


def _copy(name: str, about: str, is_cheap: bool) -> OpDef:
    return OpDef(
        name, (_ARG,), lambda call: call.types, pointwise_rule, lambda e: e.operands[0], Partial.MOVE,
        samples=lambda: [Sample((_EXAMPLE,))], vjp=each(arg=lambda b: b.grad), concat_distributive=True, is_view=True,
        keeps_elements=True, is_cheap=is_cheap, about=about,
    )  # fmt: skip


COPIES = (
    OpDef("cast", (_ARG, Param("dtype", K.DTYPE)), _cast_infer, pointwise_rule, _cast_emit, Partial.CAST,
          samples=lambda: [Sample((_EXAMPLE, DataType.Double)), Sample((_EXAMPLE, DataType.Int))],
          vjp=each(arg=lambda b: b.grad), concat_distributive=True, about="x in another element type"),
    _copy("set", "x itself: a place for an annotation of its own", is_cheap=True),
    _copy("segment_set", "x itself; nvFuser begins another kernel after it", is_cheap=False),
)  # fmt: skip

# complex numbers --------------------------------------------------------------------------------------------------


@kernel
def complex(a: Any, b: Any) -> torch.Tensor:
    """A complex tensor from a real and an imaginary part."""
    return torch.complex(*torch.broadcast_tensors(*both_tensors(a, b)))


def _complex_nvfuser(n: NvfuserEmit) -> Any:
    """Casts and broadcasts both parts first: nvFuser does neither."""
    part = n.call.results[0].dtype.real
    return n.plain(**{name: _part(n, name, part) for name in ("a", "b")})


def _part(n: NvfuserEmit, name: str, part: DataType) -> Any:
    found, tensor, shape = n.call.type_of(name), n.operand(name), list(n.result_shapes[0])
    if found is None:
        return n.ops.full(shape, n.number(name), n.dtype(part))
    made = cast(n, tensor, found.dtype, part)
    return made if found.shape == n.call.results[0].shape else repeated_to(n.ops, n.dtype(DataType.Bool), made, shape)


@kernel
def real(x: torch.Tensor) -> torch.Tensor:
    """A copy of the real part; a real tensor itself."""
    return torch.real(x).contiguous() if x.is_complex() else x


def _real_bwd(b: Backward) -> Tensor:
    if b["x"].dtype.category < Category.COMPLEX:
        return b.grad
    return b.ops.complex(b.grad, b.ops.mul(b.grad, 0.0))


@kernel
def imag(x: torch.Tensor) -> torch.Tensor:
    """A copy of the imaginary part; zeros for a real tensor."""
    return torch.imag(x).contiguous() if x.is_complex() else torch.zeros_like(x)


def _imag_bwd(b: Backward) -> Tensor:
    return b.ops.complex(b.ops.mul(b.grad, 0.0), b.grad)


_COMPLEX = DataType.ComplexFloat
OPS = (
    *COPIES,
    binary("complex", "a + b i", "K.complex({a}, {b})", complex_dtype, dtype=DataType.Double, compute=keep,
           accepts=(Category.FLOAT,), nvfuser=_complex_nvfuser,
           vjp=elementwise(a=lambda b: b.ops.real(b.grad), b=lambda b: b.ops.imag(b.grad))),
    unary("real", "real part", "K.real({x})", promoted, dtype=_COMPLEX, real=True, partial=Partial.JOINT,
          vjp=each(x=_real_bwd)),
    unary("imag", "imaginary part", "K.imag({x})", promoted, dtype=_COMPLEX, real=True, partial=Partial.JOINT,
          accepts=(Category.COMPLEX,), vjp=each(x=_imag_bwd)),
)  # fmt: skip
