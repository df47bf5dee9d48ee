"""aten ops that torch computes on whole items of a batch: as in eager torch, with the batch cut over the ranks."""

# ruff: noqa: E501  # rows of tables

from __future__ import annotations

from collections.abc import Callable

import pytest
import torch
import torch.nn.functional as F

import meshfuse as mf
from frontend_models import difference

MESH = mf.DeviceMesh((2,), ("dp",))
Made = list[torch.Tensor]


@pytest.fixture(autouse=True)
def _plan_once(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("MESHFUSE_SEARCH", "fast")


def numbers(*shape: int, seed: int = 0) -> torch.Tensor:
    return torch.randn(shape, generator=torch.Generator().manual_seed(seed), dtype=torch.float64)


def _solving(x: torch.Tensor, y: torch.Tensor) -> Made:
    square = x @ x.mT + torch.eye(4, dtype=x.dtype)
    lower = torch.linalg.cholesky(square)
    return [
        torch.linalg.inv(square), torch.linalg.solve(square, y), torch.linalg.solve(square, y[..., 0]), lower,
        torch.linalg.det(square), torch.linalg.slogdet(square)[1], torch.cholesky_solve(y, lower),
        torch.linalg.solve_triangular(lower, y, upper=False), torch.linalg.matrix_exp(x / 4),
        torch.linalg.solve(square[0], y), torch.cholesky_inverse(lower),
    ]  # fmt: skip


def _factoring(x: torch.Tensor, y: torch.Tensor) -> Made:
    square = x @ x.mT + torch.diag_embed(torch.arange(4.0, dtype=x.dtype) * 3)
    values, vectors = torch.linalg.eigh(square)
    q, r = torch.linalg.qr(y)
    return [
        values, vectors.abs(), torch.linalg.svdvals(y), q.abs(), r.abs(), torch.linalg.pinv(y),
        torch.linalg.matrix_norm(y, 2), torch.linalg.matrix_norm(y, "nuc"), torch.linalg.eigvalsh(square),
    ]  # fmt: skip


def _ordering(x: torch.Tensor, y: torch.Tensor) -> Made:
    return [
        x.median(2)[0], x.median(), x.nanmedian(1)[0], x.kthvalue(2, 2)[0], x.mode(2)[0], x.cummax(2)[0], x.cummin(0)[0],
        x.logcumsumexp(1), x.quantile(0.3, dim=2), torch.cdist(x, y.mT), torch.cdist(x[0], y[0].mT, 1.0), F.pdist(x[0]),
        x.renorm(2, 0, 1.0), torch.trapezoid(x, dim=1), x.kron(y[0]), torch.linalg.cross(x[:, :3], y[:, :3].repeat(1, 1, 2), dim=1),
    ]  # fmt: skip


def _transforms(x: torch.Tensor, y: torch.Tensor) -> Made:
    turned = torch.polar(x, x * 2)
    return [
        torch.view_as_real(torch.fft.fft(x)), torch.view_as_real(torch.fft.rfft2(x)), torch.fft.irfft(torch.fft.rfft(x, dim=1), dim=1),
        torch.fft.ifftn(turned).abs(), turned.angle(), torch.view_as_real(torch.sgn(turned)), torch.fft.fftshift(x, (1,)),
    ]  # fmt: skip


def _images(x: torch.Tensor, y: torch.Tensor) -> Made:
    image = x.view(3, 1, 4, 4).expand(3, 2, 4, 4)
    grid = y.reshape(3, 2, 2, 2).tanh()
    return [
        F.grid_sample(image, grid, align_corners=False), F.grid_sample(image, grid, mode="nearest", align_corners=True),
        F.adaptive_max_pool2d(image, 2), F.adaptive_avg_pool2d(x, (2, 3)), F.max_pool2d(x, 2), F.pad(x, (1, 2), mode="replicate"),
        F.fold(F.unfold(image, 2), (4, 4), 2), F.pixel_shuffle(image.reshape(3, 4, 4, 2), 2), F.avg_pool2d(x, 3, 1),
        F.affine_grid(y[:, :2, :2].repeat(1, 1, 2)[..., :3], [3, 1, 2, 2], align_corners=False),
        F.interpolate(image, (3, 5), mode="bicubic"), F.interpolate(image, (3, 2), mode="bilinear", antialias=True),
    ]  # fmt: skip


def _by_index(x: torch.Tensor, y: torch.Tensor) -> Made:
    rows, mask = torch.tensor([[0, 2, 0, 1]] * 2), x > 0
    flat, more = x.reshape(3, 16), x.reshape(16, 3)
    return [
        flat.scatter_add(0, rows, more[:2, :1].expand(2, 4)), flat.detach().scatter(1, rows, 2.0, reduce="add"),
        flat.scatter_reduce(1, rows, flat[:2, 3:7], "amax"), flat.scatter_reduce(0, rows, flat[:2, :4], "mean", include_self=False),
        flat.index_reduce(0, torch.tensor([0, 2]), flat[1:] + 2, "prod"), x.masked_scatter(mask, y.repeat(1, 1, 2) * 2),
        torch.addbmm(x[0], x, x), x.put(torch.tensor([3, 40]), y[0, 0]), x.take(torch.tensor([[3, 40], [7, 0]])),
        x.where(~mask, torch.inf).diagonal(0, 1, 2).clamp(max=9.0),
        x.diagonal_scatter(y[:, :, 0], 0, 1, 2), x.copysign(-y.repeat(1, 1, 2)), x.fmax(y.repeat(1, 1, 2)), torch.hypot(x, x[0] + 1),
        torch.polygamma(1, x.abs() + 1), (x.abs() + 1).digamma(), torch.special.i0(x), x.squeeze(()),
    ]  # fmt: skip


def _in_memory(x: torch.Tensor, y: torch.Tensor) -> Made:
    """Views by strides, and what writes to them."""
    diagonal, column = x[0].clone(), x.clone()
    diagonal.fill_diagonal_(2.0)
    column.as_strided((3, 4), (16, 5)).mul_(y[:, :, 0])
    return [
        diagonal, column, x.as_strided((2, 3), (9, 4), 2), x.transpose(0, 2).as_strided((4, 5), (3, 5), 1),
        x.as_strided((4, 2, 4), (0, 7, 1)), x.transpose(1, 2).as_strided((48,), (1,)),
        x.repeat_interleave(torch.tensor([1, 0, 2, 3]), 1, output_size=6),
    ]  # fmt: skip


def _bags(x: torch.Tensor, y: torch.Tensor) -> Made:
    """Embeddings and bags of them, with all of their options."""
    rows, flat = torch.tensor([[0, 5, 5], [11, 3, 0]]), torch.tensor([0, 5, 5, 11, 3])
    table, starts, bag = x.reshape(12, 4), torch.tensor([0, 2, 2]), F.embedding_bag
    return [
        F.embedding(rows, table, scale_grad_by_freq=True), F.embedding(rows, table, padding_idx=5), F.embedding(rows, table * 1, max_norm=1.0),
        F.embedding(rows, table * 1, max_norm=0.5, norm_type=1.0), bag(rows, table, mode="max"), bag(rows, table, padding_idx=5),
        bag(flat, table, starts), bag(flat, table, starts, mode="sum", per_sample_weights=y.flatten()[:5]),
        bag(flat, table, torch.tensor([0, 1, 5]), include_last_offset=True, padding_idx=-1),
    ]  # fmt: skip


@pytest.mark.sampled(2)
@pytest.mark.parametrize(
    "function", [_solving, _factoring, _ordering, _transforms, _images, _by_index, _in_memory, _bags]
)
@pytest.mark.parametrize("cut", [["dp", None, None], [None, None, "dp"]], ids=["batch", "item"])
def test_values_and_gradients(function: Callable[..., Made], cut: list[str | None]) -> None:
    def loss(x: torch.Tensor, y: torch.Tensor) -> tuple[torch.Tensor, ...]:
        made = function(x, y)
        weights = (torch.cos(torch.arange(t.numel(), dtype=torch.float64)).view(t.shape) for t in made)
        return torch.stack([(t * w).sum() for t, w in zip(made, weights, strict=True)]).sum(), *made

    step = mf.compile(loss, MESH, inputs={"x": cut, "y": ["dp", None, None]})
    results = []
    for each in (step, loss):
        x, y = numbers(3, 4, 4).requires_grad_(), numbers(3, 4, 2, seed=1).requires_grad_()
        made = each(x, y)
        made[0].backward()
        results.append([*made, x.grad, y.grad])
    for place, (found, wanted) in enumerate(zip(*results, strict=True)):
        if wanted is None:
            assert found is None or not found.any()
            continue
        assert found.shape == wanted.shape and found.dtype == wanted.dtype, place
        assert difference(found, wanted) < 1e-8, place


def test_what_cannot_be_solved_is_nan() -> None:
    """torch raises; here only the item that cannot be solved has no number."""

    def solved(x: torch.Tensor) -> Made:
        return [torch.linalg.inv(x), torch.linalg.cholesky(x), torch.linalg.solve(x, x)]

    step = mf.compile(solved, MESH, inputs={"x": ["dp", None, None]})
    with torch.no_grad():
        for found in step(torch.stack([torch.eye(3), torch.zeros(3, 3)])):
            assert torch.equal(found[0], torch.eye(3)) and found[1].isnan().all()


def test_a_transposed_argument_is_a_result() -> None:
    step = mf.compile(lambda x: (x.sum(), x.T), MESH, inputs={"x": ["dp", None]})
    x = numbers(3, 2).requires_grad_()
    total, turned = step(x)
    (total + turned[0].sum()).backward()
    assert x.grad is not None and torch.equal(turned, x.T)
    assert torch.equal(x.grad, torch.tensor([2.0, 1.0]).expand(3, 2))
