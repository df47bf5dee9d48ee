"""Kernels that pack and unpack what real ranks send each other, op by op and compiled, against unsharded torch."""

from __future__ import annotations

import pytest
import torch

import meshfuse as mf
from copy_programs import MOVED
from meshfuse.sharding.data import shard

pytestmark = pytest.mark.ranks


def on_rank_moved(name: str, compiled: bool) -> list[tuple[torch.Tensor, torch.Tensor]]:
    """What the rank has, and should have, twice of each backend."""
    world, moved = mf.World.current(), MOVED[name]
    found = []
    for backend in ("eager", "eager", *["inductor", "inductor"] * compiled):
        fd = moved.define()
        (view,) = (value for value in fd.fusion.inputs() if isinstance(value, mf.TensorView))
        for _ in range(2):
            (out,) = fd.execute([mf.shard_tensor(moved.inputs()[0], view)], backend=backend)
            found.append((out, shard(moved.expected(), fd.output_shardings()[0], world.rank)))
    return found


@pytest.mark.parametrize("name", MOVED)
def test_ranks_have_the_numbers_of_torch(name: str, ranks2) -> None:
    """Compiled, one of each kind of move; test_copies.py compiles all of them, on simulated ranks."""
    compiled = name in {moved.kind: name for name, moved in MOVED.items()}.values()
    for found in ranks2.run(on_rank_moved, name, compiled, timeout=280.0):
        for out, expected in found:
            torch.testing.assert_close(out, expected)
