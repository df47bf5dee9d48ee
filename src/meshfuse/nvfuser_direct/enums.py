"""nvFuser's enumerations that meshfuse has no use for itself."""

from __future__ import annotations

import enum

# Made by names: one of them is a keyword of Python.
MemoryType = enum.Enum("MemoryType", ["local", "shared", "global", "tensor", "symmetric"])
MemoryType.__doc__ = "Where nvFuser keeps a tensor; a hint that meshfuse records."


class CommunicatorBackend(enum.Enum):
    """Who communicates in nvFuser. meshfuse goes by the tensors' device: gloo on CPU, NCCL on CUDA."""

    nccl = 0
    ucc = 1
    cuda = 2
