"""DTensors in, DTensors out, on torch device meshes of gloo ranks; against DTensor's own full_tensor."""

from __future__ import annotations

from typing import Any

import pytest
import torch
import torch.nn.functional as F

import meshfuse as mf
from meshfuse.frontends.placing import join_default_group

pytestmark = pytest.mark.ranks

DOUBLE = mf.DataType.Double


def torch_mesh(shape: tuple[int, ...], names: tuple[str, ...] | None) -> Any:
    """A torch device mesh of this rank's world, whose default process group is made at the first call."""
    import torch.distributed as dist
    from torch.distributed.device_mesh import init_device_mesh

    if not dist.is_initialized():
        join_default_group(mf.World.current(), torch.device("cpu"))
    return init_device_mesh("cpu", shape, mesh_dim_names=names)


def numbers(*shape: int) -> torch.Tensor:
    return torch.randn(shape, generator=torch.Generator().manual_seed(sum(shape)), dtype=torch.float64)


def distributed(tensor: torch.Tensor, mesh: Any, placements: str) -> Any:
    """`placements`: per axis a dim's number, or R."""
    from torch.distributed.tensor import Replicate, Shard, distribute_tensor

    made = [Replicate() if letter == "R" else Shard(int(letter)) for letter in placements]
    return distribute_tensor(tensor, mesh, made, src_data_rank=None)


def described(value: Any) -> tuple[str, torch.Tensor, tuple[int, ...]]:
    """(placements in letters, the global tensor by torch, the strides) of a DTensor."""
    letters = "".join("R" if p.is_replicate() else str(p.dim) for p in value.placements)
    return letters, value.full_tensor(), value.stride()


def error_of(call: Any) -> str:
    try:
        call()
    except mf.ArgumentError as error:
        return str(error)
    return "no error"


def linear_of(x: Any, w: Any) -> mf.FusionDefinition:
    """A linear annotated by its DTensors alone."""
    with mf.FusionDefinition() as fd:
        fd.add_output(fd.ops.linear(fd.from_pytorch(x), fd.from_pytorch(w)))
    return fd


def on_rank_linear(shape: tuple[int, ...], names: Any, x: str, w: str, rows: int) -> tuple[Any, ...]:
    mesh = torch_mesh(shape, names)
    inputs = [distributed(numbers(rows, 8), mesh, x), distributed(numbers(12, 8), mesh, w)]
    (out,) = linear_of(*inputs).execute(inputs)
    same = out.device_mesh is mesh
    return (*described(out), same, tuple(out.to_local().shape))


LINEAR = [
    ((4,), ("tp",), "R", "0", 6, "1", (6, 3)),
    ((4,), None, "1", "1", 6, "1", (6, 3)),
    ((4,), None, "0", "R", 8, "0", (2, 12)),
    ((2, 2), ("dp", "tp"), "0R", "R0", 6, "01", (3, 6)),
    ((2, 2), ("dp", "tp"), "01", "R1", 6, "01", (3, 6)),
    ((2, 2), None, "00", "RR", 8, "00", (2, 12)),
    ((1, 4), ("dp", "tp"), "0R", "R0", 6, "R1", (6, 3)),
]


@pytest.mark.parametrize(("shape", "names", "x", "w", "rows", "expected", "local"), LINEAR)
def test_dtensors_give_dtensors(ranks4, shape, names, x, w, rows, expected, local):
    reference = F.linear(numbers(rows, 8), numbers(12, 8))
    for letters, whole, strides, same_mesh, found in ranks4.run(on_rank_linear, shape, names, x, w, rows):
        torch.testing.assert_close(whole, reference, rtol=1e-12, atol=1e-12)
        assert (letters, strides, same_mesh, found) == (expected, (12, 1), True, local)


def test_uneven_shards_are_those_of_torch(ranks4):
    """Five rows over four ranks: 2, 2, 1 and none."""
    found = ranks4.run(on_rank_linear, (4,), ("tp",), "0", "R", 5)
    for letters, whole, *_ in found:
        torch.testing.assert_close(whole, F.linear(numbers(5, 8), numbers(12, 8)), rtol=1e-12, atol=1e-12)
        assert letters == "0"
    assert [local for *_, local in found] == [(2, 12), (2, 12), (1, 12), (0, 12)]


def on_rank_sizes(rows: list[int]) -> list[torch.Tensor]:
    """Rank 0's shards of 7 and 8 rows are alike, the global tensors are not."""
    mesh = torch_mesh((4,), ("tp",))
    w = distributed(numbers(12, 8), mesh, "R")
    fd = linear_of(distributed(numbers(8, 8), mesh, "0"), w)
    return [fd.execute([distributed(numbers(n, 8), mesh, "0"), w])[0].full_tensor() for n in rows]


def test_the_global_shape_makes_the_plan(ranks4):
    rows = [8, 7, 8, 4]
    for results in ranks4.run(on_rank_sizes, rows):
        for n, found in zip(rows, results, strict=True):
            torch.testing.assert_close(found, F.linear(numbers(n, 8), numbers(12, 8)), rtol=1e-12, atol=1e-12)


def on_rank_transpose() -> tuple[Any, ...]:
    mesh = torch_mesh((2, 2), ("dp", "tp"))
    x = distributed(numbers(6, 8), mesh, "01")
    with mf.FusionDefinition() as fd:
        fd.add_output(fd.ops.permute(fd.from_pytorch(x), [1, 0]))
    return described(fd.execute([x])[0])


def test_placements_follow_the_dims(ranks4):
    for letters, whole, _ in ranks4.run(on_rank_transpose):
        assert letters == "10" and torch.equal(whole, numbers(6, 8).T)


def annotated(spec: Any, out_spec: list[Any] | None = None) -> mf.FusionDefinition:
    """With x as `spec` says on two axes of two, or its rows over the one axis of four that `spec` names."""
    mesh = mf.DeviceMesh((4,), (spec,)) if isinstance(spec, str) else mf.DeviceMesh((2, 2), ("dp", "tp"))
    spec = [spec, None] if isinstance(spec, str) else spec
    with mf.FusionDefinition() as fd:
        x = fd.define_tensor([8, -1], dtype=DOUBLE)
        y = fd.ops.relu(x)
        fd.add_output(y)
        fd.mesh_split(x, mesh, spec)
        if out_spec is not None:
            fd.mesh_split(y, mesh, out_spec)
    return fd


def on_rank_mismatch() -> dict[str, str]:
    from torch.distributed.tensor import DTensor, Partial, Replicate, Shard

    mesh, line = torch_mesh((2, 2), None), torch_mesh((4,), None)
    fd = annotated(["dp", None])
    partial = DTensor.from_local(numbers(4, 6), mesh, [Shard(0), Partial()], run_check=False)
    row = DTensor.from_local(numbers(2, 6), line, [Shard(0)], run_check=False)
    uneven = distributed(numbers(8, 6), mesh, "11")
    return {
        "as annotated": error_of(lambda: fd.execute([distributed(numbers(8, 6), mesh, "0R")])),
        "other": error_of(lambda: fd.execute([distributed(numbers(8, 6), mesh, "R0")])),
        "partial": error_of(lambda: fd.execute([partial])),
        "line": error_of(lambda: fd.execute([row])),
        "uneven": error_of(lambda: annotated([None, ("dp", "tp")]).execute([uneven])),
        "order": error_of(lambda: annotated([None, ("tp", "dp")]).execute([uneven])),
        "size": error_of(lambda: fd.execute([distributed(numbers(10, 6), mesh, "0R")])),
        "replicated": error_of(
            lambda: fd.execute([DTensor.from_local(numbers(8, 6), mesh, [Replicate()] * 2, run_check=False)])
        ),
    }


def test_other_placements_than_annotated_are_errors(ranks4):
    found = ranks4.run(on_rank_mismatch)
    assert all(errors == found[0] for errors in found)
    errors = found[0]
    assert errors.pop("as annotated") == errors.pop("uneven") == "no error"
    assert "has the wrong global shape: found [10, 6], needed [8, -1]. Pass" in errors.pop("size")
    given = {
        "other": "(Replicate(), Shard(dim=0)) of shape [8, 6] on DeviceMesh((2, 2), ('y', 'x'))",
        "partial": "(Shard(dim=0), Partial(sum)) of shape [8, 6] on DeviceMesh((2, 2), ('y', 'x'))",
        "line": "(Shard(dim=0),) of shape [8, 6] on DeviceMesh((4,), ('x',))",
        "order": "(Shard(dim=1), Shard(dim=1)) of shape [8, 6] on DeviceMesh((2, 2), ('y', 'x'))",
        "replicated": "(Replicate(), Replicate()) of shape [8, 6] on DeviceMesh((2, 2), ('y', 'x'))",
    }
    for name, placements in given.items():
        assert "is passed with other placements: found " + placements in errors[name]
        wanted = "[-, (tp, dp)]" if name == "order" else "[dp, -]"
        assert f", needed {wanted} on DeviceMesh((2, 2), ('dp', 'tp')). Redistribute" in errors[name]
        assert "(at test_dtensor.py:" in errors[name]


def on_rank_unsayable() -> dict[str, str]:
    x = distributed(numbers(8, 6), torch_mesh((4,), None), "0")
    outputs = {
        "major part": [None, mf.Split(2, "tp")],
        "minor part": [None, mf.Split(2, "tp", 2)],
        "turned": [[mf.Split(2, "tp", 2), mf.Split(2, "tp")], None],
        "inner": [[mf.Split(2), mf.Split(4, "tp")], None],
        "uneven": [None, [mf.Split(None), mf.Split(4, "tp")]],
    }
    return {name: error_of(lambda s=spec: annotated("tp", s).execute([x])) for name, spec in outputs.items()}


def test_outputs_that_no_dtensor_can_be(ranks4):
    """Those over parts of an axis."""
    found = ranks4.run(on_rank_unsayable)
    assert all(errors == found[0] for errors in found)
    assert found[0].pop("inner") == found[0].pop("uneven") == "no error"
    assert len(found[0]) == 3
    for error in found[0].values():
        assert error.startswith("output y (t1) (made at test_dtensor.py:")
        assert ") cannot be a DTensor: found [" in error and "of shape [8, 6] on DeviceMesh((4,)" in error
        assert "needed placements that DTensor has. Annotate the output otherwise, or pass plain shards." in error


def on_rank_other_mesh() -> str:
    x = distributed(numbers(8, 6), torch_mesh((4,), None), "0")
    other = mf.DeviceMesh((2, 2), ("dp", "tp"))
    with mf.FusionDefinition() as fd:
        t = fd.from_pytorch(x)
        y = fd.ops.set(t)
        fd.add_output(y)
        fd.mesh_split(y, other, [None, None])
    return error_of(lambda: fd.execute([x]))


def test_an_output_on_a_mesh_of_no_input_is_an_error(ranks4):
    for error in ranks4.run(on_rank_other_mesh):
        assert "cannot be a DTensor: found [-, -] of shape [8, 6] on DeviceMesh((2, 2), ('dp', 'tp'))" in error
        assert "needed one of [DeviceMesh(" in error


def on_rank_nothing_annotated(shape: tuple[int, ...]) -> list[Any]:
    mesh = torch_mesh(shape, None)
    x = distributed(numbers(8, 6), mesh, "R" * len(shape))
    with mf.FusionDefinition() as fd:
        t = fd.define_tensor([8, 6], dtype=DOUBLE)
        for made in (fd.ops.neg(t), t):
            fd.add_output(made)
    return [(*described(out)[:2], out.device_mesh is mesh) for out in fd.execute([x])]


@pytest.mark.parametrize("shape", [(4,), (2, 2)])
def test_where_nothing_is_annotated_outputs_are_whole_on_the_inputs_mesh(ranks4, shape):
    """Propagation then knows of no mesh but the world, one axis of all ranks."""
    for outputs in ranks4.run(on_rank_nothing_annotated, shape):
        for (letters, whole, same_mesh), right in zip(outputs, (-numbers(8, 6), numbers(8, 6)), strict=True):
            assert letters == "R" * len(shape) and torch.equal(whole, right) and same_mesh


def on_rank_recording() -> list[tuple[bool, bool]]:
    """Whether the graph of outputs has the call alone, and whether they are right.

    Of the argument itself, a view and a product.
    """
    value = numbers(8, 4)
    x = torch.nn.Parameter(distributed(value, torch_mesh((2,), ("x",)), "0"))
    with mf.FusionDefinition() as fd:
        t = fd.define_tensor([8, 4], dtype=DOUBLE)
        for made in (t, fd.ops.permute(t, [1, 0]), fd.ops.mul(t, 2.0)):
            fd.add_output(made)
        fd.mesh_split(t, mf.DeviceMesh((2,), ("x",)), ["x", None])
    whole = value.clone().requires_grad_()
    found = [*fd.execute([x]), *fd(whole)]
    wanted, leaves = [value, value.T, value * 2] * 2, [x] * 3 + [whole] * 3
    with torch.no_grad():
        assert not any(one.requires_grad for one in (*fd.execute([x]), *fd(whole)))
    return [(is_recorded_call(one, leaf), torch.equal(getattr(one, "full_tensor", lambda one=one: one)(), w))
            for one, w, leaf in zip(found, wanted, leaves, strict=True)]  # fmt: skip


def is_recorded_call(output: Any, leaf: Any) -> bool:
    """Whether torch has recorded one call between a leaf and an output, and nothing of what ran in it."""
    before = [node for node, _ in output.grad_fn.next_functions if node is not None]
    return output.grad_fn.name() == "DefinitionCallBackward" and len(before) == 1 and before[0].variable is leaf


def test_no_graph_of_autograd_goes_through_a_program(ranks2):
    assert ranks2.run(on_rank_recording) == [[(True, True)] * 6] * 2


def on_rank_free_output(rows: int, width: int) -> tuple[Any, ...]:
    """The output's home on shards, and what DTensors give."""
    mesh = torch_mesh((4,), None)
    inputs = [distributed(numbers(rows, 16), mesh, "1"), distributed(numbers(width, 16), mesh, "1")]
    fd = linear_of(*inputs)
    fd.execute([value.to_local() for value in inputs])
    sharding = str(fd.latest().output_shardings()[0])
    (out,) = fd.execute(inputs)
    return sharding, *described(out)


@pytest.mark.parametrize(("rows", "width"), [(6, 12), (8, 8), (64, 48)])
def test_a_free_output_lies_where_placements_can_say_it(ranks4, rows, width):
    """On shards it lies in parts of the axis, which no placements say: for DTensors the program is planned again."""
    reference = F.linear(numbers(rows, 16), numbers(width, 16))
    for sharding, letters, whole, _ in ranks4.run(on_rank_free_output, rows, width):
        torch.testing.assert_close(whole, reference, rtol=1e-12, atol=1e-12)
        assert ":" in sharding
        assert letters in ("0", "1")
