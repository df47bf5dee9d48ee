"""Scalars of a definition: long and shared expressions, whole numbers as in C, and what has no value."""

from __future__ import annotations

import contextlib
import itertools
import math
from collections.abc import Callable, Sequence
from typing import Any

import pytest
import torch

import meshfuse as mf
import op_references as references
from meshfuse import DataType
from meshfuse.kernels.scalars import FUNCTIONS
from meshfuse.ops import OPS

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
    "bits of a float": (
        lambda fd, s: fd.ops.bitwise_and(s, 2),
        1.5,
        "operand type: found Double, needed Bool or integer",
    ),
    "an order of complex numbers": (lambda fd, s: fd.ops.where(s < 2, 1, 2), 1j, "not supported"),
    "a common divisor of floats": (
        lambda fd, s: fd.ops.gcd(s, 2),
        1.5,
        "operand type: found Double, needed Bool or integer",
    ),
    "a division by zero": (lambda fd, s: fd.ops.div(s, 0), 7, "by zero"),
}


@pytest.mark.timeout(20)
@pytest.mark.parametrize("constant", [True, False])
@pytest.mark.parametrize("name", NO_VALUE)
def test_scalars_without_a_value_are_errors(name: str, constant: bool) -> None:
    make, value, message = NO_VALUE[name]
    dtype = {int: DataType.Int, float: DataType.Double, complex: DataType.ComplexDouble}[type(value)]
    with pytest.raises((mf.DefinitionError, mf.KernelError), match=rf"{message}.*\(at test_scalars\.py:\d+\)"):
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
    assert fd.recording.scalars[z.ref.id].dtype is DataType.ComplexDouble
    for made in (fd.ops.real(z), fd.ops.imag(z), fd.ops.abs(z)):
        fd.add_output(fd.ops.full([1], made, DataType.Double))
    fd.add_output(fd.ops.full([1], z, DataType.ComplexDouble))
    found = [t.item() for t in fd.simulate([])]
    assert found == [3.0, -4.0, math.hypot(3, 4), 3 - 4j]


INF, NAN = math.inf, math.nan
VALUES: dict[DataType, tuple[Any, ...]] = {
    DataType.Double: (0.0, -0.0, 1.0, -1.5, 2.5, 1000.0, -1000.0, 1e300, INF, -INF, NAN),
    DataType.Int: (0, 1, 2, -7, 5), DataType.Bool: (False, True),
}  # fmt: skip
REFERENCES: dict[str, Callable[..., torch.Tensor]] = {
    **references.REFERENCES, "mod": torch.fmod,
    "div": lambda a, b: a / b if a.is_floating_point() else torch.div(a, b, rounding_mode="trunc"),
    "where": lambda c, a, b: torch.where(c != 0, a, b), "threshold": lambda x, t, v: torch.where(x <= t, v, x),
    "imag": torch.zeros_like, "lerp": lambda a, b, w: a + w * (b - a),
}  # fmt: skip


def wanted(name: str, row: Sequence[Any], dtype: DataType) -> torch.Tensor | None:
    """What torch makes of tensors of these numbers; None where it refuses them, or it is nothing certain."""
    if "shift" in name and min(row) < 0:
        return None
    try:
        return REFERENCES[name](*(torch.tensor([v], dtype=getattr(torch, dtype.value)) for v in row))
    except (RuntimeError, TypeError):
        return None


def known(name: str) -> list[tuple[Sequence[Any], DataType, torch.Tensor]]:
    """Numbers of one type for an op's operands, and what torch makes of them, where it takes them."""
    count, found = sum(param.name != "dtype" for param in OPS[name].params), []
    for dtype, values in VALUES.items():
        rows = itertools.product(values if count < 3 else values[::4], repeat=count)
        found += [(row, dtype, made) for row in rows if (made := wanted(name, row, dtype)) is not None]
    return found


@pytest.mark.parametrize("constant", [True, False])
@pytest.mark.parametrize("name", FUNCTIONS)
def test_scalars_are_what_tensors_of_them_are(name: str, constant: bool) -> None:
    """Where Python has an error, or a number of another type, too."""
    rows, fd = known(name), mf.FusionDefinition()
    for row, dtype, _ in rows:
        made = getattr(fd.ops, name)(*(fd.define_scalar(v) if constant else fd.define_scalar(dtype=dtype) for v in row))
        fd.add_output(fd.ops.full([1], fd.ops.where(made, 1, 0) if made.dtype is DataType.Bool else made, made.dtype))
    found = fd.simulate([] if constant else [v for row, _, _ in rows for v in row])
    for out, (row, _, made) in zip(found, rows, strict=True):
        close = torch.allclose(
            out.to(made.dtype), made, rtol=1e-12 if made.dtype == out.dtype else 1e-5, equal_nan=True
        )
        assert close, f"{row}: {out} instead of {made}"


@pytest.mark.parametrize("name", [name for name in FUNCTIONS if name != "silu"])  # torch has none of whole numbers
@pytest.mark.parametrize("dtype", [DataType.Int, DataType.Int32, DataType.Bool])
def test_scalars_of_whole_numbers_are_of_the_type_that_tensors_of_them_are(name: str, dtype: DataType) -> None:
    """Doubles in the place of floats: whole numbers have all their digits, and are divided as such."""
    types, count = [], sum(param.name != "dtype" for param in OPS[name].params)
    if wanted(name, [1] * count, dtype) is None:
        pytest.skip("torch has none of these numbers")
    for define in (lambda fd: fd.define_scalar(dtype=dtype), lambda fd: fd.define_tensor([], dtype=dtype)):
        fd = mf.FusionDefinition()
        try:
            types.append(getattr(fd.ops, name)(*(define(fd) for _ in range(count))).dtype)
        except mf.DefinitionError:
            pytest.skip("the op takes no tensors of this type")
    assert types[0] is {DataType.Float: DataType.Double}.get(types[1], types[1])


@pytest.mark.parametrize("constant", [True, False])
@pytest.mark.parametrize("name", ["floor", "ceil", "round", "trunc", "real"])
@pytest.mark.parametrize("value", [2**53 + 1, -(2**60) - 1, 7])
def test_whole_numbers_are_rounded_to_themselves(name: str, value: int, constant: bool) -> None:
    assert times(lambda fd, s: getattr(fd.ops, name)(s), value, DataType.Int, constant).tolist() == [2 * value] * 4
    halved = times(lambda fd, s: getattr(fd.ops, name)(s) // 2, value, DataType.Int, constant)
    assert halved[0] == 2 * int(torch.div(torch.tensor(value), 2, rounding_mode="trunc"))


@pytest.mark.parametrize("constant", [True, False])
def test_scalars_have_numbers_of_their_own_type(constant: bool) -> None:
    """What an op gives of operands of two types is a number of the greater one: it is not divided as whole ones are."""
    for make in (
        lambda fd, s: fd.ops.where(s > 0, s, 2.5), lambda fd, s: fd.ops.maximum(s, 2.5),
        lambda fd, s: fd.ops.clamp(s, 0.5, 9), lambda fd, s: fd.ops.relu(fd.ops.floor(fd.ops.maximum(s, 0.5))),
        lambda fd, s: repeated(30, lambda fd, t: fd.ops.maximum(s, t))(fd, fd.ops.truediv(s, 2)),
    ):  # fmt: skip
        fd = mf.FusionDefinition()
        made = make(fd, fd.define_scalar(7) if constant else fd.define_scalar(dtype=DataType.Int))
        fd.add_output(fd.ops.full([1], fd.ops.div(made, 2), DataType.Double))
        assert fd.simulate([] if constant else [7])[0].item() == 3.5


PASSED = [
    (7, DataType.Double), (True, DataType.Double), (7, DataType.Float), (3, DataType.ComplexDouble),
    (True, DataType.Int),
]  # fmt: skip


@pytest.mark.parametrize("constant", [True, False])
@pytest.mark.parametrize(("value", "dtype"), PASSED)
def test_a_number_that_is_passed_is_one_of_its_scalars_type(value: Any, dtype: DataType, constant: bool) -> None:
    """A whole number for a Double is divided as a Double; a bool for an Int is no bool."""
    fd, whole = mf.FusionDefinition(), dtype is DataType.Int
    s = fd.define_scalar(value, dtype) if constant else fd.define_scalar(dtype=dtype)
    for made in (fd.ops.div(s, 2), fd.ops.bitwise_not(s) if whole else fd.ops.pow(s, -1)):
        fd.add_output(fd.ops.full([1], made, made.dtype))
    number = torch.tensor([value], dtype=getattr(torch, dtype.value))
    wanted = (number.div(2, rounding_mode="trunc"), ~number) if whole else (number / 2, 1 / number)
    for found, right in zip(fd.simulate([] if constant else [value]), wanted, strict=True):
        torch.testing.assert_close(found, right)


@pytest.mark.parametrize("beyond", [0, 1])
@pytest.mark.parametrize("dtype", [DataType.Int, DataType.Int32, DataType.Int16, DataType.Char, DataType.Byte])
def test_an_integer_scalar_is_a_number_that_its_type_holds(dtype: DataType, beyond: int) -> None:
    """As a constant and in a call: the largest and smallest that the type holds, and those beyond them."""
    limits = torch.iinfo(getattr(torch, dtype.value))
    for number in (limits.min - beyond, limits.max + beyond):
        fd = mf.FusionDefinition()
        fd.add_output(fd.ops.full([1], fd.define_scalar(dtype=dtype), dtype))
        with pytest.raises(ValueError, match=str(number)) if beyond else contextlib.nullcontext():
            assert fd.simulate([number])[0].item() == number
        with pytest.raises(ValueError, match=str(number)) if beyond else contextlib.nullcontext():
            mf.FusionDefinition().define_scalar(number, dtype)


EDGES = [
    0,
    1,
    -1,
    127,
    128,
    255,
    256,
    -129,
    32767,
    32768,
    -32769,
    2**31 - 1,
    2**31 + 5,
    -(2**31) - 1,
    2**40 + 7,
    2**63 - 1,
]
WHOLE = [DataType.Int, DataType.Int32, DataType.Int16, DataType.Char, DataType.Byte, DataType.Bool]


@pytest.mark.parametrize("wanted", WHOLE)
@pytest.mark.parametrize("given", WHOLE)
def test_casts_of_whole_numbers_wrap_as_in_torch(given: DataType, wanted: DataType) -> None:
    """Of tensors, sharded, and of scalars, passed and constant."""
    kind, to = (getattr(torch, dtype.value) for dtype in (given, wanted))
    values = torch.tensor(EDGES).to(kind)
    fd = mf.FusionDefinition()
    x = fd.define_tensor([len(EDGES)], dtype=given)
    fd.add_output(fd.ops.cast(x, wanted))
    passed = [fd.define_scalar(dtype=given) for _ in EDGES]
    for scalar, value in zip(passed, values.tolist(), strict=True):
        for made in (scalar, fd.define_scalar(value, given)):
            fd.add_output(fd.ops.full([1], fd.ops.cast(made, wanted), wanted))
    fd.mesh_split(x, mf.DeviceMesh((2,), ("x",)), ["x"])
    found, *scalars = fd.simulate([values, *values.tolist()])
    assert torch.equal(found, values.to(to))
    assert torch.equal(torch.cat(scalars), values.to(to).repeat_interleave(2))


@pytest.mark.parametrize("constant", [False, True])
@pytest.mark.parametrize("name", ["add", "sub", "mul", "neg", "bitwise_not", "bitwise_left_shift"])
@pytest.mark.parametrize("dtype", WHOLE[1:-1])
def test_arithmetic_of_narrow_scalars_wraps_as_in_torch(dtype: DataType, name: str, constant: bool) -> None:
    limits, kind = torch.iinfo(getattr(torch, dtype.value)), getattr(torch, dtype.value)
    numbers = [limits.max, 3] if name not in ("neg", "bitwise_not") else [limits.min]
    fd = mf.FusionDefinition()
    x = fd.define_tensor([1], dtype=dtype)
    operands = [fd.define_scalar(*([n] if constant else []), dtype=dtype) for n in numbers]
    fd.add_output(fd.ops.where(fd.ops.ge(x, 1), x, fd.ops.full([1], fd.call(name, operands), dtype)))
    (found,) = fd.simulate([torch.zeros(1, dtype=kind), *([] if constant else numbers)])
    assert torch.equal(found, getattr(torch, name)(*(torch.tensor([n], dtype=kind) for n in numbers)))


@pytest.mark.parametrize("known", [False, True])
def test_sizes_are_listed_as_in_nvfuser_and_in_torch(known: bool) -> None:
    """By a call, by dim, in a row, and where a list of sizes is taken; of arguments of another size too."""
    with mf.FusionDefinition() as fd:
        x = fd.define_tensor([4, 6] if known else [-1, -1])
        rows, columns = x.shape
        assert len(x.shape) == 2 and repr(x.shape) == repr(x.type.shape)
        made = [
            fd.ops.reshape(x, [x.shape[1], x.shape[0]]), fd.ops.reshape(x, [*x.shape, 1]),
            fd.ops.reshape(x, [rows * columns]), fd.ops.full(x.shape, 2.0, x.dtype),
            fd.ops.full(shape=x.size(), fill_value=3.0, dtype=x.dtype), fd.ops.full(x.shape(), 4.0, x.dtype),
            fd.ops.reshape(x, [*x.shape[:1], x.shape[-1]]),
        ]  # fmt: skip
        for output in made:
            fd.add_output(output)
    for shape in [(4, 6)] if known else [(4, 6), (3, 5)]:
        (m, n), given = shape, torch.arange(float(math.prod(shape))).reshape(shape)
        filled = [torch.full(shape, value) for value in (2.0, 3.0, 4.0)]
        expected = [given.reshape(n, m), given[..., None], given.reshape(-1), *filled, given]
        for a, b in zip(fd.execute([given]), expected, strict=True):
            assert torch.equal(a, b)
