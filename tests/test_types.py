"""What type checkers, `inspect` and IPython know of `fd.ops` and of arithmetic on tensors."""

from __future__ import annotations

import inspect
import json
import os
import subprocess
import sys
from pathlib import Path

import pytest

import meshfuse as mf
from meshfuse.ops import COMPOSITES, EXPERT_OPS, OPS
from scripts import script

ROOT = Path(__file__).parent.parent
# What is right, and by line what is wrong in it: the text after `#` is a part of each checker's error.
RIGHT = """
import torch
import meshfuse as mf

fd = mf.FusionDefinition()
x, s = fd.define_tensor([4, 4]), fd.define_scalar()
one: mf.TensorView = fd.ops.sum(x * 2.0 + s, [0], keepdim=True)
two: mf.TensorView = 1 - x @ x.T
three: mf.TensorView = s * x
four: mf.Val = s * 2 + x.size(0)
five: mf.TensorView = fd.ops.add(2.0, x)
six: mf.Val = fd.ops.add(2.0, s)
values, indices = fd.ops.topk(x, 2, 0)
seven: mf.TensorView = fd.ops.cast(fd.ops.softmax(values, -1), torch.bfloat16)
eight: mf.TensorView = fd.ops.mean(x, dim=0)
nine: mf.TensorView = fd.ops.reshape(x, [x.size(0) * 2, 2])
ten: mf.TensorView = (-x) ** 2 < 0.5
"""
WRONG = [
    ("fd.ops.linearr(x, x)", "linearr"),
    ("fd.ops.linear(x)", "weight"),
    ("fd.ops.sum(x, 'rows')", "sum"),
    ("fd.ops.softmax(x, axis=1)", "axis"),
    ("x + 'one'", "+"),
    ("a, b, c = fd.ops.topk(x, 2, 0)", "3"),
    ("n: mf.Val = fd.ops.add(s, x)", "TensorView"),
]


def test_the_stub_is_what_the_records_say() -> None:
    made = script("tools/op_stubs.py")
    assert made.STUB.read_text() == made.stub(), "run .venv/bin/python tools/op_stubs.py"
    assert all(f"def {name}(self, " in made.stub() for name in {*OPS, *EXPERT_OPS, *COMPOSITES})


# Of torch, mypy reads what `import torch` names and its types, not all that it is made of, which takes twenty seconds.
MYPY = """
[mypy]
follow_imports = silent
[mypy-torch.*,numpy.*,sympy.*]
follow_imports = skip
[mypy-torch,torch._C.*,torch.types]
follow_imports = silent
"""


@pytest.mark.slow
@pytest.mark.parametrize("command", [["pyright"], ["mypy", "--no-incremental"]])
def test_type_checkers_know_the_ops(command: list[str], tmp_path: Path) -> None:
    right, wrong = tmp_path / "right.py", tmp_path / "wrong.py"
    right.write_text(RIGHT)
    wrong.write_text(RIGHT + "".join(f"{line}\n" for line, _ in WRONG))
    (tmp_path / "pyrightconfig.json").write_text(json.dumps({"extraPaths": [str(ROOT)]}))
    (tmp_path / "mypy.ini").write_text(MYPY)
    words = ["--pythonpath", sys.executable]
    if command != ["pyright"]:
        words = ["--python-executable", sys.executable, str(right), str(wrong)]
    environment = {**os.environ, "MYPYPATH": str(ROOT)}
    done = subprocess.run(
        [sys.executable, "-m", *command, *words], cwd=tmp_path, capture_output=True, text=True, timeout=280,
        env=environment,
    )  # fmt: skip
    errors = [line for line in done.stdout.splitlines() if "error:" in line]
    first = len(RIGHT.splitlines()) + 1
    assert not [line for line in errors if "right.py" in line], done.stdout
    for place, (text, needed) in enumerate(WRONG, first):
        assert any(f"wrong.py:{place}:" in line for line in errors), (text, needed, done.stdout)


@pytest.mark.parametrize("name", sorted({*OPS, *COMPOSITES}))
def test_every_op_has_the_signature_that_it_takes(name: str) -> None:
    found = inspect.signature(getattr(mf.FusionDefinition().ops, name))
    assert "fd" not in found.parameters
    if name in OPS:
        assert list(found.parameters) == [p.name for p in OPS[name].params]


def test_the_signature_of_a_sum() -> None:
    ops = mf.FusionDefinition().ops
    assert ops.sum.__name__ == "sum"
    assert str(inspect.signature(ops.sum)) == (
        "(arg: 'TensorView', dims: 'int | Sequence[int] | None' = None, keepdim: 'bool' = False, "
        "dtype: 'DataType | torch.dtype' = DataType.Null)"
    )
    assert str(inspect.signature(ops.softmax)).startswith("(x: 'Any', dim: 'int' = -1, dtype")


def test_ipython_completes_ops_and_shows_their_parameters() -> None:
    from IPython.core.interactiveshell import InteractiveShell

    shell = InteractiveShell()
    shell.user_ns["fd"] = mf.FusionDefinition()
    shell.Completer.use_jedi = False
    assert shell.complete("fd.ops.soft")[1] == [".softmax"]
    shown = shell.object_inspect("fd.ops.sum", detail_level=0)
    assert "keepdim" in shown["definition"] and "the sum over `dims`" in shown["docstring"]
