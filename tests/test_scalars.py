"""Scalars of a definition: long and shared expressions, whole numbers as in C, and what has no value."""

from __future__ import annotations

import math
from collections.abc import Callable
from typing import Any

import pytest
import torch

import meshfuse as mf
from meshfuse import DataType

Make = Callable[[Any, Any], Any]


def times(make: Make, value: Any, dtype: DataType, constant: bool) -> torch.Tensor:
    """Twos times a scalar, which follows from an input of a program or is known before."""
    fd = mf.FusionDefinition()
    x = fd.define_tensor([4], dtype=DataType.Int if dtype is DataType.Int else DataType.Double)
    s = fd.define_scalar(value) if constant else fd.define_scalar(dtype=dtype)
    fd.add_output(fd.ops.mul(x, make(fd, s)))
    twos = torch.full((4,), 2, dtype=torch.int64 if dtype is DataType.Int else torch.float64)
    return fd.simulate([twos] if constant else [twos, value])[0]


def repeated(count: int, step: Make) -> Make:
    def made(fd: Any, s: Any) -> Any:
        for _ in range(count):
            s = step(fd, s)
        return s

    return made


LONG: dict[str, tuple[Make, int, int]] = {
    "a chain": (repeated(3000, lambda fd, s: s + 1), 3, 3003),
    "each read twice": (repeated(60, lambda fd, s: s + s), 1, 2**60),
    "one short of steps": (repeated(24, lambda fd, s: s + 1), 3, 27),
    "the first of steps": (repeated(25, lambda fd, s: s + 1), 3, 28),
    "constants and casts": (
        repeated(40, lambda fd, s: fd.ops.cast(fd.ops.cast(s, DataType.Double) + 0.75, DataType.Int)), 3, 3,
    ),
    "an input read late": (lambda fd, s: s - repeated(40, lambda fd, s: s + 1)(fd, s), 3, -40),
}  # fmt: skip


@pytest.mark.parametrize("constant", [True, False])
@pytest.mark.parametrize("name", LONG)
def test_long_expressions_of_scalars(name: str, constant: bool) -> None:
    """Neither nested text, nor text of a scalar once for each of its readers."""
    make, value, wanted = LONG[name]
    assert times(make, value, DataType.Int, constant).tolist() == [2 * wanted] * 4


@pytest.mark.parametrize("constant", [True, False])
@pytest.mark.parametrize(("a", "b"), [(2**53 + 1, 1), (-(2**60) - 1, 3), (2**61 + 1, -2), (-7, -2), (7, 2)])
def test_whole_numbers_are_divided_as_in_c_to_the_last_digit(a: int, b: int, constant: bool) -> None:
    quotient, rest = (torch.div(torch.tensor(a), b, rounding_mode="trunc"), torch.fmod(torch.tensor(a), b))
    assert times(lambda fd, s: fd.ops.div(s, b), a, DataType.Int, constant)[0] == 2 * int(quotient)
    assert times(lambda fd, s: fd.ops.mod(s, b), a, DataType.Int, constant)[0] == 2 * int(rest)


NO_VALUE: dict[str, tuple[Make, Any, str]] = {
    "a power beyond all types": (lambda fd, s: fd.ops.pow(s, 2**62), 2**62, "an int of more than 64 bits"),
    "powers of powers": (repeated(6, lambda fd, s: fd.ops.pow(s, 60)), 2, "an int of more than 64 bits"),
    "a shift beyond all types": (lambda fd, s: fd.ops.bitwise_left_shift(s, 2**62), 1, "more than 64 bits"),
    "squares of squares": (repeated(60, lambda fd, s: s * s), 3, "an int of more than 64 bits"),
    "bits of a float": (lambda fd, s: fd.ops.bitwise_and(s, 2), 1.5, "unsupported operand"),
    "an order of complex numbers": (lambda fd, s: fd.ops.where(s < 2, 1, 2), 1j, "not supported"),
    "a common divisor of floats": (lambda fd, s: fd.ops.gcd(s, 2), 1.5, "interpreted as an integer"),
    "a division by zero": (lambda fd, s: fd.ops.div(s, 0), 7, "by zero"),
}


@pytest.mark.timeout(20)
@pytest.mark.parametrize("constant", [True, False])
@pytest.mark.parametrize("name", NO_VALUE)
def test_scalars_without_a_value(name: str, constant: bool) -> None:
    make, value, said = NO_VALUE[name]
    dtype = {int: DataType.Int, float: DataType.Double, complex: DataType.ComplexDouble}[type(value)]
    with pytest.raises((mf.DefinitionError, mf.KernelError), match=rf"{said}.*\(at test_scalars\.py:\d+\)"):
        times(make, value, dtype, constant)


@pytest.mark.parametrize("size", [float("nan"), float("inf"), 1.5])
def test_a_size_that_is_no_whole_number(size: float) -> None:
    fd = mf.FusionDefinition()
    fd.add_output(fd.ops.iota(fd.define_scalar(size)))
    with pytest.raises(mf.DefinitionError, match=r"iota: a size is no whole number: found .*\(at test_scalars"):
        fd.simulate([])


def test_complex_scalars_and_their_parts() -> None:
    fd = mf.FusionDefinition()
    z = fd.ops.complex(fd.define_scalar(3.0), fd.define_scalar(-4.0))
    assert fd.scalars[z.ref.id].dtype is DataType.ComplexDouble
    for made in (fd.ops.real(z), fd.ops.imag(z), fd.ops.abs(z)):
        fd.add_output(fd.ops.full([1], made, DataType.Double))
    fd.add_output(fd.ops.full([1], z, DataType.ComplexDouble))
    found = [t.item() for t in fd.simulate([])]
    assert found == [3.0, -4.0, math.hypot(3, 4), 3 - 4j]
