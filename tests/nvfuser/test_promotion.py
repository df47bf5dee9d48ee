"""Types of results from operands of different types: tensors, 0-d tensors and numbers, as in nvFuser."""

from __future__ import annotations

import dataclasses
from collections.abc import Iterator, Sequence
from typing import Any

import pytest
from native_calls import DTYPES, differences, make_call, on_one_rank

from meshfuse.backends.nvfuser import build_call
from meshfuse.dtypes import DataType
from meshfuse.errors import DefinitionError
from meshfuse.ops import OPS
from meshfuse.ops.opdef import OpDef, Sample
from meshfuse.ops.values import ParamKind, TensorType

pytestmark = pytest.mark.nvfuser

NUMBERS = [True, 2, 2.5, 1 + 2j]
MIXING = [
    name for name, kinds in {name: [p.kind for p in op.params] for name, op in OPS.items()}.items()
    if kinds.count(ParamKind.TENSOR_OR_SCALAR) > 1 and ParamKind.INT not in kinds
]  # fmt: skip


def pairs() -> Iterator[tuple[Any, Any]]:
    """A tensor beside a tensor, a 0-d tensor and a number, in both orders."""
    for dtype in DTYPES:
        full = TensorType((3, 4), dtype)
        others = [TensorType(shape, other) for other in DTYPES for shape in ((3, 4), ())]
        for other in (*others, *NUMBERS):
            yield full, other
            yield other, full


def arguments(op: OpDef, pair: Sequence[Any]) -> tuple[Any, ...]:
    """The pair as the first operands that are no condition; the second one again where there is a third."""
    rest = iter([*pair, pair[1]])
    known = {"condition": TensorType((3, 4), DataType.Bool), "value": 1}
    return tuple(known[p.name] if p.name in known else next(rest) for p in op.params)


def taken_there(op: OpDef, sample: Sample) -> bool:
    try:
        build_call(on_one_rank(make_call(dataclasses.replace(op, nvfuser=None), sample, typed=False)))
    except (RuntimeError, TypeError):
        return False
    return True


def disagreement(op: OpDef, sample: Sample) -> list[str]:
    """What differs; that complex numbers are no parts of a complex number is known (see test_definitions)."""
    try:
        call = make_call(op, sample)
    except DefinitionError as refusal:
        if op.name == "complex":
            return []
        return [f"taken there: {refusal}"] if taken_there(op, sample) else []
    try:
        return differences(build_call(on_one_rank(call)))
    except RuntimeError as refusal:
        return [f"refused there: {refusal}"]


@pytest.mark.parametrize("name", MIXING)
def test_every_pair_of_types_agrees(name: str) -> None:
    wrong = []
    for pair in pairs():
        found = disagreement(OPS[name], Sample(arguments(OPS[name], pair)))
        wrong += [f"{', '.join(map(str, pair))}: {text}" for text in found]
    assert not wrong, "\n".join(wrong)
