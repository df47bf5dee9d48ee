"""aten ops that torch computes on whole items of a batch: linear algebra, transforms, order statistics and others."""

from __future__ import annotations

import math
from collections.abc import Sequence
from typing import Any

import torch

from ...definition.tensor_view import TensorView
from .table import RULES, Translation, aten, rule
from .torch_calls import Form, Items, Shapes, along, torch_call, torch_rule, trailing, whole

# By form the ops that have it: how many last dims make an item of each operand and each result, or of all of them.
_MATRICES = trailing(2)
_FORMS: tuple[tuple[Form, tuple[Any, ...]], ...] = (
    (_MATRICES, (
        aten.cholesky.default, aten.cholesky_inverse.default, aten.cholesky_solve.default,
        aten._cholesky_solve_helper.default, aten.linalg_matrix_exp.default, aten.linalg_solve_triangular.default,
        aten.triangular_solve.default, aten.linalg_qr.default, aten.linalg_lu.default,
        aten._upsample_bilinear2d_aa.default, aten._upsample_bicubic2d_aa.default, aten.adaptive_max_pool2d.default,
        aten.adaptive_max_pool2d_backward.default, aten.replication_pad2d_backward.default,
    )),
    (trailing(2, 2, 1, 0), (aten.linalg_lu_factor_ex.default, aten.linalg_ldl_factor_ex.default)),
    (trailing(2, 1, 2), (aten.linalg_householder_product.default,)),
    (trailing(2, 1, 2, 2), (aten.linalg_lu_solve.default, aten.linalg_ldl_solve.default, aten.ormqr.default)),
    (trailing(2, 1, 2, 2, 2), (aten.lu_unpack.default,)),
    (trailing(2, 0, 2, 1), (aten._linalg_det.default,)),
    (trailing(2, 0, 0, 2, 1), (aten._linalg_slogdet.default,)),
    (trailing(2, 1, 2), (aten._linalg_eigh.default, aten.linalg_eig.default)),
    (trailing(2, 1), (aten._linalg_eigvals.default,)),
    (trailing(2, 2, 1), (aten.geqrf.default,)),
    (trailing(3), (
        aten.grid_sampler_2d_backward.default, aten.adaptive_max_pool3d.default,
        aten.adaptive_max_pool3d_backward.default, aten.replication_pad3d_backward.default,
    )),
    (trailing(1), (aten.replication_pad1d_backward.default,)),
    (trailing(4), (aten.grid_sampler_3d.default, aten.grid_sampler_3d_backward.default)),
    (trailing(0), (
        aten.hardshrink_backward.default, aten.softshrink_backward.default, aten.frexp.Tensor,
        aten._standard_gamma_grad.default,
    )),
    # As a whole: a result is of all elements, or batches are not dims.
    (whole, (
        aten.median.default, aten.nanmedian.default, aten._pdist_forward.default, aten._pdist_backward.default,
        aten.histogram.bin_ct, aten.histogram.bins_tensor,
        aten._embedding_bag.default, aten._embedding_bag_forward_only.default,
        aten._embedding_bag_dense_backward.default, aten._embedding_bag_per_sample_weights_backward.default,
        aten.multi_margin_loss_backward.default, aten.multilabel_margin_loss_backward.default,
        aten.linalg_lstsq.default,
    )),
)  # fmt: skip


def _enter() -> None:
    for form, targets in _FORMS:
        for target in targets:
            assert target not in RULES, target
            RULES[target] = torch_rule(target, form)


_enter()


# torch.linalg raises where a matrix cannot be inverted, solved or factored. That depends on numbers, of which each rank
# has its own: here such matrices give NaN.


def _or_nan(found: torch.Tensor, info: torch.Tensor) -> torch.Tensor:
    """Results with NaN where something is wrong with an item, as its number of `info` says."""
    return torch.where((info == 0).reshape(*info.shape, *[1] * (found.ndim - info.ndim)), found, math.nan)


def inv_ex(x: torch.Tensor) -> tuple[torch.Tensor, ...]:
    """The inverse, and what is wrong."""
    found, info = aten.linalg_inv_ex(x)
    return _or_nan(found, info), info


def cholesky_ex(x: torch.Tensor, upper: bool) -> tuple[torch.Tensor, ...]:
    """The Cholesky factor, and what is wrong."""
    found, info = aten.linalg_cholesky_ex(x, upper=upper)
    return _or_nan(found, info), info


def solve_ex(a: torch.Tensor, b: torch.Tensor, left: bool) -> tuple[torch.Tensor, ...]:
    """The solution, the LU factors and their pivots, and what is wrong."""
    found, factors, pivots, info = aten._linalg_solve_ex(a, b, left=left)
    return _or_nan(found, info), factors, pivots, info


@rule(aten.linalg_inv_ex.default)
def _inv(t: Translation, x: TensorView, **_: Any) -> Any:
    return torch_call(t, trailing(2, 2, 0), inv_ex, x)


@rule(aten.linalg_cholesky_ex.default)
def _cholesky(t: Translation, x: TensorView, *, upper: bool = False, **_: Any) -> Any:
    return torch_call(t, trailing(2, 2, 0), cholesky_ex, x, upper)


@rule(aten._linalg_solve_ex.default)
def _solve(t: Translation, a: TensorView, b: TensorView, *, left: bool = True, **_: Any) -> Any:
    """Vectors have one dim less than the matrices, or are a vector of each."""
    columns = 1 if b.ndim == 1 or b.type.shape == a.type.shape[:-1] else 2
    return torch_call(t, trailing(2, columns, columns, 2, 1, 0), solve_ex, a, b, left)


@rule(aten.linalg_pinv.atol_rtol_tensor)
def _pinv(t: Translation, x: TensorView, **more: Any) -> Any:
    bounds = [value for value in more.values() if isinstance(value, TensorView)]
    return torch_call(t, trailing(2, *[0] * len(bounds), 2), aten.linalg_pinv.atol_rtol_tensor, x, **more)


@rule(aten._linalg_svd.default)
def _svd(t: Translation, x: TensorView, full_matrices: bool = False, compute_uv: bool = True, **more: Any) -> Any:
    form = trailing(2, 2, 1, 2) if compute_uv else _values_alone
    return torch_call(t, form, aten._linalg_svd.default, x, full_matrices, compute_uv, **more)


def _values_alone(operands: Shapes, results: Shapes) -> Items:
    """Vectors that nobody asked for have no dims that matter."""
    return whole(operands, results)


def _along_dim(target: Any, dropped: bool) -> None:
    """A rule of an op along its argument `dim`; the dim is missing in results unless it is kept."""

    def write(t: Translation, x: TensorView, *args: Any, **kwargs: Any) -> Any:
        names = [argument.name for argument in target._schema.arguments][1:]
        given = {**dict(zip(names, args, strict=False)), **kwargs}
        gone = dropped and not given.get("keepdim", False)
        return torch_call(t, along(given.get("dim", -1), gone), target, x, *args, **kwargs)

    RULES[target] = write


for _target in (
    aten._fft_r2c.default, aten._fft_c2c.default, aten._fft_c2r.default, aten.cummax.default, aten.cummin.default,
    aten._logcumsumexp.default, aten.logcumsumexp.default,
):  # fmt: skip
    _along_dim(_target, dropped=False)
for _target in (aten.median.dim, aten.nanmedian.dim, aten.kthvalue.default, aten.mode.default):
    _along_dim(_target, dropped=True)


@rule(aten._cdist_forward.default)
def _distances(t: Translation, a: TensorView, b: TensorView, *more: Any) -> Any:
    """Every row of one with every row of the other: both are cut alike in the result."""
    return torch_call(t, _pairs, aten._cdist_forward.default, a, b, *more)


def _pairs(operands: Shapes, results: Shapes) -> Items:
    batch, found = _batches(operands, results)
    return Items(((*batch[0], "r", "D"), (*batch[1], "c", "D")), ((*found[0], "r", "c"),))


@rule(aten._cdist_backward.default)
def _distances_gradient(
    t: Translation, grad: TensorView, a: TensorView, b: TensorView, p: float, distances: TensorView
) -> Any:  # fmt: skip
    return torch_call(t, _pairs_gradient, aten._cdist_backward.default, grad, a, b, p, distances)


def _pairs_gradient(operands: Shapes, results: Shapes) -> Items:
    batch, found = _batches(operands, results)
    rows = (*batch[0], "r", "D"), (*batch[1], "r", "D"), (*batch[2], "D", "D"), (*batch[3], "r", "D")
    return Items(rows, ((*found[0], "r", "D"),))


def _batches(operands: Shapes, results: Shapes) -> tuple[Sequence[Any], Sequence[Any]]:
    """The names of all dims but the last two."""
    named = trailing(2)(operands, results)
    return [names[:-2] for names in named.operands], [names[:-2] for names in named.results]


@rule(aten.searchsorted.Tensor)
def _searchsorted(t: Translation, sequence: TensorView, values: TensorView, **more: Any) -> Any:
    """One sequence for all values, or one for each row of them."""
    form = _in_one_sequence if sequence.ndim == 1 else _in_rows
    return torch_call(t, form, aten.searchsorted.Tensor, sequence, values, **more)


@rule(aten.searchsorted.Scalar)
def _searchsorted_number(t: Translation, sequence: TensorView, value: Any, **more: Any) -> Any:
    return torch_call(t, whole, aten.searchsorted.Scalar, sequence, value, **more)


def _in_one_sequence(operands: Shapes, results: Shapes) -> Items:
    values = tuple(f"b{d}" for d in range(len(operands[1])))
    return Items((("D",), values, *[("D",)] * (len(operands) - 2)), (values,))


def _in_rows(operands: Shapes, results: Shapes) -> Items:
    rows = tuple(f"b{d}" for d in range(len(operands[1]) - 1))
    return Items(tuple((*rows, "v" if i == 1 else "D") for i in range(len(operands))), ((*rows, "v"),))


@rule(aten.grid_sampler_2d.default)
def _grid_sampler(t: Translation, x: TensorView, grid: TensorView, *more: Any) -> Any:
    return torch_call(t, _sampled, aten.grid_sampler_2d.default, x, grid, *more)


def _sampled(operands: Shapes, results: Shapes) -> Items:
    return Items((("n", "c", "D", "D"), ("n", "h", "w", "D")), (("n", "c", "h", "w"),))


@rule(aten.fractional_max_pool2d.default)
def _fractional_pool(t: Translation, x: TensorView, *args: Any) -> Any:
    return torch_call(t, trailing(2, 1, 2, 2), aten.fractional_max_pool2d.default, x, *args)


def _scaled_gradient(target: Any, spatial: int) -> None:
    """A rule of a gradient that is told the input's sizes: of these the batch and the channels are a rank's."""

    def compute(grad: torch.Tensor, output_size: Any, input_size: Any, *more: Any) -> torch.Tensor:
        return target(grad, output_size, [*grad.shape[:-spatial], *input_size[-spatial:]], *more)

    compute.__name__ = target._schema.name.partition("::")[2]
    RULES[target] = torch_rule(compute, trailing(spatial))


for _target, _spatial in {
    aten._upsample_bilinear2d_aa_backward.default: 2, aten._upsample_bicubic2d_aa_backward.default: 2,
    aten._upsample_nearest_exact1d_backward.default: 1, aten._upsample_nearest_exact2d_backward.default: 2,
    aten._upsample_nearest_exact3d_backward.default: 3, aten.upsample_nearest1d_backward.default: 1,
    aten.upsample_nearest2d_backward.default: 2, aten.upsample_nearest3d_backward.default: 3,
    aten.upsample_linear1d_backward.default: 1, aten.upsample_bilinear2d_backward.default: 2,
    aten.upsample_bicubic2d_backward.default: 2, aten.upsample_trilinear3d_backward.default: 3,
}.items():  # fmt: skip
    _scaled_gradient(_target, _spatial)
