"""Records of ops whose own functions raise, or give what is no result: `check_op` and `torch_op` say which and why."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import pytest
import torch

import meshfuse as mf
from meshfuse.ops.rules import Rule, RuleBuilder
from meshfuse.ops.values import Param, ParamKind
from meshfuse.testing import check_op


def tensor(*shape: int) -> mf.TensorType:
    return mf.TensorType(shape, mf.DataType.Double)


def _rule(call: Any) -> Rule:
    builder = RuleBuilder()
    dims = builder.dims(call.types[0].shape)
    return builder.build([dims], [dims])


def record(**parts: Any) -> mf.OpDef:
    """An op that doubles, with other parts."""
    good: dict[str, Any] = {
        "name": "doubled", "params": (Param("x", ParamKind.TENSOR),), "infer": lambda call: (call.types[0],),
        "rule": _rule, "emit": lambda e: f"{e.operands[0]} * 2", "samples": lambda: [mf.Sample((tensor(2, 3),))],
    }  # fmt: skip
    return mf.OpDef(**(good | parts))


def fails(*_: Any) -> Any:
    raise LookupError("the mistake")


BROKEN: dict[str, tuple[dict[str, Any], str]] = {
    "infer raises": ({"infer": fails}, "LookupError: the mistake"),
    "infer gives nothing": ({"infer": lambda call: None}, "cannot be worked with"),
    "rule raises": ({"rule": fails}, "LookupError: the mistake"),
    "rule gives nothing": ({"rule": lambda call: None}, "cannot be worked with"),
    "window raises": ({"window": fails}, "LookupError: the mistake"),
    "flops raises": ({"flops": fails}, "LookupError: the mistake"),
    "vjp raises": ({"vjp": fails}, "LookupError: the mistake"),
    "vjp gives no dict": ({"vjp": lambda b: (None,)}, "cannot be worked with"),
    "samples raises": ({"samples": fails}, "LookupError: the mistake"),
    "emit raises": ({"emit": fails}, "LookupError: the mistake"),
    "emit gives a number": ({"emit": lambda e: "3"}, "gives no tensor as result 0"),
}


@pytest.mark.parametrize("name", BROKEN)
def test_a_record_whose_parts_fail(name: str) -> None:
    parts, message = BROKEN[name]
    with pytest.raises(AssertionError, match=message) as caught:
        check_op(record(**parts), max_examples=3)
    assert str(caught.value).startswith("doubled: ") and "\n  what to do " in str(caught.value)


def test_the_good_record_is_good() -> None:
    check_op(record(), max_examples=3)


@pytest.mark.parametrize("found", [None, 3, "ab", (1, 2)])
def test_a_function_that_gives_no_tensor(found: Any) -> None:
    def odd(x: torch.Tensor) -> Any:
        return found

    with pytest.raises(AssertionError, match="odd: its function returned something else than its rule says: found "):
        check_op(mf.torch_op("a b -> a b", samples=[mf.Sample((tensor(2, 3),))])(odd))


def same(x: torch.Tensor) -> torch.Tensor:
    return x


TOLD: list[tuple[str, Callable[[], Any]]] = [
    ("torch_op: the op's name: found '<lambda>'", lambda: mf.torch_op("a -> a")(lambda x: x)),
    ("torch_op: the op's name: found 'class'", lambda: mf.torch_op("a -> a", name="class")(lambda x: x)),
    ("the op's name: found 'a b'", lambda: mf.torch_op("a -> a", name="a b")(same)),
    ("halo: found {'a': (1, 0)}, needed a dim with neighbours", lambda: mf.torch_op("a -> a", halo={"a": (1, 0)})),
    ("sizes: found 3, needed a function", lambda: mf.torch_op("a -> a b", sizes=3)),  # type: ignore[arg-type]
    ("the operand Double[2] has the wrong number of dims",
     lambda: check_op(mf.torch_op("a b -> a b", samples=[mf.Sample((tensor(2),))])(same))),
    ("argument 'x' is missing", lambda: check_op(mf.torch_op("a -> a", samples=[mf.Sample(())])(same))),
]  # fmt: skip


@pytest.mark.parametrize(("message", "make"), TOLD, ids=[message for message, _ in TOLD])
def test_wrong_options_of_torch_op_are_errors(message: str, make: Callable[[], Any]) -> None:
    with pytest.raises(mf.DefinitionError) as caught:
        make()
    assert message in str(caught.value) and "(at test_broken_records.py:" in str(caught.value)
