"""The names that a script written for `nvfuser_direct` uses: `import meshfuse.nvfuser_direct as nvfuser`.

The scripts run on any device that torch has; kernels are torch's, collectives are meshfuse's. What only
orders nvFuser's work (stream axes, swizzles, memory types, options) is accepted and changes no value.
"""

from __future__ import annotations

from .. import __version__
from ..definition.loop import AxisView as IterDomain
from ..definition.tensor_view import TensorView, Val
from ..dtypes import DataType
from ..mesh import ParallelType
from . import multidevice, pytorch_utils
from .cache import LruFusionCache
from .definition import Fusion, FusionDefinition, FusionExecutorCache, execute_with_dtensors
from .enums import CommunicatorBackend, MemoryType
from .profiler import FusionProfile, KernelProfile, PythonProfiler, get_fusion_profile, reset_profiler


def version() -> str:
    """meshfuse's version, where nvFuser gives its own."""
    return __version__


__all__ = [
    "CommunicatorBackend",
    "DataType",
    "Fusion",
    "FusionDefinition",
    "FusionExecutorCache",
    "FusionProfile",
    "IterDomain",
    "KernelProfile",
    "LruFusionCache",
    "MemoryType",
    "ParallelType",
    "PythonProfiler",
    "TensorView",
    "Val",
    "execute_with_dtensors",
    "get_fusion_profile",
    "multidevice",
    "pytorch_utils",
    "reset_profiler",
    "version",
]
