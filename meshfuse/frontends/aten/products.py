"""aten's matrix products."""

from __future__ import annotations

from typing import Any

from ...definition.tensor_view import TensorView
from .table import Translation, aten, named_rule, rule


@rule(aten.mm.default, aten.bmm.default, aten.matmul.default, aten.mv.default, aten.dot.default)
def _product(t: Translation, a: TensorView, b: TensorView) -> TensorView:
    return t.ops.matmul(a, b)


@rule(aten.addmm.default, aten.baddbmm.default, aten.addmv.default)
def _added(t: Translation, bias: TensorView, a: TensorView, b: TensorView, *, beta: Any = 1, alpha: Any = 1) -> Any:
    product = t.ops.matmul(a, b)
    product = product if alpha == 1 else t.ops.mul(product, alpha)
    if beta == 0:
        return product
    return t.ops.add(product, bias if beta == 1 else t.ops.mul(bias, beta))


@rule(aten.addbmm.default)
def _added_sum(t: Translation, bias: TensorView, a: TensorView, b: TensorView, *, beta: Any = 1, alpha: Any = 1) -> Any:
    """A matrix and the sum of a batch of products, which is one product of matrices in a row."""
    (n, rows, k), columns = a.type.shape, b.type.shape[2]
    wide = t.reshape(t.ops.permute(a, [1, 0, 2]), [rows, n * k])
    return _added(t, bias, wide, t.reshape(b, [n * k, columns]), beta=beta, alpha=alpha)


@rule(aten._grouped_mm.default)
def _grouped(
    t: Translation, a: TensorView, b: TensorView, offs: Any = None, bias: Any = None, out_dtype: Any = None
) -> Any:
    """A product per group of rows; `offs` says where groups end."""
    product = t.ops.grouped_mm(a, b, offs)
    return product if bias is None else t.ops.add(product, bias)


@named_rule("transformers::grouped_mm_fallback")
def _grouped_fallback(t: Translation, a: TensorView, b: TensorView, offs: TensorView) -> TensorView:
    """What transformers has in the place of _grouped_mm where torch has no kernel."""
    return t.ops.grouped_mm(a, b, offs)


@named_rule("transformers::grouped_mm_fallback_backward")
def _grouped_fallback_backward(
    t: Translation, a: TensorView, b: TensorView, offs: TensorView, grad: TensorView
) -> tuple[TensorView, ...]:
    by_a = t.ops.grouped_mm(grad, t.ops.permute(b, [0, 2, 1]), offs)
    return by_a, t.ops.grouped_mm(t.ops.permute(a, [1, 0]), grad, offs)
