"""The bytes that 31 programs move per rank, beside the best plan known by hand, XLA's and DTensor's.

Writes results.json: [{id, ours_mb, opt_mb, xla_cpu_mb, dtensor_mb, executed_mb}]. `executed_mb` is counted by the
transport while all ranks' programs run on tensors of full size, and must equal the bill: minutes, and several GB.
`xla_cpu_mb` is measured where jax is installed (the extra `bench`, or another Python's: --jax PYTHON), else it is the
published figure; `dtensor_mb` is null where DTensor cannot run a program.
"""

from __future__ import annotations

import argparse
import importlib.util
import json
import subprocess
import sys
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from counting import executed_bytes, random_inputs
from figures import ROUNDING, Figures, read_figures
from programs import PROGRAMS

HERE = Path(__file__).parent
RESULTS = HERE / "results.json"
COLUMNS = ("ours_mb", "opt_mb", "xla_cpu_mb", "xla_tpu_mb", "dtensor_mb", "executed_mb")
MB = 1e6
LIMIT = 900.0


@dataclass(frozen=True, slots=True)
class Rival:
    """What another partitioner moves, in MB by program; `failed` says why it cannot run some."""

    version: str
    mb: dict[str, float]
    failed: dict[str, str]


def measure_rival(script: str, python: str, ids: list[str]) -> Rival:
    """Run a rival's programs in a process of their own. Raises CalledProcessError where that fails."""
    done = subprocess.run([python, script, *ids], cwd=HERE, check=True, capture_output=True, text=True, timeout=LIMIT)
    found = json.loads(done.stdout.splitlines()[-1])
    return Rival(found["version"], found["mb"], found.get("failed", {}))


def measure(figures: Figures, execute: bool, xla: Rival, dtensor: Rival, old: dict[str, Any]) -> dict[str, Any]:
    """One line of results.json. AssertionError where the ranks send other bytes than the bill says.

    What is not executed keeps the figure of an earlier run, if the bill is the same.
    """
    fd = PROGRAMS[figures.id].define()
    billed = fd.bill().total
    executed = executed_bytes(fd, random_inputs(fd)) if execute else None
    assert executed in (None, billed), f"{figures.id}: billed {billed:,.1f} bytes, executed {executed:,.1f}"
    before = old.get("executed_mb") if old.get("ours_mb") == billed / MB else None
    return {
        "id": figures.id,
        "ours_mb": billed / MB,
        "opt_mb": figures.opt_mb,
        "xla_cpu_mb": xla.mb.get(figures.id, figures.xla_cpu_mb),
        "dtensor_mb": dtensor.mb.get(figures.id),
        "executed_mb": before if executed is None else executed / MB,
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


def differences(xla: Rival) -> list[str]:
    """Where XLA as measured is not as published."""
    lines = []
    for name, figures in read_figures().items():
        now = xla.mb.get(name, figures.xla_cpu_mb)
        if abs(now - figures.xla_cpu_mb) > ROUNDING + 1e-3:
            lines.append(f"xla {name}: {now:.2f} MB measured, {figures.xla_cpu_mb:.2f} published")
    if lines:
        lines.append(
            "(measured: the mean over devices; published: a permute in full, though some devices send nothing)"
        )
    return lines


def arguments() -> argparse.Namespace:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("ids", nargs="*", help="programs of the table; all of them without")
    parser.add_argument("--no-execute", action="store_true", help="keep the executed figures of equal bills")
    here = sys.executable if importlib.util.find_spec("jax") else None
    parser.add_argument("--jax", metavar="PYTHON", default=here, help="a Python that has jax, to measure XLA with")
    return parser.parse_args()


def main() -> int:
    args = arguments()
    ids = [name for name in read_figures() if not args.ids or name in args.ids]
    old = {line["id"]: line for line in json.loads(RESULTS.read_text())} if RESULTS.exists() else {}
    xla = measure_rival("rival_xla.py", args.jax, ids) if args.jax else Rival("not installed, as published", {}, {})
    dtensor = measure_rival("rival_dtensor.py", sys.executable, ids)
    results = []
    print(f"XLA: jax {xla.version}; DTensor: torch {dtensor.version}")
    print("MB per rank on the wire, float32, ring collectives\n" + heading())
    for name in ids:
        figures = read_figures()[name]
        results.append(measure(figures, not args.no_execute, xla, dtensor, old.get(name, {})))
        print(line(figures, results[-1]), flush=True)
    notes = [f"dtensor {name}: {why}" for name, why in dtensor.failed.items()]
    print("\n".join([*(differences(xla) if xla.mb else []), *notes]))
    known = old | {result["id"]: result for result in results}
    RESULTS.write_text(json.dumps([known[name] for name in read_figures() if name in known], indent=1) + "\n")
    return 0


if __name__ == "__main__":
    sys.exit(main())
