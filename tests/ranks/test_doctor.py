"""`meshfuse doctor`, and what the parts that run before torch may import."""

from __future__ import annotations

import subprocess
import sys

import pytest
import torch
from rank_pool import base_environment

from meshfuse.runtime import doctor


def test_report_has_a_row_for_each_part(monkeypatch):
    monkeypatch.delenv("RANK", raising=False)
    monkeypatch.delenv("WORLD_SIZE", raising=False)
    heading, *rows = doctor.report().splitlines()
    assert heading.split("  ")[0] == "what"
    start = heading.index("found")
    found = {row[:start].strip(): row[start:] for row in rows}
    for name in (
        "Python",
        "torch",
        "CUDA",
        "gloo",
        "NCCL",
        "nvFuser",
        "Thunder",
        "launcher",
        "MESHFUSE_TIMEOUT",
    ):
        assert name in found
    assert found["torch"].startswith(torch.__version__)
    assert found["gloo"].startswith("yes") == torch.distributed.is_gloo_available()


def test_report_of_a_machine_without_torch(monkeypatch):
    monkeypatch.setattr(doctor.importlib.util, "find_spec", lambda name: None)
    report = doctor.report()
    assert "programs can be planned but not run" in report
    assert "nvFuser" not in report


def test_wrong_variables_are_a_row(monkeypatch):
    monkeypatch.setenv("RANK", "one")
    monkeypatch.setenv("WORLD_SIZE", "2")
    monkeypatch.setenv("MESHFUSE_TIMEOUT", "soon")
    report = doctor.report()
    assert "the environment variable RANK is no number" in report
    assert "MESHFUSE_TIMEOUT is no time" in report


@pytest.mark.parametrize("module", ["launcher", "doctor", "environment"])
def test_launching_and_looking_import_no_torch(module):
    loaded = "print('torch' in sys.modules, 'nvfuser_direct' in sys.modules)"
    code = f"import sys, meshfuse.runtime.{module}; {loaded}"
    done = subprocess.run(
        [sys.executable, "-c", code], env=base_environment(), capture_output=True, text=True, timeout=60
    )
    assert done.stdout == "False False\n", done.stderr
