"""The GPT block on a real rank, which run.py starts; rank 0 prints what was found.

Its arguments are the device and, for a block of another size, its batch, length, width and heads.
"""

from __future__ import annotations

import json
import sys

from gpu_checks import check_block
from gpu_works import Block

import meshfuse as mf


def main(device: str, *sizes: str) -> None:
    batch, length, width, heads = map(int, sizes or (4, 256, 512, 8))
    block, world = Block(batch, length, width, heads), mf.World.current()
    fd = block.definition(world.size)
    found = check_block(block, world.size, device, lambda inputs: fd(*inputs))
    if world.rank == 0:
        print("found", json.dumps(found | {"by": fd.backends().splitlines()}), flush=True)


if __name__ == "__main__":
    main(*sys.argv[1:])
