"""Ranks in modes of torch: what a first call makes there and later ones use again is as if it had been made outside."""

from __future__ import annotations

import contextlib
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
from rank_pool import RankPool
from rank_programs import CASES
from test_collectives import DTYPES, SIZES, reduced, reducible, values

import meshfuse as mf

pytestmark = pytest.mark.ranks


MODES: dict[str, Callable[[], Any]] = {
    "a default device": lambda: torch.device("meta"),
    "inference": torch.inference_mode,
}


def reductions(world: Any, mode: Callable[[], Any]) -> list[str]:
    """What is wrong of reductions of tensors that were made outside, called in the mode."""
    wrong, rank, size = list[str](), world.rank, world.size
    group = world.group(world.all_ranks, "all")
    for dtype, n in ((dtype, n) for dtype in DTYPES for n in SIZES):
        for op in reducible(dtype):
            whole, many = values(rank, n, dtype), values(rank, n * size, dtype)
            part = torch.empty(n, dtype=dtype)
            with mode():
                group.all_reduce(whole, op).wait()
                group.reduce_scatter(part, many, op).wait()
            expected = reduced(size, n * size, dtype, op).chunk(size)[rank]
            if not (torch.equal(whole, reduced(size, n, dtype, op)) and torch.equal(part, expected)):
                wrong.append(f"{dtype} {op} {n}")
    return wrong


def program(name: str, mode: Callable[[], Any]) -> list[str]:
    """What is wrong of a program that is called in the mode first, then outside, then in it again."""
    case, wrong = CASES[2][name], list[str]()
    fd, inputs, expected = case.define(), [*case.inputs(), *case.scalars], case.expected()
    for inside in (True, False, True):
        with mode() if inside else contextlib.nullcontext():
            found = fd(*inputs)
        for place, (a, b) in enumerate(zip(found, expected, strict=True)):
            if a.device.type != "cpu" or not torch.allclose(a, b, rtol=1e-8, atol=1e-8):
                wrong.append(f"{name}: output {place} of a call {'in' if inside else 'out of'} the mode")
    return wrong


def stored(folder: str, mode: Callable[[], Any]) -> list[str]:
    """What is wrong of a checkpoint saved and loaded in the mode."""
    state = {"w": torch.arange(8.0), "x": torch.arange(6) * 3}
    with mode():
        mf.save(folder, state)
        found = mf.load(folder)
    return [name for name, t in state.items() if found[name].device != t.device or not torch.equal(found[name], t)]


def on_rank(name: str, folder: str) -> list[str]:
    world, mode = mf.World.current(), MODES[name]
    wrong = [line for case in CASES[2] for line in program(case, mode)]
    return [*wrong, *reductions(world, mode), *reductions(world, contextlib.nullcontext), *stored(folder, mode)]


@pytest.mark.parametrize("name", MODES)
def test_modes_make_no_difference(name: str, tmp_path: Path) -> None:
    pool = RankPool(2)  # Its first calls are in the mode.
    try:
        assert pool.run(on_rank, name, str(tmp_path)) == [[], []]
    finally:
        pool.close()
