"""What NVIDIA's benchmarks and tests of nvFuser take from `nvfuser_direct`, and their timers for pytest-benchmark."""

from __future__ import annotations

import enum
import functools
import math
import subprocess
import sys
import types
from collections.abc import Callable
from typing import Any

import pytest
import torch

import meshfuse as mf
import meshfuse.nvfuser_direct as nvfuser
from defining import nvfuser_relu
from meshfuse.nvfuser_direct import benchmark_utils, pytorch_utils

# All names that the files in benchmarks/python and tests/python of github.com/NVIDIA/Fuser (April 2026) import from
# nvfuser_direct, and what they read of those.
USED = """
BroadcastOp CommunicatorBackend CommunicatorBackend.cuda CommunicatorBackend.nccl CommunicatorBackend.ucc
CompileParams DataType DataType.BFloat16 DataType.Bool DataType.ComplexDouble DataType.ComplexFloat
DataType.Double DataType.Float DataType.Float4_e2m1fn DataType.Float4_e2m1fn_x2 DataType.Float8_e4m3fn
DataType.Half DataType.Int DataType.Int32 DataType.Null DataType.UInt64 FusionDefinition IdMappingMode
IdMappingMode.exact KernelExecutor LRUCache LoadStoreOpType LoadStoreOpType.tma LruFusionCache MemoryType
MemoryType.shared MemoryType.symmetric Merge ParallelType ParallelType.block_x ParallelType.block_y
ParallelType.grid_x ParallelType.grid_y ParallelType.grid_z ParallelType.mesh_x ParallelType.mesh_y
ParallelType.mesh_z ParallelType.stream ParallelType.tma ParallelType.unroll ParallelType.vectorize
PythonProfiler ReshapeOp SchedulerType SchedulerType.__entries SchedulerType.inner_persistent SchedulerType.none
SchedulerType.pointwise SchedulerType.reduction Split SqueezeOp TensorView benchmark_utils.CuptiTimer
benchmark_utils.FusionProfileTimer compute_tensor_descriptor execute_with_dtensors idm idm.IdModel multidevice
multidevice.Communicator multidevice.Communicator.instance multidevice.DeviceMesh
multidevice.MultiDeviceExecutor multidevice.MultiDeviceExecutorParams multidevice.shard_tensor nvf_cutlass
nvf_cutlass.grouped_mm nvf_cutlass.mxfp8_scaled_mm nvf_cutlass.nvfp4_scaled_grouped_mm
nvf_cutlass.nvfp4_scaled_mm nvf_cutlass.nvfp4_scaled_mm_blockscale nvfuser_direct_version.Version
pytorch_utils.DEVICE_PROPERTIES pytorch_utils.python_scalar_to_nvfuser_dtype
pytorch_utils.retry_on_oom_or_skip_test pytorch_utils.torch_dtype_to_nvfuser_dtype schedule
schedule.can_schedule schedule.compute_heuristics schedule.find_compatible_schedulers schedule.schedule version
""".split()  # noqa: SIM905 - a list of them would take a page


@pytest.mark.parametrize("path", USED)
def test_what_nvidias_files_use_is_there(path: str) -> None:
    assert functools.reduce(getattr, path.split("."), nvfuser) is not None


IMPORTING = """
import importlib, sys
import meshfuse
sys.modules["nvfuser_direct"] = meshfuse.nvfuser_direct
for path in sys.argv[1:]:
    module, _, name = f"nvfuser_direct.{path}".rpartition(".")
    exec(f"from {module} import {name}")
from nvfuser_direct import *
"""


@pytest.mark.slow
def test_imports_as_in_nvidias_files_after_a_plain_import_of_meshfuse() -> None:
    """As README shows, which has no `import meshfuse.nvfuser_direct`."""
    paths = [path for path in USED if isinstance(at(path.rpartition(".")[0]), types.ModuleType)]
    done = subprocess.run([sys.executable, "-c", IMPORTING, *paths], capture_output=True, text=True, timeout=120)
    assert done.returncode == 0, done.stderr


def at(path: str) -> Any:
    return functools.reduce(getattr, path.split(".") if path else (), nvfuser)


ENUMERATIONS = [value for value in vars(nvfuser).values() if isinstance(value, enum.EnumMeta)]


@pytest.mark.parametrize("kind", ENUMERATIONS, ids=lambda kind: kind.__name__)
def test_entries_of_enumerations(kind: Any) -> None:
    """pybind11's enumerations cannot be iterated over: scripts read (member, description) by name."""
    assert {name: value for name, (value, _) in kind.__entries.items()} == dict(kind.__members__)


# timers


class Fixture:
    """What nvFuser's benchmarks need of pytest-benchmark's fixture: rounds that are timed by two calls of a timer."""

    def __init__(self, timer: Callable[[], float]):
        self.timer, self.seconds = timer, list[float]()

    def pedantic(self, function: Callable[[], Any], rounds: int) -> Any:
        result = None
        for _ in range(rounds):
            start = self.timer()
            result = function()
            self.seconds.append(self.timer() - start)
        return result


def test_a_definition_timed_by_its_profile() -> None:
    timer, whole = benchmark_utils.FusionProfileTimer(), torch.randn(2, 3)
    fd, fixture, profiles = nvfuser_relu(), Fixture(timer), list[float]()

    def run() -> Any:
        timer.set_fd(fd)
        with nvfuser.PythonProfiler() as profiler:
            outputs = fd.execute([whole])
        profiles.append(profiler.profile.host_time_ms / 1e3)
        return outputs

    assert torch.equal(fixture.pedantic(run, rounds=3)[0], whole.relu())
    assert fixture.seconds == pytest.approx(profiles) and timer.fd is fd
    timer.cleanup()


def test_a_timer_of_what_was_not_profiled() -> None:
    nvfuser.reset_profiler()
    timer = benchmark_utils.FusionProfileTimer()
    with pytest.raises(mf.DefinitionError, match="there is no profile"):
        Fixture(timer).pedantic(lambda: nvfuser_relu().execute([torch.ones(2, 3)]), rounds=1)


def test_a_timer_of_ones_own() -> None:
    class Counting(benchmark_utils.Timer):
        def __call__(self) -> float:
            self._increment_global_time(1.5)
            return self.current_time

    fixture = Fixture(Counting())
    fixture.pedantic(lambda: None, rounds=2)
    assert fixture.seconds == [1.5, 1.5]


def test_kernels_on_the_cpu_are_timed_by_the_clock(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(torch.cuda, "is_available", lambda: False)
    clock = iter([1.0, 3.5])
    monkeypatch.setattr(benchmark_utils.time, "perf_counter", lambda: next(clock))
    timer = benchmark_utils.CuptiTimer()
    fixture = Fixture(timer)
    fixture.pedantic(lambda: torch.ones(3), rounds=1)
    timer.cleanup()
    assert fixture.seconds == [2.5]
    with pytest.raises(
        OSError, match=r"CuptiProfiler: there is no CUDA device.*\(at test_nvfuser_benchmarks\.py:\d+\)"
    ):
        benchmark_utils.CuptiProfiler()


def event(name: str, microseconds: float, device: str = "CUDA") -> Any:
    kind = getattr(torch.autograd.DeviceType, device)
    span = types.SimpleNamespace(elapsed_us=lambda: microseconds)
    return types.SimpleNamespace(name=name, device_type=kind, time_range=span)


RECORDED = [event("add", 3.0), event("cudaLaunchKernel", 50.0, "CPU"), event("mul", 4.0),
            event("Memcpy DtoD (Device -> Device)", 20.0), event("Memset (Device)", 9.0)]  # fmt: skip


@pytest.fixture
def device(monkeypatch: pytest.MonkeyPatch) -> list[Any]:
    """A stand-in for a CUDA device: what torch's profiler records on it is in the list."""
    recorded: list[Any] = []
    made = types.SimpleNamespace(start=lambda: None, stop=lambda: None, events=lambda: list(recorded))
    monkeypatch.setattr(torch.cuda, "is_available", lambda: True)
    monkeypatch.setattr(torch.cuda, "synchronize", lambda: None)
    monkeypatch.setattr(torch.profiler, "profile", lambda activities: made)
    return recorded


def test_kernels_on_a_device_are_timed_by_torchs_profiler(device: list[Any]) -> None:
    timer = benchmark_utils.CuptiTimer()
    fixture = Fixture(timer)
    fixture.pedantic(lambda: device.extend(RECORDED), rounds=1)
    assert fixture.seconds == pytest.approx([7e-6])
    device.clear()
    with pytest.raises(mf.DefinitionError, match="found no kernel on the CUDA device, needed at least one"):
        fixture.pedantic(lambda: None, rounds=1)
    assert timer.cupti_profiler is not None and not timer.cupti_profiler.is_valid
    timer.cleanup()
    with pytest.raises(mf.DefinitionError, match="it was torn down"):
        timer()


def test_a_profiler_of_kernels(device: list[Any]) -> None:
    profiler = benchmark_utils.CuptiProfiler()
    assert profiler.stop() == []
    profiler.start()
    device.extend(RECORDED)
    assert [name for name, _ in profiler.stop()] == ["add", "mul"]
    profiler.teardown_cupti()


def test_properties_without_a_device(monkeypatch: pytest.MonkeyPatch) -> None:
    """NVIDIA's benchmarks read them as they are imported: they are false, with a value for every key."""
    monkeypatch.setattr(torch.cuda, "is_available", lambda: False)
    none = pytorch_utils.DEVICE_PROPERTIES
    assert not none and none["gpu_l2_bytes"] == 0 and math.isnan(none["gpu_peak_bandwidth_gbps"])
    monkeypatch.setattr(torch.cuda, "is_available", lambda: True)
    monkeypatch.setattr(torch.cuda, "current_device", lambda: 0)
    monkeypatch.setattr(torch.cuda, "get_device_properties", lambda place: types.SimpleNamespace(name="G"))
    assert set(pytorch_utils.DEVICE_PROPERTIES) == set(none)
    assert math.isnan(pytorch_utils.DEVICE_PROPERTIES["gpu_peak_bandwidth_gbps"])
