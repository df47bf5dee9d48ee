"""`fd.sched` and `nvfuser_direct.schedule`: annotations as calls on tensors, and nvFuser's schedules of kernels."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import TYPE_CHECKING, Any

from ..definition.tensor_view import TensorView
from ..errors import caller_line
from ..mesh import ParallelType
from ..user_values import as_int
from .enums import SchedulerType
from .kernel_params import HeuristicParams

if TYPE_CHECKING:
    from .definition import FusionDefinition

_HINTS = (
    "bounded_transform_backward", "bounded_transform_forward", "inline_at", "inline_most",
    "inline_selected_at", "parallelize_like", "schedule", "set_memory_type", "transform_like", "warp_specialize",
)  # fmt: skip


def accepted(*options: Any, **named: Any) -> None:
    """A call that orders the work inside a kernel, which is torch's: it changes nothing."""


bounded_transform_backward = bounded_transform_forward = inline_at = inline_most = inline_selected_at = accepted
parallelize_like = schedule = transform_like = warp_specialize = accepted


def compute_heuristics(*options: Any, **named: Any) -> HeuristicParams:
    """Parameters that a script may set and pass to `manual_execute`."""
    return HeuristicParams(scheduler_type=SchedulerType.expr_eval)


def can_schedule(*options: Any, **named: Any) -> bool:
    """True: torch runs every op."""
    return True


def find_compatible_schedulers(*options: Any, **named: Any) -> list[SchedulerType]:
    """torch evaluates expressions as they are."""
    return [SchedulerType.expr_eval]


class Schedule:
    """What shards a tensor is an annotation; what orders the work inside a kernel is accepted and changes nothing."""

    __slots__ = ("_fd",)

    def __init__(self, fd: FusionDefinition):
        self._fd = fd

    def __getattr__(self, name: str) -> Any:
        if name not in _HINTS:
            known = ", ".join(known for known in dir(self) if not known.startswith("_"))
            raise AttributeError(f"fd.sched has no {name!r}; it has {known}")
        return accepted

    def __dir__(self) -> list[str]:
        return sorted([*(name for name in vars(type(self)) if not name.startswith("__")), *_HINTS])

    def _set_device_mesh(self, tensor: TensorView, mesh: Any) -> None:
        _own(self, tensor).set_device_mesh(mesh)

    def tensors(self) -> list[TensorView]:
        """All tensors of the definition."""
        return [value for value in self._fd.fusion.vals() if isinstance(value, TensorView)]

    def split(self, tensor: TensorView, dim: int, factor: int, inner_split: bool = True) -> TensorView:
        return _own(self, tensor).split(dim, factor, inner_split)

    def merge(self, tensor: TensorView, dim: int) -> TensorView:
        """Merge axis `dim` with the one after it."""
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
        return _own(self, tensor).cache_before()

    def cache_after(self, tensor: TensorView, *options: Any) -> TensorView:
        return _own(self, tensor).cache_after()

    compute_heuristics = staticmethod(compute_heuristics)
    can_schedule = staticmethod(can_schedule)
    find_compatible_schedulers = staticmethod(find_compatible_schedulers)


def _own(schedule: Schedule, tensor: Any) -> TensorView:
    """The tensor. Raises DefinitionError for what is none of the schedule's definition."""
    return schedule._fd._own(tensor, "fd.sched", caller_line())
