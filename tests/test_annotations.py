"""Every way to say a sharding means the same, before and after the ops; definitions in all their forms."""

from __future__ import annotations

import os
from collections.abc import Callable, Iterator
from typing import Any

import pytest
import torch
import torch.distributed as dist
from torch.distributed.tensor import Replicate, Shard

import meshfuse as mf
import meshfuse.programs as module
from meshfuse import DataType, ParallelType, TensorType
from meshfuse.sharding.layout import Split
from meshfuse.testing import assert_same_as_unsharded, inputs_for

MESH = mf.DeviceMesh((2, 4), ("dp", "tp"))
X, Y = ParallelType.mesh_x, ParallelType.mesh_y


class TorchMesh:
    """What meshfuse reads of a torch DeviceMesh, which itself needs as many processes as ranks."""

    mesh = torch.arange(8).reshape(2, 4)
    mesh_dim_names = ("dp", "tp")


Annotate = Callable[[mf.FusionDefinition, mf.TensorView], Any]


def _by_sharding(fd: mf.FusionDefinition, t: mf.TensorView) -> None:
    fd.shard(t, mf.Sharding(MESH, ((Split(2, "dp"),), (Split(4, "tp"),))))


def _nvfuser(split: Callable[[mf.TensorView, int, int], Any]) -> Annotate:
    def annotate(fd: mf.FusionDefinition, t: mf.TensorView) -> None:
        t.set_device_mesh(MESH)
        split(t, 0, 2)
        t.axis(0).parallelize(Y)
        split(t, 2, 4)
        t.axis(-2).parallelize(X)

    return annotate


def _reordered(fd: mf.FusionDefinition, t: mf.TensorView) -> None:
    t.outer_split(1, 4)
    t.reorder({1: 0})
    t.axis(0).parallelize(X)
    t.outer_split(1, 2)
    t.axis(1).parallelize(Y)
    t.set_device_mesh(MESH)


FORMS: dict[str, Annotate] = {
    "names": lambda fd, t: fd.mesh_split(t, MESH, ["dp", "tp"]),
    "lists of names": lambda fd, t: fd.mesh_split(t, MESH, (["dp"], ("tp",))),
    "numbers": lambda fd, t: fd.mesh_split(t, MESH, [0, 1]),
    "splits": lambda fd, t: fd.mesh_split(t, MESH, [mf.Split(2, "dp"), [(4, "tp")]]),
    "sub-axes put together": lambda fd, t: fd.mesh_split(t, MESH, ["dp", [Split(2, "tp", 1), Split(2, "tp", 2)]]),
    "Sharding": _by_sharding,
    "placements": lambda fd, t: fd.shard(t, [Shard(0), Shard(1)], MESH),
    "placements, from the end": lambda fd, t: fd.shard(t, [Shard(-2), Shard(-1)], MESH),
    "placements on a torch mesh": lambda fd, t: fd.shard(t, (Shard(0), Shard(1)), TorchMesh()),
    "torch mesh": lambda fd, t: fd.mesh_split(t, TorchMesh(), ["dp", "tp"]),
    "outer_split": _nvfuser(lambda t, axis, n: t.outer_split(axis, n)),
    "split": _nvfuser(lambda t, axis, n: t.split(axis, n, inner_split=False)),
    "reorder": _reordered,
    "twice the same": lambda fd, t: (fd.mesh_split(t, MESH, ["dp", "tp"]), _by_sharding(fd, t)),
    "mesh first": lambda fd, t: (t.set_device_mesh(MESH), fd.mesh_split(t, MESH, ["dp", "tp"])),
    "nvFuser's way and then by name": lambda fd, t: (FORMS["outer_split"](fd, t), FORMS["names"](fd, t)),
}


def program(annotate: Annotate, when: str) -> tuple[mf.FusionDefinition, mf.TensorView]:
    fd = mf.FusionDefinition()
    x = fd.define_tensor([8, 16])
    if when == "before":
        annotate(fd, x)
    y = fd.ops.sum(fd.ops.exp(x), [1])
    fd.add_output(y)
    if when == "after":
        annotate(fd, x)
    return fd, x


@pytest.mark.parametrize("form", FORMS)
@pytest.mark.parametrize("when", ["before", "after"])
def test_every_form_gives_the_same_sharding(form: str, when: str) -> None:
    fd, _ = program(FORMS[form], when)
    plain, _ = program(FORMS["names"], "before")
    assert fd.latest().sharded.shardings == plain.latest().sharded.shardings
    assert [c.placement for c in fd.latest().sharded.choices] == [c.placement for c in plain.latest().sharded.choices]
    wanted = mf.Sharding(MESH, ((Split(2, "dp"),), (Split(4, "tp"),)))
    assert fd.latest().sharded.shardings[0] == wanted
    x = torch.randn(8, 16)
    torch.testing.assert_close(fd.simulate([x])[0], x.exp().sum(1))


def test_not_split() -> None:
    for annotate in (
        lambda fd, t: fd.mesh_split(t, MESH, [-1, None]),
        lambda fd, t: t.set_device_mesh(MESH),
        lambda fd, t: fd.shard(t, [Replicate(), Replicate()], MESH),
    ):
        fd, _ = program(annotate, "after")
        assert fd.latest().sharded.shardings[0] == mf.Sharding.replicated(MESH, 2)


def test_two_axes_on_a_dim_in_either_order_and_inner_splits() -> None:
    shards = {}
    x = torch.arange(8 * 16.0).reshape(8, 16)
    for name, spec in {"major dp": ["dp", "tp"], "major tp": ["tp", "dp"]}.items():
        _, t = program(lambda fd, t, spec=spec: fd.mesh_split(t, MESH, [spec, None]), "after")
        shards[name] = [int(mf.shard_tensor(x, t, rank)[0, 0]) // 16 for rank in range(8)]
    assert shards == {"major dp": [0, 1, 2, 3, 4, 5, 6, 7], "major tp": [0, 2, 4, 6, 1, 3, 5, 7]}

    def inner(fd: mf.FusionDefinition, t: mf.TensorView) -> None:
        t.set_device_mesh(MESH)
        t.inner_split(0, 4)
        t.axis(1).parallelize(X)

    _, t = program(inner, "after")
    assert mf.shard_tensor(x, t, 1)[:, 0].tolist() == [16.0, 16.0 * 5]


def test_streams_place_nothing() -> None:
    def annotate(fd: mf.FusionDefinition, t: mf.TensorView) -> None:
        t.set_device_mesh(MESH)
        t.outer_split(0, 2)
        t.axis(0).parallelize(ParallelType.stream)
        t.swizzle1d(0, X)

    fd, _ = program(annotate, "after")
    assert fd.latest().sharded.shardings[0] == mf.Sharding.replicated(MESH, 2)


@pytest.fixture
def torch_mesh(tmp_path: Any) -> Iterator[Any]:
    """A torch DeviceMesh of this one process."""
    dist.init_process_group("gloo", store=dist.FileStore(str(tmp_path / "store"), 1), rank=0, world_size=1)
    try:
        yield dist.init_device_mesh("cpu", (1, 1), mesh_dim_names=("dp", "tp"))
    finally:
        dist.destroy_process_group()


READERS: dict[str, Callable[[mf.FusionDefinition, mf.TensorView], mf.TensorView]] = {
    "pointwise": lambda fd, y: fd.ops.cos(y),
    "normalized": lambda fd, y: fd.ops.softmax(y, -1),
    "moved along": lambda fd, y: fd.ops.cos(fd.ops.permute(y, [1, 0])),
}


@pytest.mark.parametrize("reader", READERS)
def test_a_reader_takes_what_is_annotated_from_there(reader: str) -> None:
    """It would be as well off with where its operand was, but an annotation binds: it is moved there and back."""
    mesh = mf.DeviceMesh((4,), ("tp",))
    for output in (False, True):
        with mf.FusionDefinition() as fd:
            x = fd.define_tensor([8, 12], dtype=DataType.Double)
            kept = fd.ops.sin(x)
            y = READERS[reader](fd, kept)
            fd.mesh_split(x, mesh, ["tp", None])
            fd.mesh_split(kept, mesh, [None, "tp"])
            fd.mesh_split(y, mesh, ["tp", None] if y.type.shape == (8, 12) else [None, "tp"])
            for made in (y, kept) if output else (y,):
                fd.add_output(made)
        assert_same_as_unsharded(fd, inputs_for(fd))
        assert fd.bill().total == 2 * 8 * 12 * 8 / 4 * 3 / 4


def test_a_real_torch_mesh_and_dtensors(torch_mesh: Any) -> None:
    from torch.distributed.tensor import DTensor, distribute_tensor

    x = distribute_tensor(torch.randn(4, 6), torch_mesh, [Replicate(), Shard(1)])
    with mf.FusionDefinition() as fd:
        t = fd.from_pytorch(x)
        fd.add_output(fd.ops.relu(t))
    assert t.mesh == mf.DeviceMesh((1, 1), ("dp", "tp"))
    (out,) = fd.execute([x])
    assert isinstance(out, DTensor) and torch.equal(out.full_tensor(), x.full_tensor().relu())
    with pytest.raises(mf.ArgumentError, match="is a DTensor: found DTensor, needed a plain global tensor"):
        fd.simulate([x])


# loop domains


def domain(t: mf.TensorView) -> str:
    """One letter per axis: r for a reduction, i for the others. As the real nvFuser prints them."""
    return "".join("r" if axis.is_reduction() else "i" for axis in t.get_loop_domain())


def test_reduction_dims_stand_where_nvfuser_has_them() -> None:
    """The right-hand sides are what nvfuser_direct 0.2.36 prints for the same definitions."""
    fd = mf.FusionDefinition()
    x, w, b = (fd.define_tensor(shape) for shape in ([-1, -1, -1], [-1, -1], [-1]))
    z = fd.define_tensor([-1, -1, -1])
    ops = fd.ops
    assert domain(ops.sum(x, [1])) == "iri"
    assert domain(ops.max(x, [0, 2])) == "rir"
    assert domain(ops.sum(x, [1], keepdim=True)) == "iii"
    assert domain(ops.linear(x, w, b)) == "iiir"
    assert domain(ops.matmul(x, z)) == "iiir"
    assert domain(ops.stride_order(x, [0, 2, 1])) == "iii"
    assert domain(ops.relu(x)) == "iii"
    assert len(ops.sum(x, [1]).get_logical_domain()) == 2


def test_a_split_reduction_leaves_an_unreduced_sum() -> None:
    mesh = mf.DeviceMesh((4,), ("tp",))
    with mf.FusionDefinition() as fd:
        x = fd.define_tensor([8, 16])
        w = fd.define_tensor([12, 16])
        y = fd.ops.linear(x, w)
        fd.add_output(y)
        for t, axis in ((x, 1), (w, 1), (y, -1)):
            t.set_device_mesh(mesh)
            t.outer_split(axis, 4)
            t.axis(-2).parallelize(X)
        before = [str(a) for a in y.get_loop_domain()]
        first = y.rfactor([-1])
        assert [str(a) for a in first.get_loop_domain()] == before
        assert [str(a) for a in y.get_loop_domain()] == before[:-1]
    a, b = torch.randn(8, 16), torch.randn(12, 16)
    torch.testing.assert_close(fd.simulate([a, b])[0], a @ b.T)
    assert [entry.collective for entry in fd.bill().entries] == ["all-reduce"]
    made = fd.latest().sharded.choices[0].placement
    assert [split.axis for split in made.results[0].partial] == ["tp"]


# memory order


def by_allocation(fd: mf.FusionDefinition, y: mf.TensorView) -> mf.TensorView:
    y.set_allocation_domain([y.axis(1), y.axis(2), y.axis(0)], True)
    return y


def by_op(fd: mf.FusionDefinition, y: mf.TensorView) -> mf.TensorView:
    return fd.ops.stride_order(y, [0, 2, 1])


@pytest.mark.parametrize("order", [by_allocation, by_op])
@pytest.mark.parametrize("split", [False, True])
def test_outputs_have_their_stride_order(order: Callable[..., Any], split: bool) -> None:
    with mf.FusionDefinition() as fd:
        x = fd.define_tensor([4, 6, 8])
        y = order(fd, fd.ops.neg(x))
        fd.add_output(y)
        fd.add_output(fd.ops.relu(x))
        if split:
            fd.mesh_split(x, mf.DeviceMesh((2,), ("tp",)), [None, "tp", None])
    value = torch.randn(4, 6, 8)
    out, plain = fd.simulate([value])
    assert torch.equal(out, -value) and out.stride() == (1, 32, 4)
    assert plain.stride() == (48, 8, 1)
    if not split:
        (out, _) = fd.execute([value])
        assert torch.equal(out, -value) and out.stride() == (1, 32, 4)


def test_an_allocation_domain_keeps_an_annotation() -> None:
    with mf.FusionDefinition() as fd:
        x = fd.define_tensor([4, 6])
        y = fd.ops.neg(x)
        fd.add_output(y)
        y.set_allocation_domain([y.axis(1), y.axis(0)])
        fd.mesh_split(y, MESH, ["dp", None])
    out = fd.simulate([torch.ones(4, 6)])[0]
    assert out.stride() == (1, 4)
    assert fd.output_shardings() == [mf.Sharding(MESH, ((Split(2, "dp"),), ()))]


# definitions


def test_define_tensor_in_both_forms_and_from_pytorch() -> None:
    fd = mf.FusionDefinition()
    plain = fd.define_tensor(shape=[-1, 8, 1], contiguity=[True, True, None], dtype=DataType.Half, is_cpu=False)
    assert plain.type == TensorType((-1, 8, 1), DataType.Half)
    by_sizes = fd.define_tensor(sizes=[5, 8, 1], strides=[8, 1, 1], dtype=DataType.Float)
    assert by_sizes.type.shape == (-1, -1, 1) and fd.recording.tensors[by_sizes.id].stride_order is None
    transposed = fd.define_tensor([4, 8], [1, 4])
    assert transposed.type.shape == (-1, -1) and fd.recording.tensors[transposed.id].stride_order == (0, 1)
    static = fd.define_tensor(sizes=[4, 8], strides=[8, 1], static_sizes=True)
    assert static.type.shape == (4, 8)
    example = fd.from_pytorch(torch.zeros(3, 1, 5, dtype=torch.bfloat16).transpose(0, 2))
    assert example.type == TensorType((-1, 1, -1), DataType.BFloat16)
    assert fd.recording.tensors[example.id].stride_order == (0, 2, 1)
    assert fd.from_pytorch(torch.zeros(3, 5), static_sizes=True).type.shape == (3, 5)


def test_scalars_vectors_and_their_arithmetic() -> None:
    with mf.FusionDefinition() as fd:
        n = fd.define_scalar(dtype=DataType.Int)
        x = fd.define_tensor([-1, 4])
        rows, columns = fd.define_vector(2)
        width = x.size(1) * 2 + rows - rows
        grid = fd.ops.full([n, width], 1.5, DataType.Float)
        sized = fd.ops.full(fd.define_vector([2, 3]), 2, DataType.Int)
        scaled = fd.ops.mul(x, (n + 1) / fd.define_scalar(2.0) * -columns)
        for out in (grid, sized, scaled):
            fd.add_output(out)
        fd.mesh_split(x, MESH, ["dp", None])
    x_value = torch.randn(6, 4)
    for count in (3, 5):
        grid_value, sized_value, scaled_value = fd.simulate([count, x_value, 7, 2])
        assert torch.equal(grid_value, torch.full((count, 8), 1.5))
        assert torch.equal(sized_value, torch.full((2, 3), 2))
        torch.testing.assert_close(scaled_value, x_value * ((count + 1) / 2.0 * -2))


def test_inputs_and_outputs_of_the_fusion() -> None:
    with mf.FusionDefinition() as fd:
        x = fd.define_tensor([8])
        n = fd.define_scalar(dtype=DataType.Double)
        y = fd.ops.mul(x, n)
        fd.add_output(y)
        inputs = fd.fusion.inputs()
        (out,) = fd.fusion.outputs()
        for t in (inputs[0], out):
            t.set_device_mesh(mf.DeviceMesh([0, 1]))
            t.outer_split(0, 2)
            t.axis(0).parallelize(X)
    assert [type(v).__name__ for v in inputs] == ["TensorView", "Val"]
    assert (inputs[0].ref, inputs[1].ref, out.ref) == (x.ref, n.ref, y.ref)
    assert x.has_device_mesh() and y.mesh == mf.DeviceMesh([0, 1])
    assert torch.equal(fd.simulate([torch.arange(8.0), 3.0])[0], torch.arange(8.0) * 3)


def test_dtype_is_an_attribute_and_a_method() -> None:
    x = mf.FusionDefinition().define_tensor([2], dtype=DataType.BFloat16)
    assert x.dtype is x.dtype() is DataType.BFloat16


@pytest.mark.parametrize("mesh", [MESH, mf.DeviceMesh(torch.arange(8).reshape(2, 4)), mf.DeviceMesh([[3, 1], [2, 0]])])
def test_shard_tensor_cuts_what_the_annotation_says(mesh: mf.DeviceMesh) -> None:
    fd = mf.FusionDefinition()
    t = fd.define_tensor([-1, 7])
    fd.mesh_split(t, mesh, [1, 0])
    value = torch.arange(5 * 7).reshape(5, 7)
    for rank in range(10):
        if rank in mesh.ranks:
            major, minor = mesh.coordinate(rank)
            rows = value.tensor_split([-(-5 // mesh.shape[1]) * i for i in range(1, mesh.shape[1])])[minor]
            columns = [4 * major, 4 * major + 4]
            assert torch.equal(mf.shard_tensor(value, t, rank), rows[:, columns[0] : columns[1]])
            layouts = [(mf.Split(mesh.shape[place], mesh.names[place]),) for place in (1, 0)]
            sharding = mf.Sharding.make(mesh, layouts, [5, 7])
            assert torch.equal(mf.shard_tensor(value, sharding, rank), mf.shard_tensor(value, t, rank))
    free = fd.define_tensor([3])
    assert mf.shard_tensor(torch.ones(3), free, 5).shape == (3,)


@pytest.mark.parametrize(
    ("split", "text"),
    [
        (mf.Split(3, "dp"), r"a split over axis 'dp' of .*: found 3 parts, needed as many as the axis is large \(2\)"),
        (mf.Split(3, "tp"), r"a split over axis 'tp' of .*: found 3 parts, needed as many as the axis is large \(4\)"),
        (mf.Split(2, "tp", 3), "found 2 parts after 3, needed"),
        (mf.Split(2, "pp"), "no such axis"),
        (mf.Split(None, "tp"), "found a split of no size over an axis, needed its size"),
        *((mf.Split(size, "dp"), "Sharding") for size in (0, -1)),  # type: ignore[arg-type]
    ],
)
def test_a_sharding_that_a_mesh_cannot_have_is_an_error_where_it_is_used(split: mf.Split, text: str) -> None:
    uses: list[Callable[[], Any]] = [
        lambda: mf.Sharding(MESH, ((split,), ())).local_shape((16, 6), 1),
        lambda: mf.Sharding(MESH, ((split,), ())).runs((16, 6), 1),
        lambda: mf.shard_tensor(torch.zeros(16, 6), mf.Sharding(MESH, ((split,), ())), 1),
    ]
    for use in uses:
        with pytest.raises((mf.DefinitionError, mf.ArgumentError), match=text):
            use()
    if split.size == 0:
        with pytest.raises(mf.DefinitionError, match=r"Sharding\.make: found"):
            mf.Sharding.make(MESH, [(split,), ()], [16, 6])


def test_shard_tensor_cuts_what_an_output_s_sharding_says() -> None:
    with mf.FusionDefinition() as fd:
        x, w = fd.define_tensor([8, 6]), fd.define_tensor([6, 12])
        fd.add_output(fd.ops.matmul(x, w))
        fd.mesh_split(x, MESH, ["dp", None])
        fd.mesh_split(w, MESH, [None, "tp"])
    (sharding,) = fd.output_shardings()
    whole = torch.arange(96.0).reshape(8, 12)
    for rank in MESH.ranks:
        row, column = MESH.coordinate(rank)
        found = mf.shard_tensor(whole, sharding, rank)
        assert torch.equal(found, whole.chunk(MESH.shape[0])[row].chunk(MESH.shape[1], 1)[column])
    assert mf.shard_tensor(whole, sharding, 99).shape == whole.shape
    with pytest.raises(mf.ArgumentError, match="needed a dense tensor of 2 dims"):
        mf.shard_tensor(torch.ones(3), sharding)
    owed = mf.Sharding(MESH, ((), ()), (mf.Split(MESH.shape[0], "dp"),), "sum")
    with pytest.raises(mf.ArgumentError, match="needed a tensor and a TensorView, or a Sharding of what is reduced"):
        mf.shard_tensor(whole, owed)


# plans


def test_a_second_call_with_the_same_shapes_plans_nothing(monkeypatch: pytest.MonkeyPatch) -> None:
    calls: list[Any] = []
    compiled = module.compile_definition

    def counted(*arguments: Any) -> Any:
        calls.append(arguments[1])
        return compiled(*arguments)

    monkeypatch.setattr(module, "compile_definition", counted)
    with mf.FusionDefinition() as fd:
        x = fd.define_tensor([-1, 4])
        fd.add_output(fd.ops.sum(x, [0]))
        fd.mesh_split(x, mf.DeviceMesh([0]), ["x", None])
    for rows in (6, 6, 9, 6, 9):
        value = torch.randn(rows, 4)
        for run in (fd.simulate, fd.execute, lambda inputs: fd(*inputs)):
            torch.testing.assert_close(run([value])[0], value.sum(0))
    assert calls == [{0: (6, 4)}, {0: (9, 4)}]


def test_the_text_of_definitions_reads_well() -> None:
    fd = mf.FusionDefinition()
    x = fd.define_tensor([-1, 4])
    x.outer_split(0, 2)
    x.axis(0).parallelize(X)
    assert repr(x) == "TensorView(t0: Float[?, 4])"
    assert x.label == "x (t0)"
    assert [str(axis) for axis in x.get_loop_domain()] == ["ideviceIdx.x0{2}", "iS1{?}", "iS2{4}"]
    assert os.path.basename(__file__) == str(fd.recording.tensors[0].line).split(":")[0]
