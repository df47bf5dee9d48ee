"""One bad argument of a public call beside good ones: a house error, or what the call means with it."""

from __future__ import annotations

import operator
import re
from collections.abc import Callable
from typing import Any

import numpy as np
import pytest
import torch

import meshfuse as mf
from meshfuse import DataType, ParallelType
from meshfuse.errors import MeshfuseError

MESH = mf.DeviceMesh((2,), ("x",))
X = torch.arange(24.0).reshape(4, 6)


def defined() -> tuple[mf.FusionDefinition, mf.TensorView, mf.TensorView]:
    fd = mf.FusionDefinition()
    x = fd.define_tensor([4, 6])
    y = fd.ops.relu(x)
    fd.add_output(y)
    return fd, x, y


ENDLESS: list[Any] = []
ENDLESS += [ENDLESS, ENDLESS]
DEEP: list[Any] = []
for _ in range(5000):
    DEEP = [DEEP]


class Unprintable:
    def __repr__(self) -> str:
        raise RuntimeError


MODEL = torch.nn.Sequential(*[torch.nn.Linear(2, 2) for _ in range(50)], torch.nn.Dropout(0.25))
BAD: list[Any] = [
    MODEL, [MODEL], torch.ones(300, 300), np.ones((300, 300)), {str(n): n for n in range(10**4)}, "long " * 10**4,
    "\ud800", 10**400, 5e-324, -1.0, ENDLESS, X.to_sparse(), X.to("meta"), mf.Link(1e9, 0), "dgx-h100",
    None, True, -1, 0, 3, 2**70, 1.5, float("nan"), "", "a", "x", "a\0b", b"x", [], (), [0], ["x"], [None], [["x"]],
    [5], {}, {0: 1}, object(), int, torch.ones(2), torch.tensor(1), np.int64(1), np.float32(0.5), DataType.Int, 1j,
    ParallelType.mesh_x, ParallelType.stream, ParallelType.block_x, MESH, mf.Split(2), [mf.Split(2, "x")], slice(0, 1),
    iter([1]), defined()[1], "a tensor of its own", DEEP, Unprintable(), [1] * 10**5,
    range(10**12), np.array([]), np.array(1), torch.ones(2, 2), [torch.ones(2, 2)], np.ones((2, 2)), defined()[0],
]  # fmt: skip
SHARDED = mf.Sharding(MESH, ((mf.Split(2, "x"),), ()))
Fd, View = mf.FusionDefinition, mf.TensorView
# Good arguments, and the call; one after the other each argument is replaced by each bad value.
CALLS: dict[str, tuple[Callable[[Fd, View, View], list[Any]], Callable[..., Any]]] = {
    "mesh_split": (lambda fd, x, y: [x, MESH, ["x", None]], lambda fd, x, y, *a: fd.mesh_split(*a)),
    "shard": (lambda fd, x, y: [x, mf.Sharding.replicated(MESH, 2), None], lambda fd, x, y, *a: fd.shard(*a)),
    "overlap": (lambda fd, x, y: [y, 2, 0], lambda fd, x, y, *a: fd.overlap(*a)),
    "outer_split": (lambda fd, x, y: [0, 2], lambda fd, x, y, *a: x.outer_split(*a)),
    "reorder": (lambda fd, x, y: [{0: 1}], lambda fd, x, y, *a: x.reorder(*a)),
    "swizzle1d": (lambda fd, x, y: [0, ParallelType.mesh_x], lambda fd, x, y, *a: x.swizzle1d(*a)),
    "set_device_mesh": (lambda fd, x, y: [MESH], lambda fd, x, y, *a: x.set_device_mesh(*a)),
    "parallelize": (
        lambda fd, x, y: [ParallelType.mesh_x],
        lambda fd, x, y, *a: (x.set_device_mesh(MESH), x.axis(0).parallelize(*a)),
    ),
    "define_tensor": (
        lambda fd, x, y: [[4, 6], None, DataType.Float, False, None],
        lambda fd, x, y, *a: fd.define_tensor(*a),
    ),
    "define_tensor of an example": (
        lambda fd, x, y: [[4, 6], [6, 1]],
        lambda fd, x, y, sizes, strides: fd.define_tensor(sizes=sizes, strides=strides),
    ),
    "from_pytorch": (lambda fd, x, y: [X, False], lambda fd, x, y, *a: Fd().from_pytorch(*a)),
    "sizes of an example": (
        lambda fd, x, y: [[4, 6], [6, 1], False, False],
        lambda fd, x, y, sizes, strides, static, cpu: fd.define_tensor(
            sizes=sizes, strides=strides, static_sizes=static, is_cpu=cpu
        ),
    ),
    "split": (lambda fd, x, y: [0, 2, True], lambda fd, x, y, *a: x.split(*a)),
    "bill": (
        lambda fd, x, y: [[4, 6], False], lambda fd, x, y, shape, more: fd.bill(shape, alternatives=more),
    ),
    "memory": (lambda fd, x, y: [[4, 6]], lambda fd, x, y, *a: fd.memory(*a)),
    "write": (lambda fd, x, y: [0, 1.0], lambda fd, x, y, place, value: operator.setitem(x, place, value)),
    "max_local_numel": (lambda fd, x, y: [[4, 6]], lambda fd, x, y, *a: SHARDED.max_local_numel(*a)),
    "with_dims": (lambda fd, x, y: [((), (mf.Split(2, "x"),))], lambda fd, x, y, *a: SHARDED.with_dims(*a)),
    "define_scalar": (lambda fd, x, y: [1, DataType.Int], lambda fd, x, y, *a: fd.define_scalar(*a)),
    "define_vector": (lambda fd, x, y: [2, DataType.Int], lambda fd, x, y, *a: fd.define_vector(*a)),
    "grad": (lambda fd, x, y: [[fd.ops.sum(y)], [x]], lambda fd, x, y, *a: fd.grad(*a)),
    "call": (lambda fd, x, y: ["relu", [x], {}], lambda fd, x, y, *a: fd.call(*a)),
    "execute": (
        lambda fd, x, y: [[X], "eager"], lambda fd, x, y, given, backend: fd.execute(given, backend=backend),
    ),
    "simulate": (lambda fd, x, y: [[X]], lambda fd, x, y, *a: fd.simulate(*a)),
    "compile": (
        lambda fd, x, y: [[4, 6], None], lambda fd, x, y, shape, scalars: fd.compile(shape, scalars=scalars),
    ),
    "host_program": (lambda fd, x, y: [0, [4, 6]], lambda fd, x, y, *a: fd.host_program(*a)),
    "explain": (lambda fd, x, y: [y, [4, 6]], lambda fd, x, y, *a: fd.explain(*a)),
    "max_memory": (
        lambda fd, x, y: [1e9, 1e9],
        lambda fd, x, y, wire, memory: Fd(max_wire=wire, max_memory=memory),
    ),
    "shard_tensor": (lambda fd, x, y: [X, x, 0], lambda fd, x, y, *a: mf.shard_tensor(*a)),
    "shard_tensor on a mesh": (
        lambda fd, x, y: [X, x, 1], lambda fd, x, y, *a: (fd.mesh_split(x, MESH, ["x", None]), mf.shard_tensor(*a)),
    ),
    "options of execute": (
        lambda fd, x, y: [False, False],
        lambda fd, x, y, idle, graph: fd.execute([X], idle_ranks=idle, cuda_graph=graph),
    ),
    "options of simulate": (lambda fd, x, y: [True], lambda fd, x, y, v: fd.simulate([X], check_replicas=v)),
    "Link": (
        lambda fd, x, y: [1e9, 1e-6],
        lambda fd, x, y, *a: fd.mesh_split(x, mf.DeviceMesh((2,), ("x",), links=mf.Link(*a)), ["x", None]),
    ),
    "Machine": (
        lambda fd, x, y: [mf.Link(1e9, 0), mf.Link(1e9, 0), 8, 1e12],
        lambda fd, x, y, *a: fd.mesh_split(x, mf.DeviceMesh((2,), ("x",), links=mf.Machine(*a)), ["x", None]),
    ),
    "rate of a mesh": (
        lambda fd, x, y: [1e12],
        lambda fd, x, y, v: fd.mesh_split(x, mf.DeviceMesh((2,), ("x",), flops=v), ["x", None]),
    ),
    "name of an axis": (
        lambda fd, x, y: ["x"], lambda fd, x, y, v: fd.mesh_split(x, mf.DeviceMesh((2,), (v,)), [v, None]),
    ),
    "DeviceMesh of ranks": (lambda fd, x, y: [[0, 1]], lambda fd, x, y, *a: mf.DeviceMesh(*a)),
    "axis_size": (lambda fd, x, y: ["x"], lambda fd, x, y, *a: MESH.axis_size(*a)),
    "coordinate": (lambda fd, x, y: [0], lambda fd, x, y, *a: MESH.coordinate(*a)),
    "rank in a mesh": (lambda fd, x, y: [0], lambda fd, x, y, v: v in MESH),
    "link of axes": (lambda fd, x, y: ["x"], lambda fd, x, y, v: MESH.link((v,))),
    "parallel_axis": (lambda fd, x, y: [ParallelType.mesh_x], lambda fd, x, y, *a: MESH.parallel_axis(*a)),
    "Sharding.make": (
        lambda fd, x, y: [[(mf.Split(2, "x"),), ()], [4, 6]], lambda fd, x, y, *a: mf.Sharding.make(MESH, *a),
    ),
    "local_shape": (lambda fd, x, y: [[4, 6], 0], lambda fd, x, y, *a: SHARDED.local_shape(*a)),
    "local_shape of a whole tensor": (
        lambda fd, x, y: [[4, 6], 0], lambda fd, x, y, *a: mf.Sharding.replicated(MESH, 2).local_shape(*a),
    ),
    "link": (lambda fd, x, y: [("x",)], lambda fd, x, y, *a: MESH.link(*a)),
    "runs": (lambda fd, x, y: [[4, 6], 0], lambda fd, x, y, *a: SHARDED.runs(*a)),
    "placement": (lambda fd, x, y: [[4, 6]], lambda fd, x, y, *a: SHARDED.placement(*a)),
    "coordinates": (lambda fd, x, y: [0], lambda fd, x, y, *a: SHARDED.coordinates(*a)),
    "DeviceMesh": (
        lambda fd, x, y: [(2,), ("x",), [0, 1], None, 1e12],
        lambda fd, x, y, shape, names, ranks, links, flops: mf.DeviceMesh(
            shape, names, ranks=ranks, links=links, flops=flops
        ),
    ),
    "FusionDefinition": (lambda fd, x, y: [0], lambda fd, x, y, *a: mf.FusionDefinition(*a)),
    "Split": (
        lambda fd, x, y: [2, "x", 1], lambda fd, x, y, *a: fd.mesh_split(x, MESH, [[mf.Split(*a)], None]),
    ),
    "Sharding": (
        lambda fd, x, y: [MESH, ((mf.Split(2, "x"),), ()), (), ""],
        lambda fd, x, y, *a: fd.shard(x, mf.Sharding(*a)),
    ),
    "Sharding.replicated": (
        lambda fd, x, y: [MESH, 2], lambda fd, x, y, *a: fd.shard(x, mf.Sharding.replicated(*a)),
    ),
    "register_op": (lambda fd, x, y: ["relu"], lambda fd, x, y, *a: mf.register_op(*a)),
    "unregister_op": (lambda fd, x, y: ["relu"], lambda fd, x, y, *a: mf.unregister_op(*a)),
    "save in time": (
        lambda fd, x, y: [1.0], lambda fd, x, y, timeout: mf.save("run", {"w": X}, timeout=timeout),
    ),
    "save": (lambda fd, x, y: ["/dev/null/run", {"w": X}], lambda fd, x, y, *a: mf.save(*a)),
    "load": (lambda fd, x, y: ["/dev/null/run", {"w": None}], lambda fd, x, y, *a: mf.load(*a)),
}  # fmt: skip
CASES = [(name, place) for name, (good, _) in CALLS.items() for place in range(len(good(*defined())))]


@pytest.mark.timeout(60)
@pytest.mark.sampled(1)
@pytest.mark.parametrize(("name", "place"), CASES)
def test_a_bad_value_among_good_ones_is_an_error_or_changes_no_number(
    name: str, place: int, tmp_path: Any, monkeypatch: pytest.MonkeyPatch, pytestconfig: pytest.Config
) -> None:
    """What is taken changes no number: the definition's output is that of torch. Of two arguments, one after the other
    in the list, each has half of the values.
    """
    monkeypatch.chdir(tmp_path)  # some of these are good names of folders
    good, call = CALLS[name]
    step = 1 if pytestconfig.getoption("--all-cases") else 2
    for value in BAD[CASES.index((name, place)) % step :: step]:
        fd, x, y = defined()
        arguments = good(fd, x, y)
        arguments[place] = y if isinstance(value, str) and value == "a tensor of its own" else value
        try:
            call(fd, x, y, *arguments)
            more = [t for t in fd.fusion.inputs()[1:]]
            if not more:
                assert torch.equal(fd.simulate([X])[0], X), value
        except MeshfuseError as error:
            assert isinstance(error, (ValueError, OSError)), repr(error)
            assert re.search(r"\(at test_bad_values\.py:\d+\)", str(error)), str(error)
            assert "\n" not in str(error), str(error)
            assert len(str(error)) < 1500 and "Dropout" not in str(error), str(error)


def test_more_dims_than_a_tensor_has() -> None:
    with pytest.raises(mf.DefinitionError, match="define_tensor: more dims than a tensor has: found 65"):
        mf.FusionDefinition().define_tensor([1] * 65)
    fd, x, _ = defined()
    with pytest.raises(mf.DefinitionError, match="expand: more dims than a tensor has: found 99, needed at most 64"):
        fd.ops.expand(x, [1] * 97 + [4, 6])


def test_no_bound_is_a_bound() -> None:
    fd = mf.FusionDefinition(max_wire=float("inf"), max_memory=float("inf"))
    x = fd.define_tensor([4, 6])
    fd.add_output(fd.ops.sum(x, [0]))
    fd.mesh_split(x, MESH, ["x", None])
    assert torch.equal(fd.simulate([X])[0], X.sum(0))
