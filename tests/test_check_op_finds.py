"""What is wrong with ops of a user's own is found, and what is right passes."""

from __future__ import annotations

import dataclasses
import subprocess
import sys
from collections.abc import Callable
from typing import Any

import pytest
import torch

import meshfuse as mf
from meshfuse.ops import OPS
from meshfuse.testing import assert_same_as_unsharded, check_op

D = mf.DataType
PAIR = mf.DeviceMesh((2,), ("x",))


def op(text: str, function: Callable[..., Any], *types: mf.TensorType, **kwargs: Any) -> mf.OpDef:
    samples = kwargs.pop("samples", [mf.Sample(types)])
    return mf.torch_op(text, name=kwargs.pop("name", "mine"), samples=samples, **kwargs)(function)


def kind(*shape: int, dtype: mf.DataType = D.Double) -> mf.TensorType:
    return mf.TensorType(shape, dtype)


def _first_type(call: Any) -> mf.DataType:
    return call.types[0].dtype


def _segments(x, i, s: int):
    return torch.zeros(s, x.shape[1], dtype=x.dtype).index_add(0, i, x)


RIGHT = {
    "an index beside numbers": lambda: op(
        "n d, n -> s d", _segments, blocked="s", sizes=lambda c: {"s": c["s"]}, dtype=_first_type,
        partial=mf.Partial.FIRST,
        samples=[mf.Sample((kind(7, 3), kind(7, dtype=D.Int), 5), {}, {1: [0, 3, 3, 4, 1, 0]})],
    ),
    "a mask beside numbers": lambda: op(
        "a b, a b -> a", lambda x, m: (x * m).sum(1), kind(3, 6), kind(3, 6, dtype=D.Bool), dtype=_first_type
    ),
    "whole numbers": lambda: op("a b -> a b", lambda x: x + 1, kind(3, 6, dtype=D.Int)),
    "a sum in BFloat16": lambda: op("a b -> a", lambda x: x.sum(1), kind(3, 8, dtype=D.BFloat16)),
    "a product in BFloat16": lambda: op(
        "a k, k n -> a n", lambda x, w: x @ w, kind(3, 8, dtype=D.BFloat16), kind(8, 5, dtype=D.BFloat16)
    ),
    "a long product in Half": lambda: op(
        "a k, k n -> a n", lambda x, w: x @ w, kind(3, 64, dtype=D.Half), kind(64, 5, dtype=D.Half)
    ),
    "a sum of large numbers": lambda: op(
        "a b -> a", lambda x: x.sum(1), kind(3, 16, dtype=D.Float), domain=(-1000.0, 1000.0)
    ),
    "no dim to shard": lambda: op("a -> a", lambda x: x.sort().values, kind(5), blocked="a"),
    "no dims": lambda: op("-> ", lambda: torch.ones((), dtype=torch.float64), dtype=D.Double, samples=[mf.Sample(())]),
    "dims of size 1": lambda: op("a b -> a b", lambda x: x.sin(), kind(1, 1)),
}  # fmt: skip


@pytest.mark.parametrize("name", RIGHT)
@pytest.mark.parametrize("examples", [0, 8])
def test_what_is_right_passes(name: str, examples: int) -> None:
    check_op(RIGHT[name](), max_examples=examples)


def _abs(**kwargs: Any) -> mf.OpDef:
    return op("a b -> a b", lambda x: x.abs(), partial=mf.Partial.JOINT, differentiable=False, **kwargs)


def _far_places(x):
    return 1_000_000 + torch.arange(x.shape[1]).expand(x.shape)


WRONG = {
    "terms of both signs, where a domain has one": (
        lambda: _abs(samples=[mf.Sample((kind(3, 4),))], domain=(0.1, 4.0)), "partial rule does not hold"),
    "terms of both signs, whole numbers": (
        lambda: _abs(samples=[mf.Sample((kind(3, 4, dtype=D.Int),))]), "partial rule does not hold"),
    "large whole numbers": (
        lambda: op("a b -> a b", _far_places, kind(3, 4, dtype=D.Int)), "factor rule does not hold"),
    "small numbers": (
        lambda: op("a b -> a b", lambda x: 1e-5 * x.softmax(1), kind(3, 4)), "factor rule does not hold"),
    "numbers none of which is finite": (
        lambda: op("a b -> a b", lambda x: x.log().cumsum(1), kind(3, 8), domain=(-2.0, -1.0)),
        "no number of its results is finite"),
    "sizes that are right for one sample": (
        lambda: op("a b -> a c", lambda x: x[:, ::2], kind(3, 4), blocked="b c", sizes=lambda c: {"c": 2}),
        "type rule is wrong"),
    "a view of what is not row-major": (
        lambda: op("a b c -> a b c", lambda x: (x.view(-1, x.shape[-1]) * 2).view(x.shape), kind(4, 6, 5)),
        "not row-major in memory"),
}  # fmt: skip


@pytest.mark.parametrize("name", WRONG)
def test_what_is_wrong_is_found(name: str) -> None:
    made, text = WRONG[name]
    with pytest.raises(AssertionError, match=text):
        check_op(made())


def with_wrong_gradient() -> mf.OpDef:
    sin = OPS["sin"]
    return dataclasses.replace(sin, vjp=lambda b: {name: b.grads[0] for name in b.arguments})


@pytest.mark.slow
@pytest.mark.parametrize("mode", [torch.no_grad, torch.inference_mode], ids=lambda mode: mode.__name__)
def test_a_wrong_gradient_is_found_where_the_caller_has_none(mode: Callable[[], Any]) -> None:
    with mode(), pytest.raises(AssertionError, match="derivative is not that of the lowering"):
        check_op(with_wrong_gradient())


def _of_flag(x, flag: bool):
    return Doubled.apply(x, flag)


class Doubled(torch.autograd.Function):
    """Its backward needs all of dim 1, but only where the flag is set."""

    @staticmethod
    def forward(ctx, x, flag):
        ctx.flag = flag
        return 2 * x

    @staticmethod
    def backward(ctx, grad):
        return (2 * grad + grad.sum(1, keepdim=True) if ctx.flag else 2 * grad), None


@pytest.mark.slow
@pytest.mark.parametrize("flags", [(True, False), (False, True)])
def test_derivatives_are_checked_on_all_samples(flags: tuple[bool, ...]) -> None:
    samples = [mf.Sample((kind(3, 4), flag)) for flag in flags]
    with pytest.raises(AssertionError, match="mine_bwd_x: the factor rule does not hold"):
        check_op(op("a b -> a b", _of_flag, samples=samples))


# whole definitions --------------------------------------------------------------------------------------------


def doubled(dtype: mf.DataType, beside: mf.DataType | None = None) -> mf.FusionDefinition:
    with mf.FusionDefinition() as fd:
        x = fd.define_tensor([4], dtype=dtype)
        fd.add_output(x + x)
        fd.mesh_split(x, PAIR, ["x"])
        if beside is not None:
            fd.add_output(fd.ops.neg(fd.define_tensor([4], dtype=beside)))
    return fd


@pytest.mark.parametrize("expected", [torch.full((4,), 2.5), torch.full((4,), 2 + 5j)], ids=["fraction", "complex"])
def test_whole_numbers_are_compared_with_what_is_expected_as_it_is(expected: torch.Tensor) -> None:
    with pytest.raises(AssertionError, match=r"output t1.*: element \[0\] is 2, expected"):
        assert_same_as_unsharded(doubled(D.Int), [torch.ones(4, dtype=torch.int64)], [expected])
    assert_same_as_unsharded(doubled(D.Int), [torch.ones(4, dtype=torch.int64)], [torch.full((4,), 2.0)])


def test_an_output_is_as_precise_as_what_it_is_made_of() -> None:
    fd = doubled(D.Double, D.BFloat16)
    one, half = torch.ones(4, dtype=torch.float64), torch.ones(4, dtype=torch.bfloat16)
    with pytest.raises(AssertionError, match=r"element \[0\] is 2\.0, expected 2\.02"):
        assert_same_as_unsharded(fd, [one, half], [2.02 * one, -half])
    assert_same_as_unsharded(fd, [one, half], [2 * one, -half * 1.001])


OPTIMISED = """\
import torch, meshfuse as mf
from meshfuse.ops import OPS
from meshfuse.testing import assert_same_as_unsharded
with mf.FusionDefinition() as fd:
    x = fd.define_tensor([4])
    fd.add_output(x + x)
    fd.mesh_split(x, mf.DeviceMesh((2,), ("x",)), ["x"])
for wrong in (torch.ones(4), torch.ones(5)):
    try:
        assert_same_as_unsharded(fd, [torch.ones(4)], [wrong])
    except AssertionError as error:
        print(error)
"""


@pytest.mark.slow
def test_checks_are_made_by_an_optimised_python_too() -> None:
    done = subprocess.run([sys.executable, "-O", "-c", OPTIMISED], capture_output=True, text=True, timeout=120)
    assert done.returncode == 0, done.stderr
    different, longer = done.stdout.splitlines()
    assert "element [0] is 2.0, expected 1.0 (4 of 4 differ)" in different
    assert longer == "output t1: shape (4,) instead of (5,)"
