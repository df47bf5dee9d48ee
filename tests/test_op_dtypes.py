"""Result types are those that the real nvFuser infers: `nvfuser_dtypes.json` records what nvfuser_direct
0.2.36 said.
"""

from __future__ import annotations

import json
import re
from pathlib import Path
from typing import Any

import pytest
import torch

import meshfuse as mf

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
    assert wanted.startswith(found)


KINDS = [mf.DataType[name] for name in ("Double", "Float", "Half", "Int", "Int32", "Int16", "Char", "Byte", "Bool")]


@pytest.mark.parametrize("dtype", KINDS)
@pytest.mark.parametrize("name", ["sum", "prod"])
def test_a_reduction_gives_the_type_that_is_asked_for(name: str, dtype: mf.DataType) -> None:
    """torch's own prod gives Int for every integer type."""
    fd = mf.FusionDefinition()
    x = fd.define_tensor([3, 4])
    fd.add_output(fd.call(name, [x, [0, 1]], {"dtype": dtype}))
    fd.mesh_split(x, mf.DeviceMesh((2,), ("x",)), ["x", None])
    (found,) = fd.simulate([torch.ones(3, 4)])
    assert str(found.dtype) == f"torch.{dtype.value}"
