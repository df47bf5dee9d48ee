"""Gradients of whole programs against torch's autograd, on one rank and on simulated meshes, and their bills."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any

import pytest
import torch
import torch.nn.functional as F

import meshfuse as mf
from defining import rebuilt
from meshfuse.dtypes import Category, DataType

DOUBLE, INT = DataType.Double, DataType.Int
B, S, D, HEADS, HIDDEN, VOCAB = 2, 6, 8, 4, 12, 10


def _random(*shape: int, seed: int = 0) -> torch.Tensor:
    generator = torch.Generator().manual_seed(seed + sum(shape))
    return torch.randn(shape, dtype=torch.float64, generator=generator)


def mlp(o: Any, x: Any, w1: Any, b1: Any, w2: Any) -> Any:
    return o.linear(o.gelu(o.linear(x, w1, b1)), w2)


def torch_mlp(x: Any, w1: Any, b1: Any, w2: Any) -> Any:
    return F.linear(F.gelu(F.linear(x, w1, b1)), w2)


def attention(o: Any, x: Any, wq: Any, wk: Any, wv: Any, wo: Any) -> Any:
    """x [B, S, D], causal, with weights [D, D]."""

    def split(w: Any) -> Any:
        return o.permute(o.reshape(o.matmul(x, w), [B, S, HEADS, D // HEADS]), [0, 2, 1, 3])

    out = o.sdpfa_fwd(split(wq), split(wk), split(wv), is_causal=True)[0]
    return o.matmul(o.reshape(o.permute(out, [0, 2, 1, 3]), [B, S, D]), wo)


def torch_attention(x: Any, wq: Any, wk: Any, wv: Any, wo: Any) -> Any:
    q, k, v = ((x @ w).reshape(B, S, HEADS, D // HEADS).transpose(1, 2) for w in (wq, wk, wv))
    out = F.scaled_dot_product_attention(q, k, v, is_causal=True)
    return out.transpose(1, 2).reshape(B, S, D) @ wo


def block(o: Any, x: Any, gain: Any, bias: Any, *w: Any) -> Any:
    h = o.add(x, attention(o, o.layer_norm(x, [D], gain, bias), *w[:4]))
    return o.add(h, mlp(o, o.rms_norm(h, [D], gain, 1e-6), *w[4:]))


def torch_block(x: Any, gain: Any, bias: Any, *w: Any) -> Any:
    h = x + torch_attention(F.layer_norm(x, [D], gain, bias), *w[:4])
    return h + torch_mlp(F.rms_norm(h, [D], gain, 1e-6), *w[4:])


def fused(o: Any, x: Any, w: Any) -> Any:
    """q, k, v of one product, and a softmax over the last dim."""
    qkv = o.matmul(x, w)
    q, k, v = (o.slice(qkv, [0, 0, i * D], [B, S, (i + 1) * D]) for i in range(3))
    return o.mul(o.softmax(q), o.add(k, o.sigmoid(v)))


def torch_fused(x: Any, w: Any) -> Any:
    q, k, v = (x @ w).split(D, -1)
    return q.softmax(-1) * (k + v.sigmoid())


def language_model(o: Any, table: Any, head: Any, tokens: Any, targets: Any) -> Any:
    """The mean cross entropy of a look-up, a norm and a projection; one target is ignored."""
    x = o.layer_norm(o.embedding_fwd(tokens, table), [D])
    return o.cross_entropy(o.linear(x, head), targets, ignore_index=-100)


def torch_language_model(table: Any, head: Any, tokens: Any, targets: Any) -> Any:
    logits = F.linear(F.layer_norm(F.embedding(tokens, table), [D]), head)
    return F.cross_entropy(logits.movedim(-1, 1), targets, ignore_index=-100)


X, GAIN, BIAS = _random(B, S, D), _random(D) + 2.0, _random(D, seed=1)
WEIGHTS = [_random(D, D, seed=i) for i in range(4)]
W1, B1, W2 = _random(HIDDEN, D), _random(HIDDEN), _random(D, HIDDEN)
TOKENS = torch.tensor([[0, 3, 9, 3, 3, 7], [1, 0, 2, 9, 9, 4]])
TARGETS = torch.tensor([[3, 9, 3, 3, 7, -100], [0, 2, 9, 9, 4, 5]])
PROGRAMS: dict[str, tuple[Callable[..., Any], Callable[..., Any], list[torch.Tensor]]] = {
    "mlp": (mlp, torch_mlp, [X, W1, B1, W2]),
    "attention": (attention, torch_attention, [X, *WEIGHTS]),
    "block": (block, torch_block, [X, GAIN, BIAS, *WEIGHTS, W1, B1, W2]),
    "fused projection": (fused, torch_fused, [X, _random(D, 3 * D)]),
    "language model": (
        language_model,
        torch_language_model,
        [_random(VOCAB, D), _random(VOCAB, D, seed=1), TOKENS, TARGETS],
    ),
    "log_softmax": (lambda o, x: o.log_softmax(x, 1), lambda x: x.log_softmax(1), [X]),
    "logsumexp": (lambda o, x: o.logsumexp(x, [0, 2]), lambda x: x.logsumexp((0, 2)), [X]),
    "var and mean": (
        lambda o, x: o.truediv(o.mean(x, -1), o.add(o.var(x, [2]), 1.0)),
        lambda x: x.mean(-1) / (x.var(-1) + 1.0),
        [X],
    ),
}
MESHES = {
    "two ranks": mf.DeviceMesh((2,), ("x",)),
    "three ranks": mf.DeviceMesh((3,), ("x",)),
    "four by two": mf.DeviceMesh((2, 2), ("x", "y")),
}


def _name(dtype: torch.dtype) -> DataType:
    return DataType(str(dtype).removeprefix("torch."))


def _program(name: str) -> tuple[mf.FusionDefinition, list[Any], list[Any]]:
    """(definition with the gradients of the sum of the squares / 2 as its outputs, inputs, gradients)."""
    build, _, values = PROGRAMS[name]
    fd = mf.FusionDefinition()
    tensors = [fd.define_tensor(list(t.shape), dtype=_name(t.dtype)) for t in values]
    y = build(fd.ops, *tensors)
    wrt = [t for t in tensors if t.dtype.category is Category.FLOAT]
    grads = fd.grad(y, wrt, y)
    for t in (y, *grads):
        fd.add_output(t)
    return fd, tensors, grads


def _wanted(name: str) -> list[torch.Tensor]:
    _, reference, values = PROGRAMS[name]
    leaves = [t.clone().requires_grad_(t.is_floating_point()) for t in values]
    y = reference(*leaves)
    return [y.detach(), *torch.autograd.grad(y, [t for t in leaves if t.requires_grad], y.detach())]


def _assert_close(found: Sequence[torch.Tensor], wanted: Sequence[torch.Tensor]) -> None:
    for a, b in zip(found, wanted, strict=True):
        torch.testing.assert_close(a, b, rtol=1e-6, atol=1e-7)


@pytest.mark.parametrize("name", PROGRAMS)
def test_gradients_of_a_program_are_those_of_autograd(name: str) -> None:
    fd, _, _ = _program(name)
    _assert_close(fd.simulate(PROGRAMS[name][2]), _wanted(name))


@pytest.mark.sampled(3)
@pytest.mark.parametrize("mesh", MESHES)
@pytest.mark.parametrize("name", PROGRAMS)
@pytest.mark.usefixtures("over_whole_axes")
def test_they_are_the_same_however_the_inputs_are_sharded(name: str, mesh: str) -> None:
    wanted, axes = _wanted(name), list(MESHES[mesh].names)
    for i, dim in ((i, d) for i, t in enumerate(PROGRAMS[name][2]) for d in range(t.ndim)):
        fd, tensors, _ = _program(name)
        others = [d for d in range(tensors[i].ndim) if d != dim][: len(axes) - 1]
        spec: list[Any] = [None] * tensors[i].ndim
        for d, axis in zip((dim, *others), axes, strict=False):
            spec[d] = axis
        fd.mesh_split(tensors[i], MESHES[mesh], spec)
        _assert_close(fd.simulate(PROGRAMS[name][2], check_replicas=True), wanted)


@pytest.mark.slow
@pytest.mark.parametrize("name", ["mlp", "block", "language model"])
def test_gradients_annotated_like_their_primals(name: str) -> None:
    """Every weight and its gradient in shards of dim 0 (FSDP), the batch sharded too."""
    fd, tensors, grads = _program(name)
    primals = [t for t in tensors if t.dtype.category is Category.FLOAT]
    for t in (*tensors, *grads):
        fd.mesh_split(t, MESHES["two ranks"], ["x", *[None] * (t.ndim - 1)])
    assert len(primals) == len(grads)
    _assert_close(fd.simulate(PROGRAMS[name][2]), _wanted(name))


# what is communicated


def _collectives(fd: mf.FusionDefinition) -> dict[str, int]:
    """How often each collective moves at least 1000 bytes."""
    found: dict[str, int] = {}
    for entry in fd.bill().entries:
        if entry.wire >= 1000:
            found[entry.collective] = found.get(entry.collective, 0) + 1
    return found


def _sharded_mlp(spec: list[Any], annotate_grads: bool) -> tuple[mf.FusionDefinition, list[Any]]:
    """x [2, 64, 128] with the given sharding, Megatron's column and row split weights."""
    fd, mesh = mf.FusionDefinition(), mf.DeviceMesh((4,), ("tp",))
    x, w1, w2 = fd.define_tensor([2, 64, 128]), fd.define_tensor([512, 128]), fd.define_tensor([128, 512])
    y = fd.ops.linear(fd.ops.gelu(fd.ops.linear(x, w1)), w2)
    seed = fd.define_tensor([2, 64, 128])
    grads = fd.grad(y, [x, w1, w2], seed)
    for t in (y, *grads):
        fd.add_output(t)
    for t, dims in ((x, spec), (y, spec), (seed, spec), (w1, ["tp", None]), (w2, [None, "tp"])):
        fd.mesh_split(t, mesh, dims)
    for t, dims in zip(grads, (spec, ["tp", None], [None, "tp"]), strict=True):
        if annotate_grads:
            fd.mesh_split(t, mesh, dims)
    return fd, grads


def _data_parallel(weight: Any, grad: Any = None, *, other: mf.DeviceMesh | None = None) -> mf.FusionDefinition:
    """The gradient of a weight [6, 8] by rows over 4 ranks; what is said of either, unless None."""
    fd, mesh = mf.FusionDefinition(), mf.DeviceMesh((4,), ("dp",))
    x, w, z = fd.define_tensor([16, 8]), fd.define_tensor([6, 8]), fd.define_tensor([3])
    made = fd.grad(fd.ops.gelu(fd.ops.linear(x, w)), w)
    for output in (made, fd.ops.neg(z)):
        fd.add_output(output)
    fd.mesh_split(x, mesh, ["dp", None])
    for tensor, spec in ((w, weight), (made, grad)):
        if spec is not None:
            fd.mesh_split(tensor, mesh, spec)
    if other is not None:
        fd.mesh_split(z, other, [None])
    return fd


@pytest.mark.parametrize(("weight", "grad", "wanted"), [
    (None, None, "[-, -]"), ([None, None], None, "[-, -]"), (["dp", None], None, "[dp, -]"),
    ([None, [mf.Split(2, "dp"), mf.Split(2), mf.Split(2, "dp", 2)]], None, "[-, (dp:(1)2, 2, dp:(2)2)]"),
    ([None, None], ["dp", None], "[dp, -]"),
])  # fmt: skip
def test_a_gradient_that_is_an_output_lies_as_its_primal(weight: Any, grad: Any, wanted: str) -> None:
    """Unless it is annotated itself; however the definition is written."""
    fd = _data_parallel(weight, grad)
    for definition in (fd, rebuilt(fd)):
        assert str(definition.compile().output_shardings()[0]) == wanted
        known = [str(definition.recording.annotations.get(i)) for i in range(len(definition.recording.tensors))]
        assert [str(definition.recording.placed(i)) for i in range(len(definition.recording.tensors))] == known
    assert repr(rebuilt(fd)) == repr(fd)


def test_a_gradient_of_an_input_that_may_lie_on_either_of_two_meshes_is_free() -> None:
    fd = _data_parallel(None, other=mf.DeviceMesh((2,), ("pp",)))
    assert list(fd.recording.annotations) == [0, 2]


@pytest.mark.slow
def test_tensor_parallel_backward_is_one_all_reduce() -> None:
    fd, _ = _sharded_mlp([None, None, None], False)
    assert _collectives(fd) == {"all-reduce": 2}


@pytest.mark.slow
def test_sequence_parallel_backward_gathers_and_reduce_scatters() -> None:
    """The transpose of a gather is an unreduced sum: forward and backward each gather and reduce-scatter."""
    fd, _ = _sharded_mlp([None, "tp", None], True)
    assert _collectives(fd) == {"all-gather": 2, "reduce-scatter": 2}
    once = 2 * 64 * 128 * 4 * 3 / 4
    assert fd.bill().total == 4 * once


@pytest.mark.parametrize("rows", [64, 62])
def test_the_gradient_of_a_weight_is_a_local_sum_over_a_sharded_sequence(rows: int) -> None:
    """x [B, S/tp, D]: batch and sequence are contracted where they are, evenly sharded or not."""
    fd, mesh = mf.FusionDefinition(), mf.DeviceMesh((4,), ("tp",))
    x, w = fd.define_tensor([2, rows, 64]), fd.define_tensor([32, 64])
    seed = fd.define_tensor([2, rows, 32])
    grad = fd.grad(fd.ops.linear(x, w), w, seed)
    fd.add_output(grad)
    for t in (x, seed):
        fd.mesh_split(t, mesh, [None, "tp", None])
    fd.mesh_split(w, mesh, [None, None])
    assert [(e.collective, e.wire) for e in fd.bill().entries] == [("all-reduce", 2 * 32 * 64 * 4 * 3 / 4)]
    a, b = torch.randn(2, rows, 64), torch.randn(2, rows, 32)
    (found,) = fd.simulate([a, torch.zeros(32, 64), b])
    torch.testing.assert_close(found, torch.einsum("bsn,bsk->nk", b, a), rtol=1e-4, atol=1e-4)


def test_the_gradient_of_a_sharded_table_needs_no_communication() -> None:
    """Each rank of a vocabulary split adds up the rows that it holds."""
    fd, mesh = mf.FusionDefinition(), mf.DeviceMesh((4,), ("tp",))
    tokens, table = fd.define_tensor([64], dtype=INT), fd.define_tensor([100, 16])
    seed = fd.define_tensor([64, 16])
    grad = fd.grad(fd.ops.embedding_fwd(tokens, table), table, seed)
    fd.add_output(grad)
    for t in (table, grad):
        fd.mesh_split(t, mesh, ["tp", None])
    assert fd.bill().total == 0
    index, given = torch.randint(0, 100, (64,)), torch.randn(64, 16)
    (found,) = fd.simulate([index, torch.zeros(100, 16), given])
    torch.testing.assert_close(found, torch.zeros(100, 16).index_add_(0, index, given))


def test_the_backward_of_a_sharded_cross_entropy_is_local() -> None:
    """But for the rows' log-sum-exp, which the forward alone needs on one rank only."""

    def bill(backward: bool) -> float:
        fd = mf.FusionDefinition()
        logits, targets = fd.define_tensor([64, 128]), fd.define_tensor([64], dtype=INT)
        loss = fd.ops.cross_entropy(logits, targets)
        fd.add_output(fd.grad(loss, logits) if backward else loss)
        if backward:
            fd.add_output(loss)
        fd.mesh_split(logits, mf.DeviceMesh((4,), ("tp",)), [None, "tp"])
        return fd.bill().total

    assert 0 < bill(True) <= bill(False) + 64 * 4 * 3 / 4


def test_gradients_of_several_readers_are_added_before_they_are_reduced() -> None:
    """dq, dk and dv by the input are three unreduced sums; the residual's is none and is added last."""
    fd, mesh = mf.FusionDefinition(), mf.DeviceMesh((4,), ("tp",), links="dgx-h100")
    x, seed = fd.define_tensor([64, 128]), fd.define_tensor([64, 128])
    weights = [fd.define_tensor([128, 128]) for _ in range(4)]
    q, k, v = (fd.ops.linear(x, w) for w in weights[:3])
    y = fd.ops.add(x, fd.ops.linear(fd.ops.mul(fd.ops.mul(q, k), v), weights[3]))
    grad = fd.grad(y, x, seed)
    for t in (y, grad):
        fd.add_output(t)
    for w in weights[:3]:
        fd.mesh_split(w, mesh, ["tp", None])
    fd.mesh_split(weights[3], mesh, [None, "tp"])
    for t in (x, y, seed, grad):
        fd.mesh_split(t, mesh, [None, None])
    assert _collectives(fd) == {"all-reduce": 2}


def test_slices_that_make_up_a_tensor_are_joined() -> None:
    fd, _, _ = _program("fused projection")
    names = [node.op.name for node in fd.recording.nodes]
    assert "pad" not in names and names.count("cat") == 1


# what is returned


def test_open_sizes_are_filled_in_when_they_are_known() -> None:
    fd = mf.FusionDefinition()
    x, w = (fd.define_tensor(shape, dtype=DOUBLE) for shape in ([-1, -1, 6], [8, 6]))
    y = fd.ops.softmax(fd.ops.linear(x, w), 1)
    z = fd.ops.mul(fd.ops.mean(fd.ops.reshape(y, [-1, 8]), 0), 3.0)
    for grad in fd.grad(z, [x, w], z):
        fd.add_output(grad)
    for shape in ((2, 5, 6), (3, 4, 6)):
        leaves = [_random(*shape).requires_grad_(), _random(8, 6).requires_grad_()]
        out = F.linear(*leaves).softmax(1).reshape(-1, 8).mean(0) * 3.0
        wanted = torch.autograd.grad(out, leaves, out.detach())
        _assert_close(fd.simulate([t.detach() for t in leaves]), wanted)


def test_second_derivatives() -> None:
    fd = mf.FusionDefinition()
    x, w = (fd.define_tensor([n, 4], dtype=DOUBLE) for n in (3, 5))
    first = fd.grad(fd.ops.sum(fd.ops.tanh(fd.ops.linear(x, w))), w)
    for grad in fd.grad(fd.ops.sum(fd.ops.mul(first, first)), [x, w]):
        fd.add_output(grad)
    leaves = [_random(3, 4).requires_grad_(), _random(5, 4).requires_grad_()]
    (once,) = torch.autograd.grad(F.linear(*leaves).tanh().sum(), leaves[1], create_graph=True)
    wanted = torch.autograd.grad((once * once).sum(), leaves)
    _assert_close(fd.simulate([t.detach() for t in leaves]), wanted)


def test_a_definition_with_its_backward_prints_as_python() -> None:
    fd, _, _ = _program("block")
    _assert_close(rebuilt(fd).simulate(PROGRAMS["block"][2]), fd.simulate(PROGRAMS["block"][2]))
