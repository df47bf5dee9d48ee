"""What is defined, called or passed wrongly is a ValueError that names what is wrong, at the user's own line."""

from __future__ import annotations

import copy
import io
import itertools
import pickle
import re
import warnings
from collections.abc import Callable
from typing import Any

import numpy as np
import pytest
import torch

import meshfuse as mf
import meshfuse.nvfuser_direct as nv
from meshfuse import DataType, ParallelType
from meshfuse.ops.registry import OPS as OPS_BY_NAME
from meshfuse.ops.values import TensorRef
from refusing import MESH, X, define, raises


def other() -> mf.TensorView:
    return define()[1]


@pytest.mark.parametrize("value", [None, 3, "t0", X, other(), define()[0].define_scalar(2)], ids=str)
def test_values_that_are_no_tensor_of_the_definition(value: Any) -> None:
    fd, _ = define()
    for call in (
        lambda: fd.mesh_split(value, MESH, [None, None]),
        lambda: fd.shard(value, mf.Sharding.replicated(MESH, 2)),
        lambda: fd.add_output(value),
        lambda: fd.size(value, 0),
    ):
        raises("needed a tensor of this definition", call)


DEFINING: list[tuple[str, Callable[[mf.FusionDefinition], Any]]] = [
    *[
        ("define_tensor: shape", lambda fd, v=v: fd.define_tensor(v))
        for v in ("ab", 5, None, [2.5], [-2], [True], [2**80], {"a": 1}, [None], [[2]], {8, 16}, {8: 16}, {}, b"a")
    ],
    *[
        ("define_tensor: dtype", lambda fd, v=v: fd.define_tensor([2], dtype=v))
        for v in ("f", None, 3, float, torch.qint8, DataType.Null)
    ],
    *[
        ("define_tensor: stride_order", lambda fd, v=v: fd.define_tensor([2, 3], stride_order=v))
        for v in ([0], [0, 0], "ab", [0, 2], 5, [0.0, 1.0])
    ],
    ("define_tensor: strides", lambda fd: fd.define_tensor(sizes=[2, 3], strides=[1])),
    ("from_pytorch: found list, needed a torch tensor", lambda fd: fd.from_pytorch([1, 2])),
    ("from_pytorch: found ndarray, needed a torch tensor", lambda fd: fd.from_pytorch(np.zeros(2))),
    ("define_scalar: found 'a' (str), needed a number", lambda fd: fd.define_scalar("a")),
    (
        "define_scalar: found nan, needed a number that Int holds",
        lambda fd: fd.define_scalar(float("nan"), DataType.Int),
    ),
    (
        "define_scalar: found 2j, needed a number that Float holds",
        lambda fd: fd.define_scalar(2j, DataType.Float),
    ),
    ("a number is too large", lambda fd: fd.define_scalar(2**70)),
    ("define_scalar: dtype", lambda fd: fd.define_scalar(2, "x")),
    *[("define_vector", lambda fd, v=v: fd.define_vector(v)) for v in (-1, "ab", 2.5, [None], True, None)],
    ("a number that Int holds", lambda fd: fd.define_vector([2.5])),
    ("seed: found 'a'", lambda fd: mf.FusionDefinition("a")),  # type: ignore[arg-type]
]


@pytest.mark.parametrize(("text", "call"), DEFINING, ids=[f"{i}-{text}" for i, (text, _) in enumerate(DEFINING)])
def test_wrong_inputs_of_a_definition_are_errors(text: str, call: Callable[[mf.FusionDefinition], Any]) -> None:
    raises(text, lambda: call(define()[0]))


Ops = Callable[[mf.FusionDefinition, mf.TensorView, Any], Any]
OPS: list[tuple[str, Ops]] = [
    ("expand: an operand's size and its result's differ: found 8 and 1", lambda fd, x, o: o.expand(x, [1, 16])),
    ("expand: an operand's size and its result's differ: found 16 and 1", lambda fd, x, o: o.expand(x, [2, -1, 1])),
    ("has no op 'reluu': found near to it ['relu'", lambda fd, x, o: o.reluu(x)),
    ("has no op 'nope'", lambda fd, x, o: fd.call("nope", [x])),
    ("add: argument 'b' is missing", lambda fd, x, o: o.add(x)),
    ("relu: too many arguments: found 2", lambda fd, x, o: o.relu(x, x)),
    ("relu: 'foo' is not a parameter", lambda fd, x, o: o.relu(x, foo=1)),
    ("sum: 'dims' is given twice", lambda fd, x, o: o.sum(x, [0], dims=[1])),
    *[("add: argument 'b' is of the wrong kind", lambda fd, x, o, v=v: o.add(x, v))
      for v in ("a", None, torch.zeros(3), np.zeros(3), [1, 2])],
    *[(f"add: argument 'b' is of the wrong kind: found a {type(v).__name__} of shape [3, 2], needed tensor or scalar. "
       "Call it as add(a, b). Tensors of numbers come in by define_tensor", lambda fd, x, o, v=v: o.add(x, v))
      for v in (torch.zeros(3, 2), np.zeros((3, 2)))],
    ("softmax: the first argument: found a Tensor of shape [3]", lambda fd, x, o: o.softmax(torch.zeros(3), 0)),
    ("relu: no tensor operand", lambda fd, x, o: o.relu(3.0)),
    ("matmul: argument 'b' is of the wrong kind: found 3.0", lambda fd, x, o: o.matmul(x, 3.0)),
    ("sum: argument 'arg' is of the wrong kind", lambda fd, x, o: o.sum(x.size(0), [0])),
    ("sum: dim out of range: found dim 2", lambda fd, x, o: o.sum(x, [2])),
    ("sum: a dim is given twice", lambda fd, x, o: o.sum(x, [0, -2])),
    *[("sum: argument 'dims' is of the wrong kind", lambda fd, x, o, v=v: o.sum(x, v)) for v in ("a", [0.5], True)],
    ("a tensor of 0 dims", lambda fd, x, o: o.sum(o.sum(x), [0])),
    # torch takes these for all dims, numpy for none, and nvFuser refuses them.
    *[(f"{op}: dims: found none, needed at least one. Leave dims out for all of them.",
       lambda fd, x, o, op=op: getattr(o, op)(x, []))
      for op in ("sum", "prod", "max", "min", "mean", "logsumexp", "var", "var_mean", "welford")],
    *[(f"{op}: complex numbers have no order: found ComplexFloat[8, 16], needed a real type",
       lambda fd, x, o, op=op, more=more: getattr(o, op)(o.complex(x, x), *more))
      for op, more in {"max": (0,), "cummin": (0,), "argsort": (0,), "topk": (2,), "argmax": (0,)}.items()],
    *[(f"argmax: a dim of size 0 has no largest element: found Float[{rows}, 0], needed at least one element",
       lambda fd, x, o, rows=rows, dim=dim: o.argmax(o.full([rows, 0], 1.0, DataType.Float), dim))
      for rows, dim in ((8, 1), (0, -1), (3, None))],
    *[(f"{op}: a number that no integer is: found {v} as Int32", lambda fd, x, o, op=op, v=v: getattr(o, op)(
        o.cast(x, DataType.Int32), 0, v)) for op in ("cumsum", "cummax") for v in (float("inf"), float("nan"))],
    *[(f"{op}: a number is too large: found {v} as Int32", lambda fd, x, o, op=op, v=v: getattr(o, op)(
        o.cast(x, DataType.Int32), 0, v)) for op in ("cumprod", "cummin") for v in (1e300, -(2**40))],
    *[(f"{op}: the {what}: found Float{list(shape)}, needed [16], the normalized_shape",
       lambda fd, x, o, op=op, what=what, shape=shape: getattr(o, op)(x, [16], **{what: fd.define_tensor(shape)}))
      for op, what in (("layer_norm", "weight"), ("layer_norm", "bias"), ("rms_norm", "weight"))
      for shape in ([1], [8, 16], [8, 1], [], [4])],
    *[(f"pad: more is cut off than there is: found {cut} of dim 1 of Float[8, 16], needed at most 16",
       lambda fd, x, o, w=w: o.pad(x, w)) for w, cut in (([-17, 40], 17), ([40, -17], 17), ([-9, -9], 18))],
    ("cast: argument 'dtype' is of the wrong kind", lambda fd, x, o: o.cast(x, "abc")),
    ("cast: dtype: found DataType.Null", lambda fd, x, o: o.cast(x, DataType.Null)),
    ("reshape", lambda fd, x, o: o.reshape(x, [5, 5])),
    ("reshape", lambda fd, x, o: o.reshape(x, [-1, -1])),
    ("too large", lambda fd, x, o: o.reshape(x, [2**80])),
    *[("sum: argument 'dims' is of the wrong kind", lambda fd, x, o, v=v: o.sum(x, np.array(v)))
      for v in ([0], [0, 1])],
    *[("call of 'relu': arguments", lambda fd, x, o, v=v: fd.call("relu", x if v else None)) for v in (True, False)],
    ("cat: argument 'tensors' is of the wrong kind", lambda fd, x, o: o.cat([])),
    ("cat: argument 'tensors' is of the wrong kind", lambda fd, x, o: o.cat([x, 3])),
    ("full: a size is negative: found [-5]", lambda fd, x, o: o.full([-5], 0.0, DataType.Float)),
    ("full: a size is negative: found [-92]", lambda fd, x, o: o.full([x.size(0) - 100], 0.0, DataType.Float)),
    ("larger than any memory", lambda fd, x, o: o.full([2**62], 0.0, DataType.Float)),
    ("full: the result is larger than any memory: found Float[4611686018427387904], needed less than 2**63 bytes",
     lambda fd, x, o: o.full([x.size(0) * 2**59], 0.0, DataType.Float)),
    ("a number that no integer is: found nan as Int", lambda fd, x, o: o.full([4], float("nan"), DataType.Int)),
    ("a number that no integer is: found -inf as Int", lambda fd, x, o: o.full([4], float("-inf"), DataType.Int)),
    ("a complex number in a real tensor", lambda fd, x, o: o.full([4], 1j, DataType.Float)),
    ("a number is too large", lambda fd, x, o: o.add(x, 2**100)),
    ("a size is no whole number: found 4.5", lambda fd, x, o: o.full([x.size(0) * 0.5625], 1.0, DataType.Float)),
    ("a size is no whole number: found inf",
     lambda fd, x, o: o.full([x.size(0) / fd.define_scalar(0)], 1.0, DataType.Float)),
    ("a scalar has no value: found integer division",
     lambda fd, x, o: o.mul(x, o.div(x.size(0), fd.define_scalar(0)))),
    ("add of scalars: found 3 arguments", lambda fd, x, o: o.add(x.size(0), 1, 2)),
    ("add of scalars", lambda fd, x, o: o.add(x.size(0), foo=2)),
    ("found TensorView(t0: Float[8, 16]) of another definition", lambda fd, x, o: o.add(x, other())),
    ("of another definition", lambda fd, x, o: o.add(x, define()[0].define_scalar())),
    ("gelu: missing a required argument: 'x'. Call it as gelu(x, approximate='none')", lambda fd, x, o: o.gelu()),
    ("gelu: got an unexpected keyword argument 'foo'", lambda fd, x, o: o.gelu(x, foo=2)),
    ("gelu: the first argument: found 3 (int)", lambda fd, x, o: o.gelu(3)),
    ("gelu: approximate", lambda fd, x, o: o.gelu(x, "x")),
    *[("softmax: argument 'dim' is of the wrong kind: found ", lambda fd, x, o, v=v: o.softmax(x, v))
      for v in ("a", None, [0], (0, 1), True, 1.0, iter([0]), range(1), np.array(0.0))],
    ("softmax: argument 'dtype' is of the wrong kind: found 'a' (str), needed DataType. Call it as softmax(x, dim=-1, "
     "dtype=None)", lambda fd, x, o: o.softmax(x, 0, "a")),
    *[("mean: argument 'dims' is of the wrong kind", lambda fd, x, o, v=v: o.mean(x, v))
      for v in (iter([0]), (d for d in [0]), {0}, {0: 1}, "", [True], range(10**12), [None])],
    *[("mean: argument 'keepdim' is of the wrong kind", lambda fd, x, o, v=v: o.mean(x, 0, v))
      for v in (None, 2, "a", [], np.array([]), torch.ones(2), DataType.Null)],
    ("logsumexp: argument 'keepdim' is of the wrong kind", lambda fd, x, o: o.logsumexp(x, 0, torch.ones(2))),
    *[("argmax: argument 'dim' is of the wrong kind", lambda fd, x, o, v=v: o.argmax(x, v))
      for v in (X.to_sparse(), np.array([]), 1.0, [0])],
    ("layer_norm: argument 'normalized_shape' is of the wrong kind", lambda fd, x, o: o.layer_norm(x, 16)),
    ("layer_norm: normalized_shape: found ", lambda fd, x, o: o.layer_norm(x, [np.int64(8)])),
    ("layer_norm: argument 'weight' is of the wrong kind: found a Tensor of shape [16]",
     lambda fd, x, o: o.layer_norm(x, [16], torch.ones(16))),
    ("rms_norm: argument 'eps' is of the wrong kind", lambda fd, x, o: o.rms_norm(x, [16], None, x)),
    *[("cross_entropy: argument 'ignore_index' is of the wrong kind",
       lambda fd, x, o, v=v: o.cross_entropy(x, fd.define_tensor([8], dtype=DataType.Int), "mean", v))
      for v in (0.5, float("nan"), 1j, "a")],
    *[(text, lambda fd, x, o, op=op, v=v: getattr(o, op)(x, v))
      for v in (np.array([]), torch.ones(2), X.to_sparse(), ["none"])
      for op, text in {"gelu": "gelu: approximate", "dropout": "dropout: argument 'p'"}.items()],
    *[(f"zigzag: ring: found {v}, needed 1 to 65536", lambda fd, x, o, op=op, v=v: getattr(o, op)(x, 0, v))
      for op in ("zigzag", "unzigzag") for v in (0, -1, 2**31, 10**40)],
    ("layer_norm: normalized_shape: found [3]", lambda fd, x, o: o.layer_norm(x, [3])),
    ("cross_entropy", lambda fd, x, o: o.cross_entropy(x, None)),
    *[(f"cross_entropy: targets: found {found} for logits Float[8, 16], needed integers, one for each row",
       lambda fd, x, o, shape=shape, kind=kind: o.cross_entropy(x, fd.define_tensor(shape, dtype=kind)))
      for shape, kind, found in (([8, 16], DataType.Float, "Float[8, 16]"), ([8, 16], DataType.Int, "Int[8, 16]"),
                                 ([8], DataType.Float, "Float[8]"), ([], DataType.Int, "Int[]"))],
    *[("mul: argument 'b' is of the wrong kind: found tensor(2.) (Tensor), needed tensor or scalar. Call it as mul(a, "
       "b). A tensor of one number comes in by define_tensor([]), a number that stays as it is by its item().", make)
      for make in (lambda fd, x, o: o.mul(x, torch.tensor(2.0)), lambda fd, x, o: x * torch.tensor(2.0))],
    ("dropout: argument 'p' is of the wrong kind", lambda fd, x, o: o.dropout(x, "a")),
    ("dropout: an argument is of the wrong kind", lambda fd, x, o: o.dropout(x, 1j)),
    ("dropout: a value of a definition has no truth value", lambda fd, x, o: o.dropout(x, fd.define_scalar(0.5))),
    ("select: index: found 99", lambda fd, x, o: o.select(x, 99, 0)),
    *[(f"embedding_fwd: padding_idx: found {v}, needed an int from -8 to 7", lambda fd, x, o, v=v: o.embedding_fwd(
        fd.define_tensor([4], dtype=DataType.Int), x, v)) for v in (-9, 8, 1.0, True)],
    ("add_output: found Val", lambda fd, x, o: x.size(0)),
    ("alias_input", lambda fd, x, o: fd.add_output(x, alias_input=x)),
]  # fmt: skip


@pytest.mark.parametrize(("text", "call"), OPS, ids=[f"{i}-{text}" for i, (text, _) in enumerate(OPS)])
def test_wrong_arguments_of_ops_are_errors(text: str, call: Ops) -> None:
    fd, x = define()

    def run() -> None:
        fd.add_output(call(fd, x, fd.ops))
        fd.simulate([X])

    raises(text, run)


# Classes have the attributes of their arrays and numbers: `shape`, `__array__`, `__index__`, `item`.
CLASSES = [np.float64, np.int64, np.ndarray, torch.Tensor, torch.Size, mf.TensorView, DataType]


@pytest.mark.parametrize("op", sorted(set(dir(mf.FusionDefinition().ops)) & set(OPS_BY_NAME)))
def test_a_class_in_the_place_of_an_argument_is_an_error(op: str) -> None:
    """As in `fd.ops.cast(x, np.float64)`."""
    for (place, param), value in itertools.product(enumerate(OPS_BY_NAME[op].params), CLASSES):
        fd, x = define()
        raises(f"{op}: ", lambda fd=fd, given={param.name: value}: getattr(fd.ops, op)(**given))
        raises(f"{op}: ", lambda fd=fd, given=[x] * place + [value]: getattr(fd.ops, op)(*given))


def test_an_unknown_op_is_an_attribute_error_too() -> None:
    fd, _ = define()
    assert not hasattr(fd.ops, "reluu")


def nested() -> torch.Tensor:
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")
        return torch.nested.nested_tensor([torch.ones(3), torch.ones(4)])


CALLS: list[tuple[str, Any]] = [
    *[("the arguments: found", v) for v in (X, None, 3, {"x": X}, "x", iter([X]))],
    ("wrong number of arguments: found 0, needed 2: [x (t0), s0]", []),
    ("wrong number of arguments: found 3", [X, 1, X]),
    *[("argument 0, x (t0) (defined at refusing.py:", [v, 1]) for v in (None, 1.0, np.zeros((8, 16)))],
    ("is no tensor: found int, needed a torch tensor, Float[8, 16]", [1, X]),
    ("has the wrong dtype: found torch.float64, needed torch.float32", [X.double(), 1]),
    ("has the wrong number of dims: found shape [16], needed 2 dims", [X[0], 1]),
    ("has the wrong number of dims: found shape []", [torch.tensor(1.0), 1]),
    ("has the wrong global shape: found [8, 8], needed [8, 16]", [X[:, :8], 1]),
    ("has the wrong global shape: found [4, 16]", [X[:4], 1]),
    ("is not dense: found torch.sparse_coo", [X.to_sparse(), 1]),
    ("is not dense: found a nested tensor, needed torch.strided", [nested(), 1]),
    ("arguments on different devices", [X, 1]),
    *[("argument 1, scalar s0: found", [X, v]) for v in ("a", None, X, 2.5, 2j, float("nan"), X[0, 0].to("meta"))],
    ("argument 1, scalar s0: found 1208925819614629174706176, needed an int of 64 bits", [X, 2**80]),
]  # fmt: skip


@pytest.mark.parametrize(("text", "arguments"), CALLS, ids=[f"{i}-{text}" for i, (text, _) in enumerate(CALLS)])
@pytest.mark.parametrize("method", ["simulate", "execute"])
def test_arguments_of_a_call(text: str, arguments: Any, method: str) -> None:
    fd, x = define()
    y = fd.ops.mul(x, fd.define_scalar(dtype=DataType.Int))
    if "devices" in text:
        y, arguments = fd.ops.add(y, fd.define_tensor([8, 16])), [*arguments, X.to("meta")]
    fd.add_output(y)
    raises(
        text,
        lambda: getattr(fd, method)(arguments),
        mf.ArgumentError if "large" not in text else mf.DefinitionError,
    )


def test_another_stride_order_is_an_error() -> None:
    fd = mf.FusionDefinition()
    x = fd.define_tensor([8, 16], stride_order=[0, 1])
    fd.add_output(fd.ops.relu(x))
    raises("x (t0)", lambda: fd.simulate([X]), mf.ArgumentError)
    raises("has the wrong stride order: found strides [16, 1]", lambda: fd.simulate([X]), mf.ArgumentError)
    fd.simulate([X.t().contiguous().t()])


def test_a_shard_in_the_place_of_the_whole_and_the_other_way_round() -> None:
    fd, x = define()
    one = mf.DeviceMesh([0])
    fd.mesh_split(x, MESH, ["dp", None])
    fd.add_output(fd.ops.relu(x))
    raises(
        "has the wrong global shape: found [4, 16], rank 0's shard",
        lambda: fd.simulate([X[:4]]),
        mf.ArgumentError,
    )
    fd, x = define()
    fd.mesh_split(x, one, ["x", None])
    fd.add_output(fd.ops.relu(x))
    raises("has the wrong local shape: found [4, 16]", lambda: fd.execute([X[:4]]), mf.ArgumentError)


def test_a_mesh_larger_than_the_world_is_an_error() -> None:
    fd, x = define()
    fd.mesh_split(x, MESH, ["dp", None])
    fd.add_output(fd.ops.relu(x))
    raises("Start them with 'meshfuse run --ranks 8 script.py', or use fd.simulate", lambda: fd.execute([X]))
    compiled, one = fd.compile(), np.int64(1)
    for rank in (99, -1, None, "0", [0], True, 1.0):
        raises("host_program: no such rank: found", lambda rank=rank: fd.host_program(rank))
        raises("host_program: no such rank: found", lambda rank=rank: compiled.host_program(rank))
    assert compiled.host_program(one) is compiled.host_program(1) is fd.host_program(one)


@pytest.mark.parametrize("ask", [lambda fd: fd.simulate([X]), lambda fd: fd.execute([X]), lambda fd: fd.bill()])
def test_a_definition_without_outputs_is_an_error(ask: Callable[[mf.FusionDefinition], Any]) -> None:
    fd, _ = define()
    raises("the definition has no outputs: found no add_output call", lambda: ask(fd))


def test_an_input_without_an_annotation_is_replicated() -> None:
    with mf.FusionDefinition() as fd:
        x = fd.define_tensor([8, 16])
        y = fd.define_tensor([8, 16])
        z = fd.ops.add(x, y)
        fd.add_output(z)
        fd.mesh_split(x, MESH, ["dp", None])
    assert torch.equal(fd.simulate([X, X + 1])[0], X + 1)
    assert "never annotated: an input without an annotation is replicated" in fd.explain(y)


CHANGES: list[Callable[[mf.FusionDefinition, mf.TensorView, Any], Any]] = [
    lambda fd, x, axis: fd.mesh_split(x, MESH, ["dp", None]),
    lambda fd, x, axis: fd.shard(x, mf.Sharding.replicated(MESH, 2)),
    lambda fd, x, axis: x.set_device_mesh(MESH),
    lambda fd, x, axis: axis.parallelize(ParallelType.mesh_x),
    lambda fd, x, axis: x.outer_split(0, 2),
    lambda fd, x, axis: x.reorder({0: 1}),
    lambda fd, x, axis: x.set_allocation_domain([axis, axis]),
    lambda fd, x, axis: x.set_memory_type("symmetric"),
    lambda fd, x, axis: fd.define_tensor([2]),
    lambda fd, x, axis: fd.from_pytorch(X),
    lambda fd, x, axis: fd.define_scalar(2),
    lambda fd, x, axis: fd.define_vector(2),
    lambda fd, x, axis: fd.add_output(x),
    lambda fd, x, axis: fd.ops.relu(x),
    lambda fd, x, axis: fd.ops.gelu(x),
    lambda fd, x, axis: x.size(0),
]


@pytest.mark.parametrize("change", CHANGES)
def test_no_changes_after_the_first_call(change: Callable[..., Any]) -> None:
    fd, x = define()
    axis = x.axis(0)
    fd.add_output(fd.ops.relu(x))
    fd.simulate([X])
    raises("has been compiled and cannot change any more", lambda: change(fd, x, axis))


@pytest.mark.parametrize("shapes", [(), ([3, 4], [2, 2]), (5,), ("ab",), ([3],), ([3, 5],), ([-1, 4],), ([True, 4],)])
def test_shapes_to_compile_for(shapes: Any) -> None:
    fd = mf.FusionDefinition()
    fd.add_output(fd.ops.relu(fd.define_tensor([-1, 4])))
    raises("compile", lambda: fd.bill(*shapes))
    assert not fd.bill([3, 4]).entries


def test_scalars_to_compile_for() -> None:
    fd = mf.FusionDefinition()
    n = fd.define_scalar(dtype=DataType.Int)
    fd.add_output(fd.ops.full([n], 1.0, DataType.Float))
    raises("compile needs the scalars that sizes depend on: found none, needed s0", lambda: fd.compile())
    raises("compile: scalars", lambda: fd.compile(scalars={7: 2}))
    assert fd.compile(scalars={n: 5}).graph.shape(0) == (5,)


@pytest.mark.parametrize(("tensor", "view"), [(3, None), (X, 3), (X[0], None), (None, None)])
def test_wrong_arguments_of_shard_tensor_are_errors(tensor: Any, view: Any) -> None:
    fd, x = define()
    fd.mesh_split(x, MESH, ["dp", None])
    raises("shard_tensor", lambda: mf.shard_tensor(tensor, x if view is None else view), mf.ArgumentError)


@pytest.mark.parametrize(
    ("hint", "tensor", "view"),
    [
        ("Pass the global tensor, and the view of the input or output that it is", X[0], None),
        ("Pass the TensorView that was annotated, or one of fd.output_shardings()", X, MESH),
        ("Pass the TensorView that was annotated, or one of fd.output_shardings()", X, ["dp", None]),
        ("pass the sharding's reduced()", X, mf.Sharding(MESH, ((), ()), (mf.Split(2, "dp"),), "sum")),
        ("Pass the tensor first", mf.Sharding.replicated(MESH, 2), X),
    ],
)
def test_shard_tensor_hints_at_what_is_wrong(hint: str, tensor: Any, view: Any) -> None:
    fd, x = define()
    fd.mesh_split(x, MESH, ["dp", None])
    raises(hint, lambda: mf.shard_tensor(tensor, x if view is None else view), mf.ArgumentError)


def test_numbers_of_numpy_and_sizes_of_torch_are_fine() -> None:
    with mf.FusionDefinition() as fd:
        x = fd.define_tensor(torch.Size([8, 16]))
        y = fd.ops.add(fd.ops.reshape(x, torch.Size([np.int64(16), 8])), np.float32(1.5))
        fd.add_output(y)
        fd.add_output(fd.ops.full([2], float("-inf"), DataType.Float))
        fd.add_output(fd.ops.add(fd.ops.cast(x, DataType.ComplexFloat), complex(0, float("inf"))))
        fd.mesh_split(x, MESH, [np.int64(0), np.int64(-1)])
    first, second, third = fd.simulate([X])
    assert torch.equal(first, torch.full((16, 8), 1.5)) and torch.equal(second, torch.full((2,), float("-inf")))
    assert torch.isinf(third.imag).all()


def test_replicas_without_numbers_are_not_compared() -> None:
    fd, x = define()
    fd.mesh_split(x, MESH, ["dp", None])
    fd.add_output(fd.ops.sum(x))
    raises(
        "check_replicas: arguments without numbers: found x (t0) on meta, needed tensors with memory",
        lambda: fd.simulate([X.to("meta")], check_replicas=True),
        mf.ArgumentError,
    )
    assert fd.simulate([X.to("meta")])[0].is_meta


class Model(torch.nn.Module):
    """Holds a definition."""

    def __init__(self, fd: mf.FusionDefinition) -> None:
        super().__init__()
        self.fd = fd


COPYING: list[Callable[[mf.FusionDefinition], Any]] = [
    lambda fd: copy.copy(fd),
    lambda fd: copy.deepcopy(fd),
    lambda fd: copy.deepcopy({"all": [fd, fd]}),
    lambda fd: copy.deepcopy(Model(fd)),
    lambda fd: copy.deepcopy(fd.ops),
    lambda fd: copy.deepcopy(mf.TensorView(fd, TensorRef(0))),
    lambda fd: pickle.dumps(fd),
    lambda fd: pickle.dumps([Model(fd)], 2),
    lambda fd: pickle._dumps(fd),  # type: ignore[attr-defined]  # written in Python
    lambda fd: torch.save(Model(fd), io.BytesIO()),
]


@pytest.mark.parametrize("how", COPYING)
@pytest.mark.parametrize("used", [False, True])
def test_a_definition_is_not_copied(how: Callable[[Any], Any], used: bool) -> None:
    """A copy would share what is defined with the first, or lose what was compiled. The line is the user's own."""
    fd, x = define()
    fd.add_output(fd.ops.relu(x))
    if used:
        fd.simulate([X])
    message = re.escape(
        "a definition cannot be copied or pickled: found FusionDefinition, needed the code that makes it. Call that "
        "code again where another is needed; print(fd) is it. (at test_bad_input.py:"
    )
    with pytest.raises(mf.DefinitionError, match=message) as caught:
        how(fd)
    assert caught.value.where is not None and "lambda fd: " in caught.value.where.text


def test_scalars_of_thousands_of_steps_are_computed() -> None:
    fd, x = define()
    n = x.size(0)
    for _ in range(3000):
        n = n + 1
    fd.add_output(fd.ops.mul(x, n))
    assert torch.equal(fd.simulate([X + 1])[0], X + 3008)


# A definition's own names, but for `ops`.
STATE = sorted({name for name in vars(mf.FusionDefinition()) if not name.startswith("_")} - {"ops"})


@pytest.mark.parametrize("name", STATE)
@pytest.mark.parametrize(
    "form",
    [lambda x: x, lambda x: [x], lambda x: (x.fd.define_scalar(2.0),), lambda x: {"x": x}, lambda x: X,
     lambda x: [X, 2], lambda x: {"x": X}],
)  # fmt: skip
def test_tensors_are_not_kept_in_place_of_a_definitions_state(name: str, form: Callable[[Any], Any]) -> None:
    fd, x = define()
    fd.add_output(x)
    raises(f"fd.{name} = ...: found a name that meshfuse's definitions keep", lambda: setattr(fd, name, form(x)))
    setattr(fd, f"{name}_", form(x))
    assert torch.equal(fd.simulate([X])[0], X)


def late(above: type, first: Callable[[Any], Any]) -> type:
    """A script's class whose `__init__` does something before it calls the one above, or does not call it."""

    def init(self: Any) -> None:
        first(self)
        if first is not nothing:
            above.__init__(self)

    return type("Late", (above,), {"__init__": init})


def nothing(fd: Any) -> None:
    fd.width = 3


@pytest.mark.parametrize("above", [mf.FusionDefinition, nv.FusionDefinition])
@pytest.mark.parametrize(
    "first",
    [nothing, lambda fd: fd.define_tensor([2]), lambda fd: fd.define_scalar(), lambda fd: fd.ops, lambda fd: fd.bill(),
     lambda fd: fd.mesh_split(None, MESH, []), lambda fd: fd.execute([]), lambda fd: fd.simulate([])],
)  # fmt: skip
def test_a_class_that_does_not_call_the_init_above_first(above: type, first: Callable[[Any], Any]) -> None:
    """As a script forgets `super().__init__()`."""
    raises("Late is no definition yet: found an __init__ that has not called", lambda: late(above, first)())


@pytest.mark.parametrize("above", [mf.FusionDefinition, nv.FusionDefinition])
def test_a_class_has_its_own_errors_and_a_second_class_above(above: type) -> None:
    def misspelled(fd: Any) -> None:
        fd.width = MESH.shapes  # type: ignore[attr-defined]

    with pytest.raises(AttributeError, match="shapes"):
        late(above, misspelled)()
    middle = late(above, lambda fd: setattr(fd, "width", 3))
    fd = type("Below", (middle,), {"__init__": lambda self: middle.__init__(self)})()
    fd.add_output(fd.ops.relu(fd.define_tensor([8, 16])))
    assert fd.width == 3 and torch.equal(fd.simulate([X])[0], X)


@pytest.mark.parametrize("above", [mf.FusionDefinition, nv.FusionDefinition])
def test_a_script_keeps_nothing_under_a_name_that_is_the_definitions_own(above: type) -> None:
    """Whatever it is: it would be taken for the definition's state."""
    made, settable = above(), {"max_memory", "max_wire", "fec", "ke"}
    own = {*vars(made), *(name for name in dir(above) if isinstance(getattr(above, name), property))}
    names = {name for name in own if not name.startswith("_")} - settable
    assert {"recording", "ops", "fusion"} <= names
    for name in sorted(names):
        for value in (3, [1, 2], [made.define_tensor([2])], None):
            raises(f"fd.{name} = ...: found a name that", lambda n=name, v=value: setattr(above(), n, v))


def test_a_script_may_put_its_own_in_the_place_of_a_method_and_of_what_its_class_has() -> None:
    class Model(mf.FusionDefinition):
        size = 3  # type: ignore[assignment]

    fd = Model()
    fd.size, fd.width = 4, 5  # type: ignore[attr-defined]
    fd.execute = lambda *given: given  # type: ignore[method-assign]
    assert (fd.size, fd.width, fd.execute(1)) == (4, 5, (1,))  # type: ignore[attr-defined]
