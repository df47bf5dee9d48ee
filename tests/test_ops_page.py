"""docs/ops.md, `help` and `meshfuse ops` say of each op what its record says."""

from __future__ import annotations

import re
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
import torch.nn.functional as F

import meshfuse as mf
from gradient_checks import both
from meshfuse.cli import main
from meshfuse.ops import COMPOSITES, EXPERT_OPS, OPS, families
from meshfuse.ops.opdef import Partial
from meshfuse.ops.summary import CARRIES, FATES, examples, help_text
from meshfuse.ops.torch_names import INSTEAD
from meshfuse.testing.calls import define_call
from scripts import script

ROOT = Path(__file__).parent.parent
REMAKE = "run .venv/bin/python tools/ops_page.py"
MESH = mf.DeviceMesh((2,), ("x",))


def test_the_page_is_what_the_records_say() -> None:
    assert (ROOT / "docs" / "ops.md").read_text() == script("tools/ops_page.py").page(), (
        f"docs/ops.md is not up to date: {REMAKE}"
    )


def test_the_page_has_every_op_once_and_changes_when_one_is_added(monkeypatch: pytest.MonkeyPatch) -> None:
    made = script("tools/ops_page.py")
    rows = re.findall(r"^\| `(\w+)\(", made.page(), re.MULTILINE)
    assert sorted(rows) == sorted({*OPS, *EXPERT_OPS, *COMPOSITES})
    known = families()
    more = {**known, "shape": (known["shape"][0], (*known["shape"][1], OPS["add"]))}
    monkeypatch.setattr(made, "families", lambda: more)
    assert (ROOT / "docs" / "ops.md").read_text() != made.page()


@pytest.mark.parametrize("name", OPS)
def test_every_op_says_what_it_computes(name: str) -> None:
    about = OPS[name].about
    assert about and about == about.strip().rstrip(".") and "|" not in about and "\n" not in about
    assert about in help_text(OPS[name])


def test_every_op_is_in_one_family_and_every_fate_and_partial_rule_has_its_words() -> None:
    assert sorted(op.name for _, ops in families().values() for op in ops) == sorted({*OPS, *EXPERT_OPS})
    shown = {fate.split(" by ")[0] for op in OPS.values() for example in examples(op) for fate in example.fates}
    assert shown == {*FATES}
    assert {*CARRIES} == {*Partial}


def letters_of(text: str) -> list[list[str]]:
    """The dims of each operand in an example's call, then its other lists."""
    call = text.partition(" -> ")[0]
    return [[dim for dim in dims.split(", ") if dim] for dims in re.findall(r"\[([a-z1() ,]*)\]", call)]


@pytest.mark.parametrize("name", OPS)
def test_a_dim_that_passes_is_sharded_without_communication(name: str) -> None:
    """Wherever the operands have the dim, and whatever lies beside it: by the plan of a whole definition."""
    op, example = OPS[name], examples(OPS[name])[0]
    passing = [letter for letter in example.fates.get("pass", ()) if f"{letter} " not in example.text]
    for letter in passing:
        fd = mf.FusionDefinition()
        tensors, results = define_call(fd, op, op.samples()[0])
        for result in results:
            fd.add_output(result)
        found = 0
        for tensor, dims in zip(tensors, letters_of(example.text), strict=False):
            assert len(dims) == tensor.ndim, example.text
            found += dims.count(letter)
            fd.mesh_split(tensor, MESH, ["x" if dim == letter else None for dim in dims])
        assert fd.bill().total == 0, (letter, str(fd.bill()))
        assert not found or any("x" in str(sharding) for sharding in fd.output_shardings())


NAN, INF = float("nan"), float("inf")
# Of an op's first operand a dim that does not pass, and what is then on the wire for it where the result is whole.
Made = Callable[[Any, Any], Any]
CASES: list[tuple[str, Made, str, str]] = [
    ("sum", lambda fd, x: fd.ops.sum(x, 1), "reduced by sum", "all-reduce"),
    ("max", lambda fd, x: fd.ops.max(x, 1), "reduced by max", "all-reduce"),
    ("matmul", lambda fd, x: fd.ops.matmul(x, fd.define_tensor([512, 64])), "reduced by sum", "all-reduce"),
    ("cumsum", lambda fd, x: fd.ops.sum(fd.ops.cumsum(x, 1), 1), "in parts", "all-to-all|all-reduce|all-gather"),
    ("argsort", lambda fd, x: fd.ops.argsort(x, 1), "whole", "all-gather|all-to-all"),
    ("slice", lambda fd, x: fd.ops.slice(x, [0, 2], [64, 500]), "windows", "window"),
]


@pytest.mark.parametrize(("name", "make", "fate", "moved"), CASES, ids=[case[0] for case in CASES])
def test_sharding_another_dim_moves_what_the_page_says(name: str, make: Made, fate: str, moved: str) -> None:
    example = examples(OPS[name])[0]
    assert letters_of(example.text)[0][1] in example.fates[fate]
    fd = mf.FusionDefinition()
    x = fd.define_tensor([64, 512])
    result = make(fd, x)
    fd.add_output(result)
    fd.mesh_split(x, MESH, [None, "x"])
    fd.mesh_split(result, MESH, [None] * result.ndim)
    bill = fd.bill()
    assert bill.entries and all(re.search(moved, entry.collective) for entry in bill.entries), str(bill)
    whole = 64 * 512 * 4 / 2  # on the wire per rank where all of x is gathered
    assert (bill.total < whole / 2) == (fate != "whole" and name != "slice"), str(bill)


# What torch has under a name that is not here; x and y [4, 4], i [4] of four rows.
TORCH: dict[str, Callable[..., torch.Tensor]] = {
    "transpose": lambda x, y, i: x.T,
    "concat": lambda x, y, i: torch.cat([x, y], 0),
    "bmm": lambda x, y, i: x @ y,
    "float": lambda x, y, i: x.float(),
    "zeros_like": lambda x, y, i: torch.zeros_like(x),
    "one_hot": lambda x, y, i: F.one_hot(i, 4).float(),
    "segment_sum": lambda x, y, i: torch.zeros(4, 4).double().index_add(0, i, x),
    "tril": lambda x, y, i: x.tril(),
    "square": lambda x, y, i: x.square(),
    "norm": lambda x, y, i: x.norm(dim=1),
    "std": lambda x, y, i: x.std(1),
    "amax": lambda x, y, i: x.amax(1),
    "amin": lambda x, y, i: x.amin(1),
    "clip": lambda x, y, i: x.clip(-0.5, 0.5),
    "swish": lambda x, y, i: F.silu(x),
    "leaky_relu": lambda x, y, i: F.leaky_relu(x),
    "elu": lambda x, y, i: torch.stack([F.elu(row) for row in x]),  # of many numbers at once it has NaN at NaN
    "softplus": lambda x, y, i: F.softplus(x),
    "mse_loss": lambda x, y, i: F.mse_loss(x, y),
}


def _written(name: str, fd: Any, x: Any, y: Any, i: Any) -> Any:
    """What is to be written for torch's name, on a definition."""
    expression = INSTEAD[name].partition(", which")[0].partition(", with")[0]
    numbers = {"n": 4, "dim": 0, "dims": [1], "low": -0.5, "high": 0.5}
    return eval(expression, {"fd": fd, "mf": mf, "x": x, "y": y, "i": i} | numbers)


@pytest.mark.parametrize("name", TORCH)
def test_what_is_to_be_written_for_torchs_name_is_that(name: str) -> None:
    with mf.FusionDefinition() as fd:
        x, y = (fd.define_tensor([4, 4], dtype=mf.DataType.Double) for _ in range(2))
        fd.add_output(_written(name, fd, x, y, fd.define_tensor([4], dtype=mf.DataType.Int)))
    numbers = torch.randn(4, 4).double() * 3, torch.randn(4, 4).double(), torch.tensor([2, 0, 2, 1])
    (found,) = fd(*numbers)
    torch.testing.assert_close(found, TORCH[name](*numbers))


# Zeros, equal numbers, the bounds of functions that have some, NaN and infinities.
SPECIAL = [[0.0] * 4, [1.0] * 4, [-0.5, 0.5, 0.5, -2.0], [20.0, 30.0, -800.0, 0.0]]
MORE_SPECIAL = [[NAN, 1.0, 0.0, -1.0], [INF, 0.0, 1.0, 2.0], [-INF, 0.0, 1.0, 2.0], [NAN, INF, -INF, 0.0]]
# A one-hot tensor is made of no number.
DIFFERENTIABLE = [name for name in TORCH if name not in ("zeros_like", "one_hot", "float")]


@pytest.mark.parametrize("rows", [SPECIAL, MORE_SPECIAL], ids=["zeros and ties", "NaN and infinities"])
@pytest.mark.parametrize("name", DIFFERENTIABLE)
def test_what_is_to_be_written_has_torchs_gradient_too(name: str, rows: list[list[float]]) -> None:
    operands = [torch.tensor(rows, dtype=torch.float64), torch.randn(4, 4).double(), torch.tensor([2, 0, 2, 1])]
    first, _ = both(lambda fd, *t: [_written(name, fd, *t)], lambda *t: [TORCH[name](*t)], operands)
    for found, wanted in first:
        torch.testing.assert_close(found, wanted, rtol=1e-9, atol=1e-12, equal_nan=True)


@pytest.mark.parametrize("name", INSTEAD)
def test_an_error_that_names_what_is_not_there_says_what_is(name: str) -> None:
    for op in re.findall(r"fd\.ops\.(\w+)", INSTEAD[name]):
        assert op in OPS or op in COMPOSITES, op
    assert name not in OPS and name not in COMPOSITES
    fd = mf.FusionDefinition()
    with pytest.raises(mf.DefinitionError, match=re.escape(f"has no op '{name}'. Write {INSTEAD[name]}. ")):
        getattr(fd.ops, name)


def test_errors_name_the_op_for_a_method_or_function_of_torch() -> None:
    x = mf.FusionDefinition().define_tensor([4, 4])
    for ask in (lambda: x.unsqueeze(0), lambda: torch.unsqueeze(x, 0)):
        with pytest.raises(mf.DefinitionError, match=re.escape("Write fd.ops.broadcast(x, [True, False, False])")):
            ask()


def test_the_command_lists_all_and_tells_of_one(capsys: pytest.CaptureFixture[str]) -> None:
    assert main(["ops"]) == 0
    listed = capsys.readouterr().out
    assert all(re.search(rf"^  {name}\(", listed, re.MULTILINE) for name in {*OPS, *EXPERT_OPS, *COMPOSITES})
    for name in ("sum", "softmax", "scaled_mm"):
        assert main(["ops", name]) == 0
        assert capsys.readouterr().out.strip() == getattr(mf.FusionDefinition().ops, name).__doc__.strip()
    assert main(["ops", "sofmax"]) == 1
    assert capsys.readouterr().err == (
        "meshfuse: meshfuse has no op 'sofmax': found near to it ['softmax', 'log_softmax', 'max']. "
        "dir(fd.ops) lists all; mf.register_op adds one.\n"
    )


def test_help_of_a_sum() -> None:
    assert mf.FusionDefinition().ops.sum.__doc__ == (
        "sum(arg, dims=None, keepdim=False, dtype=DataType.Null)\n\n"
        "the sum over `dims` (all of them for None); integers and bools are summed as Int\n\n"
        "sum([a, b, c], [1]) -> [a, c]: a, c pass; b reduced by sum\n"
        "sum([a, b, c]) -> []: all reduced by sum\n\n"
        "pass: may be sharded: every rank computes its part of the result, and nothing is communicated\n"
        "reduced: may be sharded: every rank reduces its part, and results without the dim are unreduced: one "
        "collective of the result's size, where something needs it reduced\n\n"
        "unreduced operands: linear in the first tensor operand, floating point only\ngradient: yes"
    )
