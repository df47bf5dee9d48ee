"""torch's default process group of a session's workers, which DTensors need. A process has one."""

from __future__ import annotations

import functools
import threading
import time
import weakref
from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any

import torch
import torch.distributed as dist

from ..errors import ArgumentError, user_error
from ..frontends.placing import join_default_group
from ..runtime.deadlines import is_of_torch
from ..runtime.world import World
from .errors import Released
from .executor import Executor, current

_REASON = 1.0  # Seconds that the controller has to say why a connection between workers broke.
# Seconds in which gloo's threads drop what a collective of a backward pass took along. For that they need the
# interpreter's lock, and the end of their group, which has it, waits for them: torch would hang.
_LET_GO = 0.05
# The worker of this process whose session has the group.
_owner: list[Executor] = []
_changing = threading.Lock()
_meshes: weakref.WeakValueDictionary[int, Any] = weakref.WeakValueDictionary()  # Equal ones are several.


def check_free() -> None:
    """Raises ArgumentError where torch's default group of this worker's process is the script's."""
    if current().size > 1 and dist.is_initialized() and not _owner:
        raise user_error(
            "torch's default process group, which DTensors need, is taken on this worker", "one of the script's",
            "none", "Do not call init_process_group where a session has models.", cls=ArgumentError,
        )  # fmt: skip


def join(device: torch.device) -> None:
    """Let torch's default group be that of this session's workers: all of them call this, none of another session."""
    worker = current()
    check_free()
    with _changing:
        if worker.size == 1 or _owner == [worker]:
            return
        World.default_group_is_a_threads = True
        join_default_group(worker.world(), device, worker.world().limit)
        _owner[:] = [worker]
    worker.at_leave.append(functools.partial(_leave, worker))


def uses(mesh: Any) -> None:
    """Have torch's mesh let go of its groups when they are left."""
    if mesh is not None:
        _meshes[id(mesh)] = mesh


def is_joined() -> bool:
    """Whether torch's default group is that of this session's workers."""
    return current().size == 1 or _owner == [current()]


def leave() -> None:
    """Let another session have torch's default group. All workers call this."""
    _leave(current())


def _leave(worker: Executor) -> None:
    with _changing:
        if _owner == [worker]:
            _owner.clear()
            # Connections end with the last reference to their group, and peers that wait notice that.
            for mesh in list(_meshes.values()):
                mesh._pg_registry.clear()
            time.sleep(_LET_GO)
            dist.destroy_process_group()
            World.default_group_is_a_threads = False


@contextmanager
def told_of_failures() -> Iterator[None]:
    """A context in which an error of torch's groups is Released where another worker's failure has caused it."""
    try:
        yield
    except RuntimeError as error:
        worker = current()
        until = time.monotonic() + (_REASON if worker.size > 1 and _is_of_connections(error) else 0.0)
        while time.monotonic() < until:
            reason = worker.why_released()
            if reason is not None:
                raise Released(f"a collective of torch was left: {reason}") from None
            time.sleep(0.01)
        raise


def _is_of_connections(error: RuntimeError) -> bool:
    text = str(error).lower()
    return is_of_torch(error) and any(word in text for word in ("gloo", "nccl", "connection", "process group"))
