"""What the parts of the runtime need to know of the job and of a group: the bottom of its imports."""

from __future__ import annotations

from typing import Protocol

import torch.distributed as dist

from .collective_order import CollectiveOrderLock
from .device_watchdog import DeviceWatchdog
from .diagnosis import FailureContext
from .environment import Environment
from .planning import Plans
from .work import Reporter


class Job(Reporter, Protocol):
    """The ranks of a job, as one of them sees them; `World` is the one implementation."""

    rank: int
    size: int
    place: Environment
    order_lock: CollectiveOrderLock
    plans: Plans
    watchdog: DeviceWatchdog

    @property
    def all_ranks(self) -> tuple[int, ...]: ...
    @property
    def store(self) -> dist.Store: ...
    def failure_context(self) -> FailureContext: ...
    def check_before_meeting(self) -> None: ...
    def raise_if_failed(self, what: str = ...) -> None: ...


class Communicator(Protocol):
    """The ranks that a transport connects; `Group` is the one implementation."""

    issued: int
    index: int
    size: int
    ranks: tuple[int, ...]

    @property
    def world(self) -> Job: ...
