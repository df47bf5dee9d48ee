"""Checkpoints of sharded tensors: saved by all ranks, loaded on any mesh or on one process.

`api` has `save` and `load`; `entries` reads what the user passes to them, `hyperslabs` cuts shards into boxes,
`transfer` writes and reads the boxes with torch.distributed.checkpoint, and `folder` makes a checkpoint appear whole or
not at all. `save` and `load` are loaded when they are first used: torch.distributed.checkpoint takes a second.
"""

from __future__ import annotations

import importlib
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from .api import load, save

__all__ = ["load", "save"]


def __getattr__(name: str) -> Any:
    if name not in __all__:
        raise AttributeError(f"module {__name__!r} has no attribute {name!r}")
    return getattr(importlib.import_module(".api", __name__), name)
