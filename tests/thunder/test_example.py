"""The example prints the same losses in one process and on ranks."""

from __future__ import annotations

import subprocess
import sys
from pathlib import Path

import pytest
from rank_pool import base_environment

SCRIPT = Path(__file__).parents[2] / "examples/thunder_tp.py"


def losses(*command: str) -> list[str]:
    done = subprocess.run(
        [sys.executable, "-W", "ignore", *command], env=base_environment(), capture_output=True, text=True, timeout=280
    )
    assert done.returncode == 0, done.stdout[-2000:] + done.stderr[-2000:]
    return [line for line in done.stdout.splitlines() if line.startswith("step")]


@pytest.mark.slow
def test_the_example_trains_alike_on_ranks() -> None:
    alone = losses(str(SCRIPT))
    assert len(alone) == 3
    assert losses("-m", "meshfuse", "run", "--ranks", "4", str(SCRIPT), "--fsdp") == alone
