"""nvFuser's segments on a GPU: right, and how fast. Writes results/<date>-<device>.json and .md beside this file.

One call, at most `--limit` seconds: a GPT block's forward and backward against float64, single ops against CPU torch;
medians over CUDA events of segments by nvFuser, eager torch and torch.compile, what bandwidth they reach beside a plain
copy, and the host's time per step. What does not fit the limit is left out, and named in the results. Exit status: 0
all is right, 1 something is wrong, 2 no CUDA or no nvFuser here (nothing is written).
"""

from __future__ import annotations

import argparse
import datetime
import json
import os
import re
import statistics
import sys
import time
from collections.abc import Callable, Mapping, Sequence
from pathlib import Path
from typing import Any

import torch
from gpu_works import Block, Work, elementwise

import meshfuse as mf
from meshfuse.backends.nvfuser import NvfuserMissing, build_segment, load
from meshfuse.ops import OPS
from meshfuse.ops.binding import make_call
from meshfuse.segmentation import Segment
from meshfuse.testing.calls import define_call, operands_of, whole

HERE = Path(__file__).parent
Lines = list[dict[str, Any]]
Call = Callable[[], Any]


class Clock:
    """What is left of the time for all sections."""

    def __init__(self, seconds: float):
        self.end = time.monotonic() + seconds

    def left(self) -> float:
        return self.end - time.monotonic()


def refusal() -> str | None:
    """Why nothing can be measured here."""
    if not torch.cuda.is_available():
        return f"benchmarks/gpu needs a CUDA device: found none (torch {torch.__version__}); nothing is written."
    try:
        load()
    except NvfuserMissing as error:
        return f"{error}; nothing is written."
    return None


# correctness ------------------------------------------------------------------------------------------------------


def check_ops(clock: Clock, least_left: float, device: str = "cuda") -> Lines:
    """Every sample of every op in a definition of its own, against the op's text on the CPU."""
    lines: Lines = []
    for name, op in OPS.items():
        for place, sample in enumerate(op.samples()):
            if clock.left() < least_left:
                lines.append({"op": name, "sample": place, "state": "not reached"})
            elif isinstance(op.nvfuser, str) or dict(sample.kwargs).get("dropout_p"):
                lines.append({"op": name, "sample": place, "state": "random or torch's own"})
            else:
                lines.append({"op": name, "sample": place, **_check_op(name, place, device)})
    return lines


def _check_op(name: str, place: int, device: str) -> dict[str, Any]:
    sample = OPS[name].samples()[place]
    call = make_call(OPS[name], sample)
    try:
        operands = operands_of(call, sample)
        expected = whole(call, operands)
    except (NotImplementedError, RuntimeError) as error:
        return {"state": "no reference on a CPU", "why": _said(error)}
    with mf.FusionDefinition() as fd:
        for output in define_call(fd, OPS[name], sample)[1]:
            fd.add_output(output)
    try:
        found = fd.simulate([t.to(device) for t in operands])
        for a, b in zip(found, expected, strict=True):
            limit = 1e-2 if a.dtype in (torch.float16, torch.bfloat16) else 2e-4
            if a.dtype is not torch.uint64:  # attention's random state
                torch.testing.assert_close(a.cpu(), b, rtol=limit, atol=limit, equal_nan=True)
    except Exception as error:
        return {"state": "wrong", "why": _said(error)}
    return {"state": "right", "by": sorted(set(reasons(fd)))}


def _said(error: Exception) -> str:
    return f"{type(error).__name__}: {str(error).strip()[:300]}"


def reasons(fd: mf.FusionDefinition) -> list[str]:
    """What ran each segment of a simulated definition, and why."""
    (made,) = fd._simulated.values()
    return [f"{c.backend}: {c.why}" for segments in made.simulation.segments for c in segments.chosen.values()]


def check_block(block: Block, ranks: int, device: str = "cuda") -> dict[str, Any]:
    """The block's results on simulated ranks of one GPU against float64, beside torch's own error in bfloat16."""
    fd, inputs = block.definition(ranks), block.inputs(device)
    expected = block.by_hand(*(t.double() for t in inputs))
    errors = {
        "meshfuse": [_error(a, b) for a, b in zip(fd.simulate(inputs), expected, strict=True)],
        "torch": [_error(a, b) for a, b in zip(block.by_hand(*inputs), expected, strict=True)],
    }
    right = all(a <= 2 * b + 1e-2 for a, b in zip(errors["meshfuse"], errors["torch"], strict=True))
    return {"ranks": ranks, "state": "right" if right else "wrong", "errors": errors, "by": sorted(set(reasons(fd)))}


def _error(found: torch.Tensor, expected: torch.Tensor) -> float:
    """The largest difference relative to the largest value; not a number where something is not one."""
    return float((found.double() - expected).abs().max() / expected.abs().max())


# time -------------------------------------------------------------------------------------------------------------


def take_turns(variants: Mapping[str, Call], rounds: int, clock: Clock) -> dict[str, float]:
    """Milliseconds of the device per call: medians over rounds, in each of which every variant has a turn."""
    found: dict[str, list[float]] = {name: [] for name in variants}
    for _ in range(3):
        for call in variants.values():
            call()
    for _ in range(rounds):
        for name, call in variants.items():
            found[name].append(_device_ms(call))
        if clock.left() < 10:
            break
    return {name: statistics.median(times) for name, times in found.items()}


def _device_ms(call: Call, calls: int = 5) -> float:
    start, end = (torch.cuda.Event(enable_timing=True) for _ in range(2))
    torch.cuda.synchronize()
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


def native_call(fd: mf.FusionDefinition, inputs: Sequence[torch.Tensor]) -> Call:
    """nvFuser's own definition of a program of one segment, called with nothing of ours around it."""
    compiled = next(iter(fd._bound.values())).compiled
    (segment,) = (part for part in compiled.segmented.parts if isinstance(part, Segment))
    definition, given = build_segment(compiled.segmented, segment, 0).definition, list(inputs)
    return lambda: definition.execute(given)


def taken_whole(fd: mf.FusionDefinition) -> bool:
    """Whether nvFuser runs all of a program's only segment."""
    return re.search(r"nvfuser +compiled", fd.backends()) is not None


def variants_of(work: Work, inputs: Sequence[torch.Tensor]) -> dict[str, Call]:
    """Compiled and called once; a segment that nvFuser did not take whole is an error, not a measurement."""
    fd, compiled = work.definition(), torch.compile(work.by_hand, dynamic=False)
    expected = work.by_hand(*(t.double() for t in inputs))
    calls: dict[str, Call] = {
        "nvfuser": lambda: fd.execute(inputs, backend="nvfuser"),
        "graph": lambda: fd.execute(inputs, backend="nvfuser", cuda_graph=True),
        "eager": lambda: work.by_hand(*inputs),
        "compile": lambda: compiled(*inputs),
    }
    for name, call in calls.items():
        error = max(_error(a, b) for a, b in zip(call(), expected, strict=True))
        assert error < 4e-2, f"{work.name} by {name}: error {error}"
    assert taken_whole(fd), fd.backends()
    return calls | {"native": native_call(fd, inputs)}


def copy_bandwidth(count: int = 1 << 29) -> float:
    """Bytes per second, read and written, of a copy: the ceiling of what moves memory once."""
    source, target = (torch.empty(count, dtype=torch.bfloat16, device="cuda") for _ in range(2))
    seconds = statistics.median(_device_ms(lambda: target.copy_(source)) for _ in range(15)) / 1e3
    return 2 * count * 2 / seconds


def measure_segments(clock: Clock, ceiling: float) -> Lines:
    """Large pointwise and normalising segments: milliseconds and the share of a copy's bandwidth."""
    lines: Lines = []
    for work in elementwise(16384, 4096):
        inputs = work.inputs()
        calls = variants_of(work, inputs)
        moved = sum(t.nbytes for t in (*inputs, *work.by_hand(*inputs)))
        for name, ms in take_turns(calls, 25, clock).items():
            share = moved / (ms / 1e3) / ceiling
            lines.append({"work": work.name, "variant": name, "ms": ms, "bytes": moved, "of_copy": share})
    return lines


def measure_block(clock: Clock) -> Lines:
    """Forward and backward of the block on one rank."""
    block = Block()
    inputs, fd = block.inputs(), block.definition(1)
    compiled = torch.compile(block.forward, dynamic=False)
    calls: dict[str, Call] = {
        "nvfuser": lambda: fd.execute(inputs, backend="nvfuser"),
        "graph": lambda: fd.execute(inputs, backend="nvfuser", cuda_graph=True),
        "eager": lambda: block.by_hand(*inputs),
        "compile": lambda: block.by_hand(*inputs, forward=compiled),
    }
    return [{"work": "gpt_block", "variant": n, "ms": ms} for n, ms in take_turns(calls, 25, clock).items()]


def measure_host() -> Lines:
    """Small tensors, where the device waits for the host."""
    lines: Lines = []
    for work in elementwise(8, 64):
        calls = variants_of(work, inputs := work.inputs())
        names = {"nvfuser": "meshfuse", "graph": "meshfuse, a graph", "native": "fd.execute", "eager": "by hand",
                 "compile": "by hand, compiled"}  # fmt: skip
        lines += [{"work": work.name, "variant": names[n], "us": host_us(c)} for n, c in calls.items()]
        del inputs
    return lines


# results ----------------------------------------------------------------------------------------------------------


def markdown(found: Mapping[str, Any]) -> str:
    out = [f"# {found['device']}, {found['date']}", "", f"torch {found['torch']}, nvFuser {found['nvfuser']}.", ""]
    states = [line["state"] for line in found["ops"]]
    out += ["## Correctness", "", *(f"- ops, {state}: {states.count(state)}" for state in sorted(set(states)))]
    out += [f"- wrong: {x['op']} {x['sample']}: {x['why']}" for x in found["ops"] if x["state"] == "wrong"]
    out += [f"- GPT block on {x['ranks']} simulated ranks: {x['state']}" for x in found["block"]]
    for title in ("segments", "gpt_block", "host"):
        out += ["", f"## {title}", "", *_table(found[title])]
    out += ["", f"Copy: {found['copy_bytes_per_second'] / 1e9:.0f} GB/s.", ""]
    return "\n".join(out + [f"Failed: {name}: {why}" for name, why in found["failed"].items()]) + "\n"


def _table(lines: Lines) -> list[str]:
    if not lines:
        return ["Not measured."]
    rows = [list(lines[0]), ["---"] * len(lines[0])]
    rows += [[f"{v:.3g}" if isinstance(v, float) else str(v) for v in line.values()] for line in lines]
    return [f"| {' | '.join(row)} |" for row in rows]


def section(found: dict[str, Any], name: str, make: Call, empty: Any) -> None:
    """A section of the results; one that fails is named, and the others go on."""
    try:
        found[name] = make()
    except Exception as error:
        found[name] = empty
        found["failed"][name] = _said(error)
    print(f"{name}: {found['failed'].get(name, 'done')}", flush=True)


def measure(limit: float) -> dict[str, Any]:
    clock, now = Clock(limit), datetime.datetime.now(datetime.timezone.utc)
    found: dict[str, Any] = {
        "device": torch.cuda.get_device_name(), "date": f"{now:%Y-%m-%d}", "torch": torch.__version__,
        "nvfuser": load().__version__, "failed": {},
    }  # fmt: skip
    section(found, "block", lambda: [check_block(Block(), ranks) for ranks in (1, 2, 4)], [])
    section(found, "copy_bytes_per_second", copy_bandwidth, 0.0)
    section(found, "segments", lambda: measure_segments(clock, found["copy_bytes_per_second"]), [])
    section(found, "gpt_block", lambda: measure_block(clock), [])
    section(found, "host", measure_host, [])
    section(found, "ops", lambda: check_ops(clock, 10.0), [])
    return found


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--limit", type=float, default=480, help="seconds for everything")
    parser.add_argument("--out", type=Path, default=HERE / "results")
    args = parser.parse_args()
    why = refusal()
    if why is not None:
        print(why, file=sys.stderr)
        return 2
    os.environ["MESHFUSE_BACKEND"] = "nvfuser"
    found = measure(args.limit)
    args.out.mkdir(parents=True, exist_ok=True)
    name = f"{found['date']}-{re.sub(r'[^A-Za-z0-9]+', '-', found['device']).strip('-')}"
    (args.out / f"{name}.json").write_text(json.dumps(found, indent=1) + "\n")
    (args.out / f"{name}.md").write_text(markdown(found))
    print(markdown(found))
    wrong = [line for line in (*found["ops"], *found["block"]) if line["state"] == "wrong"]
    return 1 if wrong or found["failed"] else 0


if __name__ == "__main__":
    sys.exit(main())
