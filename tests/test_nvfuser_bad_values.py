"""One bad argument among good ones in the calls of `meshfuse.nvfuser_direct`; definitions that are methods."""

from __future__ import annotations

import re
from collections.abc import Callable
from typing import Any

import pytest
import torch

import meshfuse as mf
import meshfuse.nvfuser_direct as nv
from meshfuse.errors import MeshfuseError

X = torch.arange(24.0).reshape(4, 6)
BAD: list[Any] = [
    None, True, -1, 9, 1.5, "", "a", b"x", [], (), [None], ["x"], {}, {0: 1}, object(), int, X, X.expand(2, 4, 6),
    mf.ParallelType.mesh_x, mf.FusionDefinition().define_tensor([2]),
]  # fmt: skip
with torch.inference_mode():
    BAD.append([torch.ones(4, 6)])
BAD += [[torch.ones(1, 6).expand(4, 6)], [X.clone().requires_grad_()]]


def defined() -> tuple[nv.FusionDefinition, mf.TensorView, mf.TensorView]:
    fd = nv.FusionDefinition()
    x = fd.define_tensor([4, 6], dtype=nv.DataType.Float)
    y = fd.ops.relu(x)
    fd.add_output(y)
    return fd, x, y


def written(fd: nv.FusionDefinition, x: mf.TensorView, y: mf.TensorView, given: Any) -> Any:
    fd.add_output(fd.ops.exp(x), x)
    return fd.execute(given)


Defined = tuple[nv.FusionDefinition, mf.TensorView, mf.TensorView]
CALLS: dict[str, tuple[Callable[..., list[Any]], Callable[..., Any]]] = {
    "execute": (lambda fd, x, y: [[X]], lambda fd, x, y, *a: fd.execute(*a)),
    "simulate": (lambda fd, x, y: [[X]], lambda fd, x, y, *a: fd.simulate(*a)),
    "manual_execute": (lambda fd, x, y: [[X]], lambda fd, x, y, *a: fd.manual_execute(*a)),
    "written arguments": (lambda fd, x, y: [[X.clone()]], written),
    "repro_script_for": (lambda fd, x, y: [[X]], lambda fd, x, y, *a: fd.repro_script_for(*a)),
    "validate": (lambda fd, x, y: [[X], [X]], lambda fd, x, y, *a: fd.validate(*a, rtol=1e9, atol=1e9)),
    "add_output": (lambda fd, x, y: [y, x], lambda fd, x, y, *a: fd.add_output(*a)),
    "add_input": (lambda fd, x, y: [x], lambda fd, x, y, *a: fd.fusion.add_input(*a)),
    "guard": (lambda fd, x, y: [fd.fusion], lambda fd, x, y, *a: nv.FusionGuard(*a)),
    "cache": (lambda fd, x, y: [fd.fusion], lambda fd, x, y, *a: nv.FusionExecutorCache(*a)),
    "cache's execute": (lambda fd, x, y: [[X]], lambda fd, x, y, *a: nv.FusionExecutorCache(fd.fusion).execute(*a)),
    "kernel": (lambda fd, x, y: [fd.fusion], lambda fd, x, y, *a: nv.KernelExecutor().compile(*a)),
    "kernel that is not there": (lambda fd, x, y: [[X]], lambda fd, x, y, *a: nv.KernelExecutor().run(*a)),
    "dtensors": (lambda fd, x, y: [fd, [X]], lambda fd, x, y, *a: nv.execute_with_dtensors(*a)),
    "descriptor": (lambda fd, x, y: [[2, 3], [3, 1]], lambda fd, x, y, *a: nv.compute_tensor_descriptor(*a)),
    "sched.split": (lambda fd, x, y: [x, 0, 2], lambda fd, x, y, *a: fd.sched.split(*a)),
    "sched.merge": (lambda fd, x, y: [x, 0], lambda fd, x, y, *a: fd.sched.merge(*a)),
    "sched.reorder": (lambda fd, x, y: [x, {0: 1}], lambda fd, x, y, *a: fd.sched.reorder(*a)),
    "sched.parallelize": (
        lambda fd, x, y: [x, 0, mf.ParallelType.block_x], lambda fd, x, y, *a: fd.sched.parallelize(*a),
    ),
    "sched.allocation": (lambda fd, x, y: [x], lambda fd, x, y, *a: fd.sched.set_allocation_as_loop(*a)),
    "executor": (lambda fd, x, y: [fd.fusion], lambda fd, x, y, *a: nv.multidevice.MultiDeviceExecutor(*a)),
    "definitions kept": (lambda fd, x, y: [2], lambda fd, x, y, *a: nv.LRUCache(*a)),
    "definition kept": (lambda fd, x, y: [fd.fusion], lambda fd, x, y, *a: nv.LRUCache(2).cache_compile(*a)),
    "tolerances": (lambda fd, x, y: [fd.fusion], lambda fd, x, y, *a: nv.get_val_tolerances(*a)),
    "outputs inferred": (
        lambda fd, x, y: [fd.fusion],
        lambda fd, x, y, v: nv.validate_with_auto_inferred_outputs(v, fd.execute([X]), [X]),
    ),
    "call": (lambda fd, x, y: ["relu", [x]], lambda fd, x, y, *a: fd.call(*a)),
    "mesh": (lambda fd, x, y: [[0, 1]], lambda fd, x, y, *a: nv.multidevice.DeviceMesh(*a)),
    "chunk of a mesh": (
        lambda fd, x, y: [X, 0, 1], lambda fd, x, y, *a: nv.multidevice.DeviceMesh([0, 1]).shard_tensor(*a),
    ),
}  # fmt: skip
CASES = [(name, place) for name, (good, _) in CALLS.items() for place in range(len(good(*defined())))]


@pytest.mark.parametrize(("name", "place"), CASES)
def test_a_bad_value_among_good_ones_is_an_error_or_changes_no_number(name: str, place: int) -> None:
    good, call = CALLS[name]
    for value in BAD:
        fd, x, y = defined()
        arguments = good(fd, x, y)
        arguments[place] = value
        try:
            call(fd, x, y, *arguments)
        except MeshfuseError as error:
            assert isinstance(error, ValueError) and isinstance(error, RuntimeError), repr(error)
            assert re.search(r"\(at test_nvfuser_bad_values\.py:\d+\)", str(error)), str(error)


def executed(fd: nv.FusionDefinition) -> nv.FusionDefinition:
    fd.execute([X])
    return fd


def executed_by_hand(fd: nv.FusionDefinition) -> nv.FusionDefinition:
    fd.manual_execute([X])
    return fd


def entered() -> nv.FusionDefinition:
    with nv.FusionDefinition() as fd:
        return fd


def scaled(dtype: nv.DataType = nv.DataType.Float) -> nv.FusionDefinition:
    """Two dims' sizes and a zero are scalars before the factor: it is the fourth."""
    with nv.FusionDefinition() as fd:
        x = fd.define_tensor([-1, -1], dtype=dtype)
        fd.add_output(fd.ops.mul(x, fd.define_scalar()))
    return fd


# What nvFuser's own tests look for in errors, and what they catch them as.
SENTENCES: dict[str, tuple[type[Exception], str, Callable[[], Any]]] = {
    "not defined": (
        NotImplementedError, "Fusion does not exist! Use `with FusionDefinition() as fd: ...` to define a fusion.",
        lambda: nv.FusionDefinition().execute([X]),
    ),
    "empty": (NotImplementedError, "Fusion is empty!", lambda: entered().execute([X])),
    "by hand after execute": (
        AssertionError, "FusionExecutorCache already exists! Use execute() to execute the fusion.",
        lambda: executed(defined()[0]).manual_execute([X]),
    ),
    "execute after one by hand": (
        AssertionError, "KernelExecutor already exists! Use manual_execute() to execute the fusion.",
        lambda: executed_by_hand(defined()[0]).execute([X]),
    ),
    "no inputs kept": (
        AssertionError,
        "fd.last_repro_script() cannot provide a repro because fd.execute(inputs, save_repro_inputs=True) was not "
        "executed!", lambda: defined()[0].last_repro_script(),
    ),
    "a number for a tensor": (
        RuntimeError, "Expected input 0, T0_g_float[iS0{?}, iS1{?}], to be an at::Tensor but got scalar 2.",
        lambda: scaled().execute([2.0, 2.0]),
    ),
    "a tensor for a number": (
        RuntimeError, "Expected input 1, d3, to be a scalar but got float tensor of rank 2.",
        lambda: scaled().execute([X, X]),
    ),
    "another dtype": (
        RuntimeError, "to be bound to a tensor of dtype float, but got a tensor of dtype __half.",
        lambda: scaled().execute([X.half(), 2.0]),
    ),
    "another dtype for a double": (
        RuntimeError, "to be bound to a tensor of dtype double, but got a tensor of dtype int64_t.",
        lambda: scaled(nv.DataType.Double).manual_execute([X.long(), 2.0]),
    ),
    "another number of dims": (
        RuntimeError, "to be bound to a tensor of rank 2, but got a tensor of rank 1.",
        lambda: scaled().execute([X[0], 2.0]),
    ),
    "a complex number": (
        RuntimeError, "Scalar value (2,1) is not compatible with the expected data type: double.",
        lambda: scaled().execute([X, 2.0 + 1.0j]),
    ),
}  # fmt: skip


@pytest.mark.parametrize("name", SENTENCES)
def test_errors_have_nvfusers_sentence_and_our_form(name: str) -> None:
    caught_as, sentence, call = SENTENCES[name]
    with pytest.raises(caught_as, match=re.escape(sentence)) as caught:
        call()
    assert isinstance(caught.value, MeshfuseError) and isinstance(caught.value, ValueError)
    assert re.search(r"\(at test_nvfuser_bad_values\.py:\d+\)$", str(caught.value))


ENDS = "Slice indexing attribute dimensions don't match!"
STRIDES = "Slice start_indices and strides don't match!"
DIMS = "Number of tensor dimensions does not match slice dimensions!"
BELOW = "Slice operation start_indices must be greater than or equal to 0."
BEFORE = "Slice operation end_indices must be greater than or equal to start_indices."
SLICES: list[tuple[list[Any], str]] = [
    ([[-1, -2], [5, 5], [7, 7]], BELOW), ([[0, -1], [4, 6]], BELOW), ([[3, 4], [1, 2], [1, 1]], BEFORE),
    ([[0, 0], [4, -1]], BEFORE), ([[0] * 3, [4] * 3, [1] * 3], DIMS), ([[0], [4]], DIMS), ([[], []], DIMS),
    ([[0] * 3, [4] * 2, [1] * 2], STRIDES), ([[0] * 2, [4] * 2, [1] * 3], STRIDES), ([[0] * 2, [4] * 2, []], STRIDES),
    ([[0] * 2, [4] * 3, [1] * 2], ENDS), ([[0] * 3, [4] * 2], ENDS),
]  # fmt: skip


@pytest.mark.parametrize(("lists", "sentence"), SLICES)
@pytest.mark.parametrize("constants", [False, True])
def test_bounds_that_nvfusers_slices_do_not_have(lists: list[Any], sentence: str, constants: bool) -> None:
    fd, x, _ = defined()
    given = [[fd.define_scalar(n) for n in part] for part in lists] if constants else lists
    names = ("start_indices", "end_indices", "strides")
    for call in (
        lambda: fd.ops.slice(x, *given),
        lambda: nv.ops.slice(x, **dict(zip(names, given, strict=False))),
    ):
        with pytest.raises(RuntimeError, match=rf"{re.escape(sentence)}.*\(at test_nvfuser_bad_values\.py:\d+\)"):
            call()


def test_bounds_that_slices_have() -> None:
    fd, x, _ = defined()
    low = fd.define_scalar(dtype=nv.DataType.Int)
    fd.add_output(fd.ops.slice(x, [low, 1], (x.size(0), 99), [1, 2]))
    assert fd.execute([X, 2])[1].equal(X[2:, 1::2])


class Rows(nv.FusionDefinition):
    """Rows of x over two ranks, said in methods."""

    def definition(self) -> None:
        self.x = self.define_tensor([4, 6], dtype=nv.DataType.Float)
        self.y = self.ops.sum(self.ops.exp(self.x), [0])
        self.add_output(self.y)

    def multidevice_schedule(self) -> None:
        self.x.set_device_mesh(nv.multidevice.DeviceMesh(torch.arange(2)))
        self.x.outer_split(0, 2)
        self.x.axis(0).parallelize(nv.ParallelType.mesh_x)


ASKED: dict[str, Callable[[Rows], Any]] = {
    "call": lambda fd: fd(X)[0],
    "simulate": lambda fd: fd.simulate([X])[0],
    "bill": lambda fd: fd.bill(),
    "explain": lambda fd: fd.explain(),
    "memory": lambda fd: fd.memory(),
    "compile": lambda fd: fd.compile(),
    "host_program": lambda fd: fd.host_program(1),
    "output_shardings": lambda fd: fd.output_shardings(),
    "backends": lambda fd: fd.backends(),
}


@pytest.mark.parametrize("first", ASKED)
def test_a_definition_by_methods_is_complete_at_any_first_question(first: str) -> None:
    fd = Rows()
    ASKED[first](fd)
    torch.testing.assert_close(fd.simulate([X])[0], X.exp().sum(0))
    assert "all-reduce" in str(fd.bill()) and len(fd.recording.tensors) == 3


class Failing(Rows):
    """Its first annotation is not reached."""

    def multidevice_schedule(self) -> None:
        raise KeyError("of the script")


class Asking(Rows):
    def definition(self) -> None:
        self.simulate([X])


@pytest.mark.parametrize("first", ASKED)
def test_a_definition_whose_methods_fail_is_never_half_of_one(first: str) -> None:
    """The second time it would run without what the method had left to say."""
    fd = Failing()
    with pytest.raises(KeyError, match="of the script"):
        ASKED[first](fd)
    for again in ASKED.values():
        with pytest.raises(
            mf.DefinitionError,
            match=r"the definition is not finished: found its method multidevice_schedule, ended by KeyError, needed "
            r"methods that have come to their ends\. Make a new definition\. \(at test_nvfuser_bad_values.py:\d+\)",
        ):
            again(fd)


def test_a_method_that_asks_for_what_it_defines() -> None:
    for _ in range(2):
        with pytest.raises(
            mf.DefinitionError, match=r"found its method definition.*\(at test_nvfuser_bad_values.py:\d+\)"
        ):
            Asking().execute([X])


def test_a_definition_that_is_left_without_being_entered() -> None:
    fd, _, _ = defined()
    fd.__exit__(None, None, None)
    assert fd.simulate([X])[0].equal(X)


EDITS: dict[str, Callable[[nv.FusionDefinition, mf.TensorView], Any]] = {
    "outer_split": lambda fd, x: x.outer_split(0, 2),
    "inner_split": lambda fd, x: x.inner_split(0, 2),
    "merge": lambda fd, x: x.merge(0, 1),
    "mesh_split": lambda fd, x: fd.mesh_split(x, mf.DeviceMesh((2,), ("x",)), [None, "x"]),
}


@pytest.mark.parametrize("edit", EDITS)
def test_an_axis_that_is_there_no_more_is_not_bound_in_vain(edit: str) -> None:
    """It would be sharded nowhere, without a word; `str` still works, as a debugger asks for it."""
    fd, x, _ = defined()
    axis = x.axis(0)
    if edit != "mesh_split":
        x.set_device_mesh(mf.DeviceMesh((2,), ("x",)))
    EDITS[edit](fd, x)
    assert repr(axis)
    with pytest.raises(
        mf.DefinitionError, match=r"parallelize: the axis is none of x \(t0\) any more: found .*\(at test_"
    ):
        axis.parallelize(mf.ParallelType.mesh_x)


def test_an_axis_that_is_moved_is_still_the_same() -> None:
    fd, x, _ = defined()
    x.set_device_mesh(mf.DeviceMesh((2,), ("x",)))
    x.outer_split(0, 2)
    axis = x.axis(0)
    x.reorder({0: 2})
    axis.parallelize(mf.ParallelType.mesh_x)
    assert fd.simulate([X])[0].equal(X) and axis.extent() == 2
    assert str(mf.shard_tensor(X, x, 1).tolist()) == str(X[2:].tolist())


# nvFuser's definitions have ops and sched, too.
STATE = sorted({name for name in vars(nv.FusionDefinition()) if not name.startswith("_")} - {"ops", "sched"})


@pytest.mark.parametrize("name", STATE)
@pytest.mark.parametrize("form", [lambda x: x, lambda x: [x], lambda x: (x.fd.define_scalar(2.0),)])
def test_scripts_keep_nothing_of_theirs_in_place_of_a_definitions_state(name: str, form: Any) -> None:
    fd, x, _ = defined()
    before = vars(fd)[name]
    with pytest.raises(mf.DefinitionError, match=rf"fd\.{name} = \.\.\.: .* any other name"):
        setattr(fd, name, form(x))
    assert vars(fd)[name] is before


def test_scripts_keep_tensors_as_attributes() -> None:
    with nv.FusionDefinition() as fd:
        for name in ("x", "seed", "mask", "weight", "out_grad", "grad"):
            setattr(fd, name, fd.define_tensor([3]))
            setattr(fd, f"{name}s", [getattr(fd, name)])
        fd.x = fd.ops.add(fd.x, fd.seed)
        fd.add_output(fd.x)
    assert fd.execute([torch.ones(3)] * 6)[0].tolist() == [2.0, 2.0, 2.0]
    assert "seed" not in repr(fd)
