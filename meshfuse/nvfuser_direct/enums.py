"""nvFuser's enumerations that meshfuse itself does not use."""

from __future__ import annotations

import enum
from collections.abc import Iterable

# Made from names, as one of them is a keyword of Python.
MemoryType = enum.Enum("MemoryType", ["local", "shared", "global", "tensor", "symmetric"])
MemoryType.__doc__ = "Where nvFuser keeps a tensor; a hint that meshfuse records."


class CommunicatorBackend(enum.Enum):
    """Who communicates in nvFuser. meshfuse goes by the tensors' device: gloo on CPU, NCCL on CUDA."""

    nccl = 0
    ucc = 1
    cuda = 2


class SchedulerType(enum.Enum):
    """nvFuser's schedulers. meshfuse's kernels are torch's; the profiler uses these names for the kinds of kernels."""

    none = 0
    no_op = 1
    pointwise = 2
    matmul = 3
    reduction = 4
    inner_persistent = 5
    inner_outer_persistent = 6
    outer_persistent = 7
    transpose = 8
    expr_eval = 9
    resize = 10


def add_entries(values: Iterable[object]) -> None:
    """Give the enumerations among `values` their `__entries`, (member, description) by name, as those of nvFuser have.

    nvFuser's are pybind11's, over which no script can iterate otherwise.
    """
    name = "__entries"  # In a class it would be written with the name of that class.
    for kind in values:
        if isinstance(kind, enum.EnumMeta):
            setattr(kind, name, {member: (value, None) for member, value in kind.__members__.items()})
