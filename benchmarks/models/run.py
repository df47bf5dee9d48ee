"""Steps of a small Llama on gloo ranks, beside torch's own ways: a table of both and their ratio.

python benchmarks/models/run.py [case ...]      cases: tp sp fsdp fsdp_tp
"""

from __future__ import annotations

import json
import subprocess
import sys
import tempfile
from pathlib import Path

STEP = Path(__file__).parent / "step.py"
CASES = {
    "tp": (2, ("dtensor", "compiled")), "sp": (2, ("dtensor",)), "fsdp": (2, ("fsdp2",)), "fsdp_tp": (4, ("fsdp2",)),
}  # fmt: skip
_LIMIT = 1500  # seconds of one pair


def main() -> None:
    chosen = sys.argv[1:] or list(CASES)
    print(
        f"{'case':10}{'ranks':>6}  {'beside':10}{'ours ms':>9}{'theirs ms':>11}{'ratio':>7}{'host ms':>9}{'first s':>9}"
    )
    for case in chosen:
        ranks, rivals = CASES[case]
        for rival in rivals:
            found = measured(case, rival, ranks)
            ours, theirs = found["ours"], found["theirs"]
            print(
                f"{case:10}{ranks:6}  {rival:10}{ours:9.1f}{theirs:11.1f}{ours / theirs:7.2f}{found['host']:9.2f}"
                f"{found['first']:9.1f}",
                flush=True,
            )


def measured(case: str, rival: str, ranks: int) -> dict[str, float]:
    """The least time of a step of each, in milliseconds, from the same ranks, which take turns."""
    with tempfile.TemporaryDirectory() as folder:
        out = Path(folder) / "found.json"
        command = [sys.executable, "-m", "meshfuse", "run", "--ranks", str(ranks), str(STEP), case, rival, str(out)]
        done = subprocess.run(command, capture_output=True, text=True, timeout=_LIMIT)
        if done.returncode:
            raise SystemExit(f"{case} beside {rival} failed:\n{done.stdout[-3000:]}\n{done.stderr[-3000:]}")
        return json.loads(out.read_text())


if __name__ == "__main__":
    main()
