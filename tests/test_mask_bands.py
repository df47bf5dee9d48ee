"""Which masks are known to be causal, windows or all seen before they are computed."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import pytest
import torch

import meshfuse as mf
from meshfuse.ops.attention.mask_bands import Band, seen_band

INF = float("inf")


def rows(fd: mf.FusionDefinition, n: Any, start: int = 0) -> mf.TensorView:
    return fd.ops.broadcast(fd.ops.iota(n, start), [True, True, False, True])


def columns(fd: mf.FusionDefinition, n: Any) -> mf.TensorView:
    return fd.ops.broadcast(fd.ops.iota(n), [True, True, True, False])


def causal(fd: mf.FusionDefinition, s: int = 5, t: int = 5) -> mf.TensorView:
    return fd.ops.le(columns(fd, t), rows(fd, s))


def reshaped(fd: mf.FusionDefinition) -> mf.TensorView:
    row = fd.ops.reshape(fd.ops.iota(5), [5, 1])
    return fd.ops.reshape(fd.ops.ge(row, fd.ops.iota(5)), [1, 1, 5, 5])


def window(fd: mf.FusionDefinition) -> mf.TensorView:
    near = fd.ops.gt(columns(fd, 5), fd.ops.sub(rows(fd, 5), 3))
    return fd.ops.logical_and(causal(fd), near)


def by_triu(fd: mf.FusionDefinition) -> mf.TensorView:
    return fd.ops.logical_not(fd.ops.triu(fd.ops.full([5, 5], True, mf.DataType.Bool), 1))


def padded(fd: mf.FusionDefinition) -> mf.TensorView:
    """A table of ones, as of tokens that are no padding, and more that does nothing."""
    ones = fd.ops.ge(fd.ops.full([1, 1, 1, 5], 1, mf.DataType.Int), 1)
    same = fd.ops.expand(fd.ops.set(fd.ops.bitwise_and(causal(fd), ones)), [2, 1, 5, 5])
    return fd.ops.bitwise_or(same, fd.ops.full([2, 1, 5, 5], False, mf.DataType.Bool))


MASKS: dict[str, tuple[Callable[[Any], mf.TensorView], Band | None]] = {
    "causal": (causal, Band(0, INF)),
    "with ones": (padded, Band(0, INF)),
    "by triu": (by_triu, Band(0, INF)),
    "reshaped": (reshaped, Band(0, INF)),
    "window": (window, Band(0, 2)),
    "transposed": (lambda fd: fd.ops.permute(by_triu(fd), [1, 0]), None),
    "later rows": (lambda fd: fd.ops.ge(rows(fd, 3, 4), columns(fd, 9)), Band(-4, INF)),
    "last rows of causal": (lambda fd: fd.ops.slice(causal(fd), [0, 0, 2, 0], [1, 1, 5, 5]), Band(-2, INF)),
    "one row, all seen": (lambda fd: fd.ops.ge(rows(fd, 1, 4), columns(fd, 5)), Band()),
    "one row, some seen": (lambda fd: fd.ops.ge(rows(fd, 1, 3), columns(fd, 5)), Band(-3, INF)),
    "one row for all": (lambda fd: fd.ops.logical_and(causal(fd), fd.ops.ge(rows(fd, 1, 3), columns(fd, 5))), None),
    "blocks": (lambda fd: fd.ops.eq(rows(fd, 5), fd.ops.mul(columns(fd, 5), 2)), None),
    "negated": (lambda fd: fd.ops.bitwise_not(fd.ops.lt(rows(fd, 5), columns(fd, 5))), Band(0, INF)),
}


@pytest.mark.parametrize("name", MASKS)
def test_a_mask_of_positions_is_the_band_that_it_is_when_it_is_run(name: str) -> None:
    make, band = MASKS[name]
    fd = mf.FusionDefinition()
    mask = make(fd)
    fd.add_output(mask)
    found = seen_band(fd.recording, mask.id)
    assert found == band
    if found is not None:
        (run,) = fd.simulate([])
        s, t = run.shape[-2:]
        apart = torch.arange(s)[:, None] - torch.arange(t)
        assert torch.equal(run, ((found.low <= apart) & (apart <= found.high)).expand(run.shape))


def test_of_open_sizes_too_and_what_a_band_is_called() -> None:
    fd = mf.FusionDefinition()
    x = fd.define_tensor([-1, 4])
    band = seen_band(fd.recording, fd.ops.ge(rows(fd, x.size(0)), columns(fd, x.size(0))).id)
    assert band is not None and band.is_causal and not band.sees_all and band.window is None
    assert Band(0, 3).window == 4 and Band(1, 3).window is None and Band().sees_all


def test_a_mask_of_an_input_is_not_known() -> None:
    fd = mf.FusionDefinition()
    given = fd.define_tensor([1, 1, 5, 5], dtype=mf.DataType.Bool)
    assert seen_band(fd.recording, given.id) is None
    assert seen_band(fd.recording, fd.ops.logical_and(given, causal(fd)).id) is None
