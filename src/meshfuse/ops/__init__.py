"""The op table: every op's `OpDef`, assembled here and nowhere else."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

from . import matmul, pointwise, reductions, reshape, shape
from .base import OpDef

OPS: dict[str, OpDef] = {
    op.name: op for family in (pointwise, reductions, matmul, reshape, shape) for op in family.OPS
}
COMPOSITES: dict[str, Callable[..., Any]] = {}
