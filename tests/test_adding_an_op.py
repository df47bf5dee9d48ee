"""One file of at most forty lines adds an op, and everything that there is for ops is there for this one."""

from __future__ import annotations

import re
from collections.abc import Iterator
from pathlib import Path

import pytest
import torch

import meshfuse as mf
import meshfuse.nvfuser_direct as nvfuser
from meshfuse.cli import main
from meshfuse.testing import check_op
from own_op import MODULE, NAME, registered
from scripts import ROOT, script


@pytest.fixture
def op(tmp_path: Path) -> Iterator[mf.OpDef]:
    with registered(tmp_path) as made:
        yield made


def test_the_file_is_short() -> None:
    assert len(MODULE.splitlines()) <= 40


def test_the_page_about_it_shows_what_stands_in_the_package() -> None:
    page, family = ((ROOT / path).read_text() for path in ("docs/adding-an-op.md", "meshfuse/ops/reductions.py"))
    blocks = re.findall(r"^```python\n(.*?)^```$", page, re.MULTILINE | re.DOTALL)
    assert blocks and all(block in family for block in blocks)
    assert sum(len(block.splitlines()) for block in blocks) <= 40


def test_help_the_command_and_the_page_of_ops_describe_it(op: mf.OpDef, capsys: pytest.CaptureFixture[str]) -> None:
    ops = mf.FusionDefinition().ops
    assert NAME in dir(ops)
    doc = getattr(ops, NAME).__doc__
    for line in (
        f"{NAME}(x, weight)", op.about, f"{NAME}([a, b], [b]) -> [a]: a pass; b reduced by sum", "gradient: yes",
    ):  # fmt: skip
        assert line in doc.splitlines()
    assert main(["ops", NAME]) == 0 and capsys.readouterr().out.strip() == doc.strip()
    row = script("tools/ops_page.py")._row(op)
    assert row[:2] == (f"`{NAME}(x, weight)`", op.about) and row[-1] == "yes"


def test_what_it_claims_is_checked(op: mf.OpDef) -> None:
    check_op(op, max_examples=10)


def test_it_is_sharded_and_differentiated(op: mf.OpDef) -> None:
    mesh = mf.DeviceMesh((2, 2), ("dp", "tp"))
    with mf.FusionDefinition() as fd:
        x, weight = fd.define_tensor([8, 6], dtype=mf.DataType.Double), fd.define_tensor([6], dtype=mf.DataType.Double)
        y = getattr(fd.ops, op.name)(x, weight)
        fd.add_output(y)
        for grad in fd.grad(y, [x, weight]):
            fd.add_output(grad)
        fd.mesh_split(x, mesh, ["dp", "tp"])
    tensors = [torch.randn(n, dtype=torch.float64, requires_grad=True) for n in ((8, 6), (6,))]
    wanted = tensors[0] @ tensors[1]
    expected = [wanted, *torch.autograd.grad(wanted.sum(), tensors)]
    found = fd.simulate([t.detach() for t in tensors], check_replicas=True)
    for one, other in zip(found, expected, strict=True):
        torch.testing.assert_close(one, other.detach())
    assert "all-reduce" in {entry.collective for entry in fd.bill().entries}


def test_a_definition_written_for_nvfuser_has_it(op: mf.OpDef) -> None:
    with nvfuser.FusionDefinition() as fd:
        x, weight = (fd.define_tensor([-1] * ndim, dtype=nvfuser.DataType.Float) for ndim in (2, 1))
        fd.add_output(getattr(fd.ops, op.name)(x, weight))
    assert f"fd.ops.{NAME}(" in repr(fd)
    tensors = torch.randn(3, 5), torch.randn(5)
    torch.testing.assert_close(fd.execute(list(tensors))[0], tensors[0] @ tensors[1])
