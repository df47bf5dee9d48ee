"""Checkpoints of sharded tensors: saved by all ranks, loaded on any mesh or on one process.

`entries` reads what the user passes, `hyperslabs` cuts shards into boxes, `folder` makes a checkpoint appear whole or
not at all, `transfer` writes and reads the boxes with torch.distributed.checkpoint, `api` has `save` and `load`.
"""

from .api import load, save

__all__ = ["load", "save"]
