"""Comparisons, tests, logic and bits, element by element."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import torch

from ..dtypes import Category, DataType
from ..kernels.table import kernel
from .opdef import NvfuserEmit, OpDef, Partial
from .pointwise import binary, both_tensors, nvfuser_integral, pointwise, unary
from .promotion import predicate, promoted
from .vjp import Backward, Tensor, elementwise


@kernel
def logical_and(a: Any, b: Any) -> torch.Tensor:
    return torch.logical_and(*both_tensors(a, b))


@kernel
def logical_or(a: Any, b: Any) -> torch.Tensor:
    return torch.logical_or(*both_tensors(a, b))


def _logical_nvfuser(n: NvfuserEmit) -> Any:
    """Complex numbers are compared with 0 first: nvFuser takes none."""
    names = [p.name for p in n.call.op.params]
    return n.plain(**{name: bool(n.call[name]) for name in names if isinstance(n.call[name], complex)})


@kernel
def shift_left(a: Any, b: Any) -> torch.Tensor:
    return torch.bitwise_left_shift(*both_tensors(a, b))


@kernel
def shift_right(a: Any, b: Any) -> torch.Tensor:
    """Shift right keeping the sign."""
    return torch.bitwise_right_shift(*both_tensors(a, b))


@kernel
def logical_right_shift(a: Any, b: Any) -> torch.Tensor:
    """Shift right filling with zeros, whatever the sign."""
    a, b = both_tensors(a, b)
    bits = a.element_size() * 8
    mask = torch.where(b > 0, (1 << (bits - b.clamp(min=1))) - 1, -1).to(a.dtype)
    return torch.bitwise_and(torch.bitwise_right_shift(a, b), mask)


@kernel
def where(condition: Any, a: Any, b: Any) -> torch.Tensor:
    """`torch.where` that takes numbers everywhere; a condition of another type means "is not zero"."""
    condition = condition if isinstance(condition, torch.Tensor) else torch.tensor(condition, device="cpu")
    return torch.where(condition if condition.dtype == torch.bool else condition != 0, a, b)


def _where_bwd(kept: bool) -> Callable[[Backward], Tensor]:
    def grad(b: Backward) -> Tensor:
        return b.ops.where(b["condition"], *((b.grad, 0.0) if kept else (0.0, b.grad)))

    return grad


_INT, _BITS = DataType.Int, (Category.BOOL, Category.INTEGER)


def _test(name: str, about: str) -> OpDef:
    """A test of one number."""
    return unary(name, about, promotion=predicate)


def _comparison(name: str, sign: str, about: str) -> OpDef:
    return binary(name, about, f"({{a}} {sign} {{b}})", predicate)


def _shift(name: str, kernel: str, about: str) -> OpDef:
    """A shift of integers."""
    return binary(name, about, f"K.{kernel}({{a}}, {{b}})", dtype=_INT, accepts=(Category.INTEGER,),
                  nvfuser=nvfuser_integral)  # fmt: skip


OPS = (
    _test("isfinite", "whether x is neither infinite nor NaN"),
    _test("isinf", "whether x is infinite"),
    _test("isnan", "whether x is NaN"),
    _test("isneginf", "whether x is minus infinity"),
    _test("isposinf", "whether x is plus infinity"),
    _test("isreal", "whether x has no imaginary part"),
    _test("signbit", "whether x's sign is negative, -0.0 included"),
    _comparison("eq", "==", "whether a equals b"),
    _comparison("ne", "!=", "whether a differs from b"),
    _comparison("lt", "<", "`a < b`"),
    _comparison("le", "<=", "`a <= b`"),
    _comparison("gt", ">", "`a > b`"),
    _comparison("ge", ">=", "`a >= b`"),
    _test("logical_not", "whether x is 0"),
    binary("logical_and", "whether neither is 0", "K.logical_and({a}, {b})", predicate, nvfuser=_logical_nvfuser),
    binary("logical_or", "whether one is not 0", "K.logical_or({a}, {b})", predicate, nvfuser=_logical_nvfuser),
    unary("bitwise_not", "`~x`", promotion=promoted, dtype=_INT, accepts=_BITS, jumps=True),
    binary("bitwise_and", "`a & b`", "({a} & {b})", dtype=_INT, accepts=_BITS),
    binary("bitwise_or", "a or b, bit by bit; Python's bar as well", "({a} | {b})", dtype=_INT, accepts=_BITS),
    binary("bitwise_xor", "`a ^ b`", "({a} ^ {b})", dtype=_INT, accepts=_BITS),
    _shift("bitwise_left_shift", "shift_left", "`a << b`"),
    _shift("bitwise_right_shift", "shift_right", "`a >> b`: the sign is kept"),
    _shift("logical_right_shift", "logical_right_shift", "the bits of a moved right by b, zeros moved in"),
    pointwise("where", "condition a b", "K.where({condition}, {a}, {b})", promoted,
              "a where the condition holds, b elsewhere", partial=Partial.PICKED,
              vjp=elementwise(a=_where_bwd(True), b=_where_bwd(False))),
)  # fmt: skip
