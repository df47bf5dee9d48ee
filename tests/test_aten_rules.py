"""aten ops written in ops of a definition: values and gradients as torch's, with inputs cut over two axes."""

# ruff: noqa: E501  # rows of tables

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import pytest
import torch
import torch.nn.functional as F

import meshfuse as mf
from frontend_models import difference

MESH = mf.DeviceMesh((2, 2), ("dp", "tp"))


@pytest.fixture(autouse=True)
def _plan_once(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("MESHFUSE_SEARCH", "fast")


def numbers(*shape: int, seed: int = 0) -> torch.Tensor:
    return torch.randn(shape, generator=torch.Generator().manual_seed(seed), dtype=torch.float64)


def _shapes(x: torch.Tensor, y: torch.Tensor) -> list[torch.Tensor]:
    a, b = x.split([2, 4], 1)
    c = x.clone()
    c[1:3, ::2] = y[1:3, ::2]
    return [
        torch.cat([a, b * 2, y], 1), torch.stack([x, y], 1), x.unsqueeze(1).repeat(2, 3, 1), x.flip(1), x.roll(2, 1),
        F.pad(x, (1, 2), value=1.5), x[:, 1:5:2] * 3, x[-1] + x[:, -1].sum(), c, x.tril(1) + y.triu(-1),
        x.reshape(2, 2, 6).transpose(0, 2).contiguous().view(12, 2), *x.unbind(1)[:2], x.roll(3), x.expand(2, 4, 6) * 2,
        torch.where(x > 0, x, y.new_zeros(())), x.masked_fill(x > 0.5, 2.0),
    ]  # fmt: skip


def _reductions(x: torch.Tensor, y: torch.Tensor) -> list[torch.Tensor]:
    value, _ = x.max(1)
    return [
        x.sum(), x.mean(0), x.var(1), x.std(0, keepdim=True), value, x.min(0)[0], x.prod(1), x.amax((0, 1)), x.norm(),
        x.softmax(-1), x.log_softmax(0), x.logsumexp(1), x.cumsum(1), x.topk(3, 1)[0], x.sort(1)[0], F.layer_norm(x, (6,)),
        F.cross_entropy(x, (y > 0).long().argmax(1)), F.mse_loss(x, y), F.group_norm(x[None], 2), F.rms_norm(x, (6,)),
        F.kl_div(x.log_softmax(1), y.softmax(1), reduction="batchmean"), F.smooth_l1_loss(x, y), torch.var_mean(x, 1)[1],
    ]  # fmt: skip


def _pointwise(x: torch.Tensor, y: torch.Tensor) -> list[torch.Tensor]:
    return [
        F.gelu(x), F.gelu(x, approximate="tanh"), F.silu(x), F.softplus(x), F.elu(x), F.leaky_relu(x), F.hardswish(x),
        x.clamp(-0.5, 0.7), torch.maximum(x, y), x.pow(3), x.abs().pow(1.5), torch.atan2(x, y), x / (y + 3), 2 - x,
        torch.addcmul(x, x, y, value=0.5), torch.addcdiv(x, x, y.abs() + 1), torch.lerp(x, y, 0.3), x.sigmoid() * x.tanh(),
        torch.add(x, y, alpha=2), F.hardsigmoid(x), F.mish(x), x.remainder(0.7), x.square().sqrt(), x.exp().log1p(),
    ]  # fmt: skip


def _products(x: torch.Tensor, y: torch.Tensor) -> list[torch.Tensor]:
    q, k, v = (z.view(1, 2, 4, 3) for z in (x, y, x * y))
    mask = torch.ones(4, 4, dtype=torch.bool).tril()
    window = mask & ~torch.ones(4, 4, dtype=torch.bool).tril(-2)
    return [
        x @ y.T, torch.einsum("ij,kj->ik", x, y), F.linear(x, y, y[:, 0]), torch.outer(x[0], y[1]), x[0] @ y[0], x @ y[0],
        torch.baddbmm(x[None], x[None] @ x.T, x[None]), F.scaled_dot_product_attention(q, k, v, is_causal=True),
        F.scaled_dot_product_attention(q, k, v, attn_mask=mask), F.scaled_dot_product_attention(q, k, v, attn_mask=window),
        F.scaled_dot_product_attention(q, k, v, attn_mask=(x[0, 0] * 0 + 1).detach() * window.double()),
        F.scaled_dot_product_attention(q[0], k[0], v[0], scale=0.3),
    ]  # fmt: skip


def _indexing(x: torch.Tensor, y: torch.Tensor) -> list[torch.Tensor]:
    rows, columns = torch.tensor([[3, 0], [1, -1]]), torch.tensor([0, 5, 2])
    written = x.clone()
    written[torch.tensor([0, 2])] = y[:2]
    return [
        x[rows], x[:, columns], x[rows, columns[:2]], F.embedding(rows.abs(), x), x.gather(1, columns.expand(4, 3)),
        x.index_select(1, columns), written, x.index_put((rows[0], columns[:2]), y[0, :2], accumulate=True),
        x.scatter(1, columns.expand(4, 3), y[:, :3]), x.scatter_add(0, torch.zeros(4, 6, dtype=torch.long), y),
        x.index_add(0, torch.tensor([1, 1]), y[:2]), x[:, None, columns], x.take_along_dim(columns.expand(4, 3), 1),
    ]  # fmt: skip


def _integers(x: torch.Tensor, y: torch.Tensor) -> list[torch.Tensor]:
    i, j = (x * 5).long(), (y * 3).abs().long() + 1
    return [
        i // j, i % j, torch.div(i, j, rounding_mode="trunc"), i.argmax(1), (x > 0).any(1), (x > -9).all(), x.argmin(0),
        i & j, i | j, i ^ j, ~(x > 0), torch.logical_xor(x > 0, y > 0), i.cumsum(0), torch.arange(2, 9, 3) + i[0, :3],
        torch.histc(x.float(), 4, -1, 1), torch.eye(3), F.one_hot(j.clamp(max=5), 7), i.sum(), i.max(),
        x.isnan(), torch.full_like(i, 3) * i, (i > 0).sum(1), x.round().int(), x.floor() == i,
    ]  # fmt: skip


def _returned(found: Any) -> list[torch.Tensor]:
    return list(found) if isinstance(found, (list, tuple)) else [found]


@pytest.mark.parametrize("function", [_shapes, _reductions, _pointwise, _products, _indexing])
def test_values_and_gradients(function: Callable[..., list[torch.Tensor]]) -> None:
    def loss(x: torch.Tensor, y: torch.Tensor) -> Any:
        made = function(x, y)
        weights = (torch.cos(torch.arange(t.numel(), dtype=torch.float64)).view(t.shape) for t in made)
        return sum((t * w).sum() for t, w in zip(made, weights, strict=True)), *made

    step = mf.compile(loss, MESH, inputs={"x": ["dp", "tp"], "y": ["dp", None]})
    results = []
    for each in (step, loss):
        x, y = numbers(4, 6).requires_grad_(), numbers(4, 6, seed=1).requires_grad_()
        made = each(x, y)
        made[0].backward()
        results.append([*made, x.grad, y.grad])
    for place, (found, wanted) in enumerate(zip(*results, strict=True)):
        assert found.shape == wanted.shape and found.dtype == wanted.dtype, place
        assert difference(found, wanted) < 1e-9, place


def test_integers_and_bools() -> None:
    step = mf.compile(_integers, MESH, inputs={"x": ["dp", None], "y": ["dp", None]})
    x, y = numbers(4, 6), numbers(4, 6, seed=1)
    with torch.no_grad():
        for place, (found, wanted) in enumerate(zip(_returned(step(x, y)), _integers(x, y), strict=True)):
            assert found.dtype == wanted.dtype and torch.equal(found, wanted), place
