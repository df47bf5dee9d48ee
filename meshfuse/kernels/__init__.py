"""Local computations that generated programs call as K.name, where torch has no single function for them.

The kernel of an op stands in the op's family (`ops/`), marked with `@kernel`; here are those that no family owns.
`runs`, here and in these modules, are the global indices of a dim that the rank holds: intervals (start, stop).
"""

# ruff: noqa: F401
from .indices import checked, checked_place, grid
from .indices import global_index as positions
from .random import normal, uniform
from .reductions import combine, fold, neutral
from .table import kernel
from .tensors import in_stride_order, stand_in, tensor_like
from .user_functions import checked_results, settled, watched
