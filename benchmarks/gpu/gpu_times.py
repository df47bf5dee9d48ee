"""What is measured on a GPU: segments, a GPT block and the host's time, each variant checked before it is timed."""

from __future__ import annotations

import re
import statistics
import time
from collections.abc import Callable, Mapping, Sequence
from typing import Any

import torch
from gpu_checks import error_of
from gpu_works import BLOCKS, Work, elementwise
from pieces import Lines, Piece, described

import meshfuse as mf
from meshfuse.backends.nvfuser import build_segment
from meshfuse.lowering.segments import Segment

Call = Callable[[], Any]
HOST_NAMES = {
    "nvfuser": "meshfuse", "graph": "meshfuse, a graph", "native": "fd.execute", "eager": "by hand",
    "compile": "by hand, compiled", "inductor": "meshfuse, Inductor",
}  # fmt: skip


def take_turns(variants: Mapping[str, Call], rounds: int, end: float, ahead: bool = False) -> dict[str, float]:
    """Milliseconds per call: medians over rounds, in each of which every variant has a turn.

    ahead: the device is kept busy until the calls are made, so that it never waits for the host.
    """
    found: dict[str, list[float]] = {name: [] for name in variants}
    for _ in range(3):
        for call in variants.values():
            call()
    for _ in range(rounds):
        for name, call in variants.items():
            found[name].append(_ms(call, ahead))
        if end - time.time() < 5:
            break
    return {name: statistics.median(times) for name, times in found.items()}


def _ms(call: Call, ahead: bool, calls: int = 10) -> float:
    start, end = (torch.cuda.Event(enable_timing=True) for _ in range(2))
    torch.cuda.synchronize()
    if ahead:
        torch.cuda._sleep(4_000_000)  # cycles: some 2 ms
    start.record()
    for _ in range(calls):
        call()
    end.record()
    torch.cuda.synchronize()
    return start.elapsed_time(end) / calls


def host_us(call: Call, calls: int = 300, rounds: int = 9) -> float:
    """Microseconds of the host per call that waits for no result: the median over rounds."""
    found = []
    for _ in range(rounds):
        torch.cuda.synchronize()
        start = time.perf_counter()
        for _ in range(calls):
            call()
        found.append((time.perf_counter() - start) / calls * 1e6)
    torch.cuda.synchronize()
    return statistics.median(found)


# variants ---------------------------------------------------------------------------------------------------------


def checked(
    calls: Mapping[str, Call], expected: Sequence[torch.Tensor], limit: float
) -> tuple[dict[str, Call], Lines, dict[str, float]]:
    """The variants that run and are right; of the others what is wrong; seconds of each one's first call.

    Each is called, and so compiled, here.
    """
    good: dict[str, Call] = {}
    problems: Lines = []
    first: dict[str, float] = {}
    for name, call in calls.items():
        start = time.perf_counter()
        try:
            made = call()
            torch.cuda.synchronize()
            first[name] = time.perf_counter() - start
            error = max(error_of(a, b) for a, b in zip(made, expected, strict=True))
            assert error < limit, f"an error of {error:.2g}, where {limit:.2g} is the limit"
            good[name] = call
        except Exception as error:
            torch.cuda.synchronize()
            problems.append({"part": name, "problem": described(error)})
    return good, problems, first


def native_call(fd: mf.FusionDefinition, inputs: Sequence[torch.Tensor]) -> Call:
    """nvFuser's own definition of a program of one segment, called with nothing of ours around it."""
    compiled = next(iter(fd._execution.bound.values())).compiled
    (segment,) = (part for part in compiled.segmented.parts if isinstance(part, Segment))
    definition, given = build_segment(compiled.segmented, segment, 0).definition, list(inputs)
    return lambda: definition.execute(given)


def _built_once(build: Callable[[], Call]) -> Call:
    """What `build` makes, made at the first call."""
    made: list[Call] = []

    def call() -> Any:
        if not made:
            made.append(build())
        return made[0]()

    return call


def taken_whole(fd: mf.FusionDefinition) -> bool:
    """Whether nvFuser runs all of a program's only segment."""
    return re.search(r"nvfuser +compiled", fd.backends()) is not None


def variants_of(work: Work, inputs: Sequence[torch.Tensor]) -> tuple[dict[str, Call], Lines, dict[str, float]]:
    """Ours first; without it, or where nvFuser did not take its segment whole, there is nothing to measure.

    The last are seconds of first calls, ours with planning.
    """
    fd, compiled = work.definition(), torch.compile(work.by_hand, dynamic=False)
    expected = work.by_hand(*(t.double() for t in inputs))
    ours, wrong, first = checked({"nvfuser": lambda: fd.execute(inputs, backend="nvfuser")}, expected, 4e-2)
    if not wrong and not taken_whole(fd):
        wrong = [{"part": "nvfuser", "problem": f"it did not take the segment whole: {fd.backends()}"}]
    if wrong:
        return {}, wrong, {}
    others: dict[str, Call] = {
        "native": _built_once(lambda: native_call(fd, inputs)),
        "eager": lambda: work.by_hand(*inputs),
        "compile": lambda: compiled(*inputs),
        "inductor": lambda: fd.execute(inputs, backend="inductor"),
        "graph": lambda: fd.execute(inputs, backend="nvfuser", cuda_graph=True),
    }
    good, problems, seconds = checked(others, expected, 4e-2)
    return ours | good, problems, first | seconds


def copy_bandwidth(count: int = 1 << 29) -> float:
    """Bytes per second, read and written, of a copy: the ceiling of what moves memory once."""
    source, target = (torch.empty(count, dtype=torch.bfloat16, device="cuda").normal_() for _ in range(2))
    seconds = statistics.median(_ms(lambda: target.copy_(source), True) for _ in range(15)) / 1e3
    return 2 * count * 2 / seconds


# what is measured -------------------------------------------------------------------------------------------------


def segments(end: float) -> list[Piece]:
    """Large pointwise and normalising segments: milliseconds and the share of a copy's bandwidth."""
    return [(work.name, lambda work=work: _segment(work, end)) for work in elementwise(16384, 4096)]


def _segment(work: Work, end: float) -> Lines:
    ceiling, inputs = copy_bandwidth(), work.inputs()
    calls, lines, first = variants_of(work, inputs)
    moved = sum(t.nbytes for t in (*inputs, *work.by_hand(*inputs)))
    for name, ms in take_turns(calls, 25, end, ahead=True).items():
        rate = moved / (ms / 1e3)
        lines.append({"work": work.name, "variant": name, "ms": ms, "bytes": moved, "copy_gb_per_s": ceiling / 1e9,
                      "of_copy": rate / ceiling, "first_call_s": first[name]})  # fmt: skip
    return lines


def gpt_block(end: float) -> list[Piece]:
    """Forward and backward of the block on one rank."""
    return [(name, lambda name=name: _block(name, end)) for name in BLOCKS]


def _block(name: str, end: float) -> Lines:
    block = BLOCKS[name]
    inputs, fd = block.inputs(), block.definition(1)
    expected = block.by_hand(*(t.double() for t in inputs))
    compiled = torch.compile(block.forward, dynamic=False)
    replayed = torch.compile(block.forward, dynamic=False, mode="reduce-overhead")
    calls: dict[str, Call] = {
        "nvfuser": lambda: fd.execute(inputs, backend="nvfuser"),
        "graph": lambda: fd.execute(inputs, backend="nvfuser", cuda_graph=True),
        "inductor": lambda: fd.execute(inputs, backend="inductor"),
        "eager": lambda: block.by_hand(*inputs),
        "compile": lambda: block.by_hand(*inputs, forward=compiled),
        "compile, graphs": lambda: block.by_hand(*inputs, forward=replayed),
    }
    good, lines, first = checked(calls, expected, 0.1)
    times = take_turns(good, 25, end).items()
    return lines + [{"work": name, "variant": n, "ms": ms, "first_call_s": first[n]} for n, ms in times]


def host(end: float) -> list[Piece]:
    """Small tensors, where the device waits for the host."""
    return [(work.name, lambda work=work: _host(work)) for work in elementwise(8, 64)]


def _host(work: Work) -> Lines:
    calls, lines, _ = variants_of(work, work.inputs())
    return lines + [{"work": work.name, "variant": HOST_NAMES[n], "us": host_us(c)} for n, c in calls.items()]
