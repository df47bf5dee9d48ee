"""Gradients of every op against torch's autograd of the independent references, in float64."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any

import pytest
import torch

import meshfuse as mf
import op_references as references
from attention_references import attention
from meshfuse.dtypes import Category, DataType
from meshfuse.ops import OPS
from meshfuse.ops.opdef import Call, Sample
from meshfuse.ops.values import TensorType
from meshfuse.testing.calls import define_call
from op_harness import argument, make_call, operands_of, sample_ids, splits

# What is checked are numbers, whatever the plan.
pytestmark = pytest.mark.usefixtures("over_whole_axes")

WIDE = {
    **dict.fromkeys((DataType.Float, DataType.Half, DataType.BFloat16), DataType.Double),
    DataType.ComplexFloat: DataType.ComplexDouble,
}
# Ops of real numbers that have no derivative here, with the reason.
WITHOUT_DERIVATIVE = {
    "lgamma": "digamma is no op of the table",
    "nextafter": "a step in the last place",
    "scaled_mm": "quantised operands",
    "attention_merge": "stands in rounds only",
    "scatter_prod": "of several factors that are 0 it has no closed form in other ops",
    **dict.fromkeys(references.NVIDIA_ONLY, "quantised operands"),
    **dict.fromkeys(
        (name for name in OPS if name.startswith(("block_", "sdpfa_bwd_")) and OPS[name].vjp is None),
        "stands in distributed forms only",
    ),
}


def _widened(value: Any) -> Any:
    if isinstance(value, TensorType):
        return TensorType(value.shape, WIDE.get(value.dtype, value.dtype))
    if isinstance(value, DataType):
        return WIDE.get(value, value)
    return [_widened(v) for v in value] if isinstance(value, list) else value


def wide_sample(name: str, place: int) -> Sample:
    """The sample with its real and complex tensors in double precision."""
    sample = OPS[name].samples()[place]
    kwargs = {key: _widened(value) for key, value in sample.kwargs.items()}
    return Sample(tuple(map(_widened, sample.args)), kwargs, sample.values)


def _has_gradient(name: str, place: int) -> bool:
    """Whether real or complex numbers go in and come out."""
    call = make_call(OPS[name], OPS[name].samples()[place])
    return all(any(t.dtype.category >= Category.FLOAT for t in side) for side in (call.types, call.results))


# Samples with tests of their own: rows whose norm is limited, and attention with dropout.
APART = [("embedding_fwd", 1), ("sdpfa_fwd", 4)]
# Their derivatives are the second ones of attention (test_second_gradients.py): their samples' outputs are made up.
BACKWARD = ("sdpfa_bwd", "sdpfa_bwd_added", "ring_attention_bwd")
DIFFERENTIABLE = [
    pair
    for pair in sample_ids()
    if pair[0] not in {*WITHOUT_DERIVATIVE, *references.RANDOM, *BACKWARD}
    and _has_gradient(*pair)
    and pair not in APART
]


def reference_of(call: Call, operands: Sequence[torch.Tensor]) -> list[torch.Tensor]:
    args = [argument(arg, operands) for arg in call.args]
    if call.op.name == "sdpfa_fwd":
        return list(attention(args[:5], call["is_causal"], call["scale"], None))
    made = references.REFERENCES[call.op.name](*args)
    return list(made) if isinstance(made, tuple) else [made]


def _wanted(call: Call, operands: Sequence[torch.Tensor], grads: dict[int, torch.Tensor]) -> list[torch.Tensor]:
    """By autograd: for every real or complex operand the gradient of the sum of (result * its gradient)."""
    leaves = [t.detach().requires_grad_(t.is_floating_point() or t.is_complex()) for t in operands]
    results = reference_of(call, leaves)
    chosen = {i: grad for i, grad in grads.items() if results[i].requires_grad}
    found = torch.autograd.grad(
        [results[i] for i in chosen],
        [t for t in leaves if t.requires_grad],
        list(chosen.values()),
        allow_unused=True,
    )
    kept = [t for t in leaves if t.requires_grad]
    return [torch.zeros_like(t) if g is None else g for t, g in zip(kept, found, strict=True)]


# Dims, counted from the last, that say no size, not even that of 1.
OPENED: dict[str, Callable[[int], bool]] = {
    "known": lambda _: False, "open": lambda _: True, "odd ones open": lambda d: d % 2 == 1,
    "even ones open": lambda d: d % 2 == 0,
}  # fmt: skip


def _opened(value: Any, is_open: Callable[[int], bool]) -> Any:
    if isinstance(value, TensorType):
        return TensorType(tuple(-1 if is_open(value.ndim - d) else n for d, n in enumerate(value.shape)), value.dtype)
    return [_opened(v, is_open) for v in value] if isinstance(value, list) else value


def _open_sample(sample: Sample, is_open: Callable[[int], bool]) -> Sample:
    kwargs = {key: _opened(value, is_open) for key, value in sample.kwargs.items()}
    return Sample(tuple(_opened(arg, is_open) for arg in sample.args), kwargs, sample.values)


def _gradients(
    name: str, sample: Sample, operands: Sequence[torch.Tensor], mesh: Any = None, opened: str = "known"
) -> tuple[Any, Any]:
    """(gradients by every real or complex operand, the gradients of the results that they are of).

    Where only some dims are open, the gradients of the results say all sizes.
    """
    fd, shapes = mf.FusionDefinition(), [t.shape for t in make_call(OPS[name], sample).results]
    tensors, results = define_call(fd, OPS[name], _open_sample(sample, OPENED[opened]))
    places = [i for i, t in enumerate(results) if t.dtype.category >= Category.FLOAT and (name != "sdpfa_fwd" or not i)]
    sizes = {i: results[i].type.shape if opened == "open" else shapes[i] for i in places}
    seeds = [fd.define_tensor(list(sizes[i]), dtype=results[i].dtype) for i in places]
    wrt = [t for t in tensors if t.dtype.category >= Category.FLOAT]
    for grad in fd.grad([results[i] for i in places], wrt, seeds):
        fd.add_output(grad)
    generator = torch.Generator().manual_seed(3)
    given = [torch.randn(shapes[i], dtype=getattr(torch, results[i].dtype.value), generator=generator) for i in places]
    if mesh is not None:
        mesh(fd, tensors)
    return fd.simulate([*operands, *given]), dict(zip(places, given, strict=True))


def _operands(name: str, call: Call, sample: Sample) -> list[torch.Tensor]:
    return operands_of(call, sample)


@pytest.mark.sampled(2)
@pytest.mark.parametrize("opened", OPENED)
@pytest.mark.parametrize(("name", "place"), DIFFERENTIABLE)
def test_gradients_of_an_op_are_those_of_autograd(name: str, place: int, opened: str) -> None:
    sample = wide_sample(name, place)
    call = make_call(OPS[name], sample)
    operands = _operands(name, call, sample)
    found, grads = _gradients(name, sample, operands, opened=opened)
    for grad, wanted in zip(found, _wanted(call, operands, grads), strict=True):
        assert grad.dtype == wanted.dtype
        torch.testing.assert_close(grad, wanted, rtol=1e-8, atol=1e-8)


def test_the_ops_without_derivative_are_known() -> None:
    real = {name for name, place in sample_ids() if _has_gradient(name, place)}
    assert {name for name in real if OPS[name].vjp is None} == set(WITHOUT_DERIVATIVE) & real


MESH = mf.DeviceMesh((3,), ("x",))


@pytest.mark.sampled(2)  # test_op_rules.py has all samples
@pytest.mark.parametrize(("name", "place"), DIFFERENTIABLE)
def test_gradients_of_an_op_are_the_same_however_an_operand_is_sharded(name: str, place: int) -> None:
    sample = wide_sample(name, place)
    call = make_call(OPS[name], sample)
    operands = _operands(name, call, sample)
    expected, _ = _gradients(name, sample, operands)
    for operand, dim in splits(call):

        def annotate(fd: mf.FusionDefinition, tensors: list[Any], operand: int = operand, dim: int = dim) -> None:
            fd.mesh_split(tensors[operand], MESH, ["x" if d == dim else None for d in range(tensors[operand].ndim)])

        found, _ = _gradients(name, sample, operands, annotate)
        for a, b in zip(found, expected, strict=True):
            torch.testing.assert_close(a, b, rtol=1e-7, atol=1e-7)


# Forms of calls that the ops' samples do not have: (build on a definition's ops, the same in torch, operands).
X, Y = (torch.randn(4, 6, dtype=torch.float64, generator=torch.Generator().manual_seed(n)) for n in (1, 2))
ZEROS = torch.tensor([[1.5, 0.0, 2.0, -1.0], [0.0, 0.0, 3.0, 1.0], [1.0, 2.0, -2.0, 0.5]], dtype=torch.float64)
TIES = torch.tensor([[1.0, 3.0, 3.0, 2.0], [2.0, 2.0, 2.0, 2.0]], dtype=torch.float64)
Z = torch.complex(X, Y)
W = torch.complex(Y, X) + 2.0
FORMS: dict[str, tuple[Any, Any, list[torch.Tensor]]] = {
    "mul with itself": (lambda o, x: o.mul(x, x), lambda x: x * x, [X]),
    "add of two broadcast operands": (lambda o, x, y: o.add(x, y), lambda x, y: x + y, [X[:, :1], X[:1]]),
    "mul with fewer dims": (lambda o, x, y: o.mul(x, y), lambda x, y: x * y, [X[None].repeat(3, 1, 1), X[0]]),
    "mul of fewer dims and of size 1": (
        lambda o, x, y: o.mul(x, y), lambda x, y: x * y, [X[None].repeat(3, 1, 1), X[:, :1]],
    ),
    "division by a row": (lambda o, x, y: o.truediv(x, y), lambda x, y: x / y, [X, Y[:1] + 3.0]),
    "a number by a tensor": (lambda o, x: o.truediv(2.0, x), lambda x: 2.0 / x, [Y.abs() + 1.0]),
    "a number less a tensor": (lambda o, x: o.sub(2.0, x), lambda x: 2.0 - x, [X]),
    "a number to a power": (lambda o, x: o.pow(2.5, x), lambda x: 2.5**x, [X]),
    "a square": (lambda o, x: o.pow(x, 2), lambda x: x**2, [X]),
    "power 0": (lambda o, x: o.pow(x, 0.0), lambda x: x**0.0, [X]),
    "powers of 0": (lambda o, x, y: o.pow(x, y), lambda x, y: x**y, [ZEROS.abs(), ZEROS.abs().flip(0) + 1.0]),
    "where of numbers": (lambda o, x: o.where(o.gt(x, 0.0), x, 1.0), lambda x: torch.where(x > 0, x, 1.0), [X]),
    "maximum of equals": (
        lambda o, x, y: o.maximum(x, y), torch.maximum, [TIES, TIES.flip(1)],
    ),
    "minimum with a number": (lambda o, x: o.minimum(x, 2.0), lambda x: torch.minimum(x, torch.tensor(2.0)), [TIES]),
    "clamp at its bounds": (lambda o, x: o.clamp(x, 2.0, 3.0), lambda x: x.clamp(2.0, 3.0), [TIES]),
    **{f"clamp from {low} to {high}": (
        lambda o, x, low=low, high=high: o.clamp(x, low, high),
        lambda x, low=low, high=high: x.clamp(low, high), [TIES],
    ) for low in (1.0, 2.0, 3.0) for high in (1.0, 2.0, 3.0)},
    "relu of 0": (lambda o, x: o.relu(x), torch.relu, [ZEROS]),
    "max of equals": (lambda o, x: o.max(x, [1]), lambda x: x.amax(1), [TIES]),
    "min of all": (lambda o, x: o.min(x), lambda x: x.amin(), [TIES]),
    "prod with zeros": (lambda o, x: o.prod(x, [1]), lambda x: x.prod(1), [ZEROS]),
    "prod of all": (lambda o, x: o.prod(x), lambda x: x.prod(), [ZEROS[2:]]),
    "cumprod with zeros": (lambda o, x: o.cumprod(x, 1), lambda x: x.cumprod(1), [ZEROS]),
    "cummax of equals": (lambda o, x: o.cummax(x, 1), lambda x: x.cummax(1).values, [TIES]),
    "cummax from a number": (
        lambda o, x: o.cummax(x, 1, 1.7),
        lambda x: torch.where(x.cummax(1).values > 1.7, x.cummax(1).values, 1.7), [TIES],
    ),
    "squeeze of what was expanded": (
        lambda o, x: o.squeeze(o.expand(x, [4, 3]), [1], True), lambda x: x.expand(4, 3)[:, 0], [X[:, :1]],
    ),
    "slice with steps and bounds": (
        lambda o, x: o.slice(x, [1, -5], [4, 6], [2, 2]), lambda x: x[1:4:2, -5:6:2], [X],
    ),
    "pad that cuts off": (
        lambda o, x: o.pad(x, [-1, 2, 1, 0]), lambda x: torch.nn.functional.pad(x, [-1, 2, 1, 0]), [X],
    ),
    "broadcast_in_dim of a size 1": (
        lambda o, x: o.broadcast_in_dim(x, [3, 4, 5], [1, 2]), lambda x: x.expand(3, 4, 5), [X[:, :1]],
    ),
    "matmul of a shared matrix by a batch": (
        lambda o, x, y: o.matmul(x, y), torch.matmul, [X, Y.T[None].repeat(3, 1, 1)],
    ),
    "matmul of a row by a batch": (lambda o, x, y: o.matmul(x, y), torch.matmul, [X[0], Y.T[None].repeat(3, 1, 1)]),
    "matmul of a batch by a column": (lambda o, x, y: o.matmul(x, y), torch.matmul, [X[None].repeat(3, 1, 1), X[0]]),
    "a dot product": (lambda o, x, y: o.matmul(x, y), torch.matmul, [X[0], Y[0]]),
    "linear of a row by a stack": (
        lambda o, x, w: o.linear(x, w), lambda x, w: torch.einsum("k,dnk->dn", x, w), [X[0], Y[None].repeat(3, 1, 1)],
    ),
    "linear of a row": (lambda o, x, w: o.linear(x, w), torch.nn.functional.linear, [X[0], Y]),
    "embedding without its padding": (
        lambda o, x: o.embedding_fwd(o.iota(3), x, 1),
        lambda x: torch.nn.functional.embedding(torch.arange(3), x, 1), [X],
    ),
    "embedding scaled by frequency": (
        lambda o, x: o.embedding_fwd(o.cast(o.truediv(o.iota(3), 2), DataType.Int), x, None, None, None, True),
        lambda x: torch.nn.functional.embedding(torch.tensor([0, 0, 1]), x, scale_grad_by_freq=True), [X],
    ),
    "select before the end": (lambda o, x: o.select(x, -2, 1), lambda x: x[:, -2], [X]),
    "index_select twice": (
        lambda o, x: o.index_select(x, o.cast(o.truediv(o.iota(6), 2), DataType.Int), 0),
        lambda x: x[[0, 0, 1, 1, 2, 2]], [X],
    ),
    "complex product": (lambda o, x, y: o.mul(x, y), lambda x, y: x * y, [Z, W]),
    "complex times real": (lambda o, x, y: o.mul(x, y), lambda x, y: x * y, [Z, X]),
    "complex quotient": (lambda o, x, y: o.truediv(x, y), lambda x, y: x / y, [Z, W]),
    "complex matmul": (lambda o, x, y: o.matmul(x, y), torch.matmul, [Z, W.T.contiguous()]),
    "complex exp": (lambda o, x: o.exp(x), torch.exp, [Z]),
    "complex tanh": (lambda o, x: o.tanh(x), torch.tanh, [Z]),
    "complex abs": (lambda o, x: o.abs(x), torch.abs, [Z]),
    "complex log": (lambda o, x: o.log(x), torch.log, [W]),
    "complex sum": (lambda o, x: o.sum(x, [0]), lambda x: x.sum(0), [Z]),
    "real of complex": (lambda o, x: o.real(x), torch.real, [Z]),
    "a real number made complex": (
        lambda o, x: o.cast(x, DataType.ComplexDouble), lambda x: x.to(torch.complex128), [X],
    ),
}  # fmt: skip


@pytest.mark.parametrize("form", FORMS)
def test_other_forms_of_calls(form: str) -> None:
    build, reference, values = FORMS[form]
    fd = mf.FusionDefinition()
    tensors = [fd.define_tensor(list(t.shape), dtype=DataType(str(t.dtype).removeprefix("torch."))) for t in values]
    out = build(fd.ops, *tensors)
    seed = fd.define_tensor(list(out.type.shape), dtype=out.dtype)
    for grad in fd.grad(out, tensors, seed):
        fd.add_output(grad)
    given = torch.randn(
        out.type.shape, dtype=getattr(torch, out.dtype.value), generator=torch.Generator().manual_seed(4)
    )
    leaves = [t.clone().requires_grad_() for t in values]
    wanted = torch.autograd.grad(reference(*leaves), leaves, given)
    for a, b in zip(fd.simulate([*values, given]), wanted, strict=True):
        torch.testing.assert_close(a, b, rtol=1e-9, atol=1e-9)


@pytest.mark.parametrize("name", ["tanh", "erfinv", "silu", "log1p", "asinh", "erfcinv"])
def test_gradients_are_finite_differences(name: str) -> None:
    low, high = OPS[name].domain or (-2.0, 2.0)
    x = torch.linspace(low * 0.9 + 0.05, high * 0.9, 8, dtype=torch.float64)
    fd = mf.FusionDefinition()
    t = fd.define_tensor([8], dtype=DataType.Double)
    y = fd.call(name, (t,))
    fd.add_output(y)
    fd.add_output(fd.grad(y, t))
    (above, _), (below, _), (_, found) = (fd.simulate([x + step]) for step in (1e-6, -1e-6, 0.0))
    torch.testing.assert_close(found, (above - below) / 2e-6, rtol=1e-6, atol=1e-6)


@pytest.mark.parametrize(("low", "high"), [(1.0, 3.0), (3.0, 1.0), (2.0, 2.0), (-torch.inf, 2.0)])
def test_the_gradient_of_a_clamp_between_scalars(low: float, high: float) -> None:
    fd = mf.FusionDefinition()
    x, bounds = fd.define_tensor([2, 4], dtype=DataType.Double), [fd.define_scalar() for _ in range(2)]
    fd.add_output(fd.grad(fd.ops.sum(fd.ops.clamp(x, *bounds)), x))
    given = TIES.clone().requires_grad_()
    given.clamp(low, high).sum().backward()
    assert given.grad is not None
    torch.testing.assert_close(fd.simulate([TIES, low, high])[0], given.grad)


@pytest.mark.parametrize("way", ["number", "scalar", "open rows"])
@pytest.mark.parametrize("padding", range(-4, 4))
def test_the_padding_of_an_embedding(padding: int, way: str) -> None:
    """As torch counts it: a negative one from the last row."""
    mesh, places = mf.DeviceMesh((2,), ("tp",)), torch.tensor([0, 3, 2, 1, 2])
    fd = mf.FusionDefinition()
    table = fd.define_tensor([-1 if way == "open rows" else 4, 6], dtype=DataType.Double)
    index = fd.define_tensor([5], dtype=DataType.Int)
    fd.mesh_split(table, mesh, ["tp", None])
    row = fd.define_scalar(dtype=DataType.Int) if way == "scalar" else padding
    fd.add_output(fd.grad(fd.ops.sum(fd.ops.embedding_fwd(index, table, row)), table))
    leaf = X.clone().requires_grad_()
    torch.nn.functional.embedding(places, leaf, padding).sum().backward()
    given = [X, places, padding] if way == "scalar" else [X, places]
    assert leaf.grad is not None
    torch.testing.assert_close(fd.simulate(given)[0], leaf.grad)
