"""Calls of `fd.grad`: what they return, and which are errors."""

from __future__ import annotations

import re
from collections.abc import Callable, Sequence
from typing import Any

import pytest
import torch

import meshfuse as mf
from meshfuse.dtypes import DataType

INT = DataType.Int


def _defined(*shapes: Sequence[int], dtype: DataType = DataType.Float) -> tuple[mf.FusionDefinition, list[Any]]:
    fd = mf.FusionDefinition()
    return fd, [fd.define_tensor(list(shape), dtype=dtype) for shape in shapes]


def test_one_tensor_gives_one_gradient_and_a_list_a_list() -> None:
    fd, (x, y) = _defined([3], [3])
    z = fd.ops.mul(x, y)
    assert fd.grad(z, x).ndim == 1
    assert [g.ndim for g in fd.grad([z], [x, y])] == [1, 1]
    assert fd.grad(z, []) == []


def test_what_nothing_depends_on_has_zeros_and_an_output_has_its_own_gradient() -> None:
    fd, (x, y) = _defined([3], [2, 2])
    z = fd.ops.mul(x, 2.0)
    for grad in fd.grad(z, [x, y, z]):
        fd.add_output(grad)
    a, b, c = fd.simulate([torch.zeros(3), torch.zeros(2, 2)])
    assert a.tolist() == [2.0] * 3 and b.tolist() == [[0.0] * 2] * 2 and c.tolist() == [1.0] * 3


def test_every_gradient_is_a_tensor_of_its_own() -> None:
    fd, (x, y, seed) = _defined([3], [3], [3])
    grads = fd.grad(fd.ops.add(x, y), [x, y], seed)
    assert len({seed.id, *(g.id for g in grads)}) == 3
    mesh = mf.DeviceMesh((3,), ("x",))
    for grad, spec in zip(grads, (["x"], [None]), strict=True):
        fd.mesh_split(grad, mesh, spec)
        fd.add_output(grad)
    found = fd.simulate([torch.zeros(3), torch.zeros(3), torch.arange(3.0)])
    assert [t.tolist() for t in found] == [[0.0, 1.0, 2.0]] * 2


def test_several_outputs_are_summed() -> None:
    fd, (x, seed) = _defined([3], [3])
    fd.add_output(fd.grad([fd.ops.mul(x, 2.0), fd.ops.sin(x)], x, [seed, None]))
    (found,) = fd.simulate([torch.arange(3.0), torch.ones(3) * 5])
    torch.testing.assert_close(found, 10.0 + torch.arange(3.0).cos())


def test_gradients_have_the_type_of_their_primal_and_are_summed_in_single_precision() -> None:
    fd, (x, w) = _defined([4, 8], [8, 8], dtype=DataType.BFloat16)
    parts = [fd.ops.matmul(x, w) for _ in range(3)]
    grads = fd.grad(fd.ops.add(fd.ops.add(parts[0], fd.ops.tanh(parts[1])), parts[2]), [x, w])
    assert [g.dtype for g in grads] == [DataType.BFloat16] * 2
    assert any(
        n.op.name == "add" and fd.recording.tensors[n.outputs[0]].type.dtype is DataType.Float
        for n in fd.recording.nodes[-8:]
    )
    for grad in grads:
        fd.add_output(grad)
    a, b = (torch.randn(*shape).bfloat16() for shape in ((4, 8), (8, 8)))
    leaves = [t.double().requires_grad_() for t in (a, b)]
    y = leaves[0] @ leaves[1]
    wanted = torch.autograd.grad((2 * y + y.tanh()).sum(), leaves)
    for found, other in zip(fd.simulate([a, b]), wanted, strict=True):
        torch.testing.assert_close(found.double(), other, rtol=3e-2, atol=5e-2)


def test_no_gradient_passes_where_it_is_stopped() -> None:
    fd, (x,) = _defined([3])
    still = fd.stop_gradient(fd.ops.mul(x, 1.0))
    fd.add_output(fd.grad(fd.ops.mul(x, still), x))
    assert fd.simulate([torch.arange(3.0)])[0].tolist() == [0.0, 1.0, 2.0]


def test_attention_without_a_bias_uses_its_own_backward_and_keeps_dropped_what_was_dropped() -> None:
    fd, qkv = _defined(*[[1, 2, 6, 4]] * 3)
    out = fd.ops.sdpfa_fwd(*qkv, dropout_p=0.5)[0]
    grad = fd.grad(out, qkv[2])
    assert [n.op.name for n in fd.recording.nodes if n.op.name.startswith("sdpfa")] == ["sdpfa_fwd", "sdpfa_bwd"]
    for t in (out, grad):
        fd.add_output(t)
    v = torch.randn(1, 2, 6, 4)
    out, found = fd.simulate([torch.zeros(1, 2, 6, 4), torch.zeros(1, 2, 6, 4), v])
    # The output is linear in v: the sum of its elements is that of v times its gradient.
    torch.testing.assert_close(out.sum(), (v * found).sum(), rtol=1e-4, atol=1e-4)
    assert float((found / found.max()).std()) > 0.1


def test_the_lines_of_a_backward_are_those_of_its_forward() -> None:
    fd, (x, w) = _defined([4, 8], [8, 8])
    y = fd.ops.matmul(x, w)
    fd.grad(y, w)
    line = fd.recording.nodes[-1].line
    assert (line.line, line.text) == (fd.recording.nodes[0].line.line, "gradient of: y = fd.ops.matmul(x, w)")


# what is refused


def _integers() -> Any:
    fd, (x,) = _defined([3], dtype=INT)
    return fd.grad(x, x)


def _predicate() -> Any:
    fd, (x,) = _defined([3])
    return fd.grad(fd.ops.gt(x, 0.0), x)


def _no_derivative() -> Any:
    fd, (x,) = _defined([3])
    return fd.grad(fd.ops.lgamma(x), x)


def _wrong_shape() -> Any:
    fd, (x, y) = _defined([3], [4])
    return fd.grad(fd.ops.neg(x), x, y)


def _wrong_count() -> Any:
    fd, (x,) = _defined([3])
    return fd.grad([x, x], x, [x])


def _no_list() -> Any:
    fd, (x, y) = _defined([3], [4])
    return fd.grad(fd.ops.sum(x), x, y)


def _foreign() -> Any:
    fd, (x,) = _defined([3])
    _, (y,) = _defined([3])
    return fd.grad(x, y)


def _limited() -> Any:
    fd, (table,) = _defined([5, 3])
    return fd.grad(fd.ops.embedding_fwd(fd.ops.iota(4), table, None, 1.0), table)


REFUSED = {
    _integers: "grad: outputs: found x (t0): Int[3], needed floating point or complex tensors. Only those have",
    _predicate: "grad: outputs: found t1: Bool[3], needed floating point or complex tensors.",
    _no_derivative: "lgamma has no derivative here: found a gradient that passes through it. Leave what depends",
    _wrong_shape: "grad: grad_outputs: found y (t1): Float[4] for t2: Float[3], needed the output's shape.",
    _wrong_count: "grad: grad_outputs: found 1 for 2 outputs, needed one per output, or None.",
    _no_list: "Pass a tensor of the shape of the output; fd.grad(loss, [x, y]) is by several.",
    _foreign: "grad: wrt: found",
    _limited: "embedding_fwd: no derivative here: found max_norm, needed None. Limit the norm of the table",
}


@pytest.mark.parametrize("refused", REFUSED, ids=lambda f: f.__name__.strip("_"))
def test_a_missing_derivative_is_an_error_with_the_line(refused: Callable[[], Any]) -> None:
    pattern = (
        re.escape(REFUSED[refused]).replace(r"x\ \(t0\)", r"(x \(t0\)|t0)").replace(r"y\ \(t1\)", r"(y \(t1\)|t1)")
    )
    with pytest.raises(mf.DefinitionError, match=pattern) as caught:
        refused()
    assert "test_gradient_calls.py:" in str(caught.value)


def test_a_gradient_that_was_widened_is_narrowed_to_what_it_was() -> None:
    """A sum of half precision is of Float, and so is its gradient on its way: not rounded again, nor written twice."""
    with mf.FusionDefinition() as fd:
        x, y, w = (fd.define_tensor([4, 4], dtype=DataType.BFloat16) for _ in range(3))
        total = fd.ops.cast(fd.ops.add(x, fd.ops.linear(y, w)), DataType.BFloat16)
        out = fd.ops.cast(fd.ops.tanh(total), DataType.BFloat16)
        for grad in fd.grad(fd.ops.sum(fd.ops.mul(out, out)), [x, y, w]):
            fd.add_output(grad)
    makers = {i: node for node in fd.recording.nodes for i in node.outputs}
    for node in (node for node in fd.recording.nodes if node.op.name == "cast"):
        before = makers.get(node.inputs[0])
        if before is not None and before.op.name == "cast":
            first, middle, last = (
                fd.recording.tensors[i].type.dtype for i in (*before.inputs, *node.inputs, *node.outputs)
            )
            assert not (first is last and first.itemsize < middle.itemsize)
    inputs = [torch.randn(4, 4, generator=torch.Generator().manual_seed(i)).bfloat16() for i in range(3)]
    a, b, c = leaves = [t.double().requires_grad_() for t in inputs]
    expected = torch.autograd.grad((a + b @ c.t()).tanh().square().sum(), leaves)
    for found, wanted in zip(fd.execute(inputs), expected, strict=True):
        torch.testing.assert_close(found.double(), wanted, rtol=5e-2, atol=5e-2)
