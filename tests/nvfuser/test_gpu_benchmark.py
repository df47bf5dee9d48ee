"""The GPU benchmark's programs and checks, on a CPU with fake kernels; it measures nothing without a GPU."""

from __future__ import annotations

import os
import subprocess
import sys
from pathlib import Path

import fake_kernels
import pytest
import torch

from op_references import NVIDIA_ONLY

FOLDER = Path(__file__).parents[2] / "benchmarks" / "gpu"
sys.path.insert(0, str(FOLDER))

import gpu_works  # noqa: E402  # pyright: ignore[reportMissingImports]

pytestmark = pytest.mark.nvfuser


@pytest.fixture(scope="module")
def script():
    """run.py as a module."""
    import importlib.util

    spec = importlib.util.spec_from_file_location("gpu_benchmark", FOLDER / "run.py")
    assert spec is not None and spec.loader is not None
    module = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(module)
    return module


@pytest.mark.parametrize("work", gpu_works.elementwise(6, 16), ids=lambda work: work.name)
def test_works_are_what_is_written_by_hand(script, work: gpu_works.Work, monkeypatch: pytest.MonkeyPatch) -> None:
    launcher = fake_kernels.use(monkeypatch)
    fd, inputs = work.definition(), work.inputs("cpu")
    expected = work.by_hand(*(t.double() for t in inputs))
    for a, b in zip(fd.execute(inputs), expected, strict=True):
        torch.testing.assert_close(a.double(), b, rtol=2e-2, atol=2e-2)
    assert launcher.calls == len(launcher.parts) == 1
    assert script.taken_whole(fd)
    assert callable(script.native_call(fd, inputs))


@pytest.mark.parametrize("ranks", [1, 2, 4])
def test_the_block_is_right(script, ranks: int, monkeypatch: pytest.MonkeyPatch) -> None:
    launcher = fake_kernels.use(monkeypatch)
    found = script.check_block(gpu_works.Block(2, 8, 32, 4), ranks, "cpu")
    assert found["state"] == "right", found
    assert found["by"] == ["nvfuser: compiled"] and launcher.calls


def test_every_op_is_right(script, monkeypatch: pytest.MonkeyPatch) -> None:
    """Through the whole backend: also what the definitions of single ops are called with."""
    launcher = fake_kernels.use(monkeypatch)
    lines = script.check_ops(script.Clock(1e6), 0.0, "cpu")
    assert not [line for line in lines if line["state"] in ("wrong", "not reached")]
    assert {line["op"] for line in lines if line["state"].startswith("no reference")} <= NVIDIA_ONLY
    assert launcher.calls == len(launcher.parts) > len(lines) / 2


def test_without_cuda_nothing_is_written(tmp_path: Path) -> None:
    done = subprocess.run(
        [sys.executable, str(FOLDER / "run.py"), "--out", str(tmp_path / "out")],
        env={**os.environ, "CUDA_VISIBLE_DEVICES": ""}, capture_output=True, text=True, timeout=120,
    )  # fmt: skip
    assert done.returncode == 2 and "needs a CUDA device: found none" in done.stderr
    assert not (tmp_path / "out").exists()
