"""Lowerings to nvFuser of pointwise ops, for the operands that its functions refuse or type otherwise."""

from __future__ import annotations

from typing import Any

from ..dtypes import Category, DataType, scalar_dtype
from .nvfuser_lowering import cast, repeated_to
from .opdef import NvfuserEmit
from .values import ParamKind, ScalarRef, TensorRef


def _tensors(n: NvfuserEmit) -> list[str]:
    """The names of the parameters for which tensors were passed."""
    return [p.name for p in n.call.op.params if isinstance(n.call[p.name], TensorRef)]


def _recast(n: NvfuserEmit, found: tuple[DataType, ...], wanted: DataType) -> dict[str, Any]:
    """The tensor operands of the types in `found`, cast to `wanted`; by parameter."""
    kinds = {name: kind for name in _tensors(n) if (kind := n.call.type_of(name)) is not None}
    return {name: cast(n, n.operand(name), kind.dtype, wanted) for name, kind in kinds.items() if kind.dtype in found}


def _meets_complex(n: NvfuserEmit) -> bool:
    numbers = [n.call[p.name] for p in n.call.op.params if p.kind is ParamKind.TENSOR_OR_SCALAR]
    found = [_number_type(v) for v in numbers if not isinstance(v, TensorRef)]
    return any(d.category is Category.COMPLEX for d in (*found, *(t.dtype for t in n.call.types)))


def _number_type(value: Any) -> DataType:
    return value.dtype or DataType.Double if isinstance(value, ScalarRef) else scalar_dtype(value)


def arithmetic(n: NvfuserEmit) -> Any:
    """Half and BFloat16 become Float beside complex operands: nvFuser has no complex type of half precision."""
    halves = (DataType.Half, DataType.BFloat16)
    return n.plain(**_recast(n, halves, DataType.Float)) if _meets_complex(n) else n.plain()


def integral(n: NvfuserEmit) -> Any:
    """A 0-d Bool becomes an integer beside integers, as nvFuser's shifts and gcd require."""
    return n.plain(**_recast(n, (DataType.Bool,), DataType.Int))


def logical(n: NvfuserEmit) -> Any:
    """Complex numbers become Bool by comparison with 0, which nvFuser does not do for them."""
    names = [p.name for p in n.call.op.params]
    return n.plain(**{name: bool(n.call[name]) for name in names if isinstance(n.call[name], complex)})


def lerp(n: NvfuserEmit) -> Any:
    """Tensors are made of numbers, with which nvFuser would compute first, and in their type."""
    return n.ops.cast(arithmetic(n), n.dtype(n.call.results[0].dtype))


def complex_of(n: NvfuserEmit) -> Any:
    """Both parts are made of one type and shape: nvFuser neither promotes nor broadcasts them."""
    part = n.call.results[0].dtype.real
    return n.plain(**{name: _part(n, name, part) for name in ("a", "b")})


def _part(n: NvfuserEmit, name: str, part: DataType) -> Any:
    found, tensor, shape = n.call.type_of(name), n.operand(name), list(n.result_shapes[0])
    if found is None:
        return n.ops.full(shape, n.number(name), n.dtype(part))
    made = cast(n, tensor, found.dtype, part)
    return made if found.shape == n.call.results[0].shape else repeated_to(n.ops, n.dtype(DataType.Bool), made, shape)
