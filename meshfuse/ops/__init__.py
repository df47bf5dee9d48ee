"""The op table: every op's `OpDef`, assembled here and nowhere else."""

from __future__ import annotations

from collections.abc import Sequence

from . import (
    adjoints,
    arithmetic,
    block_order,
    blocks,
    casts,
    composite,
    convolution,
    convolution_weight,
    embedding,
    experts,
    factories,
    functions,
    grouped_products,
    indexing,
    joins,
    linear_index,
    logic,
    matmul,
    reductions,
    reshape,
    scaled_products,
    scans,
    scatter,
    scatter_folds,
    shape,
    sorting,
    statistics,
    window_maxima,
    window_sums,
    windows,
)
from .attention import column_blocks, ring, ring_steps, scaled_dot_product
from .image_composites import IMAGE_COMPOSITES
from .index_composites import INDEX_COMPOSITES
from .norm_composites import NORM_COMPOSITES
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
    linear_index,
    scatter,
    scatter_folds,
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
# Functions of `fd.ops` that are written in ops of the table, by name.
COMPOSITES = composite.COMPOSITES | experts.EXPERT_COMPOSITES | NORM_COMPOSITES | IMAGE_COMPOSITES | INDEX_COMPOSITES
OPS: dict[str, OpDef] = {op.name: op for family in _FAMILIES for op in family.OPS}
# Ops on the rows of experts, which are as many as the numbers say.
EXPERT_OPS: dict[str, OpDef] = {op.name: op for op in experts.OPS}


def families() -> dict[str, tuple[str, Sequence[OpDef]]]:
    """By family, those for everyone first: the first sentence of its module, and its ops."""
    in_order = [*sorted(_FAMILIES, key=lambda family: family in _INNER), experts]
    return {f.__name__.rpartition(".")[2]: ((f.__doc__ or "").partition("\n")[0], f.OPS) for f in in_order}


__all__ = ["COMPOSITES", "EXPERT_OPS", "OPS", "families"]
