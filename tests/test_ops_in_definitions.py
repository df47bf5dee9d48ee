"""Every op of the table in a definition of its own, with each dim of each operand sharded by annotation."""

from __future__ import annotations

import functools
from typing import Any

import pytest
import torch

import meshfuse as mf
import op_references as references
from meshfuse.graph import Graph, Node
from meshfuse.lowering.kernel_text import scalar_text
from meshfuse.lowering.op_text import OpText
from meshfuse.ops import OPS
from meshfuse.ops.local import LocalCall
from meshfuse.placement.factors import Placement
from meshfuse.resharding import Compute
from meshfuse.testing.calls import define_call
from op_harness import make_call, operands_of, sample_ids, splits, whole

# What is checked are numbers, whatever the plan.
pytestmark = pytest.mark.usefixtures("over_whole_axes")

RUNNABLE = [pair for pair in sample_ids() if pair[0] not in references.NVIDIA_ONLY]
MESH = mf.DeviceMesh((3,), ("x",))


def _define(name: str, place: int) -> tuple[mf.FusionDefinition, list[Any]]:
    """The definition of one op on input tensors, and those."""
    fd = mf.FusionDefinition(seed=1)
    tensors, results = define_call(fd, OPS[name], OPS[name].samples()[place])
    for tensor in results:
        fd.add_output(tensor)
    return fd, tensors


def test_help_says_how_an_op_is_called() -> None:
    fd = mf.FusionDefinition()
    for name in dir(fd.ops):
        function = getattr(fd.ops, name)
        assert function.__doc__.startswith(f"{name}(") and repr(function) == f"<fd.ops.{name}>"
    assert fd.ops.linear.__doc__.splitlines()[0] == "linear(input, weight, bias=None)"
    assert fd.ops.log_softmax.__doc__.splitlines()[0] == "log_softmax(x, dim=-1, dtype=None)"


@pytest.mark.sampled(2)  # test_op_rules.py has all samples
@pytest.mark.parametrize(("name", "place"), RUNNABLE)
def test_an_op_of_a_definition_is_right_however_an_operand_is_annotated(name: str, place: int) -> None:
    sample = OPS[name].samples()[place]
    call = make_call(OPS[name], sample)
    operands = operands_of(call, sample)
    random = name in references.RANDOM or bool(dict(sample.kwargs).get("dropout_p"))
    expected = None if random else whole(call, operands)
    for operand, dim in splits(call) or [(-1, 0)]:
        fd, tensors = _define(name, place)
        if operand >= 0:
            fd.mesh_split(tensors[operand], MESH, ["x" if d == dim else None for d in range(tensors[operand].ndim)])
        found = fd.simulate(operands)
        expected = expected if expected is not None else found
        for a, b in zip(found, expected, strict=True):
            tolerance = 2e-3 if a.dtype == torch.float16 else 2e-5
            if a.dtype != torch.uint64:  # attention's random state, which says what the program's seed is
                torch.testing.assert_close(a, b, rtol=tolerance, atol=tolerance, equal_nan=True)


@pytest.mark.parametrize("name", ["div", "truediv", "sub", "mul", "add"])
def test_a_number_before_an_unreduced_sum(name: str) -> None:
    fd = mf.FusionDefinition()
    x = fd.define_tensor([6, 8])
    fd.add_output(getattr(fd.ops, name)(2.0, fd.ops.sum(x, [0])))
    fd.mesh_split(x, MESH, ["x", None])
    values = torch.rand(6, 8) + 1.0
    (found,) = fd.simulate([values])
    torch.testing.assert_close(found, references.REFERENCES[name](torch.tensor(2.0), values.sum(0)))


@pytest.mark.parametrize("dtype", [torch.bool, torch.int32, torch.float16, torch.complex64])
def test_lookups_in_a_sharded_dim_of_every_type(dtype: torch.dtype) -> None:
    table = (torch.randn(10, 4) * 5).to(dtype)
    fd = mf.FusionDefinition()
    t = fd.define_tensor([10, 4], dtype=mf.DataType(str(dtype).removeprefix("torch.")))
    index = fd.define_tensor([4], dtype=mf.DataType.Int)
    fd.add_output(fd.ops.index_select(t, index, 0))
    fd.mesh_split(t, MESH, ["x", None])
    places = torch.tensor([9, 0, 3, 3])
    assert torch.equal(fd.simulate([table, places])[0], table[places])


def test_attention_forward_and_backward_with_heads_sharded() -> None:
    torch.manual_seed(0)
    q, k, v = (torch.randn(2, heads, 6, 4) for heads in (6, 3, 3))
    fd = mf.FusionDefinition()
    tensors = [fd.define_tensor(list(t.shape)) for t in (q, k, v)]
    out, lse, seed, offset = fd.ops.sdpfa_fwd(*tensors, dropout_p=0.0, is_causal=True)
    for grad in fd.ops.sdpfa_bwd(out, *tensors, out, lse, 0.0, True, seed, offset, None):
        fd.add_output(grad)
    fd.mesh_split(tensors[0], MESH, [None, "x", None, None])
    found = fd.simulate([q, k, v])
    leaves = [t.double().requires_grad_() for t in (q, k, v)]
    wanted = torch.nn.functional.scaled_dot_product_attention(*leaves, is_causal=True, enable_gqa=True)
    wanted.backward(wanted.detach())
    for a, leaf in zip(found, leaves, strict=True):
        torch.testing.assert_close(a, leaf.grad.float(), rtol=1e-4, atol=1e-5)


@pytest.mark.parametrize(("name", "place"), sample_ids())
def test_lines_from_templates_are_those_written_out(name: str, place: int) -> None:
    """For an op and, with other names, for its equal; where operands are one tensor, too."""
    fd, _ = _define(name, place)
    compiled = fd.compile()
    for step in compiled.resharded.statements:
        if isinstance(step, Compute):
            _check_lines(compiled.graph.nodes[step.node], step.placement, compiled.graph)


def _check_lines(node: Node, placement: Placement, graph: Graph) -> None:
    scalar = functools.partial(scalar_text, graph)
    texts, results = OpText(0, scalar), [f"v{i}" for i in node.outputs]
    for names in ([f"a{i}" for i in node.inputs], [f"v1{i}" for i in node.inputs], ["x"] * len(node.inputs)):
        local = LocalCall(node.call, names, placement.operands, placement.results, 0, scalar, node.origin)
        for _ in range(2):
            assert texts.lines(node, placement, names, results) == local.statements(results)
