"""Second gradients of every differentiable op against torch's autograd of the references, at zeros and ties as well."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import pytest
import torch

import meshfuse as mf
from gradient_checks import Annotate, Pair, both
from meshfuse.dtypes import Category
from meshfuse.ops import OPS
from meshfuse.ops.opdef import Call, Sample
from op_harness import argument, make_call, operands_of
from test_gradients import DIFFERENTIABLE, reference_of, wide_sample

# What is checked are numbers, whatever the plan.
pytestmark = pytest.mark.usefixtures("over_whole_axes")


def _whole(call: Call, sample: Sample) -> list[torch.Tensor]:
    """Operands of small whole numbers, many of them 0 or equal; indices and flags as the sample has them."""
    generator = torch.Generator().manual_seed(7)
    return [
        torch.randint(-1, 3, t.shape, generator=generator).to(t.dtype) if t.is_floating_point() or t.is_complex() else t
        for t in operands_of(call, sample)
    ]


def _float_results(name: str, place: int) -> list[int]:
    results = make_call(OPS[name], wide_sample(name, place)).results
    return [i for i, t in enumerate(results) if t.dtype.category >= Category.FLOAT]


def _second(
    name: str, sample: Sample, operands: Sequence[torch.Tensor], places: Sequence[int], annotate: Annotate
) -> list[Pair]:
    """The second gradients of these results."""
    call = make_call(OPS[name], sample)

    def build(fd: Any, *tensors: Any) -> list[Any]:
        made = fd.call(name, [argument(arg, tensors) for arg in call.args])
        return [made[i] if isinstance(made, tuple) else made for i in places]

    def reference(*tensors: Any) -> list[torch.Tensor]:
        return [reference_of(call, tensors)[i] for i in places]

    return both(build, reference, operands, annotate).second


def _assert_same(pairs: Sequence[Pair]) -> None:
    """But for NaN in torch, which has 0 / 0 on its way to some numbers."""
    for found, wanted in pairs:
        torch.testing.assert_close(
            torch.where(wanted.isnan(), wanted, found), wanted, rtol=1e-8, atol=1e-8, equal_nan=True
        )


# Of several results all, or the first one only: attention then has other gradients.
CASES = [(*pair, n) for pair in DIFFERENTIABLE for n in sorted({1, len(_float_results(*pair))})]


@pytest.mark.sampled(2)
@pytest.mark.parametrize("numbers", ["any", "zeros and ties"])
@pytest.mark.parametrize(("name", "place", "results"), CASES)
def test_second_gradients_of_an_op_are_those_of_autograd(name: str, place: int, results: int, numbers: str) -> None:
    sample = wide_sample(name, place)
    call = make_call(OPS[name], sample)
    operands = operands_of(call, sample) if numbers == "any" else _whole(call, sample)
    _assert_same(_second(name, sample, operands, _float_results(name, place)[:results], lambda *_: None))


SHARDED = [("prod", 0), ("cumprod", 0), ("max", 0), ("cummax", 0), ("var", 0), ("sdpfa_fwd", 0), ("sdpfa_fwd", 3),
           ("ring_attention", 0), ("ring_attention", 2), ("linear", 0), ("embedding_fwd", 0)]  # fmt: skip


@pytest.mark.slow
@pytest.mark.parametrize(("name", "place"), SHARDED)
def test_they_are_the_same_however_an_operand_is_sharded(name: str, place: int) -> None:
    sample, mesh = wide_sample(name, place), mf.DeviceMesh((2,), ("x",))
    call = make_call(OPS[name], sample)
    for operand, dim in [(i, d) for i, t in enumerate(call.types) for d, n in enumerate(t.shape) if n > 1]:

        def annotate(fd: Any, tensors: Sequence[Any], operand: int = operand, dim: int = dim) -> None:
            fd.mesh_split(tensors[operand], mesh, ["x" if d == dim else None for d in range(tensors[operand].ndim)])

        _assert_same(_second(name, sample, _whole(call, sample), [0], annotate))


ZEROS = [[2.0, 0.0, 3.0], [0.0, 0.0, 3.0], [0.0, 2.0, 0.0], [0.0, 0.0, 0.0], [2.0, -1.0, 3.0]]


@pytest.mark.parametrize("name", ["prod", "cumprod"])
@pytest.mark.parametrize("row", ZEROS, ids=str)
def test_the_sum_of_the_squares_of_a_product_s_gradient(name: str, row: list[float]) -> None:
    fd = mf.FusionDefinition()
    x = fd.define_tensor([1, 3], dtype=mf.DataType.Double)
    made = fd.ops.prod(x, [1]) if name == "prod" else fd.ops.cumprod(x, 1)
    once = fd.grad(made, x)
    fd.add_output(fd.grad(fd.ops.sum(fd.ops.mul(once, once)), x))
    leaf = torch.tensor([row], dtype=torch.float64, requires_grad=True)
    (first,) = torch.autograd.grad(getattr(leaf, name)(1).sum(), leaf, create_graph=True)
    wanted = torch.autograd.grad((first * first).sum(), leaf)
    torch.testing.assert_close(fd.simulate([leaf.detach()]), list(wanted))


def test_attention_with_dropout_says_that_it_has_no_second_derivative() -> None:
    fd = mf.FusionDefinition()
    q, k, v = (fd.define_tensor([2, 2, 4, 8]) for _ in range(3))
    grad = fd.grad(fd.ops.sdpfa_fwd(q, k, v, dropout_p=0.1)[0], q)
    with pytest.raises(
        mf.DefinitionError,
        match=r"sdpfa_bwd: no derivative here with dropout: found dropout_p 0.1, needed 0. Write the attention with",
    ):
        fd.grad(grad, k)
