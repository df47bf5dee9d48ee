"""What torch refuses while a program runs is told in terms of the user's op, operands and line."""

from __future__ import annotations

import re
from typing import Any

import pytest
import torch

import meshfuse as mf

# Arguments of the ops, x and y being tensors of one dtype.
OPS: dict[str, tuple[Any, ...]] = {
    "add": ("x", "y"), "matmul": ("x", "y"), "sum": ("x", [0]), "exp": ("x",), "cumsum": ("x", 0), "max": ("x", [1]),
    "argsort": ("x", 0), "topk": ("x", 2, 0, True, True), "var": ("x", [0], 0), "bitwise_and": ("x", "y"),
    "where": ("y", "x", "x"), "remainder": ("x", "y"), "gelu": ("x",), "abs": ("x",), "lgamma": ("x",),
    "softmax": ("x", 1), "cat": (["x", "y"], 0), "triu": ("x", 0), "neg": ("x",), "isnan": ("x",),
}  # fmt: skip
# Numbers of four bits are packed in twos: what cannot be made of ones cannot be passed.
DTYPES = [d for d in mf.DataType if d is not mf.DataType.Null and not d.name.startswith("Float4")]


def defined(name: str, dtype: mf.DataType, mesh: mf.DeviceMesh) -> mf.FusionDefinition | None:
    """A definition of one op; None where it does not take the dtype."""
    with mf.FusionDefinition() as fd:
        named = {n: fd.define_tensor([4, 4], dtype=dtype) for n in "xy"}
        fd.mesh_split(named["x"], mesh, ["tp", None])
        try:
            made = fd.call(name, tuple(_filled(arg, named) for arg in OPS[name]))
        except mf.DefinitionError:
            return None
        for out in made if isinstance(made, tuple) else (made,):
            fd.add_output(out)
    return fd


def _filled(arg: Any, named: dict[str, Any]) -> Any:
    if isinstance(arg, list) and arg[0] in named:
        return [named[name] for name in arg]
    return named[arg] if isinstance(arg, str) else arg


@pytest.mark.parametrize("name", OPS)
def test_no_error_of_torch_is_raised_as_it_is(name: str) -> None:
    refused = []
    for dtype in DTYPES:
        fd = defined(name, dtype, mf.DeviceMesh((2,), ("tp",)))
        if fd is not None:
            ones = torch.ones(4, 4).to(getattr(torch, dtype.value))
            try:
                fd.simulate([ones, ones])
            except mf.KernelError as error:
                refused.append(str(error))
    for text in refused:
        assert "cannot be computed on rank 0: found " in text and "needed operands that torch has a kernel for" in text
        assert "(at test_refusals.py:" in text and re.search(r"v\d: \w+\[\d, \d\]", text)
    assert refused or name not in ("add", "matmul", "sum")


def test_a_refusal_names_the_op_its_operands_and_the_cause() -> None:
    with mf.FusionDefinition() as fd:
        x = fd.define_tensor([4, 4], dtype=mf.DataType.UInt64)
        double = fd.ops.add(x, x)
        fd.add_output(double)
    with pytest.raises(mf.KernelError) as caught:
        fd.execute([torch.ones(4, 4, dtype=torch.uint64)])
    text = str(caught.value)
    assert text.startswith("double (add) cannot be computed on rank 0: found NotImplementedError: ")
    assert (
        "uint64[4, 4]" in text and f"Cast them with fd.ops.cast, or pass other values. (at {fd.nodes[0].line})" in text
    )
    assert isinstance(caught.value.__cause__, NotImplementedError) and isinstance(caught.value, ValueError)
