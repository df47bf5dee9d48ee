"""Segments as nvFuser definitions of local tensors.

nvFuser itself is imported by `load` alone, when a definition is built: importing this package needs none.
"""

from __future__ import annotations

from .cut import Part, cut, torch_reason
from .load import NvfuserMissing, load
from .native_call import NativeCall
from .segment import NativeKernel, build_call, build_segment

__all__ = [
    "NativeCall",
    "NativeKernel",
    "NvfuserMissing",
    "Part",
    "build_call",
    "build_segment",
    "cut",
    "load",
    "torch_reason",
]
