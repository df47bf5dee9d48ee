"""The training example under `meshfuse run`: a rank is killed, the job starts anew and goes on from its checkpoint."""

from __future__ import annotations

from pathlib import Path

import pytest

pytestmark = pytest.mark.ranks

EXAMPLE = Path(__file__).resolve().parents[2] / "examples" / "gpt"
SCRIPT = f"""
import os, signal, sys
from pathlib import Path
sys.path.insert(0, {str(EXAMPLE)!r})
import data, fused, model, train_mesh
import torch
import meshfuse as mf
torch.set_num_threads(1)
config = model.Config(layers=1, width=16, heads=2, block=8, vocab=256)
text = data.to_tokens(data.EVAL_PATH.read_bytes()[:5000])
folder, victim, fatal = Path(sys.argv[1]), int(sys.argv[2]), int(sys.argv[3])
world = mf.World.current()

def before_step(step):
    if world.attempt == 0 and world.rank == victim and step == fatal:
        os.kill(os.getpid(), signal.SIGKILL)
    world.rank or print("step", step, "attempt", world.attempt, flush=True)

mesh = fused.parse_mesh(sys.argv[4])
losses = train_mesh.run(text, 12, mesh, config, folder, 3, before_step)
world.rank or print("losses", *map(repr, losses))
"""


def losses(done) -> list[float]:
    assert done.returncode == 0, done.stderr
    (line,) = [line for line in done.stdout.splitlines() if line.startswith("losses")]
    return [float(text) for text in line.split()[1:]]


def test_a_killed_training_goes_on_from_its_checkpoint(job, tmp_path):
    """The loss curve is that of one process without ranks that nothing happened to."""
    plans = {"MESHFUSE_CACHE": str(tmp_path / "cache")}
    reference = losses(job(SCRIPT, args=(str(tmp_path / "one"), "-1", "0", "tp=1"), **plans))
    launcher = ("-m", "meshfuse.runtime.launcher", "--ranks", "2", "--max-restarts", "1")
    done = job(SCRIPT, *launcher, args=(str(tmp_path / "two"), "1", "8", "tp=2"), **plans)
    assert losses(done) == pytest.approx(reference, abs=1e-5, rel=0)
    steps = [line.split()[1::2] for line in done.stdout.splitlines() if line.startswith("step")]
    # The last checkpoint before step 8 was made after step 6.
    assert [step for step, attempt in steps if attempt == "1"] == [str(step) for step in range(7, 13)]
    assert len(reference) == 12 and reference[-1] < reference[0]
    # Done already: nothing is trained.
    again = job(SCRIPT, args=(str(tmp_path / "two"), "-1", "0", "tp=1"), **plans)
    assert losses(again) == losses(done) and "step" not in again.stdout
