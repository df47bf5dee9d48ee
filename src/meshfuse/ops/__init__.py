"""The op table: every op's `OpDef`, assembled here and nowhere else."""

from __future__ import annotations

from . import (
    adjoints,
    attention,
    attention_blocks,
    block_order,
    blocks,
    factories,
    indexing,
    matmul,
    pointwise,
    products,
    reductions,
    reshape,
    ring,
    scans,
    shape,
    sorting,
    statistics,
    windows,
)
from .base import OpDef
from .composite import COMPOSITES

_FAMILIES = (
    pointwise,
    reductions,
    statistics,
    scans,
    blocks,
    matmul,
    reshape,
    shape,
    windows,
    block_order,
    indexing,
    sorting,
    factories,
    attention,
    attention_blocks,
    ring,
    products,
    adjoints,
)
OPS: dict[str, OpDef] = {op.name: op for family in _FAMILIES for op in family.OPS}

__all__ = ["COMPOSITES", "OPS"]
