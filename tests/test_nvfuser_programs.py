"""What scripts for one device ask of nvFuser's frontend: programs in its words beside torch, arguments that are
written, schedules of kernels, and the texts of a definition.
"""

from __future__ import annotations

import math
from collections.abc import Callable
from typing import Any

import pytest
import torch
import torch.nn.functional as F

import meshfuse as mf
import meshfuse.nvfuser_direct as nvfuser
from defining import nvfuser_rebuilt
from meshfuse.nvfuser_direct import DataType, FusionDefinition, ParallelType
from meshfuse.nvfuser_direct.executors import EmptyDefinitionError, ExecutorError

Define = Callable[[FusionDefinition], Any]


def made(define: Define) -> FusionDefinition:
    """A definition of what the function returns, a tensor or several."""
    with FusionDefinition() as fd:
        found = define(fd)
        for tv in found if isinstance(found, (list, tuple)) else [found]:
            fd.add_output(tv)
    return fd


X = torch.randn(4, 6)
MASK = torch.rand(4) < 0.5
QKV = [torch.randn(2, 3, 5, 8) for _ in range(3)]


def numbers_of(a: Any, b: Any, *dtype: DataType) -> Define:
    """where of two constants."""
    return lambda fd: fd.ops.where(
        fd.define_tensor([4], dtype=DataType.Bool), fd.define_scalar(a, *dtype), fd.define_scalar(b, *dtype)
    )


def masked(fd: FusionDefinition) -> Any:
    """A mask that was expanded to 2 columns, beside 6."""
    flags, x = fd.define_tensor([-1], dtype=DataType.Bool), fd.define_tensor([-1, 6])
    return fd.ops.where(fd.ops.broadcast_in_dim(flags, [fd.ops.size(flags, 0), 2], [0]), x, 0.0)


def expanded_twice(fd: FusionDefinition) -> Any:
    """Both operands expanded, each in a dim that the other has."""
    row, column = fd.define_tensor([1, 6]), fd.define_tensor([4, 1])
    return fd.ops.add(fd.ops.expand(row, [3, 6]), fd.ops.expand(column, [4, 2]))


def shape_by_vector(fd: FusionDefinition) -> Any:
    x = fd.define_tensor([-1, -1])
    return fd.ops.reshape(x, fd.define_vector(2))


def with_flags(fd: FusionDefinition) -> Any:
    """Flags as 0 and 1."""
    x = fd.define_tensor([4, 6])
    part = fd.ops.slice(x, [0, 0], [4, 3], [1, 1], manual_normalization=0)
    return fd.ops.cat([part, part], dim=1, manual_padding=0), fd.ops.sum(x, [0], keepdim=1)


def attention_without_options(fd: FusionDefinition) -> Any:
    q, k, v, grad = (fd.define_tensor([2, 3, 5, 8]) for _ in range(4))
    out, lse, seed, offset = fd.ops.sdpfa_fwd(q, k, v, dropout_p=None, is_causal=None, scale=None)
    return [out, *fd.ops.sdpfa_bwd(grad, q, k, v, out, lse, None, None, seed, offset, None)]


def attention_torch(*inputs: torch.Tensor) -> list[torch.Tensor]:
    q, k, v = (t.clone().requires_grad_() for t in inputs[:3])
    out = F.scaled_dot_product_attention(q, k, v)
    return [out.detach(), *torch.autograd.grad(out, (q, k, v), inputs[3])]


def sizes_from_signs(fd: FusionDefinition) -> Any:
    """Scalar ops of every kind, down to the size of a dim."""
    n, x = fd.define_scalar(None, DataType.Int), fd.define_tensor([-1])
    negative = fd.ops.cast(fd.ops.signbit(n), DataType.Int)
    odd = fd.ops.cast(fd.ops.frac(fd.ops.truediv(n, 4)), DataType.Int)
    rest = fd.ops.sub(fd.ops.mul(fd.define_scalar(24), fd.ops.reciprocal(n)), fd.ops.add(negative, odd))
    finite = fd.ops.isposinf(fd.ops.exp2(n))
    return fd.ops.mul(fd.ops.reshape(x, [n, rest]), fd.ops.where(finite, 0.0, 1.0))


def to_no_size(fd: FusionDefinition) -> Any:
    row, one = fd.define_tensor([1, 0]), fd.define_tensor([1, 1])
    return [fd.ops.broadcast_in_dim(t, [0, 0], [0, 1]) for t in (row, one)]


def typed_beside_integers(fd: FusionDefinition) -> Any:
    n = fd.define_tensor([4], dtype=DataType.Int32)
    return fd.ops.add(n, fd.define_scalar(1.5, DataType.Float)), fd.ops.mul(n, fd.define_scalar(2.0, DataType.Half))


def in_stated_orders(fd: FusionDefinition) -> Any:
    """An argument whose expanded dims have no place in its order, beside a permuted one."""
    x = fd.define_tensor([-1, -1, -1], contiguity=[None, True, None], stride_order=[2, 1, 0])
    return fd.ops.mul(x, fd.define_tensor([-1, -1, -1], stride_order=[0, 2, 1]))


PROGRAMS: dict[str, tuple[Define, list[Any], Callable[..., Any]]] = {
    "where of doubles": (numbers_of(0.1, 5.0), [MASK], lambda m: torch.where(m, 0.1, 5.0 + torch.zeros(4).double())),
    "where of floats": (
        numbers_of(0.1, 5.0, DataType.Float), [MASK], lambda m: torch.where(m, 0.1, 5.0 + torch.zeros(4))),
    "where of ints": (numbers_of(3, 5), [MASK], lambda m: torch.where(m, 3, 5)),
    "where of int32": (numbers_of(3, 5, DataType.Int32), [MASK], lambda m: torch.where(m, 3, 5).int()),
    "where of bools": (numbers_of(True, False, DataType.Bool), [MASK], lambda m: m),
    "where of complex floats": (
        numbers_of(3j, 1 + 0j, DataType.ComplexFloat), [MASK], lambda m: torch.where(m, 3j, 1 + 0j)),
    "numbers of a type": (
        typed_beside_integers, [torch.arange(4).int()], lambda n: [n + torch.tensor([1.5]), n.float() * 2.0]),
    "a mask expanded too little": (masked, [MASK, X], lambda m, x: torch.where(m[:, None], x, 0.0)),
    "two expanded operands": (expanded_twice, [X[:1], X[:, :1]], torch.add),
    "a shape as a list": (shape_by_vector, [X, [3, 8]], lambda x, shape: x.reshape(shape)),
    "a shape as a tuple": (shape_by_vector, [X, (24, 1)], lambda x, shape: x.reshape(shape)),
    "flags as numbers": (with_flags, [X], lambda x: [x[:, :3].repeat(1, 2), x.sum(0, keepdim=True)]),
    "attention without options": (attention_without_options, [*QKV, torch.randn(2, 3, 5, 8)], attention_torch),
    "sizes from scalar ops": (sizes_from_signs, [4, X.flatten()], lambda n, x: x.reshape(n, 6)),
    "expanded strides": (
        in_stated_orders, [X[0].as_strided((2, 6, 3), (0, 1, 0)), torch.randn(6, 3, 2).permute(2, 0, 1)], torch.mul),
    "sizes of 0": (to_no_size, [X[:1, :0], X[:1, :1]], lambda a, b: [torch.zeros(0, 0)] * 2),
}  # fmt: skip


@pytest.mark.parametrize("name", PROGRAMS)
def test_programs_compute_what_torch_does(name: str) -> None:
    define, inputs, reference = PROGRAMS[name]
    fd = made(define)
    wanted = reference(*inputs)
    found = fd.execute(inputs)
    torch.testing.assert_close(found, wanted if isinstance(wanted, list) else [wanted])
    torch.testing.assert_close(nvfuser_rebuilt(fd).execute(inputs), found)


@pytest.mark.parametrize("name", ["sizes from scalar ops", "a mask expanded too little"])
def test_what_a_size_may_not_be(name: str) -> None:
    """An operand that is no broadcast keeps its size."""
    with pytest.raises(mf.DefinitionError, match="do not fit together"):
        made(lambda fd: fd.ops.add(fd.define_tensor([4, 2]), fd.define_tensor([4, 6])))
    if name == "sizes from scalar ops":
        with pytest.raises(mf.DefinitionError, match="no whole number"):
            made(sizes_from_signs).execute([9, torch.zeros(24)])


# arguments that are written


def relu_in_place(fd: FusionDefinition, x: Any) -> None:
    y = fd.ops.relu(x)
    fd.add_output(y)
    fd.add_output(y, alias_input=x)
    fd.add_output(x)
    fd.add_output(fd.ops.neg(y))


LAYOUTS: dict[str, Callable[[torch.Tensor], torch.Tensor]] = {
    "row-major": lambda t: t,
    "column-major": lambda t: t.t().contiguous().t(),
    "with gaps": lambda t: torch.stack([t, t], -1)[..., 1],
}


@pytest.mark.parametrize("layout", LAYOUTS.values(), ids=LAYOUTS)
def test_outputs_written_into_arguments(layout: Callable[[torch.Tensor], torch.Tensor]) -> None:
    with FusionDefinition() as fd:
        relu_in_place(fd, fd.define_tensor([4, 6]))
    x = layout(X.clone())
    wanted = x.relu()
    y, same, negative = fd.execute([x])
    assert torch.equal(x, wanted) and torch.equal(negative, -wanted)
    assert y.data_ptr() == same.data_ptr() == x.data_ptr()
    assert len(fd.fec.get_output_shardings()) == 3
    again = X.clone()
    nvfuser_rebuilt(fd).execute([again])
    assert torch.equal(again, wanted)


def test_a_view_of_a_written_argument_keeps_what_it_was() -> None:
    """Outputs are the values before the writes: a transposed view, and the transposed value written back."""
    with FusionDefinition() as fd:
        x = fd.define_tensor([4, 4])
        turned = fd.ops.permute(x, [1, 0])
        fd.add_output(turned, x)
        fd.add_output(fd.ops.permute(x, [1, 0]))
    x = torch.randn(4, 4)
    before = x.clone()
    (view,) = fd.execute([x])
    assert torch.equal(x, before.t()) and torch.equal(view, before.t())


def test_written_arguments_of_simulated_ranks() -> None:
    mesh = nvfuser.multidevice.DeviceMesh([0, 1, 2])
    with FusionDefinition() as fd:
        x = fd.define_tensor([6, 4])
        relu_in_place(fd, x)
        x.set_device_mesh(mesh)
        x.outer_split(0, 3)
        x.axis(0).parallelize(ParallelType.mesh_x)
    x = torch.randn(6, 4)
    wanted = x.relu()
    fd.simulate([x])
    assert torch.equal(x, wanted)


def test_aliases_that_do_not_fit() -> None:
    fd = FusionDefinition()
    x, other = fd.define_tensor([4, 6]), fd.define_tensor([4])
    y = fd.ops.relu(x)
    alias: Any
    for alias in (other, y, X):
        with pytest.raises(mf.DefinitionError, match="alias_input"):
            fd.add_output(y, alias)
    assert not fd.recording.outputs and not fd._aliases
    fd.add_output(y, x)
    with pytest.raises(mf.DefinitionError, match=r"alias_input: found t0, which another output is written into"):
        fd.add_output(fd.ops.neg(x), x)
    assert fd.recording.outputs == [y.id]
    fd = FusionDefinition()
    x, y = fd.define_tensor([-1]), fd.define_tensor([-1])
    fd.add_output(fd.ops.neg(x), x)
    fd.add_output(fd.ops.relu(x), y)
    with pytest.raises(mf.DefinitionError, match="prepared: arguments are written: found t0, t1, needed outputs that"):
        fd.prepared(x)
    values = torch.ones(4), torch.ones(5)
    with pytest.raises(mf.ArgumentError, match=r"written into argument.*found shape \[4\], needed \[5\]"):
        fd.execute(values)
    assert torch.equal(values[0], torch.ones(4))  # nothing is written where something cannot be


# running


def test_one_definition_runs_one_way() -> None:
    first, second = (made(lambda fd: fd.ops.relu(fd.define_tensor([4, 6]))) for _ in range(2))
    assert not hasattr(first, "ke") and not hasattr(first, "fec")
    assert torch.equal(first.execute([X])[0], X.relu()) and torch.equal(first.execute([X])[0], X.relu())
    with pytest.raises(ExecutorError, match="manual_execute after execute"):
        first.manual_execute([X])
    with nvfuser.PythonProfiler(auto_scheduled=False) as profiler:
        params = second.sched.compute_heuristics(second.fusion, [X])
        params.cparams.maxrregcount = 32
        assert torch.equal(second.manual_execute([X], params)[0], X.relu())
    assert [kernel.scheduler for kernel in profiler.profile.kernel_profiles] == ["user"]
    assert second.ke.is_compiled() and not hasattr(second, "fec")
    with pytest.raises(ExecutorError, match="execute after manual_execute"):
        second.execute([X])
    for text in (first.fec.get_scheduled_ir([X]), first.fec.get_cuda_kernel([X]), first.fusion.print_kernel()):
        assert "relu" in text
    with pytest.raises(ExecutorError, match="Call compile"):
        nvfuser.KernelExecutor().run([X])


def test_nothing_to_run() -> None:
    with pytest.raises(EmptyDefinitionError, match="no content") as caught:
        FusionDefinition().execute([X])
    assert isinstance(caught.value, NotImplementedError)
    with FusionDefinition() as fd:
        fd.define_tensor([4, 6])
    assert fd.validate_definition() == (False, "the definition has no outputs")
    with pytest.raises(EmptyDefinitionError, match="no outputs"):
        fd.execute([X])


def test_repro_scripts_with_and_without_inputs() -> None:
    fd = made(lambda fd: fd.ops.mul(fd.from_pytorch(X), fd.define_scalar(dtype=DataType.Double)))
    with_inputs, without = fd.repro_script_for([X, 3.0]), fd.repro_script_for()
    assert "fd.execute(inputs)" in with_inputs and "fd.execute" not in without
    fd.execute([X, 3.0], save_repro_inputs=True)
    assert fd.last_repro_script() == with_inputs
    space: dict[str, Any] = {}
    exec(with_inputs, space)
    assert repr(space["fd"]) == repr(fd)


# asking and scheduling


def test_axes_tell_their_sizes() -> None:
    fd = FusionDefinition()
    x, y = fd.define_tensor([2, 7, -1]), fd.define_tensor([-1, 7, -1])
    z = fd.ops.sum(fd.ops.add(x, y), [1])
    fd.add_output(z)
    assert str(x) == "T0_g_float[iS0{2}, iS1{7}, iS2{?}]" and str(z.domain()) == "[iS9{2}, rS10{?}, iS11{?}]"
    assert [axis.extent() for axis in x.get_loop_domain()[:2]] == [2, 7]
    assert (str(x.axis(1)), x.axis(1).is_symbolic(), x.axis(2).is_symbolic()) == ("iS1{7}", False, True)
    assert z.definition().node is fd.recording.nodes[-1] and z.uses() == [] and x.definition() is None
    assert [use.node for use in x.uses()] == [fd.recording.nodes[0]] and str(x.uses()[0].input(1)) == str(y)
    x.set_device_mesh(nvfuser.multidevice.DeviceMesh([0, 1]))
    x.outer_split(1, 2)
    x.axis(1).parallelize(ParallelType.mesh_x)
    assert [axis.extent() for axis in x.get_loop_domain()[1:3]] == [2, 4]
    assert str(x) == "T0_g_float[iS0{2}, ideviceIdx.x1{2}, iS2{4}, iS3{?}] (DeviceMesh((2,), ('x',)))"


def test_an_open_size_is_a_scalar_of_the_definition() -> None:
    fd = FusionDefinition()
    x = fd.define_tensor([-1])
    x.inner_split(0, 4)
    parts = x.axis(0).extent()
    fd.add_output(fd.ops.add(x, fd.ops.cast(parts, DataType.Float)))
    assert torch.equal(fd.execute([torch.zeros(9)])[0], torch.full((9,), 3.0))


def test_merging_undoes_a_split() -> None:
    fd = FusionDefinition()
    x = fd.define_tensor([8, 6])
    fd.add_output(x)
    x.set_device_mesh(nvfuser.multidevice.DeviceMesh([0, 1]))
    x.outer_split(0, 4)
    x.outer_split(0, 2)
    x.merge(0, 1)
    assert str(x.domain()) == "[iS0{4}, iS1{2}, iS2{6}]"
    x.merge(0, 1)
    x.outer_split(0, 2)
    x.axis(0).parallelize(ParallelType.mesh_x)
    assert x.fd.recording.annotations[0].sharding("x", (8, 6)).local_shape((8, 6), 0) == (4, 6)
    assert repr(nvfuser_rebuilt(fd)) == repr(fd)


def test_a_schedule_of_a_kernel_changes_nothing() -> None:
    """Axes over several dims, caches, and what is bound to threads; the sharding beside it holds."""
    with FusionDefinition() as fd:
        x = fd.define_tensor([-1, -1, 4])
        y = fd.ops.add(fd.ops.exp(x), 1.0)
        fd.add_output(y)
        copy = x.cache_after()
        y.cache_before()
        x.set_device_mesh(nvfuser.multidevice.DeviceMesh([0, 1]))
        x.outer_split(0, 2)
        x.axis(0).parallelize(ParallelType.mesh_x)
        for tv in (x, copy):
            tv.merge(-2, -1).split(-1, 128)
            tv.axis(-2).parallelize(ParallelType.grid_x)
            tv.axis(-1).parallelize(ParallelType.block_x)
        y.merge(0, 1)
        fd.sched.inline_most()
        fd.sched.transform_like(y)
    assert fd.sched.find_compatible_schedulers() == [nvfuser.SchedulerType.pointwise]
    assert nvfuser.translate_fusion(fd.fusion) == repr(fd)
    whole = torch.randn(6, 5, 4)
    torch.testing.assert_close(fd.simulate([whole])[0], whole.exp() + 1)
    assert fd.output_shardings()[0].local_shape((6, 5, 4), 0) == (3, 5, 4)
    torch.testing.assert_close(nvfuser_rebuilt(fd).simulate([whole])[0], whole.exp() + 1)


def test_axes_that_cannot_be_merged_or_bound() -> None:
    fd = FusionDefinition()
    x = fd.define_tensor([8, 6])
    total = fd.ops.sum(x, [1])
    for tv, axes in ((x, (0, 0)), (total, (0, 1))):
        with pytest.raises(mf.DefinitionError, match="merge: these axes"):
            tv.merge(*axes)
    x.merge(0, 1)
    with pytest.raises(mf.DefinitionError, match="merged of several dims"):
        x.axis(0).parallelize(ParallelType.mesh_x)
    total.axis(0).parallelize(ParallelType.mesh_x)
    with pytest.raises(mf.DefinitionError, match="merge: these axes"):
        total.merge(0, 1)


def test_annotations_by_calls_on_tensors() -> None:
    mesh = nvfuser.multidevice.DeviceMesh([0, 1])
    with FusionDefinition() as fd:
        x, w = fd.define_tensor([-1, 8]), fd.define_tensor([8, 3])
        out = fd.ops.matmul(x, w)
        fd.add_output(out)
        for tv, axis in ((x, 1), (w, 0), (out, -1)):
            fd.sched._set_device_mesh(tv, mesh)
            fd.sched.split(tv, axis, 2, False)
        fd.sched.parallelize(x, 1, ParallelType.mesh_x)
        fd.sched.parallelize(w, 0, ParallelType.mesh_x)
        fd.sched.set_allocation_as_loop(w)
        terms = fd.sched.rfactor(out, dims=[-1])
        fd.sched.parallelize(terms, -2, ParallelType.mesh_x)
    assert len(fd.sched.tensors()) == 3
    a, b = torch.randn(5, 8), torch.randn(8, 3)
    torch.testing.assert_close(fd.simulate([a, b])[0], a @ b)
    with pytest.raises(AttributeError, match=r"fd\.sched has no 'magic'; it has"):
        fd.sched.magic()


@pytest.mark.parametrize(
    "sizes, strides, contiguity, order",
    [
        ([2, 3, 4], [12, 4, 1], [True, True, True], [2, 1, 0]),
        ([2, 3, 4], [1, 2, 6], [True, True, True], [0, 1, 2]),
        ([2, 3, 4], [24, 4, 1], [False, True, True], [2, 1, 0]),
        ([2, 1, 4], [8, 9, 2], [None, True, False], [1, 2, 0]),
        ([5, 3, 4], [4, 0, 1], [True, None, True], [2, 1, 0]),
        ([5, 3, 4], [0, 0, 0], [None, None, None], [2, 1, 0]),
        ([], [], [], []),
    ],
)
def test_strides_as_contiguity_and_order(
    sizes: list[int], strides: list[int], contiguity: list[bool | None], order: list[int]
) -> None:
    assert nvfuser.compute_tensor_descriptor(sizes, strides) == (contiguity, order)


def test_versions_compare_by_number() -> None:
    version = nvfuser.nvfuser_direct_version.Version
    assert version("0.2.36+git7e04d26") > "0.2.9" and version("1.0") == "1.0.0" and version("0.10") > version("0.9")
    assert nvfuser.version() > "0.0.0" and str(nvfuser.version()) == mf.__version__


def test_cutlass_kernels_say_what_they_need() -> None:
    for name in ("grouped_mm", "mxfp8_scaled_mm", "nvfp4_scaled_mm", "nvfp4_scaled_grouped_mm"):
        with pytest.raises(NotImplementedError, match=rf"nvf_cutlass.{name}.*GPU of compute capability.*Use fd.ops"):
            getattr(nvfuser.nvf_cutlass, name)(X, X)


def test_benchmark_functions_call() -> None:
    assert [call(3) for call in nvfuser.benchmark_utils.get_benchmark_fns(math.sqrt)] == [math.sqrt(3)] * 2
