"""Fully sharded and pipelined steps of a small Llama on gloo ranks, beside hand-written ZeRO-3, FSDP2 and
torch.distributed.pipelining.

python benchmarks/parallel/run.py [sharded] [staged] [--ranks 2 4]

All rivals take turns in one run, every rank on one thread; ratios are medians over rounds, each of our step to the
rival's of the same round: of the time of the slowest rank, and of the processors' time of all ranks, which other work
on the machine disturbs less.
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
LIMIT = 900  # seconds of one number of ranks


def measured(script: str, ranks: int) -> dict[str, Any]:
    with tempfile.TemporaryDirectory() as folder:
        out = Path(folder) / "found.json"
        code = run(ranks, [str(HERE / script), str(out)], timeout=LIMIT)
        if code:
            raise SystemExit(f"{script} on {ranks} ranks ended with status {code}")
        return json.loads(out.read_text())


def sharded(ranks: int) -> None:
    """Sent are bytes of a rank over the parameters': of ours by the bill, of others as gloo is asked for them. Held are
    shards and the most that a step allocates beside them."""
    found = measured("sharded.py", ranks)
    size = found.pop("weights")
    print(f"\nfully sharded, {ranks} ranks: ZeRO-3 sends {3 * (ranks - 1) / ranks:.2f} of the parameters")
    print(f"{'':12}{'ms':>8}{'time':>8}{'cpu':>8}{'calls':>8}{'sent':>8}{'held':>8}")
    for name, line in found.items():
        held = (line["kept"] + line["peak"]) / size
        print(f"{name:12}{line['ms']:8.0f}{line['wall']:8.2f}{line['cpu']:8.2f}{line['calls']:8}"
              f"{line['sent'] / size:8.2f}{held:8.2f}")  # fmt: skip


def staged(ranks: int) -> None:
    found = measured("staged.py", ranks)
    print(f"\n{ranks} stages beside torch.distributed.pipelining")
    print(f"{'schedule':26}{'parts':>6}{'ours ms':>9}{'theirs':>9}{'time':>8}{'cpu':>8}")
    for line in found["beside"]:
        print(f"{line['schedule']:26}{line['microbatches']:6}{line['ours']:9.0f}{line['theirs']:9.0f}"
              f"{line['wall']:8.2f}{line['cpu']:8.2f}")  # fmt: skip
    print(f"\n{'stages that sleep':26}{'parts':>6}{'ms':>9}{'schedule':>9}{'ratio':>8}")
    for line in found["slept"]:
        print(f"{line['schedule']:26}{line['microbatches']:6}{line['ms']:9.0f}{line['span']:9.0f}"
              f"{line['ms'] / line['span']:8.2f}")  # fmt: skip
    held = found["held"]
    print(f"\n1f1b, 16 micro-batches allocate {held[1] / held[0]:.2f} of what 8 of the same size do, on the first rank")


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("parts", nargs="*", help="sharded, staged; both without")
    parser.add_argument("--ranks", type=int, nargs="*", default=[2, 4])
    args = parser.parse_args()
    os.environ.setdefault("OMP_NUM_THREADS", "1")
    os.environ.setdefault("KINETO_LOG_LEVEL", "99")
    os.environ.setdefault("TORCH_LOGS", "-inductor,-aot")
    for name, part in (("sharded", sharded), ("staged", staged)):
        for ranks in args.ranks if not args.parts or name in args.parts else ():
            part(ranks)
    return 0


if __name__ == "__main__":
    sys.exit(main())
