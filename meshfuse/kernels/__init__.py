"""Local computations that generated programs call as K.name, where torch has no single function for them.

The kernel of an op stands in the op's family (`ops/`), marked with `@kernel`; here are those that no family owns.
`runs`, here and in these modules, are the global indices of a dim that the rank holds: intervals (start, stop).
"""

# ruff: noqa: F401
from .adjoints import contract, embedding_bwd, select_bwd, take_bwd
from .blocks import block_merge, block_moments, block_repeat, block_scan, block_topk, block_total, over_blocks
from .indices import global_index as positions
from .indices import grid, iota
from .lookup import (
    checked,
    checked_place,
    embedding,
    index_select,
    limit_norm,
    scatter,
    select,
    take,
    take_rows,
    triu,
)
from .random import normal, uniform
from .reductions import combine, fold, neutral, reduce_max, reduce_min, reduce_prod, scan, tensor_like, topk, welford
from .strides import in_stride_order
from .table import kernel
from .user_functions import as_told, settled, watched
