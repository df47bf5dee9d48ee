"""Rows of experts, captured as ops of `frontends/experts.py`, in ops of a definition."""

from __future__ import annotations

import torch

from ...definition.tensor_view import TensorView
from .. import experts as captured
from .table import Translation, rule

assert captured.dispatch is not None  # its import registers the ops of this file
_ops = torch.ops.meshfuse


@rule(_ops.moe_dispatch.default)
def _dispatch(t: Translation, x: TensorView, experts: TensorView, count: int) -> tuple[TensorView, ...]:
    return t.ops.moe_dispatch(x, experts, count)


@rule(_ops.moe_collect.default)
def _collect(t: Translation, rows: TensorView, experts: TensorView) -> TensorView:
    return t.ops.moe_collect(rows, experts)


@rule(_ops.moe_linear.default)
def _linear(t: Translation, rows: TensorView, expert: TensorView, weight: TensorView, transposed: bool) -> TensorView:
    return t.ops.moe_linear(rows, expert, weight, transposed)


@rule(_ops.moe_weight_gradient.default)
def _weight_gradient(t: Translation, left: TensorView, right: TensorView, expert: TensorView) -> TensorView:
    return t.ops.moe_weight_gradient(left, right, expert)


@rule(_ops.moe_swiglu.default)
def _swiglu(t: Translation, rows: TensorView) -> TensorView:
    return t.ops.moe_swiglu(rows)


@rule(_ops.moe_swiglu_backward.default)
def _swiglu_backward(t: Translation, grad: TensorView, rows: TensorView) -> TensorView:
    return t.ops.moe_swiglu_bwd(grad, rows)
