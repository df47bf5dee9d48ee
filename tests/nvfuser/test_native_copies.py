"""Segments that pack and unpack, as definitions of the real nvFuser: what they take and give, and the numbers."""

from __future__ import annotations

from typing import Any

import fake_kernels
import pytest
import torch

import meshfuse as mf
import meshfuse.nvfuser_direct as nvfuser
from copy_programs import MOVED
from meshfuse.backends.nvfuser.launch import NativePart
from meshfuse.dtypes import DataType

pytestmark = pytest.mark.nvfuser

# nvFuser's own functions that stand for the copies of each.
OPS = {
    "a gather of columns": ("reshape", "permute"),
    "a gather of columns for a softmax": ("reshape", "permute"),
    "a gather of turned rows": ("permute", "reshape"),
    "a scattered sum of columns": ("slice", "reshape", "add"),
    "a scattered sum of rows": ("reshape", "sum"),
    "uneven rows to columns": ("slice", "cat"),
    "rows to columns": ("permute",),
    "columns to rows": ("reshape", "permute"),
    "columns to rows for a softmax": ("reshape", "permute"),
}


def assert_same_numbers(part: NativePart) -> None:
    """The definition's text, run op by op in torch, against the kernel's."""
    scope: dict[str, Any] = {"FusionDefinition": nvfuser.FusionDefinition, "DataType": nvfuser.DataType}
    exec(repr(part.kernel.definition), scope)
    with nvfuser.FusionDefinition() as fd:
        scope["nvfuser_fusion"](fd)
    given = [torch.randint(-3, 4, value.shape).to(value.dtype) for value in part.examples]
    for found, wanted in zip(fd.execute(given), part.text(list(given)), strict=True):
        torch.testing.assert_close(found, wanted.contiguous(), rtol=0.02, atol=0.02)


@pytest.mark.parametrize("dtype", [DataType.Double, DataType.BFloat16, DataType.Int32], ids=lambda d: d.name)
@pytest.mark.parametrize("name", MOVED)
def test_copies_are_in_the_definitions(name: str, dtype: DataType, monkeypatch: pytest.MonkeyPatch) -> None:
    launcher = fake_kernels.use(monkeypatch)
    moved = MOVED[name]
    if dtype is DataType.Int32 and "softmax" in name:
        pytest.skip("of floating point numbers only")
    fd, kind = moved.define(dtype), getattr(torch, dtype.value)
    x = moved.inputs()[0].mul(4).round()
    (found,) = fd.simulate([x.to(kind)], check_streams=True)
    expected = moved.after[1](moved.before[1](x))
    torch.testing.assert_close(found.double(), expected, rtol=0.02, atol=0.02)
    monkeypatch.setenv("MESHFUSE_BACKEND", "eager")
    kernels = [kernel for rank in (0, 1) for kernel in fd.host_program(rank).kernels]
    assert len(launcher.parts) == launcher.calls == len(kernels)
    for part, kernel in zip(launcher.parts, kernels, strict=True):
        assert len(part.kernel.inputs) == len(kernel.params) and len(part.kernel.outputs) == len(kernel.results)
        if "fd.ops.cat(" not in repr(part.kernel.definition):  # It adds numbers alone, which ours does not.
            assert_same_numbers(part)
    text = "".join(repr(part.kernel.definition) for part in launcher.parts)
    assert all(f"fd.ops.{op}(" in text for op in OPS[name]), text


def test_what_nvfuser_cannot_express_is_copied_beside_its_definition(monkeypatch: pytest.MonkeyPatch) -> None:
    """A sum of Bool is any of them."""
    launcher = fake_kernels.use(monkeypatch)
    moved = MOVED["a scattered sum of rows"]
    fd = moved.define(DataType.Bool)
    (x,) = moved.inputs()
    fd.simulate([x > 1.0])
    assert launcher.calls == len(launcher.parts) > 0


def test_a_rank_that_has_nothing_to_send(monkeypatch: pytest.MonkeyPatch) -> None:
    """Two rows on four ranks, gathered: two ranks pack nothing."""
    launcher = fake_kernels.use(monkeypatch)
    with mf.FusionDefinition() as fd:
        x = fd.define_tensor([2], dtype=DataType.Double)
        y = fd.ops.tanh(x)
        fd.add_output(z := fd.ops.neg(y))
        for tensor, layout in ((y, "r"), (z, None)):
            fd.mesh_split(tensor, mf.DeviceMesh((4,), ("r",)), [layout])
    t = torch.randn(2, dtype=torch.float64)
    torch.testing.assert_close(fd.simulate([t])[0], -t.tanh())
    assert launcher.calls == len(launcher.parts) > 0


def test_a_copy_beside_an_op_that_needs_numbers_to_run(monkeypatch: pytest.MonkeyPatch) -> None:
    """On a CPU a look-up's text looks at its indices: without them its results are known, and not its copies."""
    launcher = fake_kernels.use(monkeypatch)
    with mf.FusionDefinition() as fd:
        x, index = fd.define_tensor([4, 4], dtype=DataType.Double), fd.define_tensor([4, 2], dtype=DataType.Int)
        y = fd.ops.scatter(fd.ops.tanh(x), index, 3.0, 1)
        z = fd.ops.neg(y)
        for tensor, layout in ((x, ["r", None]), (index, ["r", None]), (y, ["r", None]), (z, [None, "r"])):
            fd.mesh_split(tensor, mf.DeviceMesh((2,), ("r",)), layout)
        for output in (y, z):
            fd.add_output(output)
    t, places = torch.randn(4, 4, dtype=torch.float64), torch.tensor([[0, 1], [2, 3], [1, 1], [3, 0]])
    expected = t.tanh().scatter(1, places, 3.0)
    for found, wanted in zip(fd.simulate([t, places]), (expected, -expected), strict=True):
        torch.testing.assert_close(found, wanted)
    assert launcher.calls == len(launcher.parts) > 0
