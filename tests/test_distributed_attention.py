"""Attention whose rows or keys are sharded: right on every mesh, and no gather of keys where less travels."""

from __future__ import annotations

import itertools
import math
from typing import Any

import pytest
import torch
import torch.nn.functional as F

import meshfuse as mf
from attention_references import attention
from distributed import assert_close, mesh_of, op_names

ROWS = [None, None, "x", None]
Shapes = tuple[tuple[int, ...], tuple[int, ...]]
# Shapes of q and of k and v, and whether q, k and v are sharded along the sequence.
ATTENTION: dict[str, tuple[Shapes, str]] = {
    "one row of q": (((2, 4, 1, 8), (2, 2, 19, 8)), "kv"),
    "few rows of q": (((1, 3, 5, 8), (1, 3, 17, 8)), "kv"),
    "an empty block": (((1, 1, 3, 8), (1, 1, 5, 8)), "kv"),
    "all along the sequence": (((1, 3, 12, 8), (1, 1, 12, 8)), "qkv"),
    "rows of q only": (((1, 3, 10, 8), (1, 1, 7, 8)), "q"),
    "keys only": (((2, 2, 3, 8), (2, 2, 21, 8)), "k"),
}


def _attention(shapes: Shapes, sharded: str, ranks: int, **options: Any) -> mf.FusionDefinition:
    fd = mf.FusionDefinition(seed=1)
    tensors = {n: fd.define_tensor(list(shapes[n != "q"]), dtype=mf.DataType.Double) for n in "qkv"}
    causal, dropout = options.get("causal", False), options.get("dropout", 0.0)
    scale = fd.define_scalar(dtype=mf.DataType.Double) if options.get("scaled") else None
    out, lse, seed, offset = fd.ops.sdpfa_fwd(*tensors.values(), None, options.get("mask"), dropout, causal, scale)
    made = [out, lse]
    if options.get("backward", True):
        saved = (*tensors.values(), out, lse, dropout, causal, seed, offset, scale)
        made += fd.ops.sdpfa_bwd(out, *saved)
    for tensor in made:
        fd.add_output(tensor)
    for name in sharded:
        fd.mesh_split(tensors[name], mesh_of((ranks,)), ROWS)
    return fd


def _inputs(shapes: Shapes) -> list[torch.Tensor]:
    generator = torch.Generator().manual_seed(1)
    return [torch.randn(shapes[i > 0], generator=generator, dtype=torch.float64) for i in range(3)]


def _attention_reference(inputs: list[torch.Tensor], causal: bool, scale: float | None = None) -> Any:
    q, k, v = leaves = [t.clone().requires_grad_() for t in inputs]
    k, v = (t.repeat_interleave(q.shape[1] // t.shape[1], 1) for t in (k, v))
    scores = q @ k.transpose(-1, -2) * (q.shape[-1] ** -0.5 if scale is None else scale)
    if causal:
        scores = scores.masked_fill(torch.ones(scores.shape[-2:]).triu(1) > 0, -math.inf)
    out = scores.softmax(-1) @ v
    out.backward(out.detach())
    return (out.detach(), scores.logsumexp(-1).detach(), *(t.grad for t in leaves))


@pytest.mark.slow
@pytest.mark.parametrize("ranks", [2, 4])
@pytest.mark.parametrize("causal", [False, True])
@pytest.mark.parametrize("name", ATTENTION)
def test_attention_with_its_sequence_sharded(name: str, causal: bool, ranks: int) -> None:
    shapes, sharded = ATTENTION[name]
    inputs = _inputs(shapes)
    found = _attention(shapes, sharded, ranks, causal=causal).simulate(inputs, check_replicas=True)
    assert_close(found, _attention_reference(inputs, causal), 1e-13)


@pytest.mark.slow
@pytest.mark.parametrize("ranks", [2, 4])
@pytest.mark.parametrize("causal", [False, True])
@pytest.mark.parametrize("name", ATTENTION)
@pytest.mark.usefixtures("forms_forced")
def test_every_distributed_form_of_attention(name: str, causal: bool, ranks: int) -> None:
    shapes, sharded = ATTENTION[name]
    inputs = _inputs(shapes)
    fd = _attention(shapes, sharded, ranks, causal=causal)
    assert ("block_attention" in op_names(fd, *(t.shape for t in inputs))) == ("k" in sharded)
    assert_close(fd.simulate(inputs, check_replicas=True), _attention_reference(inputs, causal), 1e-13)


@pytest.mark.usefixtures("forms_forced")
def test_attention_drops_the_same_on_every_mesh() -> None:
    shapes, _ = ATTENTION["few rows of q"]
    inputs = _inputs(shapes)
    runs = [_attention(shapes, sharded, ranks, dropout=0.4).simulate(inputs, check_replicas=True)
            for sharded, ranks in (("kv", 1), ("kv", 4), ("q", 2))]  # fmt: skip
    assert not torch.allclose(runs[0][0], _attention_reference(inputs, False)[0])
    for other in runs[1:]:
        assert_close(other, tuple(runs[0]), 1e-13)


@pytest.mark.slow
@pytest.mark.usefixtures("forms_forced")
def test_attention_s_scale_may_be_a_scalar_of_the_definition() -> None:
    shapes, sharded = ATTENTION["one row of q"]
    inputs = _inputs(shapes)
    found = _attention(shapes, sharded, 4, scaled=True).simulate([*inputs, 0.7], check_replicas=True)
    assert_close(found, _attention_reference(inputs, False, 0.7), 1e-13)


def test_rows_that_see_nothing_stay_so_when_blocks_are_merged() -> None:
    with mf.FusionDefinition() as fd:
        q, k, v = (fd.define_tensor(shape) for shape in ([1, 1, 3, 4], [1, 1, 64, 4], [1, 1, 64, 4]))
        mask = fd.define_tensor([3, 64], dtype=mf.DataType.Bool)
        out, lse, _, _ = fd.ops.sdpfa_fwd(q, k, v, None, mask, 0.0, False, None)
        fd.add_output(out)
        fd.add_output(lse)
        for tensor in (k, v):
            fd.mesh_split(tensor, mesh_of((4,)), ROWS)
    inputs = [torch.randn(1, 1, 3, 4), torch.randn(1, 1, 64, 4), torch.randn(1, 1, 64, 4)]
    seen = torch.ones(3, 64, dtype=torch.bool)
    seen[1], seen[2, :40] = False, False
    assert "block_attention" in op_names(fd, *(t.shape for t in (*inputs, seen)))
    found, logsumexp = fd.simulate([*inputs, seen], check_replicas=True)
    scores = (inputs[0] @ inputs[1].mT / 2).masked_fill(~seen, -math.inf)
    assert_close([found, logsumexp], (scores.softmax(-1).nan_to_num() @ inputs[2], scores.logsumexp(-1)))


def test_for_one_row_outputs_travel_and_not_keys_and_values() -> None:
    """Eight heads of 64 over 16,384 keys: k and v have 67 MB, the output and its statistics a few kB."""
    shapes = ((1, 8, 1, 64), (1, 8, 16384, 64))
    bill = _attention(shapes, "kv", 8, backward=False).bill(shapes[0], shapes[1], shapes[1])
    assert bill.total <= 2.2 * 8 * (8 * 65), str(bill)


@pytest.mark.parametrize("backward", [False, True])
def test_with_enough_heads_rows_are_exchanged_for_heads(backward: bool) -> None:
    shapes = ((1, 8, 64, 16), (1, 8, 64, 16))
    bill = _attention(shapes, "qkv", 4, backward=backward).bill(shapes[0], *[shapes[1]] * 2)
    operand = 8 * 8 * 64 * 16
    assert bill.total <= 3 * operand / 4 * 3 / 4, str(bill)


def test_with_one_head_for_keys_these_are_gathered_and_their_gradients_summed() -> None:
    shapes = ((1, 7, 64, 16), (1, 1, 64, 16))
    operand = 8 * 64 * 16
    bill = _attention(shapes, "qkv", 4).bill(shapes[0], *[shapes[1]] * 2)
    assert bill.total <= 2 * (1 + 2) * operand * 3 / 4 + 100, str(bill)


def test_with_few_heads_for_keys_rows_stay_where_they_are_backward() -> None:
    """k and v are gathered once, for both passes, and their gradients scattered: one kernel gives both and q's."""
    shapes = ((8, 16, 128, 64), (8, 2, 128, 64))
    with mf.FusionDefinition() as fd:
        tensors = [fd.define_tensor(list(shapes[n != "q"])) for n in "qkv"]
        grad = fd.define_tensor(list(shapes[0]))
        out, *_ = fd.ops.sdpfa_fwd(*tensors, is_causal=True)
        made = [out, *fd.grad(out, tensors, grad)]
        for tensor in (*tensors, grad, *made):
            fd.mesh_split(tensor, mesh_of((8,)), ROWS)
        for tensor in made:
            fd.add_output(tensor)
    assert fd.bill().total == 4 * math.prod(shapes[1]) * 4 * 7 / 8


@pytest.mark.parametrize("heads", [2, 4])
@pytest.mark.parametrize("causal", [False, True])
def test_gradients_of_rows_over_one_axis_and_columns_over_another(heads: int, causal: bool) -> None:
    """Nothing is gathered: each rank has the scores of its rows and columns, and gradients are summed."""
    mesh, shapes = mesh_of((2, 2)), ((2, heads, 6, 8), (2, 2, 10, 8))
    by_rows, by_columns = [None, None, mesh.names[0], None], [None, None, mesh.names[1], None]
    inputs = _inputs(shapes)
    out, lse, *slopes = _attention_reference(inputs, causal)
    with mf.FusionDefinition() as fd:
        q, k, v = (fd.define_tensor(list(shapes[n != "q"]), dtype=mf.DataType.Double) for n in "qkv")
        saved = [fd.define_tensor(list(t.shape), dtype=mf.DataType.Double) for t in (out, out, lse)]
        state = [fd.define_tensor(list(shape), dtype=mf.DataType.UInt64) for shape in ((2,), ())]
        made = fd.ops.sdpfa_bwd(saved[0], q, k, v, *saved[1:], 0.0, causal, *state)
        for tensor in (q, *saved[:2], made[0]):
            fd.mesh_split(tensor, mesh, by_rows)
        fd.mesh_split(saved[2], mesh, by_rows[:3])
        for tensor in (k, v, *made[1:]):
            fd.mesh_split(tensor, mesh, by_columns)
        for tensor in made:
            fd.add_output(tensor)
    assert fd.bill().total <= 8 * (math.prod(shapes[0]) + 2 * math.prod(shapes[1])) / 2
    words = [torch.zeros(2, dtype=torch.uint64), torch.zeros((), dtype=torch.uint64)]
    assert_close(fd.simulate([*inputs, out, out, lse, *words], check_replicas=True), tuple(slopes), 1e-13)


# What beside q, k and v makes another way through the gradients: (heads of k and v, parameters, uses the log-sum-exp).
GRADIENTS: dict[str, tuple[int, tuple[str, ...], bool]] = {
    "plain": (4, (), False), "shared heads": (2, (), False), "causal": (4, ("is_causal",), False),
    "bias": (2, ("bias",), False), "mask": (4, ("mask",), False),
    "bias and mask, causal": (2, ("bias", "mask", "is_causal"), False),
    "log-sum-exp": (2, ("is_causal",), True),
}  # fmt: skip


@pytest.mark.parametrize("split", ["k", "kv", "qkv"])
@pytest.mark.parametrize("form", GRADIENTS)
def test_in_float64_gradients_are_exact_to_float64_wherever_keys_lie(form: str, split: str) -> None:
    heads, given, uses_lse = GRADIENTS[form]
    generator = torch.Generator().manual_seed(2)
    shapes = {"query": (2, 4, 2, 8), "key": (2, heads, 12, 8), "value": (2, heads, 12, 8), "bias": (4, 2, 12)}
    values = {
        n: torch.randn(s, generator=generator, dtype=torch.float64)
        for n, s in shapes.items()
        if n != "bias" or n in given
    }
    seen = {"mask": torch.rand(2, 12, generator=generator) > 0.4} if "mask" in given else {}
    fd = mf.FusionDefinition()
    tensors = {n: fd.from_pytorch(t) for n, t in (values | seen).items()}
    out, lse = fd.ops.sdpfa_fwd(**tensors, is_causal="is_causal" in given)[:2]
    used = [out, lse] if uses_lse else [out]
    for grad in fd.grad(used, [tensors[n] for n in values], used):
        fd.add_output(grad)
    for name in ("query", "key", "value"):
        if name[0] in split:
            fd.mesh_split(tensors[name], mesh_of((3,)), ROWS)
    leaves = {n: t.clone().requires_grad_() for n, t in values.items()}
    inputs = [leaves["query"], leaves["key"], leaves["value"], leaves.get("bias"), seen.get("mask")]
    made = attention(inputs, "is_causal" in given, None, None)[: len(used)]
    wanted = torch.autograd.grad(made, list(leaves.values()), [t.detach() for t in made])
    assert_close(fd.simulate([*values.values(), *seen.values()], check_replicas=True), wanted, 1e-13)


BROADCAST = list(itertools.product([True, False], repeat=4))


@pytest.mark.parametrize("kind", ["float32", "bfloat16", "float16"])
@pytest.mark.parametrize("given", ["bias", "mask", "bias and mask"])
@pytest.mark.parametrize("ranks", [1, 2])
def test_biases_and_masks_as_torch_adds_them(kind: str, given: str, ranks: int) -> None:
    """To the default tolerances of the type, over heads, broadcast along any dims, with rows that see nothing."""
    q_shape, k_shape, generator = (2, 4, 5, 8), (2, 4, 7, 8), torch.Generator().manual_seed(0)
    dtype, whole = getattr(torch, kind), (2, 4, 5, 7)
    q, k, v = (torch.randn(s, generator=generator).to(dtype) for s in (q_shape, k_shape, k_shape))
    for kept in BROADCAST:
        shape = tuple(n if keep else 1 for n, keep in zip(whole, kept, strict=True))
        bias = torch.randn(shape, generator=generator).to(dtype) if "bias" in given else None
        mask = torch.rand(shape, generator=generator) > 0.6 if "mask" in given else None
        fd = mf.FusionDefinition()
        tensors = [None if t is None else fd.from_pytorch(t) for t in (q, k, v, bias, mask)]
        for made in fd.ops.sdpfa_fwd(*tensors)[:2]:
            fd.add_output(made)
        for t in tensors[:3]:
            fd.mesh_split(t, mesh_of((ranks,)), [None, "x", None, None])
        out, lse = fd.simulate([t for t in (q, k, v, bias, mask) if t is not None])
        addend = torch.zeros(whole, dtype=dtype) if bias is None else bias.expand(whole)
        addend = addend if mask is None else addend.masked_fill(~mask, -math.inf)
        assert torch.equal(out, F.scaled_dot_product_attention(q, k, v, attn_mask=addend))
        scores = q.double() @ k.double().transpose(-1, -2) * 8**-0.5 + addend.double()
        torch.testing.assert_close(lse.double(), scores.logsumexp(-1), rtol=1e-5, atol=1e-5)
