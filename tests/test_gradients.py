"""Gradients of every op against torch's autograd of the independent references, in float64."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import pytest
import torch

import meshfuse as mf
import op_references as references
from meshfuse.dtypes import DataType
from meshfuse.ops import OPS
from meshfuse.ops.base import Call, Sample, TensorRef, TensorType
from op_harness import make_call, operands_of, sample_ids

WIDE = {
    **dict.fromkeys((DataType.Float, DataType.Half, DataType.BFloat16), DataType.Double),
    DataType.ComplexFloat: DataType.ComplexDouble,
}
# Ops of real numbers that have no derivative here, with the reason.
WITHOUT_DERIVATIVE = {
    "lgamma": "digamma is no op of the table",
    "nextafter": "a step in the last place",
    "scaled_mm": "quantised operands",
    "sdpfa_bwd": "second derivatives of attention",
    **dict.fromkeys(references.NVIDIA_ONLY, "quantised operands"),
    **dict.fromkeys(
        (name for name in OPS if name.startswith(("block_", "sdpfa_bwd_"))), "stands in distributed forms only"
    ),
}


def _widened(value: Any) -> Any:
    if isinstance(value, TensorType):
        return TensorType(value.shape, WIDE.get(value.dtype, value.dtype))
    if isinstance(value, DataType):
        return WIDE.get(value, value)
    return [_widened(v) for v in value] if isinstance(value, list) else value


def _wide_sample(name: str, place: int) -> Sample:
    """The sample with its real and complex tensors in double precision."""
    sample = OPS[name].samples()[place]
    kwargs = {key: _widened(value) for key, value in sample.kwargs.items()}
    return Sample(tuple(map(_widened, sample.args)), kwargs, sample.values)


def _has_gradient(name: str, place: int) -> bool:
    """Whether real or complex numbers go in and come out."""
    call = make_call(OPS[name], OPS[name].samples()[place])
    return all(any(t.dtype.category >= 2 for t in side) for side in (call.types, call.results))


# Raises: a table whose rows are limited has none.
LIMITED = ("embedding_fwd", 1)
DIFFERENTIABLE = [
    pair
    for pair in sample_ids()
    if pair[0] not in {*WITHOUT_DERIVATIVE, *references.RANDOM} and _has_gradient(*pair) and pair != LIMITED
]


def _argument(arg: Any, tensors: Sequence[torch.Tensor]) -> Any:
    if isinstance(arg, TensorRef):
        return tensors[arg.id]
    if isinstance(arg, tuple) and arg and isinstance(arg[0], TensorRef):
        return [tensors[ref.id] for ref in arg]
    return arg


def _reference(call: Call, operands: Sequence[torch.Tensor]) -> list[torch.Tensor]:
    args = [_argument(arg, operands) for arg in call.args]
    if call.op.name == "sdpfa_fwd":
        return [references.attention(args[:5], call["is_causal"], call["scale"], None)[0]]
    made = references.REFERENCES[call.op.name](*args)
    return list(made) if isinstance(made, tuple) else [made]


def _wanted(call: Call, operands: Sequence[torch.Tensor], grads: dict[int, torch.Tensor]) -> list[torch.Tensor]:
    """By autograd: for every real or complex operand the gradient of the sum of (result * its gradient)."""
    leaves = [t.detach().requires_grad_(t.is_floating_point() or t.is_complex()) for t in operands]
    results = _reference(call, leaves)
    chosen = {i: grad for i, grad in grads.items() if results[i].requires_grad}
    found = torch.autograd.grad(
        [results[i] for i in chosen],
        [t for t in leaves if t.requires_grad],
        list(chosen.values()),
        allow_unused=True,
    )
    kept = [t for t in leaves if t.requires_grad]
    return [torch.zeros_like(t) if g is None else g for t, g in zip(kept, found, strict=True)]


def _defined(sample: Sample, name: str) -> tuple[mf.FusionDefinition, list[Any], list[Any]]:
    """(definition of the one op, its operands, its results)."""
    fd, tensors = mf.FusionDefinition(), []

    def defined(arg: Any) -> Any:
        if isinstance(arg, TensorType):
            tensors.append(fd.define_tensor(list(arg.shape), dtype=arg.dtype))
            return tensors[-1]
        return [defined(a) for a in arg] if isinstance(arg, list) else arg

    args = [defined(arg) for arg in sample.args]
    made = fd.call(name, args, {key: defined(value) for key, value in sample.kwargs.items()})
    return fd, tensors, list(made) if isinstance(made, tuple) else [made]


def _gradients(name: str, sample: Sample, operands: Sequence[torch.Tensor], mesh: Any = None) -> tuple[Any, Any]:
    """(gradients by every real or complex operand, the gradients of the results that they are of)."""
    fd, tensors, results = _defined(sample, name)
    places = [i for i, t in enumerate(results) if t.dtype.category >= 2 and (name != "sdpfa_fwd" or not i)]
    seeds = [fd.define_tensor(list(results[i].type.shape), dtype=results[i].dtype) for i in places]
    wrt = [t for t in tensors if t.dtype.category >= 2]
    for grad in fd.grad([results[i] for i in places], wrt, seeds):
        fd.add_output(grad)
    generator = torch.Generator().manual_seed(3)
    given = [
        torch.randn(results[i].type.shape, dtype=getattr(torch, results[i].dtype.value), generator=generator)
        for i in places
    ]
    if mesh is not None:
        mesh(fd, tensors)
    return fd.simulate([*operands, *given]), dict(zip(places, given, strict=True))


def _operands(name: str, call: Call, sample: Sample) -> list[torch.Tensor]:
    return operands_of(call, sample, references.DOMAINS.get(name))


@pytest.mark.parametrize(("name", "place"), DIFFERENTIABLE)
def test_gradients_of_an_op_are_those_of_autograd(name: str, place: int) -> None:
    sample = _wide_sample(name, place)
    if sample.kwargs.get("dropout_p") or len(sample.args) == 5 and name == "sdpfa_fwd":
        pytest.skip("see the tests of attention")
    call = make_call(OPS[name], sample)
    operands = _operands(name, call, sample)
    found, grads = _gradients(name, sample, operands)
    for grad, wanted in zip(found, _wanted(call, operands, grads), strict=True):
        assert grad.dtype == wanted.dtype
        torch.testing.assert_close(grad, wanted, rtol=1e-8, atol=1e-8)


def test_the_ops_without_derivative_are_known() -> None:
    real = {name for name, place in sample_ids() if _has_gradient(name, place)}
    assert {name for name in real if OPS[name].vjp is None} == set(WITHOUT_DERIVATIVE) & real
