"""`fd.sched` and `nvfuser_direct.schedule`: annotations as calls on tensors, and nvFuser's schedules of kernels."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any

from ..argument_checks import as_int
from ..definition.namespaces import Fusion as CoreFusion
from ..definition.tensor_view import TensorView, own
from ..errors import caller_line
from ..mesh import ParallelType
from .active import NvfuserDefinition, definition_of
from .enums import SchedulerType
from .kernel_params import HeuristicParams
from .multidevice import DeviceMesh
from .schedulers import ops_of, scheduler_of

_HINTS = (
    "bounded_transform_backward", "bounded_transform_forward", "inline_at", "inline_most",
    "inline_selected_at", "parallelize_like", "schedule", "set_memory_type", "transform_like", "warp_specialize",
)  # fmt: skip


def accepted(*options: Any, **named: Any) -> None:
    """Accept a call that orders the work inside a kernel: kernels are torch's, and it changes nothing."""


bounded_transform_backward = bounded_transform_forward = inline_at = inline_most = inline_selected_at = accepted
parallelize_like = schedule = transform_like = warp_specialize = accepted


def compute_heuristics(
    fusion: CoreFusion | None = None, scheduler_type: Any = None, inputs: Sequence[Any] = ()
) -> HeuristicParams:
    """Parameters that a script can set and pass to `manual_execute`."""
    kind = scheduler_type if isinstance(scheduler_type, SchedulerType) else SchedulerType.expr_eval
    return HeuristicParams(scheduler_type=kind)


def can_schedule(fusion: CoreFusion, scheduler_type: SchedulerType, inputs: Sequence[Any] = ()) -> tuple[bool, str]:
    """(whether nvFuser has the whole fusion in one kernel of this scheduler, what prevents that)."""
    found = find_compatible_schedulers(fusion, inputs)
    if scheduler_type in found:
        return True, ""
    named = ", ".join(kind.name for kind in found) or "none alone: its ops are several kernels"
    return False, f"{getattr(scheduler_type, 'name', scheduler_type)} is not the scheduler of these ops, but {named}."


def find_compatible_schedulers(fusion: CoreFusion, inputs: Sequence[Any] = ()) -> list[SchedulerType]:
    """The scheduler that the fusion's ops ask for; an empty list where nvFuser makes several kernels of them."""
    found = scheduler_of(ops_of(definition_of(fusion, "find_compatible_schedulers").recording))
    return [] if found is None else [found]


class Schedule:
    """`fd.sched`. Calls that shard a tensor annotate it; calls that order work inside a kernel change nothing."""

    __slots__ = ("_fd",)

    def __init__(self, fd: NvfuserDefinition):
        self._fd = fd

    def __getattr__(self, name: str) -> Any:
        if name not in _HINTS:
            known = ", ".join(known for known in dir(self) if not known.startswith("_"))
            raise AttributeError(f"fd.sched has no {name!r}; it has {known}")
        return accepted

    def __dir__(self) -> list[str]:
        return sorted([*(name for name in vars(type(self)) if not name.startswith("__")), *_HINTS])

    def _create_device_mesh(self, devices: Any) -> DeviceMesh:
        return DeviceMesh(devices)

    def _set_device_mesh(self, tensor: TensorView, mesh: Any) -> None:
        _own(self, tensor).set_device_mesh(mesh)

    def tensors(self) -> list[TensorView]:
        """All tensors of the definition."""
        return [value for value in self._fd.fusion.vals() if isinstance(value, TensorView)]

    def split(self, tensor: TensorView, dim: int, factor: int, inner_split: bool = True) -> TensorView:
        return _own(self, tensor).split(dim, factor, inner_split)

    def merge(self, tensor: TensorView, dim: int) -> TensorView:
        """Merge axis `dim` with the axis after it."""
        place = as_int(dim)
        return _own(self, tensor).merge(dim, dim if place is None else place + 1)

    def reorder(self, tensor: TensorView, old2new: Mapping[int, int]) -> TensorView:
        return _own(self, tensor).reorder(old2new)

    def parallelize(self, tensor: TensorView, axis: int, parallel_type: ParallelType) -> None:
        _own(self, tensor).axis(axis).parallelize(parallel_type)

    def rfactor(self, tensor: TensorView, dims: Sequence[int]) -> TensorView:
        return _own(self, tensor).rfactor(dims)

    def swizzle1d(self, tensor: TensorView, axis: int, parallel_type: ParallelType) -> TensorView:
        return _own(self, tensor).swizzle1d(axis, parallel_type)

    def set_allocation_as_loop(self, tensor: TensorView) -> None:
        _own(self, tensor).set_allocation_domain(tensor.get_loop_domain())

    def cache_before(self, tensor: TensorView, *options: Any) -> TensorView:
        return _own(self, tensor).cache_before(*options)

    def cache_after(self, tensor: TensorView, *options: Any) -> TensorView:
        return _own(self, tensor).cache_after(*options)

    def compute_heuristics(self, *options: Any) -> HeuristicParams:
        """The module's function, for this definition where no fusion is given; the next two are alike."""
        return compute_heuristics(*self._with_fusion(options))

    def can_schedule(self, *options: Any) -> tuple[bool, str]:
        return can_schedule(*self._with_fusion(options))

    def find_compatible_schedulers(self, *options: Any) -> list[SchedulerType]:
        return find_compatible_schedulers(*self._with_fusion(options))

    def _with_fusion(self, options: tuple[Any, ...]) -> tuple[Any, ...]:
        return options if options and hasattr(options[0], "definition") else (self._fd.fusion, *options)


def _own(schedule: Schedule, tensor: Any) -> TensorView:
    """The tensor. Raises DefinitionError for anything but a tensor of the schedule's definition."""
    return own(schedule._fd, tensor, "fd.sched", caller_line())
