"""What a user says of an op of their own, and what its function returns: a house error, or the numbers of torch."""

from __future__ import annotations

import functools
from collections.abc import Callable
from typing import Any

import pytest
import torch

import meshfuse as mf
from meshfuse import DataType
from meshfuse.testing import check_op
from refusing import refused_in

MESH = mf.DeviceMesh((2,), ("x",))
X = torch.arange(24.0).reshape(4, 6)
BAD: list[Any] = [
    None, True, -1, 3, 2**70, 1.5, float("nan"), float("inf"), "", "a", b"x", [], (), [0], ["a"], {}, {0: 1}, {"a": 1},
    {"a": "ab"}, {"a": (-1, 0)}, {"a": (1,)}, {"a": None}, {"q": 3}, {"b": "x"}, {"a": 1.5}, object(), 1j,
    torch.ones(2), DataType.Int, [DataType.Float, DataType.Float], DataType.Null, [None], iter([1]),
]  # fmt: skip
OPTIONS = ("blocked", "reduce", "halo", "fill", "sizes", "dtype", "partial", "flops", "samples", "domain",
           "differentiable")  # fmt: skip
FUNCTIONS = ("halo", "sizes", "dtype", "flops")  # of the call


refused = functools.partial(refused_in, __file__)


def ran(function: Callable[..., Any], rule: str, sharded: bool = True, **options: Any) -> torch.Tensor:
    """The op on X, on two ranks or on one."""
    op = mf.register_op(mf.torch_op(rule, name="of_the_user", **options)(function))
    try:
        fd = mf.FusionDefinition()
        x = fd.define_tensor([4, 6])
        made = fd.ops.of_the_user(x)
        fd.add_output(made)
        if sharded:
            fd.mesh_split(x, MESH, ["x", None])
        fd.explain(), fd.bill()
        return fd.simulate([X])[0]
    finally:
        mf.unregister_op(op)


@pytest.mark.parametrize("as_function", [False, True])
@pytest.mark.parametrize("name", OPTIONS)
def test_an_option_of_the_wrong_kind_is_an_error(name: str, as_function: bool) -> None:
    """As it is, and as what a function of the call returns. What is taken changes no number."""
    if as_function and name not in FUNCTIONS:
        return
    rule, function = ("a~ b -> a b", lambda x: x[1:]) if name in ("halo", "fill") else ("a b -> a b", lambda x: x)
    fitting = {"halo": {"a": (1, 0)}} if name in ("halo", "fill") else {}
    wanted = torch.cat([torch.zeros(1, 6), X[:-1]])[:4] if fitting else X
    for value in BAD:
        with refused():
            given = functools.partial(lambda kept, call: kept, value) if as_function else value
            found = ran(function, rule, **{**fitting, name: given})
            if name != "fill":
                torch.testing.assert_close(found, wanted[: len(found)], check_dtype=False)


RETURNS: dict[str, Callable[[torch.Tensor], Any]] = {
    "nothing": lambda x: None,
    "a number": lambda x: 3.0,
    "a list": lambda x: [x],
    "two": lambda x: (x, x),
    "another shape": lambda x: x[:1],
    "another number of dims": lambda x: x.sum(),
    "another dtype": lambda x: x.double(),
    "a sparse tensor": lambda x: x.to_sparse(),
}


@pytest.mark.parametrize("sharded", [False, True])
@pytest.mark.parametrize("name", RETURNS)
def test_a_function_that_does_not_return_what_its_rule_says(name: str, sharded: bool) -> None:
    """Such a result would be spread over its place without a word."""
    with pytest.raises(mf.KernelError, match="its function returned something else than its rule says") as caught:
        ran(RETURNS[name], "a b -> a b", sharded)
    assert f"needed float32[{2 if sharded else 4}, 6] on this rank" in str(caught.value)
    assert "(at test_bad_user_ops.py:" in str(caught.value)


def pair_in(kind: Callable[[Any], Any], rule: str, function: Callable[..., Any]) -> list[torch.Tensor]:
    """An op of two results that its function returns in a list or a tuple, and its gradient."""
    op = mf.register_op(
        mf.torch_op(rule, name="of_the_user", halo=None if "~" not in rule else {"a": (1, 0)})(
            lambda x: kind(function(x))
        )
    )
    try:
        fd = mf.FusionDefinition()
        x = fd.define_tensor([4, 6])
        made = list(fd.ops.of_the_user(x))
        for t in (*made, fd.grad(made, x)):
            fd.add_output(t)
        fd.mesh_split(x, MESH, ["x", None])
        return fd.simulate([X])
    finally:
        mf.unregister_op(op)


@pytest.mark.parametrize("kind", [tuple, list, lambda pair: torch.return_types.max(pair)])
@pytest.mark.parametrize("rule", ["a b -> a b, a b", "a~ b -> a b, a b"])
def test_results_are_returned_in_a_tuple_of_any_kind(kind: Callable[[Any], Any], rule: str) -> None:
    """By the op itself, by its gradient and, of a dim with neighbours, on each of the blocks."""

    def both(x: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
        own = x[1:] if "~" in rule else x
        return own * 2, own.sin()

    wanted = [X * 2, X.sin(), 2 + X.cos()]
    for found, one in zip(pair_in(kind, rule, both), wanted, strict=True):
        torch.testing.assert_close(found, one)


@pytest.mark.parametrize("rule", ["a b -> a b, b", "a b -> b a, ", "a* b -> b a*, b", "(a b) -> a b, b"])
def test_a_result_that_lacks_a_factor_of_another_is_an_error(rule: str) -> None:
    """It would be made of a rank's own part alone."""
    with pytest.raises(mf.DefinitionError, match=r"found result 1 without it, others with it, needed it in every"):
        mf.torch_op(rule)
    mf.torch_op(rule, blocked="a* b" if "*" in rule else "a b")


def same(x: torch.Tensor) -> torch.Tensor:
    return x


@pytest.mark.parametrize("rule", ["(a b) -> a b", "(a b) -> (b a)", "(a b), c -> c"])
def test_a_rule_that_does_not_tell_the_sizes_of_factors(rule: str) -> None:
    op = mf.register_op(mf.torch_op(rule, name="of_the_user")(same if "," not in rule else lambda x, y: x))
    try:
        fd = mf.FusionDefinition()
        for n in (12, -1, 0):
            with pytest.raises(mf.DefinitionError, match="the size of 'b': found no operand that has it as a dim"):
                fd.ops.of_the_user(*(fd.define_tensor([n]) for _ in op.params))
    finally:
        mf.unregister_op(op)


CHANGES: dict[str, Callable[[torch.Tensor], Any]] = {
    "and returns it": lambda x: x.mul_(2),
    "and returns another": lambda x: x.add_(1) * 2,
    "a part of it": lambda x: (x[:1].zero_(), x * 2)[1],
    "by out=": lambda x: torch.mul(x, 2, out=x),
    "through a view": lambda x: (x.view(-1)[0].fill_(3), x.clone())[1],
}


@pytest.mark.parametrize("sharded", [False, True])
@pytest.mark.parametrize("name", CHANGES)
def test_a_function_that_changes_its_argument(name: str, sharded: bool) -> None:
    """Else the user's own tensor would be another one after the call, and so would all other ops' operand."""
    kept = X.clone()
    try:
        with pytest.raises(
            mf.KernelError, match=r"of_the_user: its function changed its argument 0 in place"
        ) as caught:
            ran(CHANGES[name], "a b -> a b", sharded)
        assert "(at test_bad_user_ops.py:" in str(caught.value)
    finally:
        X.copy_(kept)


def test_a_function_that_returns_a_tensor_of_another_device() -> None:
    with pytest.raises(mf.KernelError, match=r"returned a tensor of another device: found meta, needed cpu"):
        ran(lambda x: x.to("meta"), "a b -> a b")


def test_a_function_that_changes_what_it_has_made_itself() -> None:
    def own(x: torch.Tensor) -> torch.Tensor:
        return x.clone().add_(1)

    for sharded in (False, True):
        assert torch.equal(ran(own, "a b -> a b", sharded), X + 1)
        with torch.inference_mode():
            assert torch.equal(ran(own, "a b -> a b", sharded), X + 1)


@pytest.mark.parametrize("error", [KeyError, ZeroDivisionError, StopIteration, AttributeError, RecursionError])
@pytest.mark.parametrize("sharded", [False, True])
def test_an_error_in_a_function_names_the_line_of_its_call(error: type[Exception], sharded: bool) -> None:
    def raising(x: torch.Tensor) -> torch.Tensor:
        raise error("mine")

    with pytest.raises(mf.KernelError, match=rf"found {error.__name__}: .*mine.*\(at test_bad_user_ops\.py:") as caught:
        ran(raising, "a b -> a b", sharded)
    assert isinstance(caught.value.__cause__, error)


class Silent(Exception):
    def __str__(self) -> str:
        raise LookupError("no text either")


def silent() -> Exception:
    return Silent()


def long() -> Exception:
    return ValueError("x" * 50_000_000)


def of_no_lines() -> Exception:
    return ValueError("\n")


def of_surrogates() -> Exception:
    return ValueError("half \ud800")


ERRORS = {"silent": silent, "long": long, "of no lines": of_no_lines, "of surrogates": of_surrogates}


def failing(made: Exception) -> Callable[..., Any]:
    def function(*_: Any) -> Any:
        raise made

    return function


@pytest.mark.parametrize("sharded", [False, True])
@pytest.mark.parametrize("kind", ERRORS)
def test_a_function_whose_error_has_no_good_text(kind: str, sharded: bool) -> None:
    made = ERRORS[kind]()
    with pytest.raises(mf.KernelError, match=rf"cannot be computed on rank 0: found {type(made).__name__}") as caught:
        ran(failing(made), "a b -> a b", sharded)
    assert caught.value.__cause__ is made
    assert len(str(caught.value)) < 2000


@pytest.mark.parametrize("sharded", [False, True])
def test_a_function_for_which_a_device_has_no_memory(sharded: bool) -> None:
    made = torch.OutOfMemoryError("CUDA out of memory. Tried to allocate 2.00 GiB.")
    with pytest.raises(
        mf.OutOfMemoryError, match=r"no memory for .*of_the_user.* on rank 0: found OutOfMemoryError: CUDA"
    ):
        ran(failing(made), "a b -> a b", sharded)


@pytest.mark.parametrize("option", FUNCTIONS)
@pytest.mark.parametrize("kind", ERRORS)
def test_what_says_something_of_a_call_with_an_error_of_no_good_text(kind: str, option: str) -> None:
    made = ERRORS[kind]()
    rule, function = ("a~ b -> a b", lambda x: x) if option == "halo" else ("a b -> a b", lambda x: x)
    with pytest.raises((mf.DefinitionError, type(made))) as caught:
        ran(function, rule, **{option: failing(made)})
    assert caught.value is made or len(str(caught.value)) < 2000


@pytest.mark.parametrize("kind", ERRORS)
def test_checking_an_op_whose_error_has_no_good_text(kind: str) -> None:
    made = ERRORS[kind]()
    op = mf.torch_op("a b -> a b", name="of_the_user", samples=[mf.Sample.of_floats((4, 6))])(failing(made))
    with pytest.raises(AssertionError, match=type(made).__name__) as caught:
        check_op(op, max_examples=3)
    assert len(str(caught.value)) < 3000
