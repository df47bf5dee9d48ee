"""`meshfuse.nvfuser_direct`: its names, the forms and the names of arguments, and the properties of a device."""

from __future__ import annotations

import functools
import inspect
import subprocess
import sys
import types
from collections.abc import Callable
from typing import Any

import numpy as np
import pytest
import torch

import meshfuse as mf
import meshfuse.nvfuser_direct as nvfuser
from defining import nvfuser_relu
from meshfuse.nvfuser_direct import DataType, FusionDefinition, pytorch_utils

NVMesh = nvfuser.multidevice.DeviceMesh
X = nvfuser.ParallelType.mesh_x

NAMES = {
    "": "CommunicatorBackend DataType Fusion FusionDefinition LruFusionCache MemoryType ParallelType Val "
    "PythonProfiler TensorView execute_with_dtensors IterDomain TensorDomain KernelExecutor SchedulerType "
    "compute_tensor_descriptor version translate_fusion LaunchParams CompileParams HeuristicParams PointwiseParams "
    "ReductionParams MatmulParams CacheOp LoadStoreOpType",
    "multidevice": "Communicator DeviceMesh MultiDeviceExecutor MultiDeviceExecutorParams Sharding shard_tensor",
    "pytorch_utils": "torch_dtype_to_nvfuser_dtype DEVICE_PROPERTIES get_device_properties retry_on_oom_or_skip_test",
    "benchmark_utils": "get_benchmark_fns Timer FusionProfileTimer CuptiTimer CuptiProfiler",
    "nvfuser_direct_version": "Version",
    "ParallelType": "serial mesh_x mesh_y mesh_z stream grid_x block_x vectorize unroll unswitch mma tma",
    "DataType": "Index Float4_e2m1fn_x2 Float8_e8m0fnu UInt64 Null",
    "Fusion": "inputs outputs vals add_output print_math print_kernel",
    "FusionExecutorCache": "get_output_shardings fusion is_compiled get_scheduled_ir get_cuda_kernel",
    "IterDomain": "parallelize extent is_reduction is_device_dim is_parallelized",
    "TensorView": "set_device_mesh outer_split inner_split split axis reorder rfactor set_allocation_domain "
    "get_loop_domain get_logical_domain has_device_mesh set_memory_type swizzle1d num_dims shape size dtype merge "
    "domain definition uses cache_before cache_after get_root_domain has_root is_symbolic is_tensor swizzle",
    "FusionDefinition": "define_tensor define_scalar define_vector from_pytorch add_output execute validate "
    "manual_execute last_repro_script repro_script_for manual_validate validate_definition",
    "multidevice.Communicator": "instance size rank local_size local_rank barrier",
    "PythonProfiler": "profile reset",
}


@pytest.mark.parametrize("owner", NAMES)
def test_names_of_nvfuser_direct(owner: str) -> None:
    found: Any = nvfuser
    for part in owner.split(".") if owner else ():
        found = getattr(found, part)
    assert [name for name in NAMES[owner].split() if not hasattr(found, name)] == []


ALIASED = """
import sys
import meshfuse.nvfuser_direct
sys.modules["nvfuser_direct"] = meshfuse.nvfuser_direct
import nvfuser_direct
import nvfuser_direct.multidevice
from nvfuser_direct import pytorch_utils as same
from nvfuser_direct.multidevice import DeviceMesh
from nvfuser_direct.pytorch_utils import torch_dtype_to_nvfuser_dtype
from nvfuser_direct.nvfuser_direct_version import Version

assert DeviceMesh is meshfuse.nvfuser_direct.multidevice.DeviceMesh and same is meshfuse.nvfuser_direct.pytorch_utils
assert same.__spec__.name == "meshfuse.nvfuser_direct.pytorch_utils"
try:
    import nvfuser_direct.nothing
except ModuleNotFoundError as error:
    assert error.name == "nvfuser_direct.nothing"
else:
    raise AssertionError
"""


@pytest.mark.slow
def test_the_package_under_nvfusers_own_name() -> None:
    """Submodules are the same modules: classes exist once."""
    done = subprocess.run([sys.executable, "-c", ALIASED], capture_output=True, text=True, timeout=120)
    assert done.returncode == 0, done.stderr


@pytest.mark.parametrize(
    "devices, text, shape",
    [
        ([0, 1, 2], "DeviceMesh{0 1 2}", (3,)),
        (range(2), "DeviceMesh{0 1}", (2,)),
        (torch.arange(4).reshape(2, 2), "DeviceMesh{{0 1}{2 3}}", (2, 2)),
        ([[3, 1], [0, 2]], "DeviceMesh{{3 1}{0 2}}", (2, 2)),
        (torch.arange(4).reshape(2, 1, 2), "DeviceMesh{{{0 1}}{{2 3}}}", (2, 1, 2)),
    ],
)
def test_meshes_read_as_nvfusers(devices: Any, text: str, shape: tuple[int, ...]) -> None:
    mesh = NVMesh(devices)
    assert (repr(mesh), str(mesh), mesh.shape) == (text, text, shape)
    assert mesh.size == torch.Size(shape).numel()
    assert mesh == mesh.plain() and mesh.plain() == mesh and "{" not in repr(mesh.plain())


def test_a_mesh_with_a_rank_twice() -> None:
    with pytest.raises(mf.DefinitionError, match="each rank once"):
        NVMesh([0, 1, 1])


def test_a_mesh_cuts_as_torch_chunks() -> None:
    whole = torch.arange(14).view(7, 2)
    for rank, part in enumerate(whole.chunk(3)):
        assert torch.equal(NVMesh([4, 2, 0]).shard_tensor(whole, 0, [4, 2, 0][rank]), part)
    with pytest.raises(mf.ArgumentError, match="a mesh of one axis"):
        NVMesh([[0, 1]]).shard_tensor(whole, 0)
    with pytest.raises(mf.ArgumentError, match="dim 2"):
        NVMesh([0, 1]).shard_tensor(whole, 2)
    for what in (None, whole.tolist(), whole.to_sparse()):
        with pytest.raises(mf.ArgumentError, match="a dense tensor"):
            NVMesh([0, 1]).shard_tensor(what, 0)
    for axis, device in ((None, 0), ("0", 0), (0.0, 0), (True, 0), (0, "1"), (0, 1.0), (0, True), (0, [1])):
        with pytest.raises(mf.ArgumentError, match=r"DeviceMesh\.shard_tensor"):
            NVMesh([0, 1]).shard_tensor(whole, axis, device)
    assert torch.equal(NVMesh([0, 1]).shard_tensor(whole, np.int64(-1), np.int64(1)), whole[:, 1:])


@pytest.mark.parametrize(
    "define",
    [
        lambda fd: fd.define_tensor(shape=[-1, 3], contiguity=[True, True], dtype=DataType.Double, is_cpu=False),
        lambda fd: fd.define_tensor(sizes=[4, 3], strides=[3, 1], dtype=DataType.Double, static_sizes=True),
        lambda fd: fd.define_tensor([4, 3], [3, 1], DataType.Double),
        lambda fd: fd.define_tensor((-1, -1), contiguity=False, dtype=DataType.Double, stride_order=[1, 0]),
        lambda fd: fd.from_pytorch(torch.empty(4, 3, dtype=torch.float64)),
    ],
)
def test_forms_of_define_tensor(define: Callable[[FusionDefinition], Any]) -> None:
    with FusionDefinition() as fd:
        x = define(fd)
        factor = fd.define_scalar(dtype=DataType.Double)
        rows, columns = fd.define_vector(2)
        y = fd.ops.mul(fd.ops.reshape(x, [columns, rows]), factor)
        fd.add_output(y)
    assert x.dtype() is DataType.Double and x.num_dims() == 2
    whole = torch.randn(4, 3, dtype=torch.float64)
    (found,) = fd.execute([whole, 2.0, 4, 3])
    assert torch.equal(found, 2 * whole.view(3, 4))


def test_arguments_by_nvfusers_names() -> None:
    with FusionDefinition() as fd:
        x = fd.define_tensor(shape=[4, 6], contiguity=[True, True], dtype=DataType.Float, stride_order=[])
        two, rows = fd.define_scalar(2.0, dtype=DataType.Float), fd.define_scalar(None, DataType.Int)
        y = fd.ops.mul(x, two)
        fd.add_output(y)
        for tv in (x, y):
            tv.set_device_mesh(mesh=NVMesh([0, 1]))
            tv.split(axis=0, factor=2, inner_split=False)
            tv.axis(index=0).parallelize(parallel_type=X)
            tv.set_allocation_domain(new_allocation_domain=tv.get_loop_domain(), new_contiguity=True)
        y.swizzle1d(axis=0, parallel_type=X)
        y.axis(0).parallelize(nvfuser.ParallelType.stream)
        y.set_memory_type(memory_type=nvfuser.MemoryType.symmetric)
    assert (x.is_tensor(), two.is_tensor(), two.is_symbolic(), rows.is_symbolic()) == (True, False, False, True)
    whole = torch.randn(4, 6)
    assert torch.equal(fd.simulate([whole, 4])[0], 2 * whole)
    assert "x" in str(fd.output_shardings()[0])


# What nvFuser's bindings call their arguments; tests/nvfuser/test_names.py reads all of them in the real package.
KEYWORDS = {
    "Fusion.add_input": "input",
    "Fusion.add_output": "output alias_input",
    "Fusion.print_math": "from_outputs_only",
    "Fusion.print_kernel": "compile_params",
    "FusionDefinition.add_output": "output alias_input",
    "FusionDefinition.define_vector": "size",
    "FusionDefinition.execute": "inputs device auto_schedule save_repro_inputs _enable_options _disable_options",
    "FusionDefinition.from_pytorch": "tensor static_sizes",
    "FusionDefinition.validate": "inputs reference_outputs device",
    "KernelExecutor": "fusion_id concrete_id runtime_id group_id",
    "KernelExecutor.compile": "fusion args launch_constraints compile_params scheduler_type",
    "KernelExecutor.run": "args launch_constraints compile_params",
    "TensorView.cache_after": "op_type cache_op propagate_allocation_domain cached_uses",
    "TensorView.merge": "axis_o axis_i",
    "TensorView.reorder": "old2new",
    "TensorView.swizzle": "x y",
    "TensorView.rfactor": "axes",
    "multidevice.DeviceMesh": "devices",
    "multidevice.DeviceMesh.shard_tensor": "tensor axis device_id",
    "multidevice.MultiDeviceExecutor": "fusion params",
    "multidevice.MultiDeviceExecutor.run": "args",
    "multidevice.Sharding.axis_sharded_on": "parallel_type",
    "multidevice.shard_tensor": "tensor tv",
    "execute_with_dtensors": "fd in_dtensors",
}


@pytest.mark.parametrize("path", KEYWORDS)
def test_arguments_have_nvfusers_names(path: str) -> None:
    call: Any = functools.reduce(getattr, path.split("."), nvfuser)
    assert [name for name in KEYWORDS[path].split() if name not in inspect.signature(call).parameters] == []


def test_calls_by_those_names() -> None:
    with FusionDefinition() as fd:
        x = fd.define_tensor([4, 6])
        rows, columns = fd.define_vector(size=2)
        y = fd.ops.reshape(x, [columns, rows])
        fd.add_output(output=y)
        fd.fusion.add_output(output=fd.ops.neg(x), alias_input=x)
    x.reorder(old2new={0: 1}).reorder()
    assert [leaf.extent() for leaf in x.get_loop_domain()] == [6, 4]
    assert fd.fusion.print_math(from_outputs_only=False) == fd.fusion.print_math() == str(fd)
    whole, given = torch.randn(4, 6), torch.empty(4, 6)
    runner = nvfuser.KernelExecutor(fusion_id=1)
    runner.compile(fusion=fd.fusion, args=[whole, 4, 6], compile_params=nvfuser.CompileParams())
    (found,) = runner.run(args=[given.copy_(whole), 4, 6])
    assert torch.equal(found, whole.view(6, 4)) and torch.equal(given, -whole)
    part = NVMesh(devices=[0, 1]).shard_tensor(tensor=whole, axis=1, device_id=1)
    assert torch.equal(part, whole[:, 3:])


def test_validating_takes_what_executing_takes() -> None:
    """And a definition that runs by hand is validated by hand."""
    whole = torch.randn(2, 3)
    fd = nvfuser_relu()
    fd.validate([whole], [whole.relu()], device="cpu", save_repro_inputs=True, _enable_options=["x"], rtol=0, atol=0)
    assert "relu" in fd.last_repro_script()
    by_hand = nvfuser_relu()
    by_hand.manual_execute([whole])
    assert torch.equal(by_hand.manual_validate([whole])[0], whole.relu())
    for validate in (fd.validate, by_hand.manual_validate):
        with pytest.raises(AssertionError, match="not close"):
            validate([whole], [whole.relu() + 1])


def test_a_profile_that_was_reset() -> None:
    with nvfuser.PythonProfiler(auto_scheduled=True) as profiler:
        nvfuser_relu().execute([torch.ones(2, 3)])
    assert profiler.profile.segments == 1
    profiler.reset()
    with pytest.raises(mf.DefinitionError, match="there is no profile"):
        _ = profiler.profile


def test_properties_of_the_device(monkeypatch: pytest.MonkeyPatch) -> None:
    device = types.SimpleNamespace(name="G", L2_cache_size=50, memory_bus_width=5120, memory_clock_rate=2_619_000)
    monkeypatch.setattr(torch.cuda, "is_available", lambda: True)
    monkeypatch.setattr(torch.cuda, "current_device", lambda: 0)
    monkeypatch.setattr(torch.cuda, "get_device_properties", lambda place: device)
    found = pytorch_utils.DEVICE_PROPERTIES
    assert (found["gpu_name"], found["gpu_l2_bytes"], found["gpu_sm_count"]) == ("G", 50, 0)
    assert found["gpu_peak_bandwidth_gbps"] == pytest.approx(3352.32)
    monkeypatch.setattr(torch.cuda, "is_available", lambda: False)
    assert not pytorch_utils.DEVICE_PROPERTIES
    with pytest.raises(OSError, match=r"there is no CUDA device.*\(at test_nvfuser_surface\.py:\d+\)"):
        pytorch_utils.get_device_properties()


@pytest.mark.parametrize("failures", [0, 1, 2])
def test_a_test_that_runs_out_of_memory_is_called_twice(failures: int) -> None:
    calls: list[int] = []

    @pytorch_utils.retry_on_oom_or_skip_test
    def run(value: int) -> int:
        calls.append(value)
        if len(calls) <= failures:
            raise torch.OutOfMemoryError("full")
        return value

    if failures == 2:
        with pytest.raises(pytest.skip.Exception, match="out of memory, twice: full"):
            run(3)
    else:
        assert run(3) == 3
    assert calls == [3] * min(failures + 1, 2)


def test_dtypes_both_ways() -> None:
    for dtype in (
        torch.half,
        torch.bfloat16,
        torch.float,
        torch.double,
        torch.int,
        torch.long,
        torch.bool,
        torch.cfloat,
    ):
        there = pytorch_utils.torch_dtype_to_nvfuser_dtype(dtype)
        assert pytorch_utils.nvfuser_dtype_to_torch_dtype(there) is dtype
    assert pytorch_utils.torch_dtype_to_nvfuser_dtype(float) is DataType.Double
    assert pytorch_utils.python_scalar_to_nvfuser_dtype(True) is DataType.Bool
    with pytest.raises(ValueError, match="dtype"):
        pytorch_utils.torch_dtype_to_nvfuser_dtype(torch.qint8)
    with pytest.raises(ValueError, match="dtype"):
        pytorch_utils.nvfuser_dtype_to_torch_dtype(DataType.Null)
