"""The op table: every op's `OpDef`, assembled here and nowhere else."""

from __future__ import annotations

from collections.abc import Sequence

from . import (
    adjoints,
    arithmetic,
    block_order,
    blocks,
    casts,
    convolution,
    convolution_weight,
    embedding,
    factories,
    functions,
    grouped_products,
    indexing,
    joins,
    logic,
    matmul,
    reductions,
    reshape,
    scaled_products,
    scans,
    scatter,
    shape,
    sorting,
    statistics,
    window_maxima,
    window_sums,
    windows,
)
from .attention import column_blocks, ring, ring_steps, scaled_dot_product
from .composite import COMPOSITES
from .opdef import OpDef

_FAMILIES = (
    functions,
    arithmetic,
    logic,
    casts,
    reductions,
    statistics,
    scans,
    blocks,
    matmul,
    convolution,
    convolution_weight,
    window_sums,
    window_maxima,
    reshape,
    shape,
    windows,
    joins,
    block_order,
    indexing,
    embedding,
    scatter,
    sorting,
    factories,
    scaled_dot_product,
    column_blocks,
    ring,
    ring_steps,
    grouped_products,
    scaled_products,
    adjoints,
)
_INNER = (blocks, column_blocks, ring_steps, adjoints)  # what distributed forms and gradients are written in
OPS: dict[str, OpDef] = {op.name: op for family in _FAMILIES for op in family.OPS}


def families() -> dict[str, tuple[str, Sequence[OpDef]]]:
    """By family, those for everyone first: the first sentence of its module, and its ops."""
    in_order = sorted(_FAMILIES, key=lambda family: family in _INNER)
    return {f.__name__.rpartition(".")[2]: ((f.__doc__ or "").partition("\n")[0], f.OPS) for f in in_order}


__all__ = ["COMPOSITES", "OPS", "families"]
