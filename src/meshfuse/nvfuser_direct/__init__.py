"""The names that a script written for `nvfuser_direct` uses: `import meshfuse.nvfuser_direct as nvfuser`.

The scripts run on any device that torch has; kernels are torch's, collectives are meshfuse's. What only
orders nvFuser's work (memory types, schedules of kernels, options) is accepted and changes no value; stream axes
and swizzles cut ops and their communication into chunks and rings. Where imports cannot change,
`sys.modules["nvfuser_direct"] = meshfuse.nvfuser_direct` does as well.
"""

from __future__ import annotations

from .. import __version__
from ..definition.loop import AxisView as IterDomain
from ..definition.tensor_view import TensorView, Val
from ..definition.text import TensorDomain
from ..dtypes import DataType
from ..mesh import ParallelType
from . import aliased, benchmark_utils, multidevice, nvf_cutlass, nvfuser_direct_version, pytorch_utils
from .cache import LruFusionCache
from .definition import Fusion, FusionDefinition, execute_with_dtensors
from .descriptors import compute_tensor_descriptor
from .enums import CommunicatorBackend, MemoryType, SchedulerType
from .executors import FusionExecutorCache, KernelExecutor
from .kernel_params import (
    CacheOp,
    CompileParams,
    HeuristicParams,
    LaunchParams,
    LoadStoreOpType,
    MatmulParams,
    PointwiseParams,
    ReductionParams,
)
from .nvfuser_direct_version import Version
from .profiler import FusionProfile, KernelProfile, PythonProfiler, get_fusion_profile, reset_profiler

dtensor_execute = execute_with_dtensors
aliased.install()


def translate_fusion(fusion: Fusion) -> str:
    """The text of a definition: a function that defines it again."""
    return str(fusion)


def version() -> Version:
    """meshfuse's version, where nvFuser gives its own."""
    return Version(__version__)


__all__ = [
    "CacheOp",
    "CommunicatorBackend",
    "CompileParams",
    "DataType",
    "Fusion",
    "FusionDefinition",
    "FusionExecutorCache",
    "FusionProfile",
    "HeuristicParams",
    "IterDomain",
    "KernelExecutor",
    "KernelProfile",
    "LaunchParams",
    "LoadStoreOpType",
    "LruFusionCache",
    "MatmulParams",
    "MemoryType",
    "ParallelType",
    "PointwiseParams",
    "PythonProfiler",
    "ReductionParams",
    "SchedulerType",
    "TensorDomain",
    "TensorView",
    "Val",
    "benchmark_utils",
    "compute_tensor_descriptor",
    "dtensor_execute",
    "execute_with_dtensors",
    "get_fusion_profile",
    "multidevice",
    "nvf_cutlass",
    "nvfuser_direct_version",
    "pytorch_utils",
    "reset_profiler",
    "translate_fusion",
    "version",
]
