"""Remote calls between named workers, as `torch.distributed.rpc` has them.

`agent`: connections. `calls`: what is sent and done. `rref`: references to values of others. `contexts`: what the
backward pass of `meshfuse.session.autograd` must remember. `api`: init_rpc, shutdown and calls; `options` of theirs.
"""

from __future__ import annotations

from . import api, backend_registry, constants, functions
from .agent import Agent as TensorPipeAgent  # noqa: F401
from .api import _get_current_rpc_agent as _get_current_rpc_agent
from .api import _rref_context_get_debug_info as _rref_context_get_debug_info
from .api import _set_rpc_timeout as _set_rpc_timeout
from .api import _wait_all as _wait_all
from .api import (
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
from .members import WorkerInfo
from .options import BackendType, RpcBackendOptions, TensorPipeRpcBackendOptions
from .rref import RRef

__all__ = [
    "BackendType", "RRef", "RpcBackendOptions", "TensorPipeRpcBackendOptions", "WorkerInfo", "api",
    "backend_registry", "constants", "functions", "get_rpc_timeout", "get_worker_info", "init_rpc", "is_available",
    "remote", "rpc_async", "rpc_sync", "rref_debug_info", "shutdown",
]  # fmt: skip
