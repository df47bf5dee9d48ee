"""Defaults, by their names in `torch.distributed.rpc.constants`."""

from __future__ import annotations

DEFAULT_RPC_TIMEOUT_SEC = 60.0
DEFAULT_INIT_METHOD = "env://"
DEFAULT_NUM_WORKER_THREADS = 16
# The group's limit, in the place of a call's own, and of shutdown's.
UNSET_RPC_TIMEOUT = -1.0
DEFAULT_SHUTDOWN_TIMEOUT = 0.0
