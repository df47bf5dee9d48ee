"""Result types are those that the real nvFuser infers: `nvfuser_dtypes.json` records what nvfuser_direct
0.2.36 said.
"""

from __future__ import annotations

import itertools
import json
import re
from pathlib import Path
from typing import Any

import pytest
import torch

import meshfuse as mf
from meshfuse.dtypes import Category, promote

FOUND: dict[str, Any] = json.loads((Path(__file__).parent / "nvfuser_dtypes.json").read_text())
NUMBERS: dict[str, Any] = {"int": 2, "float": 2.5, "bool": True, "complex": 1 + 2j}
RAISES = "raises"
# What nvFuser refuses and meshfuse takes: complex numbers beside half precision, and complex() of two types.
HALF_WITH_COMPLEX = re.compile(r"(Half|BFloat16).*complex|complex.*(Half|BFloat16)")


def _outcome(name: str, operands: list[str]) -> str:
    """The result's type, or `raises`."""
    fd = mf.FusionDefinition()
    args = [NUMBERS[o] if o in NUMBERS else fd.define_tensor([3, 4], dtype=mf.DataType[o]) for o in operands]
    try:
        made = fd.call(name, args)
    except mf.DefinitionError:
        return RAISES
    return made.dtype.name


def _difference(name: str, operands: list[str], wanted: str) -> str | None:
    found = _outcome(name, operands)
    if name == "complex" and "ComplexFloat" in operands:
        return None if found == RAISES else "complex() of complex numbers has no meaning, though nvFuser types it"
    if wanted.startswith(RAISES):
        wider = name == "complex" or "complex" in operands or HALF_WITH_COMPLEX.search(",".join(operands))
        return None if found == RAISES or wider else f"{name}({', '.join(operands)}): {found}, nvFuser raises"
    return None if found == wanted else f"{name}({', '.join(operands)}): {found}, nvFuser {wanted}"


@pytest.mark.parametrize("name", sorted(FOUND["unary"]))
def test_unary_types(name: str) -> None:
    rows = FOUND["unary"][name].items()
    assert not [d for operand, wanted in rows if (d := _difference(name, [operand], wanted))]


@pytest.mark.parametrize("kind", ["binary_tt", "binary_ts", "binary_st"])
@pytest.mark.parametrize("name", sorted(FOUND["binary_tt"]))
def test_binary_types(name: str, kind: str) -> None:
    rows = FOUND[kind][name].items()
    assert not [d for operands, wanted in rows if (d := _difference(name, operands.split(","), wanted))]


def _parsed(row: str) -> tuple[str, list[str]]:
    name, inside = re.fullmatch(r"(\w+)\((.*)\)", row).groups()  # type: ignore[union-attr]
    return name, inside.split(",")


TERNARY = [row for row in FOUND["ternary"] if re.fullmatch(r"\w+\([\w,]+\)", row)]


@pytest.mark.parametrize("name", ["where", "lerp", "addcmul", "clamp", "threshold"])
def test_ternary_types(name: str) -> None:
    rows = [(*_parsed(row), FOUND["ternary"][row]) for row in TERNARY]
    assert not [d for op, operands, wanted in rows if op == name and (d := _difference(op, operands, wanted))]


ONE_OPERAND = [
    row for row in FOUND["reductions_scans_sorts"] if re.fullmatch(r"(sum|prod|max|min|cum\w+|triu|var)\(\w+\)", row)
]


@pytest.mark.parametrize("row", ONE_OPERAND)
def test_reduction_and_scan_types(row: str) -> None:
    name, (operand,) = _parsed(row)
    fd, wanted = mf.FusionDefinition(), FOUND["reductions_scans_sorts"][row]
    tensor = fd.define_tensor([3, 4], dtype=mf.DataType[operand])
    try:
        args = [] if name == "triu" else [[1]] if name in ("sum", "prod", "max", "min", "var") else [1]
        found = fd.call(name, [tensor, *args]).dtype.name
    except mf.DefinitionError:
        found = RAISES
    # nvFuser types the variance of complex numbers as complex; as in torch it is real.
    assert (wanted.removeprefix("Complex") if name == "var" else wanted).startswith(found)


KINDS = [mf.DataType[name] for name in ("Double", "Float", "Half", "Int", "Int32", "Int16", "Char", "Byte", "Bool")]


@pytest.mark.parametrize("dtype", KINDS)
@pytest.mark.parametrize("name", ["sum", "prod"])
def test_a_reduction_gives_the_requested_dtype(name: str, dtype: mf.DataType) -> None:
    """torch's own prod gives Int for every integer type."""
    fd = mf.FusionDefinition()
    x = fd.define_tensor([3, 4])
    fd.add_output(fd.call(name, [x, [0, 1]], {"dtype": dtype}))
    fd.mesh_split(x, mf.DeviceMesh((2,), ("x",)), ["x", None])
    (found,) = fd.simulate([torch.ones(3, 4)])
    assert str(found.dtype) == f"torch.{dtype.value}"


TYPES = [dtype for dtype in mf.DataType if dtype is not mf.DataType.Null]
# What torch does not promote, and nvFuser does: its where() of different types below 32 bits gives this.
FLOATS = [mf.DataType[name] for name in ("Half", "BFloat16", "Float8_e4m3fn", "Float8_e5m2", "Float8_e8m0fnu")]
WHOLE = [dtype for dtype in TYPES if dtype.category <= Category.INTEGER and dtype is not mf.DataType.UInt64]


def _of_torch(dtype: mf.DataType) -> torch.dtype:
    return getattr(torch, dtype.value)


def _promoted_by_torch(a: mf.DataType, b: mf.DataType) -> torch.dtype | None:
    try:
        return torch.promote_types(_of_torch(a), _of_torch(b))
    except RuntimeError:
        return None


@pytest.mark.parametrize("a", TYPES)
def test_two_types_promote_as_in_torch(a: mf.DataType) -> None:
    wanted = {b: kind for b in TYPES if (kind := _promoted_by_torch(a, b)) is not None}
    assert len(wanted) > 0
    assert {b: _of_torch(promote(a, b)) for b in wanted} == wanted


@pytest.mark.parametrize(("a", "b"), list(itertools.permutations(FLOATS, 2)))
def test_small_floats_of_which_neither_holds_the_other_are_floats(a: mf.DataType, b: mf.DataType) -> None:
    assert promote(a, b) is mf.DataType.Float


@pytest.mark.parametrize("other", WHOLE)
@pytest.mark.parametrize("name", ["add", "eq", "maximum"])
def test_no_type_holds_a_uint64_and_other_whole_numbers(name: str, other: mf.DataType) -> None:
    fd = mf.FusionDefinition()
    x, y = (fd.define_tensor([3], dtype=dtype) for dtype in (mf.DataType.UInt64, other))
    for operands in ((x, y), (y, x)):
        with pytest.raises(mf.DefinitionError, match=rf"UInt64.*Cast one of them.*\(at {Path(__file__).name}:"):
            fd.call(name, operands)


@pytest.mark.parametrize(("a", "b"), list(itertools.permutations(["Byte", "Char", "Int16", "Int32", "Int", "Bool"], 2)))
@pytest.mark.parametrize("name", ["add", "maximum", "eq", "lt", "where"])
def test_numbers_of_two_whole_types(name: str, a: str, b: str) -> None:
    """The largest and the smallest of each beside one another: as torch computes them, sharded."""
    values = [_extremes(mf.DataType[a]).repeat_interleave(4), _extremes(mf.DataType[b]).repeat(4)]
    fd = mf.FusionDefinition()
    tensors = [fd.define_tensor([16], dtype=mf.DataType[kind]) for kind in (a, b)]
    condition = fd.ops.gt(fd.ops.iota(16), 7)
    fd.add_output(fd.call(name, [condition, *tensors] if name == "where" else tensors))
    fd.mesh_split(tensors[0], mf.DeviceMesh((2,), ("x",)), ["x"])
    given = [torch.arange(16) > 7, *values] if name == "where" else values
    (found,), wanted = fd.simulate(values), getattr(torch, name)(*given)
    assert found.dtype is wanted.dtype
    assert torch.equal(found, wanted)


def _extremes(dtype: mf.DataType) -> torch.Tensor:
    if dtype is mf.DataType.Bool:
        return torch.tensor([True, False, True, False])
    limits = torch.iinfo(_of_torch(dtype))
    return torch.tensor([limits.max, limits.min, 1, -1 if limits.min else 3], dtype=_of_torch(dtype))
