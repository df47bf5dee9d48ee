"""The one backend, by the names in `torch.distributed.rpc.backend_registry`."""

from __future__ import annotations

from typing import Any

from .options import BackendType, TensorPipeRpcBackendOptions

__all__ = ["BackendType", "backend_registered", "construct_rpc_backend_options"]


def backend_registered(backend_name: str) -> bool:
    """Whether there is a backend of that name."""
    return backend_name in BackendType.__members__


def construct_rpc_backend_options(backend: Any, **options: Any) -> TensorPipeRpcBackendOptions:
    """Options for `init_rpc`: those that TensorPipeRpcBackendOptions takes."""
    return TensorPipeRpcBackendOptions(**options)
