"""Remote calls between named workers, as `torch.distributed.rpc` has them.

`agent`: connections. `calls`: what is sent and done. `rref`: references to values of others. `contexts`: what the
backward pass of `meshfuse.session.autograd` must remember. `start`: init_rpc and shutdown, and `options` of theirs.
"""

from __future__ import annotations

from . import functions
from .agent import WorkerInfo
from .options import BackendType, RpcBackendOptions, TensorPipeRpcBackendOptions
from .rref import RRef
from .start import (
    _set_rpc_timeout,
    get_rpc_timeout,
    get_worker_info,
    init_rpc,
    is_available,
    remote,
    rpc_async,
    rpc_sync,
    rref_debug_info,
    shutdown,
)

__all__ = [
    "BackendType",
    "RRef",
    "RpcBackendOptions",
    "TensorPipeRpcBackendOptions",
    "WorkerInfo",
    "_set_rpc_timeout",
    "functions",
    "get_rpc_timeout",
    "get_worker_info",
    "init_rpc",
    "is_available",
    "remote",
    "rpc_async",
    "rpc_sync",
    "rref_debug_info",
    "shutdown",
]  # fmt: skip
