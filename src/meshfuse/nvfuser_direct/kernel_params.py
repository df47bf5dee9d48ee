"""Parameters of nvFuser's kernels: kept as a script sets them, and without effect on torch's kernels."""

from __future__ import annotations

import enum
from types import SimpleNamespace


class CacheOp(enum.Enum):
    unspecified = 0
    all_levels = 1
    streaming = 2
    global_ = 3


class LoadStoreOpType(enum.Enum):
    set = 0
    load_matrix = 1
    cp_async = 2
    tma = 3


class LaunchParams(SimpleNamespace):
    """Sizes of the grid and its blocks."""


class CompileParams(SimpleNamespace):
    """How nvFuser would compile a kernel."""


class HeuristicParams(SimpleNamespace):
    """What a scheduler of nvFuser found; `lparams` and `cparams` are always there."""

    def __init__(self, **values: object) -> None:
        super().__init__(**{"lparams": LaunchParams(), "cparams": CompileParams(), **values})


class PointwiseParams(HeuristicParams):
    pass


class ReductionParams(HeuristicParams):
    pass


class MatmulParams(HeuristicParams):
    pass
