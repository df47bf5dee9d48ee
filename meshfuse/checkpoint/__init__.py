"""Checkpoints of sharded tensors: saved by all ranks, loaded on any mesh or on one process.

`api` has `save` and `load`; `entries` reads what the user passes to them, `hyperslabs` cuts shards into boxes,
`transfer` writes and reads the boxes with torch.distributed.checkpoint, and `folder` makes a checkpoint appear whole or
not at all.
"""

from .api import load, save

__all__ = ["load", "save"]
