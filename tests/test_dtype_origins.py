"""Errors about dtypes say where each operand has its dtype from: the whole way of promotions, for every op."""

from __future__ import annotations

import os
from collections.abc import Iterator
from typing import Any

import pytest

import meshfuse as mf
from meshfuse import DataType, TensorType
from meshfuse.ops import OPS

HERE = os.path.basename(__file__)
KINDS = (DataType.BFloat16, DataType.Double, DataType.Int, DataType.ComplexFloat, DataType.Bool)
Place = tuple[int, ...]


def places(args: Any, at: Place = ()) -> Iterator[Place]:
    """Where tensors are among arguments, lists of them included."""
    for place, arg in enumerate(args):
        if isinstance(arg, TensorType):
            yield (*at, place)
        elif isinstance(arg, (list, tuple)):
            yield from places(arg, (*at, place))


def applied(fd: mf.FusionDefinition, op: str, sample: mf.Sample, wrong: Place, dtype: DataType | None) -> Any:
    """The op on tensors of these types; the one in the place `wrong` is cast to another dtype before."""

    def made(arg: Any, at: Place) -> Any:
        if isinstance(arg, TensorType):
            tensor = fd.define_tensor(list(arg.shape), dtype=arg.dtype)
            return fd.ops.cast(tensor, dtype) if at == wrong and dtype is not None else tensor
        if isinstance(arg, (list, tuple)) and list(places(arg)):
            return [made(entry, (*at, place)) for place, entry in enumerate(arg)]
        return arg

    return fd.call(op, [made(arg, (place,)) for place, arg in enumerate(sample.args)], sample.kwargs)


def refused(op: str, sample: mf.Sample, wrong: Place = (), dtype: DataType | None = None) -> str:
    try:
        applied(mf.FusionDefinition(), op, sample, wrong, dtype)
    except mf.DefinitionError as error:
        return str(error)
    return ""


@pytest.mark.parametrize("name", sorted(OPS))
def test_an_op_that_refuses_a_dtype_says_where_it_comes_from(name: str) -> None:
    for sample in OPS[name].samples()[:2]:
        if refused(name, sample):
            continue
        for place in places(sample.args):
            for dtype in KINDS:
                text = refused(name, sample, place, dtype)
                assert not text or f"{dtype.name} comes from t" in text, text
                assert not text or " = cast(" in text, text


def test_enough_ops_refuse_a_dtype_for_this_to_be_a_test() -> None:
    names = [
        name for name, op in OPS.items()
        if any(refused(name, s, p, d) for s in op.samples()[:1] for p in places(s.args) for d in KINDS)
    ]  # fmt: skip
    assert len(names) > 20


def line_of(text: str) -> int:
    with open(__file__) as file:
        return next(i for i, line in enumerate(file, 1) if text in line)


def test_a_promotion_by_another_tensor_is_named() -> None:
    with mf.FusionDefinition() as fd:
        x = fd.define_tensor([4, 4], dtype=DataType.BFloat16)
        bias = fd.define_tensor([4])
        w = fd.define_tensor([4, 4], dtype=DataType.BFloat16)
        biased = x + bias
        h = fd.ops.relu(fd.ops.where(biased > 0, biased, 0.0))
        with pytest.raises(
            mf.DefinitionError, match="linear: operands of different dtypes: found Float, BFloat16"
        ) as e:
            fd.ops.linear(h, w)
    assert (
        f"Float comes from bias (t1), defined at {HERE}:{line_of('bias = fd.define')}, through biased (t3) = "
        f"add(BFloat16, Float) at {HERE}:{line_of('biased = x + bias')}; BFloat16 comes from w (t2), defined at {HERE}:"
    ) in str(e.value)


def test_errors_show_the_chain_of_promotions_and_cut_long_ones() -> None:
    with mf.FusionDefinition() as fd:
        x = fd.define_tensor([4], dtype=DataType.Int)
        y = x * 1.5
        for _ in range(3):
            y = fd.ops.neg(y + fd.define_tensor([4], dtype=DataType.Half))
        with pytest.raises(mf.DefinitionError) as few:
            fd.ops.bitwise_and(y, x)
        for _ in range(20):
            y = y + fd.define_tensor([4], dtype=DataType.Half)
        with pytest.raises(mf.DefinitionError) as many:
            fd.ops.bitwise_and(y, x)
    assert "Double comes from y (t1) = mul(Int, 1.5) at " in str(few.value)
    assert str(few.value).count("add(Double, Half)") == 3 and "more" not in str(few.value)
    assert str(many.value).count("add(Double, Half)") == 6 and "... 17 more ..." in str(many.value)


def test_an_error_inside_a_composite_tells_it_once() -> None:
    with mf.FusionDefinition() as fd:
        x = fd.define_tensor([4, 4])
        n = fd.ops.cast(x, DataType.ComplexFloat)
        with pytest.raises(mf.DefinitionError) as e:
            fd.ops.softmax(n)
    assert str(e.value).count("ComplexFloat comes from n (t1) = cast(Float, ComplexFloat)") == 1
