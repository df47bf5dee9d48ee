"""Which backend compiles which segments, and at which call of a program.

"eager" runs the text of every segment. "inductor" and "nvfuser" compile all that they can before the first call. "auto"
runs the text until compiling would have paid, so a program that runs a few times is never compiled. It follows the rule
for rent or buy (Karlin et al., "Competitive snoopy caching", 1988): buy once the rent paid is the price, which costs at
most twice what knowing the future would. All costs are modelled from the definition alone, so that all ranks compile
the same segments at the same call.

On a GPU "auto" compiles by nvFuser, where it is installed, what keeps the GPU busy; what waits for the host, or what
nvFuser cannot run, by Inductor (`benchmarks/gpu/results/`: on an H200 nvFuser's kernels take 0.4 to 0.97 times as long,
and the host takes 1.6 times as long for a small block of theirs).
"""

from __future__ import annotations

import importlib.util
import math
import os
from collections.abc import Callable, Mapping
from dataclasses import dataclass

import torch

from ..errors import ArgumentError, SourceLine, shown, user_error
from ..lowering.fusable_copies import by_element
from ..lowering.segments import Segment, SegmentedDefinition
from ..resharding import ReshardedDefinition
from . import Backend, Unsupported
from .eager import Eager
from .gpu_costs import keeps_a_gpu_busy

VARIABLE = "MESHFUSE_BACKEND"


@dataclass(frozen=True, slots=True)
class _Speeds:
    """Seconds to start an op from Python, seconds to call compiled code, and bytes per second that ops read or write.

    ahead: the host starts ops while earlier ones still run.
    """

    start: float
    call: float
    bandwidth: float
    ahead: bool


_CPU_CORE = _Speeds(2e-6, 6e-6, 1e10, False)
_GPU = _Speeds(7e-6, 12e-6, 3e12, True)
# Seconds to compile: a C++ or CUDA compiler's start, and per op.
_COMPILE, _COMPILE_OP = 3.0, 0.02
# A segment that saves less per call is left alone, and no program is compiled before this call.
_LEAST, _PATIENCE = 2e-5, 16


def _inductor() -> Backend:
    from .inductor import Inductor

    return Inductor()


def _nvfuser() -> Backend:
    """The backend. Raises Unsupported where there is no nvFuser."""
    try:
        from .nvfuser.backend import NvFuser

        return NvFuser()
    except ImportError as error:
        raise Unsupported(f"it cannot be imported ({error})") from error


MAKERS: Mapping[str, Callable[[], Backend]] = {"eager": Eager, "inductor": _inductor, "nvfuser": _nvfuser}
NAMES = ("auto", *MAKERS)


def requested(given: str | None, line: SourceLine | None = None) -> str:
    """The backend's name: as given, else MESHFUSE_BACKEND, else "auto". Raises ArgumentError for other names."""
    name = given if given is not None else os.environ.get(VARIABLE) or "auto"
    if not isinstance(name, str) or name not in NAMES:
        what = "backend" if given is not None else VARIABLE
        raise user_error(what, shown(name), f"one of {', '.join(NAMES)}", "", line, ArgumentError)
    return name


@dataclass(frozen=True, slots=True)
class Chosen:
    """What runs a segment, and why; `otherwise` is the backend to try where this one cannot compile it."""

    backend: str
    why: str
    otherwise: str | None = None


@dataclass(frozen=True, slots=True)
class Assignment:
    """By segment number the backend that runs it from call number `due` (from 0) on.

    Before that, and for None, its text runs.
    """

    due: int | None
    chosen: Mapping[int, Chosen]


def assigned(definition: SegmentedDefinition, name: str, device: torch.device) -> Assignment:
    """Which segments to compile, and when; the same on all ranks."""
    every = [part for part in definition.parts if isinstance(part, Segment)]
    ragged = {segment.id: _OF_ANY_SIZE for segment in every if _has_rows(definition.resharded, segment)}
    segments = [segment for segment in every if segment.id not in ragged]
    if name != "auto":
        due = None if name == "eager" or not segments else 0
        return Assignment(due, ragged | {segment.id: Chosen(name, "asked for") for segment in segments})
    saved = {segment.id: saved_seconds(definition.resharded, segment, device) for segment in segments}
    price = sum(_COMPILE + _COMPILE_OP * len(s.computes) for s in segments if saved[s.id] >= _LEAST)
    total = sum(seconds for seconds in saved.values() if seconds >= _LEAST)
    due = max(_PATIENCE, math.ceil(price / total)) if total else None
    native = device.type == "cuda" and importlib.util.find_spec("nvfuser_direct") is not None
    busy = {segment.id for segment in segments if native and keeps_a_gpu_busy(definition, segment)}
    return Assignment(due, ragged | {number: _auto(seconds, due, number in busy) for number, seconds in saved.items()})


_OF_ANY_SIZE = Chosen("eager", "rows of experts are as many as the numbers say")


def _has_rows(resharded: ReshardedDefinition, segment: Segment) -> bool:
    """Whether an op of a segment reads or makes rows of experts."""
    return any(resharded.type_of(v).rows for c in segment.computes for v in (*c.inputs, *c.outputs))


def _auto(saved: float, due: int | None, native: bool) -> Chosen:
    micro = f"{saved * 1e6:.0f} us per call"
    if saved < _LEAST:
        return Chosen("eager", f"compiling it would save {micro} at most")
    why = f"from call {due} on, to save about {micro}"
    return Chosen("nvfuser", why, "inductor") if native else Chosen("inductor", why)


def saved_seconds(resharded: ReshardedDefinition, segment: Segment, device: torch.device) -> float:
    """Seconds per call, at least 0, that fusing a segment's ops saves: their starts, and traffic between them.

    Products and attention cost the same either way, and so do values that enter or leave the segment.
    """
    speeds = _GPU if device.type == "cuda" else _CPU_CORE
    fused = [c for c in segment.computes if by_element(resharded.graph.nodes[c.node].call)]
    starts = speeds.start * len(fused) - speeds.call
    inside = [v for c in fused for v in c.outputs if v not in segment.outputs]
    # Each value is written once and read at least once.
    traffic = 2 * sum(resharded.nbytes(v) for v in inside) / speeds.bandwidth
    return max(0.0, starts, traffic) if speeds.ahead else max(0.0, starts + traffic)
