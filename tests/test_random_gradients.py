"""First and second gradients of random programs on random meshes, against torch's autograd in float64."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any, NamedTuple

import pytest
import torch
from hypothesis import assume, given, reject, settings
from hypothesis import strategies as st

import meshfuse as mf
from gradient_checks import gradients_of
from interpreter import has_reference, interpret
from meshfuse.definition.tensor_view import TensorView
from meshfuse.dtypes import Category
from meshfuse.ops.values import TensorRef
from meshfuse.testing import annotations, definitions, inputs_for
from meshfuse.testing.check import assert_close
from test_random_programs import examples, families

# Programs per family of ops: `make fuzz` draws other ones without end.
PROGRAMS = {
    "pointwise": 10, "reductions": 15, "products": 9, "shapes": 12, "lookups": 11, "complex": 11, "ops": 12, "all": 12,
}  # fmt: skip


class Program(NamedTuple):
    """A definition with its first and second gradients as its last outputs; what they are of and by, and its first ops,
    which make that.
    """

    fd: mf.FusionDefinition
    outputs: list[int]
    variables: list[int]
    ops: int


def _variables(fd: mf.FusionDefinition) -> list[int]:
    return [i for i in fd.recording.input_tensors() if fd.recording.tensors[i].type.dtype.category >= Category.FLOAT]


def _differentiable(fd: mf.FusionDefinition) -> list[int]:
    """The outputs to which a gradient passes from an input, through ops that have derivatives only."""
    active, blocked = set(_variables(fd)), set[int]()
    for node in fd.recording.nodes:
        made = [i for i in node.outputs if fd.recording.tensors[i].type.dtype.category >= Category.FLOAT]
        if not blocked.isdisjoint(node.inputs) or (node.op.vjp is None and not active.isdisjoint(node.inputs)):
            blocked.update(made)
        elif not active.isdisjoint(node.inputs):
            active.update(made)
    return [i for i in dict.fromkeys(fd.recording.outputs) if i in active and i not in blocked]


@st.composite
def programs(draw: st.DrawFn, chosen: Sequence[str]) -> Program:
    """The first gradients are of half the sum of the outputs' squares, the second of half the sum of the first's."""
    fd = draw(definitions(chosen, max_ops=6, dtypes=[mf.DataType.Double], open_sizes=True))
    outputs, variables = _differentiable(fd), _variables(fd)
    assume(outputs and has_reference(fd))
    count = len(fd.recording.nodes)
    results, wrt = ([TensorView(fd, TensorRef(i)) for i in ids] for ids in (outputs, variables))
    try:
        first = fd.grad(results, wrt, results)
        second = fd.grad(first, wrt, first)
    except mf.DefinitionError as error:  # Some ops refuse some arguments: their own tests say which.
        assert "no derivative here" in str(error)
        reject()
    for grad in (*first, *second):
        fd.add_output(grad)
    return Program(draw(annotations(fd)), outputs, variables, count)


def _wanted(program: Program, inputs: Sequence[Any]) -> list[torch.Tensor]:
    """First and second gradients, in torch."""
    fd, outputs, variables, ops = program
    leaves = {i: inputs[fd.recording.inputs.index(TensorRef(i))].clone().requires_grad_() for i in variables}
    given = [
        leaves.get(ref.id, x) if isinstance(ref, TensorRef) else x
        for ref, x in zip(fd.recording.inputs, inputs, strict=True)
    ]
    results = interpret(fd, given, outputs, ops)
    wrt = [leaves[i] for i in variables]
    first = gradients_of(results, wrt, results)
    return [t.detach() for t in (*first, *gradients_of(first, wrt, first))]


@pytest.mark.fuzz
@pytest.mark.timeout(600)
@pytest.mark.usefixtures("over_whole_axes")
@pytest.mark.parametrize("family", PROGRAMS)
def test_first_and_second_gradients_of_a_random_program_are_those_of_autograd(family: str) -> None:
    @settings(max_examples=examples(PROGRAMS[family]))
    @given(programs(families(family)), st.integers(0, 99))
    def check(program: Program, number: int) -> None:
        fd, inputs = program.fd, inputs_for(program.fd, number)
        wanted = _wanted(program, inputs)
        found = fd.simulate(inputs, check_replicas=True)[-len(wanted) :]
        for place, (a, b) in enumerate(zip(found, wanted, strict=True)):
            finite = b.isfinite()
            order, variable = divmod(place, len(program.variables))
            name = fd.recording.tensors[program.variables[variable]].name
            # Some ops draw Float operands of their own, of which derivatives of products lose some digits.
            tolerance = 1e-6 if a.dtype in (torch.float64, torch.complex128) else 1e-4
            assert_close(a[finite], b[finite], tolerance, f"gradient {order + 1} by {name}")

    check()
