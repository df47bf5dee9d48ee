"""Paired timing of several steps that take turns, and what they ask of the transport."""

from __future__ import annotations

import statistics
import time
from collections.abc import Callable, Mapping, Sequence
from typing import Any

import torch
import torch.distributed as dist
from torch.profiler import ProfilerActivity, profile

Step = Callable[[], Any]
Clock = Callable[[], float]
# A turn is long beside the clocks' and the scheduler's grain.
TURN_SECONDS = 0.01


def repeats(step: Step) -> int:
    """How often a step runs in one turn; the same on all ranks."""
    start, count = time.perf_counter(), 5
    for _ in range(count):
        step()
    seconds = (time.perf_counter() - start) / count
    found = torch.tensor([max(1, round(TURN_SECONDS / seconds))])
    dist.broadcast(found, 0)
    return int(found)


def take_turns(steps: Mapping[str, Step], count: int, rounds: int) -> dict[str, list[tuple[float, float]]]:
    """Per variant and round (wall seconds of the slowest rank, CPU seconds of all ranks) for one step.

    Each round begins with another variant, so that none profits from its place.
    """
    names, found = list(steps), {name: [] for name in steps}
    for number in range(rounds):
        first = number % len(names)
        for name in names[first:] + names[:first]:
            found[name].append(_turn(steps[name], count))
    return {name: _over_ranks(times) for name, times in found.items()}


def _turn(step: Step, count: int) -> tuple[float, float]:
    dist.barrier()
    wall, cpu = time.perf_counter(), time.process_time()
    for _ in range(count):
        step()
    return (time.perf_counter() - wall) / count, (time.process_time() - cpu) / count


def _over_ranks(times: Sequence[tuple[float, float]]) -> list[tuple[float, float]]:
    mine = torch.tensor(times, dtype=torch.float64)
    everyone = [torch.empty_like(mine) for _ in range(dist.get_world_size())]
    dist.all_gather(everyone, mine)
    stack = torch.stack(everyone)
    return list(zip(stack[..., 0].amax(0).tolist(), stack[..., 1].sum(0).tolist(), strict=True))


def ratio(times: Sequence[float], base: Sequence[float]) -> float:
    """The median of the rounds' ratios."""
    return statistics.median(a / b for a, b in zip(times, base, strict=True))


def traffic(step: Step, group_size: int) -> tuple[int, float]:
    """(collectives, bytes sent by this rank) of one step, as gloo is asked for them and counted as rings."""
    dist.barrier()
    with profile(activities=[ProfilerActivity.CPU], record_shapes=True) as found:
        step()
    calls = [event for event in found.events() or () if event.name.startswith("gloo:")]
    return len(calls), sum(_sent(event.name, event.input_shapes, group_size) for event in calls)


def _sent(name: str, shapes: Sequence[Sequence[int]], size: int) -> float:
    # All works move float32.
    count = 4 * sum(torch.Size(shape).numel() for shape in shapes)
    ring = {"all_reduce": 2 * (size - 1) / size, "all_gather": size - 1, "all_to_all": (size - 1) / size}
    return count * ring[name.removeprefix("gloo:")]
