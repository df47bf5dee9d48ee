"""Every op of the table in a definition of its own, with each dim of each operand sharded by annotation."""

from __future__ import annotations

from typing import Any

import op_references as references
import pytest
import torch
from op_harness import make_call, operands_of, sample_ids, whole

import meshfuse as mf
from meshfuse.ops import OPS
from meshfuse.ops.base import Call, TensorType

RUNNABLE = [pair for pair in sample_ids() if pair[0] not in references.NVIDIA_ONLY]
MESH = mf.DeviceMesh((3,), ("x",))


def _define(name: str, place: int) -> tuple[mf.FusionDefinition, list[Any]]:
    """The definition of one op on input tensors, and those."""
    sample, fd, tensors = OPS[name].samples()[place], mf.FusionDefinition(), []

    def defined(arg: Any) -> Any:
        if isinstance(arg, TensorType):
            tensors.append(fd.define_tensor(list(arg.shape), dtype=arg.dtype))
            return tensors[-1]
        return [defined(a) for a in arg] if isinstance(arg, list) else arg

    args = [defined(arg) for arg in sample.args]
    made = fd.call(name, args, {key: defined(value) for key, value in sample.kwargs.items()})
    for tensor in made if isinstance(made, tuple) else (made,):
        fd.add_output(tensor)
    return fd, tensors


def _splits(call: Call) -> list[tuple[int, int]]:
    return [(i, d) for i, t in enumerate(call.types) for d, n in enumerate(t.shape) if n > 1] or [(-1, 0)]


@pytest.mark.parametrize(("name", "place"), RUNNABLE)
def test_an_op_of_a_definition_is_right_however_an_operand_is_annotated(name: str, place: int) -> None:
    sample = OPS[name].samples()[place]
    call = make_call(OPS[name], sample)
    operands = operands_of(call, sample, references.DOMAINS.get(name))
    random = name in references.RANDOM or bool(dict(sample.kwargs).get("dropout_p"))
    expected = None if random else whole(call, operands)
    for operand, dim in _splits(call):
        fd, tensors = _define(name, place)
        if operand >= 0:
            fd.mesh_split(tensors[operand], MESH, ["x" if d == dim else None for d in range(tensors[operand].ndim)])
        found = fd.simulate(operands)
        expected = expected if expected is not None else found
        for a, b in zip(found, expected, strict=True):
            tolerance = 2e-3 if a.dtype == torch.float16 else 2e-5
            if a.dtype != torch.uint64:  # attention's random state, which says what the program's seed is
                torch.testing.assert_close(a, b, rtol=tolerance, atol=tolerance, equal_nan=True)
