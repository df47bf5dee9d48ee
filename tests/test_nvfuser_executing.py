"""Definitions in nvFuser's words, run in one process: what they give, keep and say of themselves."""

from __future__ import annotations

import functools
from collections.abc import Callable
from typing import Any

import pytest
import torch

import meshfuse as mf
import meshfuse.nvfuser_direct as nvfuser
from defining import nvfuser_rebuilt, nvfuser_relu
from meshfuse.nvfuser_direct import DataType, FusionDefinition
from meshfuse.nvfuser_direct.executors import ExecutorError

NVMesh = nvfuser.multidevice.DeviceMesh
X = nvfuser.ParallelType.mesh_x


def test_outputs_have_no_gradient() -> None:
    whole = torch.randn(4, 3, requires_grad=True)
    (found,) = nvfuser_relu().execute(
        [whole], device="cuda:0", _enable_options=["host_ir_lowering"], _disable_options=["x"]
    )
    assert not found.requires_grad
    assert torch.equal(found, whole.detach().relu())
    assert torch.equal(nvfuser_relu().manual_execute([whole])[0], found)


def test_fec_is_there_after_the_first_execution() -> None:
    fd = nvfuser_relu()
    assert not hasattr(fd, "fec")
    with pytest.raises(mf.DefinitionError, match="no inputs were saved"):
        fd.last_repro_script()
    fd.execute([torch.ones(2, 3)])
    (sharding,) = fd.fec.get_output_shardings()
    assert sharding.axis_sharded_on(X) == -1 and repr(sharding.mesh) == "DeviceMesh{0}"
    assert fd.fec.fusion() is fd.fusion


def test_the_fusion_of_a_definition() -> None:
    fd = nvfuser_relu()
    assert [str(value) for value in fd.fusion.inputs()] == ["T0_g_float[iS0{?}, iS1{3}]"]
    assert [tv.name for tv in fd.fusion.outputs()] == ["t1"]
    assert [str(value) for value in fd.fusion.vals()] == ["T0_g_float[iS0{?}, iS1{3}]", "T1_g_float[iS2{?}, iS3{3}]"]
    assert fd.fusion.print_math() == str(fd) and "fd.ops.relu(tv0)" in str(fd)


def test_annotations_print_as_meshfuse_writes_them() -> None:
    """The text of a definition rebuilds it, whatever the mesh was written as."""
    with FusionDefinition() as fd:
        x, y = fd.define_tensor([4, 4]), fd.define_tensor([4, 4])
        fd.add_output(fd.ops.add(x, y))
        x.set_device_mesh(NVMesh([[0, 1], [2, 3]]))
        x.outer_split(0, 2)
        x.axis(0).parallelize(nvfuser.ParallelType.mesh_y)
        fd.mesh_split(y, NVMesh([[0, 1], [2, 3]]), ["y", "x"])
    assert repr(nvfuser_rebuilt(fd)) == repr(fd)
    a, b = torch.randn(4, 4), torch.randn(4, 4)
    assert torch.equal(fd.simulate([a, b])[0], a + b)


STRIDES = {
    "elementwise follows its operand": (lambda fd, x: fd.ops.exp(fd.ops.neg(x)), (1, 8, 2)),
    "a cast as well": (lambda fd, x: fd.ops.cast(x, DataType.Double), (1, 8, 2)),
    "a scalar does not count": (lambda fd, x: fd.ops.mul(2.0, x), (1, 8, 2)),
    "through many sums": (lambda fd, x: functools.reduce(lambda y, _: fd.ops.add(y, y), range(60), x), (1, 8, 2)),
    "a permuted result is row-major": (lambda fd, x: fd.ops.permute(x, [1, 0, 2]), (8, 4, 1)),
    "stride_order says it": (lambda fd, x: fd.ops.stride_order(x, [0, 1, 2]), (1, 2, 6)),
}


@pytest.mark.parametrize("name", STRIDES)
def test_strides_of_outputs(name: str) -> None:
    make, strides = STRIDES[name]
    with FusionDefinition() as fd:
        fd.add_output(make(fd, fd.define_tensor([2, 3, 4], stride_order=[0, 2, 1])))
    whole = torch.randn(2, 3, 4).permute(1, 2, 0).contiguous().permute(2, 0, 1)
    plain = FusionDefinition()
    plain.add_output(make(plain, plain.define_tensor([2, 3, 4])))
    (found,), (wanted,) = fd.execute([whole]), plain.execute([whole])
    assert torch.equal(found, wanted)
    assert found.stride() == strides


# without an fd


def test_a_fusion_of_its_own_is_written_to_while_its_guard_lives() -> None:
    fusion = nvfuser.Fusion()
    guard = nvfuser.FusionGuard(fusion)
    a, b = nvfuser.define_tensor([2, 3]), nvfuser.define_tensor([2, 3])
    factor = nvfuser.define_scalar(dtype=DataType.Double)
    for value in (b, factor, a):
        fusion.add_input(value)
    fusion.add_output(nvfuser.ops.mul(nvfuser.ops.sub(a, b), factor))
    del guard
    x, y = torch.randn(2, 3), torch.randn(2, 3)
    runner = nvfuser.FusionExecutorCache(fusion)
    assert not runner.is_compiled()
    assert torch.equal(runner.execute([y, 2.0, x])[0], (x - y) * 2)
    assert runner.is_compiled() and runner.get_output_shardings()[0].axis_sharded_on(X) == -1
    assert runner.fusion() is fusion and fusion.definition.fusion is fusion
    with pytest.raises(mf.DefinitionError, match="define_tensor outside of a definition"):
        nvfuser.define_tensor([2])
    with pytest.raises(mf.DefinitionError, match=r"add_input.*once"):
        fusion.add_input(a)


def test_module_level_ops_belong_to_the_innermost_definition_or_to_that_of_their_operands() -> None:
    with FusionDefinition() as outer:
        x = outer.define_tensor([3])
        with FusionDefinition() as inner:
            y = nvfuser.define_tensor([3])
            inner.add_output(nvfuser.ops.neg(y))
            outer.add_output(nvfuser.ops.cat([x, x]))
        with nvfuser.FusionGuard(inner.fusion):
            assert nvfuser.ops.iota(3, 0, 1).fd is inner
        assert nvfuser.ops.iota(3, 0, 1).fd is outer
    assert torch.equal(outer.execute([torch.ones(3)])[0], torch.ones(6))
    assert torch.equal(inner.execute([torch.ones(3)])[0], -torch.ones(3))
    with pytest.raises(AttributeError, match="no op 'nothing'"):
        nvfuser.ops.nothing()
    with pytest.raises(mf.DefinitionError, match=r"ops\.iota outside of a definition"):
        nvfuser.ops.iota(3, 0, 1)


def test_a_cache_of_fusions() -> None:
    cache = nvfuser.LRUCache(1)
    first, second = nvfuser_relu(), nvfuser_relu()
    cache.cache_compile(first.fusion).execute([torch.ones(2, 3)])
    assert torch.equal(cache.cache_compile(second.fusion).execute([-torch.ones(2, 3)])[0], torch.zeros(2, 3))
    assert second.fec.compiled is first.fec.compiled and cache.num_fusions() == 1
    assert "Cache Hits: 1" in cache.stats()
    with pytest.raises(mf.DefinitionError, match="LRUCache: max_fusions: found 0"):
        nvfuser.LRUCache(0)


def cached(fd: FusionDefinition, cache: nvfuser.LRUCache) -> FusionDefinition:
    """As nvFuser's own tests have it: the definition keeps what the cache made, and not its fusion."""
    fd.fec = cache.cache_compile(fd.fusion)
    del fd._fusion
    return fd


ASKED: dict[str, Callable[[FusionDefinition], Any]] = {
    "execute": lambda fd: fd.execute([torch.ones(2, 3)])[0].tolist(),
    "simulate": lambda fd: fd.simulate([torch.ones(2, 3)])[0].tolist(),
    "validate": lambda fd: fd.validate([torch.ones(2, 3)])[0].tolist(),
    "DTensors' execute": lambda fd: len(nvfuser.execute_with_dtensors(fd, [torch.ones(2, 3)])),
    "the executor's": lambda fd: nvfuser.multidevice.MultiDeviceExecutor(fd.fusion).run([torch.ones(2, 3)])[0].tolist(),
    "repr": repr,
    "repro_script_for": lambda fd: fd.repro_script_for([torch.ones(2, 3)]),
    "the fusion's outputs": lambda fd: [str(tv) for tv in fd.fusion.outputs()],
    "print_math": lambda fd: fd.fusion.print_math(),
    "the fec's fusion": lambda fd: fd.execute([torch.ones(2, 3)]) and fd.fec.fusion() is fd.fusion,
    "tolerances": lambda fd: nvfuser.get_val_tolerances(fd.fusion),
    "program": lambda fd: fd.execute([torch.ones(2, 3)]) and fd.fec.get_scheduled_ir(),
    "shardings": lambda fd: fd.execute([torch.ones(2, 3)]) and len(fd.fec.get_output_shardings()),
}


@pytest.mark.parametrize("name", ASKED)
def test_a_definition_answers_alike_where_a_cache_runs_it(name: str) -> None:
    cache = nvfuser.LRUCache(max_fusions=4)
    question = ASKED[name]
    wanted = question(nvfuser_relu())
    assert [question(cached(nvfuser_relu(), cache)) for _ in range(2)] == [wanted, wanted]
    assert cache.num_fusions() == 1


@pytest.mark.parametrize("constant", [False, True])
def test_definitions_of_one_text_have_scalars_of_their_own(constant: bool) -> None:
    """A number and a constant are written alike. On a mesh the sizes that follow scalars are asked for again."""
    cache, whole = nvfuser.LRUCache(max_fusions=4), torch.randn(4, 6)
    for given in (constant, not constant):
        with FusionDefinition() as fd:
            x = fd.define_tensor([4, 6])
            y = fd.ops.mul(x, fd.define_scalar(2.0) if given else 2.0)
            rows = fd.define_scalar(dtype=DataType.Int)
            fd.add_output(fd.ops.reshape(y, [rows, -1]))
            x.set_device_mesh(NVMesh([0]))
        cached(fd, cache)
        assert torch.equal(fd.execute([whole, 8])[0], (2 * whole).reshape(8, 3))
        assert fd.fec.get_output_shardings()[0].axis_sharded_on(X) == -1


def test_the_cache_that_a_definition_takes() -> None:
    fd, other = nvfuser_relu(), nvfuser_relu()
    cached(fd, nvfuser.LRUCache(1))
    assert not fd.fec.is_compiled()
    with pytest.raises(ExecutorError, match="the fusion has not run yet"):
        fd.fec.get_output_shardings()
    with pytest.raises(ExecutorError, match="manual_execute after execute"):
        fd.manual_execute([torch.ones(2, 3)])
    fd.execute([torch.ones(2, 3)])
    assert fd.fec.is_compiled()
    for wrong in (None, nvfuser.FusionExecutorCache(other.fusion)):
        with pytest.raises(mf.DefinitionError, match=r"fec: found .*, needed a FusionExecutorCache of this"):
            fd.fec = wrong  # type: ignore[assignment]


def test_ops_of_tensors() -> None:
    fd = FusionDefinition()
    x = fd.define_tensor([2, 3])
    y = fd.ops.reshape(x, [3, 2])
    z = fd.ops.broadcast(y, [False, False, True])
    assert isinstance(y.definition(), nvfuser.ReshapeOp) and isinstance(z.definition(), nvfuser.BroadcastOp)
    assert isinstance(x.uses()[0], nvfuser.Expr) and not isinstance(x.uses()[0], nvfuser.SqueezeOp)
    assert y.definition().input(0).id == x.id and y.definition().output(-1).id == y.id
    assert "reshape( T0_g_float" in str(y.definition())
    with pytest.raises(mf.DefinitionError, match="reshape: no such input: found 1"):
        y.definition().input(1)
    size = x.size(0) * 2
    assert size.definition() is not None and x.size(0).definition() is None


def test_tolerances_are_those_of_the_outputs() -> None:
    with FusionDefinition() as fd:
        x = fd.define_tensor([4, 3], dtype=DataType.BFloat16)
        fd.add_output(fd.ops.set(x))
        fd.add_output(fd.ops.cast(x, DataType.Double))
    whole = torch.randn(4, 3).to(torch.bfloat16)
    outputs = fd.execute([whole])
    assert nvfuser.get_val_tolerances(fd.fusion, [whole]) == [(0.016, 1e-05), (1e-07, 1e-07)]
    nvfuser.validate_with_auto_inferred_outputs(fd.fusion, outputs, [whole])
    with pytest.raises(AssertionError, match="not close"):
        nvfuser.validate_with_auto_inferred_outputs(fd.fusion, [outputs[0] + 1, outputs[1]], [whole])


def test_parameters_are_kept_as_they_are_set() -> None:
    params = nvfuser.MatmulParams(splitk_factor=2)
    params.tile_sizes = nvfuser.MatMulTileOptions(nvfuser.GemmTile(1, 2, 3))
    assert (params.splitk_factor, params.cluster_dims, params.tile_sizes.cta_tile.k) == (2, None, 3)
    assert params.lparams.bdimx is None and params.scheduler_type is nvfuser.SchedulerType.matmul
    assert nvfuser.MmaMacroEncode(nvfuser.MmaMacroArch.hopper, 1, 2, 3).mma_macro().n == 2


# sizes that arguments decide


UNFIT: dict[str, tuple[Callable[..., Any], list[list[int]], list[tuple[int, ...]], str]] = {
    "an expanded dim": (
        lambda fd, x, y: fd.ops.add(x, fd.ops.expand(y, [4, 3])), [[-1, 3], [1, 3]], [(5, 3), (1, 3)],
        r"add: .*found \[5, 3\] and \[4, 3\].*dim -2.* leaves open: x \(t0\) \[-1, 3\] is \[5, 3\]\.",
    ),
    "a broadcast to a size": (
        lambda fd, x, y: fd.ops.mul(fd.ops.broadcast_in_dim(x, [4, y.size(1)], [1]), y), [[-1], [-1, -1]],
        [(3,), (6, 3)],
        r"mul: .*found \[4, 3\] and \[6, 3\].* x \(t0\) \[-1\] is \[3\], y \(t1\) \[-1, -1\] is \[6, 3\]\.",
    ),
    "two open dims": (
        lambda fd, x, y: fd.ops.matmul(x, y), [[-1, -1], [-1, 2]], [(4, 3), (4, 2)],
        r"contracted dims differ: found 3 and 4.* x \(t0\) \[-1, -1\] is \[4, 3\], y \(t1\) \[-1, 2\] is \[4, 2\]\.",
    ),
}  # fmt: skip


@pytest.mark.parametrize("name", UNFIT)
@pytest.mark.parametrize("call", ["execute", "simulate", "__call__"])
@pytest.mark.parametrize("front", [mf, nvfuser])
def test_sizes_that_do_not_fit_are_an_error_at_the_call(front: Any, call: str, name: str) -> None:
    """Before anything is computed, with the arguments whose sizes the definition leaves open."""
    make, shapes, given, message = UNFIT[name]
    with front.FusionDefinition() as fd:
        x = fd.define_tensor(shapes[0])
        y = fd.define_tensor(shapes[1])
        fd.add_output(make(fd, x, y))
    arguments = [torch.ones(shape) for shape in given]
    with pytest.raises(mf.ArgumentError, match=message) as caught:
        getattr(fd, call)(*(arguments if call == "__call__" else [arguments]))
    assert "(at test_nvfuser_executing.py:" in str(caught.value) and isinstance(caught.value, mf.DefinitionError)


def test_sizes_that_the_definition_says_are_not_repeated() -> None:
    fd = FusionDefinition()
    x, y = fd.define_tensor([4, 3]), fd.define_tensor([4, 2])
    with pytest.raises(mf.DefinitionError, match="contracted dims differ") as caught:
        fd.ops.matmul(x, y)
    assert "leaves open" not in str(caught.value)
