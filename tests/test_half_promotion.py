"""`FusionDefinition(promotion="torch")`: types of half precision are torch's, and nvFuser's promotion is said."""

from __future__ import annotations

from typing import Any

import pytest
import torch

import meshfuse as mf
from meshfuse.ops import OPS
from meshfuse.ops.opdef import Sample
from meshfuse.ops.values import TensorType

UNARY = ["exp", "sin", "erf", "log", "rsqrt", "sigmoid", "tanh", "reciprocal", "neg", "abs", "relu", "sqrt", "lgamma"]
BINARY = ["add", "sub", "mul", "maximum", "minimum", "pow", "remainder", "fmod", "atan2"]
HALVES = [torch.bfloat16, torch.float16]


def numbers(dtype: torch.dtype, seed: int = 0) -> torch.Tensor:
    return (torch.rand(64, generator=torch.Generator().manual_seed(seed)) + 0.5).to(dtype)


def ran(build: Any, *tensors: torch.Tensor, promotion: str = "torch") -> torch.Tensor:
    with mf.FusionDefinition(promotion=promotion) as fd:
        fd.add_output(build(fd, *(fd.from_pytorch(t) for t in tensors)))
    return fd(*tensors)[0]


@pytest.mark.parametrize("dtype", HALVES)
@pytest.mark.parametrize("name", UNARY)
def test_functions_give_torch_s_type_and_numbers(name: str, dtype: torch.dtype) -> None:
    x = numbers(dtype)
    found, wanted = ran(lambda fd, x: getattr(fd.ops, name)(x), x), getattr(torch, name)(x)
    assert found.dtype is wanted.dtype
    torch.testing.assert_close(found, wanted, rtol=2**-7 if dtype is torch.bfloat16 else 2**-10, atol=1e-3)


@pytest.mark.parametrize("name", BINARY)
def test_types_beside_others_are_those_of_torch(name: str) -> None:
    half, other, wide = numbers(torch.bfloat16), numbers(torch.float16, 1), numbers(torch.float32, 2)
    zero_dim, integers = torch.tensor(2.0, dtype=torch.float32), torch.arange(1, 65)
    pairs: list[tuple[Any, Any]] = [(half, half), (half, other), (half, wide), (half, zero_dim), (half, 2.5),
                                    (half, 3), (wide, half), (half, integers), (integers, half)]  # fmt: skip
    tensors_only = name in ("maximum", "minimum", "atan2")  # torch's take no numbers
    for a, b in pairs[:4] + pairs[6:] if tensors_only else pairs:
        tensors = [t for t in (a, b) if isinstance(t, torch.Tensor)]

        def build(fd: Any, *given: Any, a: Any = a, b: Any = b) -> Any:
            rest = iter(given)
            return getattr(fd.ops, name)(*(next(rest) if isinstance(v, torch.Tensor) else v for v in (a, b)))

        found, wanted = ran(build, *tensors), getattr(torch, name)(a, b)
        assert found.dtype is wanted.dtype, (name, a, b)
        torch.testing.assert_close(found, wanted, rtol=2**-6, atol=1e-2)


def test_chains_and_operators_round_as_torch_rounds() -> None:
    x, y = numbers(torch.bfloat16), numbers(torch.bfloat16, 1)
    found = ran(lambda fd, x, y: (x * y + x) * y, x, y)
    assert torch.equal(found, (x * y + x) * y)
    kept = ran(lambda fd, x, y: (x * y + x) * y, x, y, promotion="nvfuser")
    assert kept.dtype is torch.float32 and torch.equal(kept, (x.float() * y.float() + x.float()) * y.float())


def test_what_is_computed_wide_in_torch_stays_so() -> None:
    """A softmax is not rounded between its own ops, and a type that is named is that."""
    x = numbers(torch.bfloat16)
    torch.testing.assert_close(ran(lambda fd, x: fd.ops.softmax(x, 0), x), x.softmax(0), rtol=2**-8, atol=0)
    assert ran(lambda fd, x: fd.ops.cast(x, torch.float32), x).dtype is torch.float32
    assert ran(lambda fd, x: fd.ops.sum(x, [0], dtype=torch.float32), x).dtype is torch.float32
    assert ran(lambda fd, x: fd.ops.var(x, [0], 1), x).dtype is x.var(0).dtype


def test_gradients_have_their_primal_s_type() -> None:
    with mf.FusionDefinition(promotion="torch") as fd:
        x = fd.define_tensor([64], dtype=mf.DataType.BFloat16)
        fd.add_output(fd.ops.sum(x * x))
    x = numbers(torch.bfloat16).requires_grad_()
    fd(x)[0].backward()
    assert torch.equal(x.grad, 2 * x.detach())


def test_no_op_of_one_result_is_left_in_float() -> None:
    """Of all ops, with the operands of their samples in BFloat16."""

    def low(value: Any) -> Any:
        if isinstance(value, TensorType):
            return value._replace(dtype=mf.DataType.BFloat16) if value.dtype is mf.DataType.Float else value
        return type(value)(map(low, value)) if isinstance(value, (list, tuple)) else value

    left = []
    for op in OPS.values():
        sample = op.samples()[0]
        sample = Sample(tuple(map(low, sample.args)), {k: low(v) for k, v in sample.kwargs.items()})
        fd = mf.FusionDefinition(promotion="torch")
        args = [fd.define_tensor(v.shape, dtype=v.dtype) if isinstance(v, TensorType) else v for v in sample.args]
        named = {p.name for p in op.params if p.kind.value == "DataType"}
        try:
            made = fd.call(op.name, args, sample.kwargs)
        except mf.DefinitionError:  # does not take BFloat16
            continue
        types = [v.dtype for v in sample.args if isinstance(v, TensorType)]
        if isinstance(made, mf.TensorView) and mf.DataType.BFloat16 in types and mf.DataType.Float not in types:
            left += [op.name] if made.dtype is mf.DataType.Float and not named else []
    assert left == []


def test_nvfuser_s_promotion_is_said_where_it_happens() -> None:
    with mf.FusionDefinition() as fd:
        x = fd.define_tensor([8], dtype=mf.DataType.BFloat16)
        y = x + x
        z = fd.ops.cast(y, mf.DataType.BFloat16)
        fd.add_output(z)
    said = (
        'Float by nvFuser\'s promotion: add of BFloat16 is not rounded; FusionDefinition(promotion="torch") rounds it'
    )
    assert said in fd.explain(y) and "Float by nvFuser" not in fd.explain(z) + fd.explain(x)


def test_an_op_of_a_list_of_tensors_is_explained() -> None:
    with mf.FusionDefinition() as fd:
        x = fd.define_tensor([8])
        y = fd.ops.cat([x, x])
        fd.add_output(y)
    assert "made by cat(x (t0), x (t0))" in fd.explain(y) and "Float by nvFuser" not in fd.explain(y)


def test_the_text_of_a_definition_has_the_casts() -> None:
    with mf.FusionDefinition(promotion="torch") as fd:
        x = fd.define_tensor([8], dtype=mf.DataType.BFloat16)
        fd.add_output(x + x)
    scope: dict[str, Any] = {}
    exec(repr(fd), scope)
    x = numbers(torch.bfloat16)[:8]
    assert torch.equal(scope["fd"](x)[0], fd(x)[0])


def test_another_promotion_is_an_error() -> None:
    with pytest.raises(mf.DefinitionError, match="promotion: found 'jax', needed 'nvfuser' or 'torch'"):
        mf.FusionDefinition(promotion="jax")
    with pytest.raises(mf.DefinitionError, match="promotion: found "):
        mf.FusionDefinition(promotion=torch.ones(2))  # type: ignore[arg-type]
