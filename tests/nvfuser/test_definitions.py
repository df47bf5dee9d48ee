"""Every op of the table as a definition of the real nvFuser: it builds, with the types that are inferred."""

from __future__ import annotations

import dataclasses
import re
from pathlib import Path

import pytest
from native_calls import DTYPES, differences, make_call, on_one_rank, samples

from meshfuse.backends.nvfuser import build_call, load_nvfuser
from meshfuse.dtypes import DataType
from meshfuse.errors import DefinitionError
from meshfuse.ops import OPS
from meshfuse.ops.opdef import ToTorch
from own_op import registered

pytestmark = pytest.mark.nvfuser

HALF = {DataType.Half, DataType.BFloat16}
RANDOM_OPS = {"uniform", "normal", "rand_like", "randn_like"}
ATTENTION = {"sdpfa_fwd", "sdpfa_bwd"}


def reason(name: str, place: int, dtype: DataType | None) -> str | None:
    """A part of the reason why a sample goes to torch on one rank, None where it must not."""
    op, sample = OPS[name], OPS[name].samples()[place]
    if isinstance(op.nvfuser, str):
        return op.nvfuser
    if name == "embedding_fwd" and len(sample.args) > 2:
        return "max_norm changes the table"
    if name in ATTENTION:
        query, key = (sample.args[op.places[operand]] for operand in ("query", "key"))
        fits = dtype in HALF and query.shape[-3] == key.shape[-3] and len(query.shape) == 4
        return None if fits else "attention"
    return "variance of complex numbers" if name in ("var", "welford") and dtype in COMPLEX else None


def test_only_random_numbers_are_left_to_torch_on_purpose() -> None:
    named = {name for name in OPS if isinstance(OPS[name].nvfuser, str)}
    assert named & set(dir(load_nvfuser().ops)) == RANDOM_OPS


@pytest.mark.parametrize(("name", "place"), list(samples()))
def test_every_sample_builds(name: str, place: int) -> None:
    op = OPS[name]
    local = on_one_rank(make_call(op, op.samples()[place]))
    why = reason(name, place, None)
    if why is not None:
        with pytest.raises(ToTorch, match=re.escape(why)):
            build_call(local)
    else:
        assert not differences(build_call(local))


def test_an_op_of_a_users_own_builds(tmp_path: Path) -> None:
    with registered(tmp_path) as op:
        assert not differences(build_call(on_one_rank(make_call(op, op.samples()[0]))))


COMPLEX = {DataType.ComplexFloat, DataType.ComplexDouble}
INTEGERS = {DataType.Int, DataType.Int32, DataType.Bool}
# Types that nvFuser takes when a definition is made and meshfuse refuses: the result has no meaning: complex
# parts of a complex number, means of integers in integers, an order of complex numbers.
REFUSED = {
    "complex": COMPLEX,
    "var_mean": INTEGERS,
    "welford": INTEGERS,
    "cummax": COMPLEX,
    "cummin": COMPLEX,
    "argsort": COMPLEX,
    "topk": COMPLEX,
}
REFUSALS = [(name, dtype) for name, dtypes in REFUSED.items() for dtype in sorted(dtypes, key=str)]


@pytest.mark.parametrize(("name", "dtype"), REFUSALS)
def test_what_meshfuse_alone_refuses(name: str, dtype: DataType) -> None:
    sample = OPS[name].samples()[0]
    with pytest.raises(DefinitionError, match=f"^{name}: .*found"):
        make_call(OPS[name], sample, dtype)
    assert any(taken_there(name, place, dtype) for place in range(len(OPS[name].samples())))


def taken_there(name: str, place: int, dtype: DataType) -> bool:
    """Whether nvFuser's function of the same name takes the sample in this type."""
    plain = dataclasses.replace(OPS[name], nvfuser=None)
    call = make_call(plain, plain.samples()[place], dtype, typed=False)
    try:
        build_call(on_one_rank(call))
    except (AttributeError, RuntimeError, TypeError, ToTorch):
        return False
    return True


@pytest.mark.parametrize("name", list(OPS))
def test_every_type_agrees(name: str) -> None:
    """Whichever of both takes a type, the other does; and the results are of the same types."""
    found = []
    for place in range(len(OPS[name].samples())):
        for dtype in DTYPES:
            found += _disagreement(name, place, dtype)
    assert not found


def _disagreement(name: str, place: int, dtype: DataType) -> list[str]:
    try:
        call = make_call(OPS[name], OPS[name].samples()[place], dtype)
    except DefinitionError as refusal:
        alone = dtype not in REFUSED.get(name, ()) and taken_there(name, place, dtype)
        return [f"{dtype.name} is taken there: {refusal}"] if alone else []
    if reason(name, place, dtype) is not None:
        return []
    try:
        return differences(build_call(on_one_rank(call)))
    except RuntimeError as refusal:
        return [f"{dtype.name} is refused there: {refusal}"]
