"""Parameters of nvFuser's kernels: kept as a script sets them, and without effect on torch's kernels."""

from __future__ import annotations

import enum
from dataclasses import dataclass, field
from types import SimpleNamespace
from typing import Any

from .enums import SchedulerType

# Made from names, as one of them is a keyword of Python.
CacheOp = enum.Enum("CacheOp", ["unspecified", "all_levels", "streaming", "global"], start=0)
LoadStoreOpType = enum.Enum("LoadStoreOpType", {"set": 0, "load_matrix": 2, "cp_async": 3, "tma": 5})
IdMappingMode = enum.Enum("IdMappingMode", ["exact", "almost_exact", "broadcast", "permissive", "loop"], start=0)
MmaMacroArch = enum.Enum(
    "MmaMacroArch", ["no_mma", "volta", "turing", "ampere", "hopper", "blackwell_1cta", "blackwell_2cta"], start=0
)
MatmulTilingStrategy = enum.Enum(
    "MatmulTilingStrategy", ["one_tile_per_cta", "distribute_tiles_across_sms", "distribute_stages_across_sms"], start=0
)
MatmulBufferingLoopLevel = enum.Enum("MatmulBufferingLoopLevel", ["cta_tiles", "warp_tiles"], start=0)
MatmulCircularBufferingStrategy = enum.Enum(
    "MatmulCircularBufferingStrategy", ["pipelined", "warp_specialized"], start=0
)
MatmulTileRasterizationOrder = enum.Enum("MatmulTileRasterizationOrder", ["row_major", "column_major"], start=0)


@dataclass
class GemmTile:
    """The sizes of a matrix product's tile."""

    m: int
    n: int
    k: int


@dataclass
class MatMulTileOptions:
    """The tiles of a thread block and of a warp."""

    cta_tile: GemmTile = field(default_factory=lambda: GemmTile(128, 128, 32))
    warp_tile: GemmTile = field(default_factory=lambda: GemmTile(64, 64, 32))


@dataclass
class ClusterDims:
    """The numbers of thread blocks in a cluster."""

    m: int = 1
    n: int = 1


@dataclass
class CircularBufferOptions:
    """How many copies of operands are under way at once."""

    circular_buffer_smem_write: bool = False
    circular_buffer_smem_read: bool = False
    smem_circular_buffer_stage: int = 2
    smem_circular_buffer_prefetch_gap: int = 1


@dataclass
class SupportedVectorization:
    """Elements per memory access: of both operands, and of the epilogue."""

    a: int
    b: int
    epilogue: int


@dataclass(frozen=True)
class MmaMacro:
    """An instruction of the tensor cores."""

    arch: Any
    m: int
    n: int
    k: int


@dataclass
class MmaMacroEncode:
    """The parts of such an instruction, by which to choose one."""

    arch: Any
    m: int
    n: int
    k: int

    def mma_macro(self) -> MmaMacro:
        return MmaMacro(self.arch, self.m, self.n, self.k)


def _words(text: str) -> tuple[str, ...]:
    return tuple(text.split())


class _Parameters(SimpleNamespace):
    """Attributes as a script sets them; those of the class that were not set are None."""

    names: tuple[str, ...] = ()

    def __init__(self, **values: Any) -> None:
        super().__init__(**{**dict.fromkeys(type(self).names), **values})


class LaunchParams(_Parameters):
    """The sizes of the grid and of its thread blocks."""

    names = ("bdimx", "bdimy", "bdimz", "gdimx", "gdimy", "gdimz")


class CompileParams(_Parameters):
    """How nvFuser would compile a kernel."""

    names = ("device", "enable_magic_zero", "enable_ptxas_verbose", "include_paths", "index_type", "maxrregcount")


class HeuristicParams(_Parameters):
    """What one of nvFuser's schedulers chooses; `lparams` and `cparams` always exist."""

    scheduler = SchedulerType.none

    def __init__(self, **values: Any) -> None:
        own = {"lparams": LaunchParams(), "cparams": CompileParams(), "scheduler_type": type(self).scheduler}
        super().__init__(**{**own, **values})

    def hash(self) -> int:
        """Equal for equal parameters."""
        return hash(repr(self))


class PointwiseParams(HeuristicParams):
    """Parameters of elementwise kernels."""

    scheduler = SchedulerType.pointwise
    names = _words(
        "break_point flip_grid_binding split_block split_grid_y_dim unroll_factor_inner unroll_factor_outer "
        "vectorization_factor"
    )


class ReductionParams(HeuristicParams):
    """Parameters of kernels that reduce."""

    scheduler = SchedulerType.reduction
    names = _words(
        "batches_per_block_inner_reduction batches_per_block_outer_reduction block_dim_inner_reduction "
        "block_dim_inner_reduction_extra block_dim_iter_dom block_dim_outer_reduction combined_inner_outer "
        "combined_split_grid_inner_dim compute_persistent_buffer_with_first_consumer "
        "cross_block_inner_reduction cross_block_outer_reduction cross_grid_inner_reduction "
        "cross_grid_outer_reduction fastest_dim flip_grid grid_dim_inner_reduction grid_dim_iter_dom "
        "grid_dim_outer_reduction multiple_reds_per_blk pad_inner_reduction_to_warp "
        "pad_outer_reduction_to_warp persistent_kernel project_persistent_buffers schedule_3d "
        "split_grid_dim_inner_reduction split_grid_dim_iter_dom_inner split_grid_dim_iter_dom_outer "
        "static_bdimx static_bdimy tidx_for_outer_reduction unroll_factor_inner_reduction "
        "unroll_factor_iter_dom unroll_factor_outer_reduction unroll_factor_top_of_vectorization "
        "vectorization_factor_outer vectorization_factor_tmp_gmem_write vectorize_inner_reduction "
        "vectorize_iter_dom"
    )


class MatmulParams(HeuristicParams):
    """Parameters of matrix products."""

    scheduler = SchedulerType.matmul
    names = _words(
        "async_gmem_load_operands buffering_loop_level circular_buffer_options circular_buffering_strategy "
        "cluster_dims cta_order grid_traversal_factor mma_macro promote_prologue_smem_reuse splitk_factor "
        "supported_vec_size tile_sizes tiling_strategy use_ldst_matrix use_smem_epilogue"
    )
