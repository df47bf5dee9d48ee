"""The names that a script written for `nvfuser_direct` uses: `import meshfuse.nvfuser_direct as nvfuser`.

The scripts run on any device that torch has: kernels are torch's, collectives are meshfuse's. What only orders
nvFuser's work (memory types, schedules of kernels, options) is accepted and changes no value; stream axes and swizzles
cut ops and their communication into chunks and rings. Where imports cannot be changed, `sys.modules["nvfuser_direct"] =
meshfuse.nvfuser_direct` works as well.
"""

from __future__ import annotations

from ..definition.copies import CommunicationType
from ..definition.domain_text import TensorDomain
from ..definition.loop import AxisView as IterDomain
from ..definition.tensor_view import TensorView, Val
from ..dtypes import DataType
from ..mesh import ParallelType
from ..version import __version__
from . import (
    benchmark_utils,
    idm,
    import_finder,
    multidevice,
    nvf_cutlass,
    nvfuser_direct_version,
    pytorch_utils,
    schedule,
)
from .active import ActiveOps, FusionGuard, define_scalar, define_tensor
from .cache import LRUCache, LruFusionCache
from .declared import compute_tensor_descriptor
from .definition import Fusion, FusionDefinition
from .enums import CommunicatorBackend, MemoryType, SchedulerType, add_entries
from .executors import FusionExecutorCache, KernelExecutor
from .exprs import BroadcastOp, Expr, Merge, ReshapeOp, Split, SqueezeOp, Statement
from .kernel_params import (
    CacheOp,
    CircularBufferOptions,
    ClusterDims,
    CompileParams,
    GemmTile,
    HeuristicParams,
    IdMappingMode,
    LaunchParams,
    LoadStoreOpType,
    MatmulBufferingLoopLevel,
    MatmulCircularBufferingStrategy,
    MatmulParams,
    MatMulTileOptions,
    MatmulTileRasterizationOrder,
    MatmulTilingStrategy,
    MmaMacro,
    MmaMacroArch,
    MmaMacroEncode,
    PointwiseParams,
    ReductionParams,
    SupportedVectorization,
)
from .multidevice import execute_with_dtensors
from .nvfuser_direct_version import Version
from .profiler import FusionProfile, KernelProfile, PythonProfiler, get_fusion_profile, reset_profiler
from .repro import get_val_tolerances, validate_with_auto_inferred_outputs

dtensor_execute = execute_with_dtensors
ops = ActiveOps()
import_finder.install()
add_entries(list(globals().values()))


def translate_fusion(fusion: Fusion) -> str:
    """The text of a function that defines a definition again."""
    return str(fusion)


def version() -> Version:
    """The version of meshfuse; nvFuser gives its own."""
    return Version(__version__)


__all__ = [
    "BroadcastOp",
    "CacheOp",
    "CircularBufferOptions",
    "ClusterDims",
    "CommunicationType",
    "CommunicatorBackend",
    "CompileParams",
    "DataType",
    "Expr",
    "Fusion",
    "FusionDefinition",
    "FusionExecutorCache",
    "FusionGuard",
    "FusionProfile",
    "GemmTile",
    "HeuristicParams",
    "IdMappingMode",
    "IterDomain",
    "KernelExecutor",
    "KernelProfile",
    "LRUCache",
    "LaunchParams",
    "LoadStoreOpType",
    "LruFusionCache",
    "MatMulTileOptions",
    "MatmulBufferingLoopLevel",
    "MatmulCircularBufferingStrategy",
    "MatmulParams",
    "MatmulTileRasterizationOrder",
    "MatmulTilingStrategy",
    "MemoryType",
    "Merge",
    "MmaMacro",
    "MmaMacroArch",
    "MmaMacroEncode",
    "ParallelType",
    "PointwiseParams",
    "PythonProfiler",
    "ReductionParams",
    "ReshapeOp",
    "SchedulerType",
    "Split",
    "SqueezeOp",
    "Statement",
    "SupportedVectorization",
    "TensorDomain",
    "TensorView",
    "Val",
    "benchmark_utils",
    "compute_tensor_descriptor",
    "define_scalar",
    "define_tensor",
    "dtensor_execute",
    "execute_with_dtensors",
    "get_fusion_profile",
    "get_val_tolerances",
    "idm",
    "multidevice",
    "nvf_cutlass",
    "nvfuser_direct_version",
    "ops",
    "pytorch_utils",
    "reset_profiler",
    "schedule",
    "translate_fusion",
    "validate_with_auto_inferred_outputs",
    "version",
]
