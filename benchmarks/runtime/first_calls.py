"""The first call of a block, forward and backward, with shapes that are new, beside DTensor's.

Writes first_calls.json: [{work, ranks, variant, rows, first_ms, step_ms}]: the wall time of the first call on the
slowest rank and of one in steady state. The first rows are the first that the process sees of the work; the others are
new shapes, each in a definition of its own. No plans are kept on disk.
"""

from __future__ import annotations

import argparse
import dataclasses
import json
import os
import statistics
import sys
import tempfile
import time
from pathlib import Path
from typing import Any

from meshfuse.runtime.launcher import run

HERE = Path(__file__).parent
WORKS, VARIANTS, ROWS = ("block_tp", "block_sp"), ("dtensor", "meshfuse_eager"), (128, 160, 192, 224)


def timed(step: Any) -> tuple[float, float]:
    """Milliseconds of the first call and of one of some later ones, on the slowest rank."""
    import torch
    import torch.distributed as dist

    found = []
    for _ in range(8):
        dist.barrier()
        start = time.perf_counter()
        step()
        found.append((time.perf_counter() - start) * 1e3)
    slowest = torch.tensor(found)
    dist.all_reduce(slowest, dist.ReduceOp.MAX)
    return float(slowest[0]), statistics.median(slowest[1:].tolist())


def lines(ranks: int) -> list[dict[str, Any]]:
    """What this rank measures."""
    import works
    from worker import Bench

    made = []
    for work in (w for w in works.WORKS if w.name in WORKS):
        for variant in VARIANTS:
            for rows in ROWS:
                shapes = {n: (rows, *s[1:]) if n in ("x", "seed") else s for n, s in work.shapes.items()}
                bench = Bench(dataclasses.replace(work, shapes=shapes))
                first, step = timed(bench.steps([variant])[variant])
                made.append({"work": work.name, "ranks": ranks, "variant": variant, "rows": rows,
                             "first_ms": round(first, 1), "step_ms": round(step, 1)})  # fmt: skip
    return made


def on_rank(out: Path) -> None:
    from worker import joined

    with joined() as world:
        found = lines(world.size)
    if world.rank == 0:
        out.write_text(json.dumps(found))


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--ranks", type=int, nargs="*", default=[2, 4])
    parser.add_argument("--out", type=Path, help="on a rank: where the first one writes its lines")
    args = parser.parse_args()
    if args.out:
        on_rank(args.out)
        return 0
    os.environ |= {"OMP_NUM_THREADS": "1", "MESHFUSE_CACHE": "off"}
    found = []
    for ranks in args.ranks:
        with tempfile.TemporaryDirectory() as folder:
            out = Path(folder) / "lines.json"
            if code := run(ranks, [__file__, "--out", str(out)], timeout=600):
                return code
            found += json.loads(out.read_text())
    text = "{work:<10}{ranks:>3} ranks {variant:<15}{rows:>4} rows: first {first_ms:>7.1f} ms, later {step_ms:>6.1f}"
    print("\n".join(text.format(**line) for line in found))
    (HERE / "first_calls.json").write_text(json.dumps(found, indent=1) + "\n")
    return 0


if __name__ == "__main__":
    sys.exit(main())
