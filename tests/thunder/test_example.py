"""The example prints the same losses in one process and on ranks."""

from __future__ import annotations

from pathlib import Path

import forked
import pytest
from rank_pool import base_environment

SCRIPT = Path(__file__).parents[2] / "examples/thunder_tp.py"


def losses(folder: Path, *command: str) -> list[str]:
    done = forked.finished(command, base_environment(), folder, 280)
    assert done.returncode == 0, done.stdout[-2000:] + done.stderr[-2000:]
    return [line for line in done.stdout.splitlines() if line.startswith("step")]


@pytest.mark.slow
def test_the_example_trains_alike_on_ranks(tmp_path: Path) -> None:
    alone = losses(tmp_path, str(SCRIPT))
    assert len(alone) == 3
    assert losses(tmp_path, "-m", "meshfuse", "run", "--ranks", "4", str(SCRIPT), "--fsdp") == alone
