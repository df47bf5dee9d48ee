"""`PythonProfiler`: the kernels and communications that the last execution of a definition ran."""

from __future__ import annotations

import math
from collections.abc import Iterable, Sequence
from dataclasses import dataclass
from types import TracebackType
from typing import Any

import torch

from ..compiler import CompiledProgram
from ..errors import user_error
from ..host_ir import HostProgram
from ..lowering.instructions import Collective, CommunicationCall, Instruction, Launch, SendRecv
from ..lowering.segments import Segment
from .schedulers import ScheduledOp, costliest, scheduler_of


@dataclass(frozen=True, slots=True)
class KernelProfile:
    """One kernel or communication; `scheduler` is "communication" for the latter.

    Times of single kernels are not measured: they are nan. What is about CUDA launches is empty.
    """

    name: str
    segment_id: int
    scheduler: str
    device: int = 0
    stream: int = 0
    output_bytes: int = 0
    input_bytes: int = 0
    time_ms: float = math.nan
    compile_time_ms: float = math.nan
    effective_bandwidth_gbs: float = math.nan
    percentage_peak_bandwidth: float = math.nan
    correlation_id: int = 0
    registers: int = 0
    block_str: str = ""
    cluster_str: str = ""
    grid_str: str = ""
    shared_mem_str: str = ""


@dataclass(frozen=True, slots=True)
class FusionProfile:
    """One execution on this rank. `host_time_ms` is its wall time, including compilation if there was any."""

    fusion_id: int
    segments: int
    host_time_ms: float
    input_bytes: int
    output_bytes: int
    kernel_profiles: list[KernelProfile]
    verbose: bool = False
    cuda_evt_time_ms: float = math.nan
    compile_time_ms: float = math.nan
    kernel_time_ms: float = math.nan
    effective_bandwidth_gbs: float = math.nan
    percentage_peak_bandwidth: float = math.nan

    @property
    def percentage_peak_bandwith(self) -> float:
        """nan; the name is spelt as in nvFuser."""
        return self.percentage_peak_bandwidth


class _LastProfile:
    """What the profilers that are on have seen last."""

    def __init__(self) -> None:
        self.switched_on, self.executions = 0, 0
        self.last: FusionProfile | None = None

    def record(self, ran: FusionProfile) -> None:
        self.executions += 1
        self.last = ran


_recorder = _LastProfile()


def profiling() -> bool:
    """Whether executions are to be recorded."""
    return _recorder.switched_on > 0


def record(
    compiled: CompiledProgram,
    rank: int,
    values: Sequence[Any],
    results: Sequence[Any],
    seconds: float,
    scheduler: str | None = None,
) -> None:
    """Note an execution on `rank` with its local inputs and outputs; `scheduler` is that of its kernels."""
    kernels: list[KernelProfile] = []
    if rank in compiled.ranks:
        kernels = list(_kernels(compiled, compiled.host_program(rank), scheduler))
    number, host_ms = _recorder.executions, 1e3 * seconds
    _recorder.record(FusionProfile(number, len(kernels), host_ms, _bytes(values), _bytes(results), kernels))


def _bytes(values: Iterable[Any]) -> int:
    tensors = (value for value in values if isinstance(value, torch.Tensor))
    return sum(tensor.numel() * tensor.element_size() for tensor in tensors)


def _kernels(compiled: CompiledProgram, program: HostProgram, scheduler: str | None) -> Iterable[KernelProfile]:
    segments = [part for part in compiled.segmented.parts if isinstance(part, Segment)]
    schedulers = {segment.name: scheduler or _scheduler(compiled, segment) for segment in segments}
    ran = [i for i in program.instructions if isinstance(i, (Launch, Collective, SendRecv))]
    for place, instruction in enumerate(ran):
        yield _kernel(place, instruction, schedulers)


def _kernel(place: int, instruction: Instruction, schedulers: dict[str, str]) -> KernelProfile:
    if isinstance(instruction, Launch):
        name = instruction.kernel.name
        return KernelProfile(name, place, schedulers.get(name, "expr_eval"))
    assert isinstance(instruction, CommunicationCall)
    about = instruction.about
    return KernelProfile(about.kind, place, "communication", output_bytes=round(about.wire))


def _scheduler(compiled: CompiledProgram, segment: Segment) -> str:
    """nvFuser's name for the kind of kernel; if a segment would be several kernels there, the costliest one's."""
    nodes = [compiled.graph.nodes[compute.node] for compute in segment.computes]
    ops = [ScheduledOp.of(node.call.op, node.inputs, node.outputs, node.rule) for node in nodes]
    return (scheduler_of(ops) or costliest(ops)).name


def get_fusion_profile() -> FusionProfile:
    """The profile of the last execution under a PythonProfiler. Raises DefinitionError where there was none."""
    if _recorder.last is None:
        raise user_error("there is no profile", needed="an execution", do="Execute inside 'with PythonProfiler()'.")
    return _recorder.last


def reset_profiler() -> None:
    """Forget the last profile."""
    _recorder.last = None


class PythonProfiler:
    """`with PythonProfiler() as prof: fd.execute(...)`; `prof.profile` is then the profile of the last execution."""

    def __init__(self, auto_scheduled: bool = True):
        self.auto_scheduled = auto_scheduled

    def __enter__(self) -> PythonProfiler:
        reset_profiler()
        _recorder.switched_on += 1
        return self

    def __exit__(self, kind: type | None, error: BaseException | None, trace: TracebackType | None) -> None:
        _recorder.switched_on -= 1

    def reset(self) -> None:
        """Forget the last profile."""
        reset_profiler()

    @property
    def profile(self) -> FusionProfile:
        return get_fusion_profile()

    @property
    def fusion_profile(self) -> FusionProfile:
        return get_fusion_profile()
