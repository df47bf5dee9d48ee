"""The norm of all gradients of a model, whichever stages have them."""

from __future__ import annotations

import math
from typing import Any

import torch
from torch import nn

from ...runtime.world import World
from .assignment import Assignment


def clip_grad_norm(module: nn.Module, assignment: Assignment, max_norm: float, norm_type: float) -> torch.Tensor:
    """Scale all gradients by one factor so that their norm is at most `max_norm`; returns the norm before.

    As torch.nn.utils.clip_grad_norm_ does, over the stages of all ranks; a tied weight counts once.
    """
    named = [(name, p) for name, p in module.named_parameters() if p.grad is not None]
    counted = [p.grad for name, p in named if _counts_here(name, assignment)]
    total = _plain(torch.nn.utils.get_total_norm([g for g in counted if g is not None], norm_type))
    if assignment.axis and World.current().size > 1:
        kind = torch.promote_types(total.dtype, torch.float32)  # Stages may have others: they meet in float64.
        total = _over_stages(total.to(torch.float64), assignment, norm_type).to(kind)
    scale = torch.clamp(max_norm / (total + 1e-6), max=1.0)
    for _, parameter in named:
        gradient: Any = parameter.grad
        getattr(gradient, "_local_tensor", gradient).mul_(scale.to(gradient.dtype))
    return total


def _plain(norm: Any) -> torch.Tensor:
    return norm.full_tensor() if hasattr(norm, "full_tensor") else norm


def _counts_here(name: str, assignment: Assignment) -> bool:
    """Whether this rank's is the first of the stages that hold a parameter."""
    if World.current().size == 1 or not assignment.axis:
        return True
    first = min(assignment.owners[name])
    return assignment.schedule.rank_of(first) == assignment.row_of(World.current().rank)


def _over_stages(norm: torch.Tensor, assignment: Assignment, norm_type: float) -> torch.Tensor:
    found = norm.clone() if math.isinf(norm_type) else norm**norm_type
    assignment.reduce(found, "max" if math.isinf(norm_type) else "sum")
    return found if math.isinf(norm_type) else found ** (1.0 / norm_type)
