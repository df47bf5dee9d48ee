"""The bytes that 31 programs move per rank, beside the best plan known by hand and XLA's for the same annotations.

Writes results.json: [{id, ours_mb, opt_mb, xla_cpu_mb, dtensor_mb, executed_mb}]. `executed_mb` is counted by the
transport while all ranks' programs run on tensors of full size, and must equal the bill: minutes, and several GB.
`dtensor_mb` is null: DTensor is not measured here.
"""

from __future__ import annotations

import argparse
import json
import sys
from pathlib import Path
from typing import Any

from counting import executed_bytes, random_inputs
from figures import Figures, read_figures
from programs import PROGRAMS

HERE = Path(__file__).parent
COLUMNS = ("ours_mb", "opt_mb", "xla_cpu_mb", "xla_tpu_mb", "executed_mb")
MB = 1e6


def measure(figures: Figures, execute: bool) -> dict[str, Any]:
    """One line of results.json. AssertionError where the ranks send other bytes than the bill says."""
    fd = PROGRAMS[figures.id].define()
    billed = fd.bill().total
    executed = executed_bytes(fd, random_inputs(fd)) if execute else None
    assert executed in (None, billed), f"{figures.id}: billed {billed:,.1f} bytes, executed {executed:,.1f}"
    return {
        "id": figures.id,
        "ours_mb": billed / MB,
        "opt_mb": figures.opt_mb,
        "xla_cpu_mb": figures.xla_cpu_mb,
        "dtensor_mb": None,
        "executed_mb": None if executed is None else executed / MB,
    }


def heading() -> str:
    names = (column.removesuffix("_mb").replace("_", " ") for column in COLUMNS)
    return f"{'id':<4}" + "".join(f"{name:>10}" for name in names) + f"{'ours/opt':>10}  exceeds   program"


def line(figures: Figures, result: dict[str, Any]) -> str:
    values = {"xla_tpu_mb": figures.xla_tpu_mb, **result}
    cells = "".join(f"{'-' if values[c] is None else format(values[c], '.2f'):>10}" for c in COLUMNS)
    return f"{figures.id:<4}{cells}{ratio(result):>10}  {figures.exceeded(result['ours_mb']):<8}  {figures.program}"


def ratio(result: dict[str, Any]) -> str:
    """Ours over the optimum; "=" where both are nothing."""
    ours, opt = result["ours_mb"], result["opt_mb"]
    if opt:
        return f"{ours / opt:.3f}"
    return "=" if ours == 0 else "inf"


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("ids", nargs="*", help="programs of the table; all of them without")
    parser.add_argument("--no-execute", action="store_true", help="only print; results.json stays as it is")
    args = parser.parse_args()
    results = []
    print("MB per rank on the wire, float32, ring collectives\n" + heading())
    for name, figures in read_figures().items():
        if not args.ids or name in args.ids:
            results.append(measure(figures, not args.no_execute))
            print(line(figures, results[-1]), flush=True)
    if not args.ids and not args.no_execute:
        (HERE / "results.json").write_text(json.dumps(results, indent=1) + "\n")
    return 0


if __name__ == "__main__":
    sys.exit(main())
