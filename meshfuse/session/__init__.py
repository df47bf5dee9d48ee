"""One controller, many workers: sessions as TVM's Disco has them, and `rpc` as PyTorch has it.

`session`: calls on all workers. `dref`: what they return. `crew`: the workers, started by `forkserver`, watched by
`supervisor` and reached by `links`, over `wire`'s frames. `executor`: a worker. `world`: its place among the others.
"""

from __future__ import annotations

import importlib
from typing import Any

from . import autograd, nn, optim, rpc
from .builtin import group_id, num_workers, worker_id
from .client import Client, connect
from .dref import DRef
from .dref import DRef as DPackedFunc  # A DRef to a function can be called.
from .errors import ConnectionRefused, Released, SessionError, WorkerError, WorkerLost, WorkerTimeout
from .ray_engine import RaySession
from .registry import register_global_func
from .registry import register_global_func as register_func
from .remote_module import RemoteModule, RemoteOptimizer
from .session import ProcessSession, RemoteDefinition, Session, SocketSession, ThreadedSession
from .torchrun import LaunchedSession

__all__ = [
    "Client", "ConnectionRefused", "DPackedFunc", "DRef", "LaunchedSession", "ProcessSession", "RaySession", "Released",
    "RemoteDefinition", "RemoteModule", "RemoteOptimizer", "Session", "SessionError", "SocketSession",
    "ThreadedSession", "WorkerError", "WorkerLost", "WorkerTimeout", "autograd", "connect", "group_id", "nn",
    "num_workers", "optim", "register_func", "register_global_func", "rpc", "worker_id",
]  # fmt: skip


def __getattr__(name: str) -> Any:
    if name == "remote":  # Run as a script, it must not have been imported before.
        return importlib.import_module(".remote", __name__)
    raise AttributeError(f"module {__name__!r} has no attribute {name!r}")
