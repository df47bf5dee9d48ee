"""Time of a step on 2 and 4 gloo ranks, against hand-written torch and torch.distributed, which is 1.

Writes results.json: [{work, ranks, variant, wall_ratio, cpu_ratio, collectives, bytes}]. All variants of a work take
turns in one run, every rank on one thread; ratios are medians over rounds, each of a variant's turn to the hand-written
one's of the same round. `meshfuse` has its segments compiled by Inductor, as `hand_compiled` and `dtensor_compiled`
have all that torch.compile can; `meshfuse_eager` runs them op by op. Outputs and gradients are checked against
unsharded torch. Minutes: three variants are compiled on every rank.
"""

from __future__ import annotations

import argparse
import json
import os
import sys
import tempfile
from pathlib import Path
from typing import Any

from meshfuse.runtime.launcher import run

HERE = Path(__file__).parent
VARIANTS = ("hand", "hand_compiled", "dtensor", "dtensor_compiled", "meshfuse_eager", "meshfuse")


def measure(ranks: int, words: list[str], limit: float) -> list[dict[str, Any]]:
    """The lines of one number of ranks."""
    with tempfile.TemporaryDirectory() as folder:
        out = Path(folder) / "lines.json"
        code = run(ranks, [str(HERE / "worker.py"), "--out", str(out), *words], timeout=limit)
        lines = json.loads(out.read_text()) if out.exists() else []
    if code:
        raise SystemExit(f"{ranks} ranks ended with status {code}")
    return lines


def table(lines: list[dict[str, Any]]) -> str:
    out = [f"{'work':<14}{'ranks':>5}  " + "".join(f"{name:>26}" for name in VARIANTS)]
    out.append(" " * 21 + f"{'wall   cpu  calls  kbytes':>26}" * len(VARIANTS))
    for work, ranks in dict.fromkeys((line["work"], line["ranks"]) for line in lines):
        found = {line["variant"]: line for line in lines if (line["work"], line["ranks"]) == (work, ranks)}
        out.append(f"{work:<14}{ranks:>5}  " + "".join(_cells(found.get(name)) for name in VARIANTS))
    return "\n".join(out)


def _cells(line: dict[str, Any] | None) -> str:
    if line is None:
        return f"{'-':>26}"
    return f"{line['wall_ratio']:>8.2f}{line['cpu_ratio']:>6.2f}{line['collectives']:>5}{line['bytes'] / 1e3:>7.0f}"


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("works", nargs="*", help="names of works; all of them without")
    parser.add_argument("--ranks", type=int, nargs="*", default=[2, 4])
    parser.add_argument("--rounds", type=int, default=40)
    parser.add_argument("--variants", nargs="*", default=list(VARIANTS))
    parser.add_argument("--limit", type=float, default=1800, help="seconds for each number of ranks")
    args = parser.parse_args()
    os.environ.setdefault("OMP_NUM_THREADS", "1")
    # Lines of torch about its profiler and its caches would hide the table.
    os.environ.setdefault("KINETO_LOG_LEVEL", "99")
    os.environ.setdefault("TORCH_LOGS", "-inductor,-aot")
    words = ["--rounds", str(args.rounds), "--works", *args.works, "--variants", *args.variants]
    lines = [line for ranks in args.ranks for line in measure(ranks, words, args.limit)]
    print(table(lines))
    if not args.works and tuple(args.variants) == VARIANTS and args.ranks == [2, 4]:
        (HERE / "results.json").write_text(json.dumps(lines, indent=1) + "\n")
    return 0


if __name__ == "__main__":
    sys.exit(main())
