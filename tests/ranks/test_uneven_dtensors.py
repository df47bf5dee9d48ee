"""DTensors of dims that several axes cut unevenly, into definitions and out, against torch's own cutting."""

from __future__ import annotations

import itertools
from typing import Any

import pytest
import torch
from torch.distributed.tensor import Replicate, Shard, distribute_tensor
from torch.distributed.tensor._utils import compute_local_shape_and_global_offset
from torch.distributed.tensor.placement_types import _StridedShard

import meshfuse as mf
from ranks.test_dtensor import torch_mesh

pytestmark = pytest.mark.ranks

HALF = _StridedShard(0, split_factor=2)
ROWS: list[Any] = [Replicate(), Shard(0), HALF, _StridedShard(0, split_factor=4)]
UNEVEN = [
    (HALF, Shard(0)), (Shard(0), Shard(0)), (Shard(0), HALF), (HALF, Replicate()),
    (_StridedShard(0, split_factor=3), HALF),
]  # fmt: skip
# Of two axes of two; some leave ranks without rows, in some no rank has what it would have of our own chunks.
SIZES = [0, 1, 3, 6, 7, 9, 13]


def in_reach(placements: tuple[Any, ...]) -> bool:
    """Whether chunks are those of the later axis, or finer ones; `fd.shard` refuses others."""
    first, second = (getattr(p, "split_factor", 1) for p in placements)
    return first == 1 or placements[1].is_replicate() or first % second == 0


def local(value: torch.Tensor, mesh: Any, placements: Any) -> torch.Tensor:
    return distribute_tensor(value, mesh, placements, src_data_rank=None).to_local()


def wrong(found: Any, right: torch.Tensor) -> list[str]:
    """What is not as torch has it in a DTensor: the local tensor, its shape, the global shape."""
    mesh, placements, here = found.device_mesh, found.placements, found.to_local()
    shape, _ = compute_local_shape_and_global_offset(right.shape, mesh, placements)
    checks = {
        "local shape": tuple(here.shape) == tuple(shape),
        "local numbers": torch.equal(here, local(right, mesh, placements)),
        "global shape": found.shape == right.shape,
    }
    return [f"{name} in {placements}" for name, fine in checks.items() if not fine]


def defined(x: Any, annotated: bool) -> mf.FusionDefinition:
    """2x, free or annotated as x, then x itself, the sum of its rows and x x^T."""
    with mf.FusionDefinition(search="fast") as fd:
        t = fd.from_pytorch(x)
        y = fd.ops.mul(t, 2.0)
        if annotated:
            fd.shard(y, x.placements, x.device_mesh)
        for made in (y, t, fd.ops.sum(t, [0]), fd.ops.matmul(t, fd.ops.permute(t, [1, 0]))):
            fd.add_output(made)
    return fd


def on_rank_uneven(placements: tuple[Any, ...], annotated: bool) -> list[str]:
    mesh, found, fd = torch_mesh((2, 2), ("dp", "tp")), [], None
    for n in SIZES:
        value = torch.arange(4.0 * n, dtype=torch.float64).view(n, 4)  # sums are exact
        x = distribute_tensor(value, mesh, placements, src_data_rank=None)
        fd = fd or defined(x, annotated)  # one definition for all sizes, which it leaves open
        outputs = fd.execute([x])
        for out, right in zip(outputs, (value * 2, value, value.sum(0), value @ value.T), strict=True):
            found += [f"{n}: {what}" for what in wrong(out, right)]
        same = [out.placements == x.placements for out in outputs]
        found += [f"{n}: {outputs[0].placements} of annotated {placements}"] if annotated and not same[0] else []
        found += [f"{n}: {outputs[1].placements} of the input {placements}"] if not same[1] else []
    return found


@pytest.mark.sampled(2)
@pytest.mark.parametrize("annotated", [False, True])
@pytest.mark.parametrize("placements", [*filter(in_reach, itertools.product(ROWS, ROWS))], ids=str)
def test_uneven_rows_come_in_and_go_out_as_torch_cuts_them(ranks4, placements, annotated: bool) -> None:
    assert ranks4.run(on_rank_uneven, placements, annotated) == [[]] * 4


def on_rank_saved(folder: str) -> list[str]:
    """Each uneven tensor is saved, and loaded into every other placement."""
    mesh, value, found = torch_mesh((2, 2), ("dp", "tp")), torch.arange(28.0).view(7, 4), []
    for number, first in enumerate(UNEVEN):
        mf.save(f"{folder}/{number}", {"x": distribute_tensor(value, mesh, first, src_data_rank=None)})
        for second in UNEVEN:
            into = distribute_tensor(torch.zeros(7, 4), mesh, second, src_data_rank=None)
            mf.load(f"{folder}/{number}", {"x": into})
            found += wrong(into, value)
    return found


def test_checkpoints_of_uneven_dtensors(ranks4, tmp_path) -> None:
    assert ranks4.run(on_rank_saved, str(tmp_path)) == [[]] * 4
