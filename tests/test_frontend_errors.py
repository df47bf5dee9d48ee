"""What `mf.parallelize` and `mf.compile` say of wrong plans, wrong calls and models that are no graph."""

# ruff: noqa: E501  # rows of tables

from __future__ import annotations

import linecache
import re
from collections.abc import Callable
from typing import Any

import pytest
import torch
from torch import nn
from torch.distributed.tensor.parallel import PrepareModuleInput

import meshfuse as mf
from frontend_models import Gpt

MESH = mf.DeviceMesh((2, 2), ("dp", "tp"))
OTHER = mf.DeviceMesh((2, 2), ("a", "b"))


def parallel(plan: Any = None, mesh: Any = MESH, **more: Any) -> Any:
    return mf.parallelize(Gpt(), mesh, plan, **more)


PLANS: list[tuple[Callable[[], Any], str]] = [
    (lambda: parallel({"layers.*.upp": "colwise"}), r"'layers\.\*\.upp' matches nothing in Gpt: found near to it \['layers\.\*\.up'"),
    (lambda: parallel({"layers.*.up": "colwize"}), r"'layers\.\*\.up'.*'colwize', near to it \['colwise'"),
    (lambda: parallel({"layers.*.up": 3}), r"found 3, needed a spec"),
    (lambda: parallel({"layers.*.up.weight": ["tp"]}), r"for layers\.0\.up\.weight of shape \[64, 16\]: found \['tp'\], needed a list of 2 entries"),
    (lambda: parallel({"layers.*.up.weight": ["tq", None]}), r"unknown mesh axis: found 'tq'"),
    (lambda: parallel({"layers.*.up.weight": ["tp", "tp"]}), r"mesh axis 'tp' is used twice"),
    (lambda: parallel({"layers.1": ["tp", None]}), r"module layers\.1 without parameters of its own"),
    (lambda: parallel({"layers.*.up:input": ["tp", None]}), r"needed a spec for \"module:output\""),
    (lambda: parallel({"layers.*.up": PrepareModuleInput()}), r"found PrepareModuleInput.*Annotate the activation"),
    (lambda: parallel({"layers.*.up": "colwise"}, OTHER), r"which axis is that of tensor parallelism: found a mesh with the axes \['a', 'b'\]"),
    (lambda: parallel("hf"), r"plan=\"hf\" for Gpt: found no _tp_plan.*Pass a dict"),
    (lambda: parallel("auto"), r"Pass plan=mf\.plan\(model, mesh, \*arguments\)"),
    (lambda: parallel("megatron"), r"plan: found 'megatron', needed \"hf\", or a dict"),
    (lambda: parallel({3: "colwise"}), r"found 3, needed patterns of full names"),
    (lambda: parallel(inputs={"idss": ["dp", None]}), r"inputs: no argument is called 'idss': found near to it \['ids'\]"),
    (lambda: parallel(inputs={"ids": "dp"}), r"inputs\['ids'\]: found 'dp', needed a list"),
    (lambda: parallel(inputs={"ids": ["dq", None]}), r"unknown mesh axis: found 'dq', needed one of \['dp', 'tp'\]"),
    (lambda: parallel(inputs=["dp"]), r"inputs: found \['dp'\], needed a dict"),
    (lambda: parallel(fsdp="dq"), r"fsdp: found 'dq', needed an mf.FSDP, or one or several of \['dp', 'tp'\]"),
    (lambda: parallel(precision="bf16"), r"precision: found 'bf16', needed an mf\.Precision"),
    (lambda: parallel(fallback="whole"), r"fallback: found 'whole'"),
    (lambda: mf.Precision(param=torch.int8), r"Precision: param: found torch\.int8"),
    (lambda: mf.parallelize(lambda x: x, MESH), r"module: found .*needed an nn\.Module"),
    (lambda: mf.parallelize(parallel(), MESH), r"the module is parallel already"),
    (lambda: mf.parallelize(nn.LazyLinear(4), MESH), r"parameters without a shape.*Call the module once before"),
    (lambda: mf.compile(3, MESH), r"function: found 3, needed a function"),
    (lambda: mf.compile(lambda x: x), r"compile: the mesh: found none, needed one mesh"),
    (lambda: parallel().bill(), r"the module has not run yet"),
    (lambda: parallel().load(3), r"load: path: found 3"),
]  # fmt: skip


@pytest.mark.parametrize("number", range(len(PLANS)))
def test_a_wrong_plan_says_what_is_needed(number: int) -> None:
    call, wanted = PLANS[number]
    with pytest.raises(mf.MeshfuseError, match=wanted) as raised:
        call()
    assert "test_frontend_errors.py" in str(raised.value)


class Odd(nn.Module):
    """Forwards that are no graph, or have ops that meshfuse lacks."""

    def __init__(self, kind: str) -> None:
        super().__init__()
        self.kind, self.weight = kind, nn.Parameter(torch.ones(4, 4))

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        y = x @ self.weight
        if self.kind == "branch":
            return y if y.sum() > 0 else -y  # a branch
        if self.kind == "print":
            print("y is", y)  # a print
        if self.kind == "mask":
            return y[y > 0].sum()  # a mask
        if self.kind == "types":
            return y @ self.weight.double()  # types
        if self.kind == "shape":
            return y @ self.weight[:3]  # shapes
        if self.kind == "op":
            return torch.conv_tbc(y[None], y[None], y[0])[0]  # an op
        return y


def run(kind: str, x: torch.Tensor | None = None, **more: Any) -> Any:
    model = mf.parallelize(Odd(kind), MESH, {"weight": [None, "tp"]}, inputs={"x": ["dp", None]}, **more)
    return model(torch.eye(4) if x is None else x)


CALLS = [
    ("branch", r"the forward of Odd is not one graph: return y if y\.sum\(\) > 0 else -y.*\[4, 4\] in all.*torch\.where"),
    ("print", r"the forward of Odd is not one graph"),
    ("mask", r"a size that depends on numbers"),
    ("types", r"matmul: operands of different dtypes: found Float, Double"),
    ("shape", r"the forward of Odd is not one graph.*arguments x \[4, 4\] here, \[4, 4\] in all"),
    ("op", r"no op of meshfuse stands for aten\.conv_tbc.*float32\[1, 4, 4\].*fallback=\"replicate\""),
]  # fmt: skip


@pytest.mark.parametrize(("kind", "wanted"), CALLS)
def test_a_model_that_cannot_be_captured_names_the_users_line(kind: str, wanted: str) -> None:
    with pytest.raises(mf.DefinitionError, match=wanted) as raised:
        run(kind)
    at = re.search(r"\(at test_frontend_errors\.py:(\d+)\)", str(raised.value))
    assert at and (kind == "shape" or linecache.getline(__file__, int(at[1])).partition("# ")[2])


def test_a_number_in_a_tensor_is_not_read_while_a_model_is_captured() -> None:
    """Examples of arguments are not initialised: what is found there is nobody's index."""
    step = mf.compile(lambda x, i: x[: int(i)] * 2, MESH, inputs={"x": ["dp", None]})
    with pytest.raises(mf.DefinitionError, match=r"a size that depends on numbers"):
        step(torch.ones(6, 4), torch.tensor(2))


def test_an_op_without_a_rule_may_run_whole_on_every_rank() -> None:
    model = mf.parallelize(Odd("op"), MESH, {"weight": [None, "tp"]}, inputs={"x": ["dp", None]}, fallback="replicate")
    model.weight.data += torch.eye(4)
    x = torch.eye(4) * 2 + torch.arange(16.0).view(4, 4) / 20
    with torch.no_grad():
        torch.testing.assert_close(model(x), (y := x @ model.weight) @ y + y[0])
        assert "whole_conv_tbc" in model.explain("conv_tbc")


def test_arguments_that_do_not_fit_their_spec() -> None:
    with pytest.raises(
        mf.ArgumentError, match=r"argument x: inputs has one entry per dim: found \['dp', None\] for shape \[4\]"
    ):
        run("plain", torch.ones(4))


def test_an_explanation_of_what_is_not_there() -> None:
    model = mf.parallelize(Odd("plain"), MESH, {"weight": [None, "tp"]})
    with torch.no_grad():
        model(torch.eye(4))
    with pytest.raises(mf.DefinitionError, match="no tensor of this name: found 'weigth', needed such as"):
        model.explain("weigth")


def _linear(**more: Any) -> Any:
    return mf.parallelize(nn.Linear(4, 4), MESH, **more)


def _example_of(value: Any) -> Any:
    return mf.plan(nn.Linear(4, 4), MESH, example=value)


async def _awaited(x: torch.Tensor) -> torch.Tensor:
    return x


HOSTILE: dict[str, tuple[Callable[[], Any], str]] = {
    "vmap": (lambda: torch.vmap(_linear())(torch.ones(3, 4, 4)), r"number 1 of the arguments.*a tensor of torch\.func"),
    "torch.func.grad": (lambda: torch.func.grad(lambda x: _linear()(x).sum())(torch.ones(4, 4)), r"a tensor of torch\.func"),
    "jvp": (lambda: torch.func.jvp(_linear(), (torch.ones(4, 4),), (torch.ones(4, 4),)), r"gradients come from backward"),
    "nested": (lambda: _linear()(torch.nested.nested_tensor([torch.ones(2), torch.ones(3)])), r"is not dense.*to_padded"),
    "sparse": (lambda: _linear()(torch.eye(4).to_sparse()), r"is not dense.*to_dense"),
    "dynamic names": (lambda: _linear(dynamic={"input": ["a"]}), r"dynamic\['input'\]: found \['a'\], needed a list of dims"),
    "dynamic dims": (lambda: _linear(dynamic={"input": [7]})(torch.ones(4, 4)), r"\[7\] for shape \[4, 4\], needed dims below 2"),
    "example": (lambda: _linear(plan="auto", example=3), r"example: found 3, needed a dict"),
    "example of plan": (lambda: _example_of(3), r"example: found 3, needed a dict"),
    "a class": (lambda: mf.compile(int, MESH), r"parameters have no names.*lambda x: f\(x\)"),
    "a builtin function": (lambda: mf.compile(torch.sin, MESH), r"parameters have no names"),
    "awaited": (lambda: mf.compile(_awaited, MESH), r"one that is awaited"),
}  # fmt: skip


@pytest.mark.parametrize("kind", HOSTILE)
def test_hostile_arguments(kind: str) -> None:
    call, wanted = HOSTILE[kind]
    with pytest.raises(mf.MeshfuseError, match=wanted) as raised:
        call()
    assert "(at test_frontend_errors.py:" in str(raised.value)


def test_weights_that_are_never_loaded_are_nan() -> None:
    """And not what was in memory, which may look like numbers."""
    with torch.device("meta"):
        model = nn.Linear(4, 4)
    mf.parallelize(model, MESH)
    assert bool(model(torch.ones(2, 4)).isnan().all()) and bool(model.weight.isnan().all())
