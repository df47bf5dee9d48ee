"""Segments as nvFuser definitions of local tensors.

nvFuser itself is imported by `load` alone, when a definition is built: importing this package needs none.
"""

from __future__ import annotations

from .load import NvfuserMissing, load
from .native_call import NativeCall
from .segment import NativeKernel, build_call, build_segment, torch_reason

__all__ = [
    "NativeCall",
    "NativeKernel",
    "NvfuserMissing",
    "build_call",
    "build_segment",
    "load",
    "torch_reason",
]
