"""The op table: every op's `OpDef`, assembled here and nowhere else."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

from . import factories, indexing, matmul, pointwise, reductions, reshape, scans, shape, statistics
from .base import OpDef

_FAMILIES = (pointwise, reductions, statistics, scans, matmul, reshape, shape, indexing, factories)
OPS: dict[str, OpDef] = {op.name: op for family in _FAMILIES for op in family.OPS}
COMPOSITES: dict[str, Callable[..., Any]] = {}
