"""Segments as nvFuser definitions of local tensors.

nvFuser itself is imported by `load_nvfuser` alone, when a definition is built: importing this package needs none.
"""

from __future__ import annotations

from .load import NvfuserMissing, load_nvfuser
from .native_call import NativeCall
from .partition import Partition, partitioned, torch_reason
from .segment import NativeKernel, build_call, build_segment

__all__ = [
    "NativeCall",
    "NativeKernel",
    "NvfuserMissing",
    "Partition",
    "build_call",
    "build_segment",
    "load_nvfuser",
    "partitioned",
    "torch_reason",
]
