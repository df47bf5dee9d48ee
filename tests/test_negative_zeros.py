"""-0.0 is a number of its own: what is padded, filled or chosen with it has its sign on every mesh."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import pytest
import torch
import torch.nn.functional as F

import meshfuse as mf

X = torch.randn(8, 8, generator=torch.Generator().manual_seed(1), dtype=torch.float64)
# What is made of a tensor of 8 x 8 with a number, and the same in torch.
CASES: dict[str, tuple[Callable[[Any, Any, float], Any], Callable[[torch.Tensor, float], torch.Tensor]]] = {
    "before and after": (lambda o, x, v: o.pad(x, [0, 0, 1, 1], v), lambda x, v: F.pad(x, (0, 0, 1, 1), value=v)),
    "a whole shard": (lambda o, x, v: o.pad(x, [0, 0, 8, 0], v), lambda x, v: F.pad(x, (0, 0, 8, 0), value=v)),
    "both dims": (lambda o, x, v: o.pad(x, [2, 0, 1, 3], v), lambda x, v: F.pad(x, (2, 0, 1, 3), value=v)),
    "shifted": (lambda o, x, v: o.pad(x, [0, 0, 1, -1], v), lambda x, v: F.pad(x, (0, 0, 1, -1), value=v)),
    "a window": (
        lambda o, x, v: o.slice(o.pad(x, [0, 0, 2, 2], v), [1, 0], [9, 8]),
        lambda x, v: F.pad(x, (0, 0, 2, 2), value=v)[1:9],
    ),
    "a window of what follows": (
        lambda o, x, v: o.slice(o.neg(o.pad(x, [0, 0, 2, 2], v)), [1, 0], [9, 8]),
        lambda x, v: -F.pad(x, (0, 0, 2, 2), value=v)[1:9],
    ),
    "put back": (
        lambda o, x, v: o.pad(o.slice(x, [2, 0], [6, 8]), [0, 0, 2, 2], v),
        lambda x, v: F.pad(x[2:6], (0, 0, 2, 2), value=v),
    ),
    "beside tensors of one number": (
        lambda o, x, v: o.cat([o.full([2, 8], v, x.dtype), x, o.full([1, 8], v, x.dtype)], 0),
        lambda x, v: torch.cat([x.new_full((2, 8), v), x, x.new_full((1, 8), v)]),
    ),
    "of a sum": (lambda o, x, v: o.pad(o.sum(x, [0]), [1, 2], v), lambda x, v: F.pad(x.sum(0), (1, 2), value=v)),
    "chosen instead of a sum": (
        lambda o, x, v: o.where(o.lt(o.iota(8), 3), v, o.sum(x, [0])),
        lambda x, v: torch.where(torch.arange(8) < 3, v, x.sum(0)),
    ),
    "written": (
        lambda o, x, v: o.scatter(x, o.full([2, 8], 5, mf.DataType.Int), v, 0),
        lambda x, v: x.scatter(0, torch.full((2, 8), 5), v),
    ),
}  # fmt: skip


@pytest.mark.parametrize("mesh", [1, 2, 3, 5])
@pytest.mark.parametrize("name", CASES)
def test_zeros_keep_their_sign(name: str, mesh: int) -> None:
    """Both zeros in one definition: neither is taken for the other."""
    build, reference = CASES[name]
    with mf.FusionDefinition() as fd:
        x = fd.define_tensor([8, 8], dtype=mf.DataType.Double)
        for value in (0.0, -0.0):
            fd.add_output(build(fd.ops, x, value))
        fd.mesh_split(x, mf.DeviceMesh((mesh,), ("d",)), ["d", None])
    for found, value in zip(fd.simulate([X]), (0.0, -0.0), strict=True):
        wanted = reference(X, value)
        torch.testing.assert_close(found, wanted)
        assert torch.equal(found.signbit(), wanted.signbit()), (found, wanted)
