"""The figures that bills are compared with, and when a bill exceeds them.

figures.json: MB per rank, float32, ring collectives, for B=8, S=512, D=1024, F=4096, 16 heads, V=32768. `opt_mb` is the
best plan known by hand; `xla_*_mb` come from jax 0.10.2 with the Shardy partitioner for the same annotations, compiled
for 8 host devices and ahead of time for v5e-8, which gathers in bfloat16.
"""

from __future__ import annotations

import json
from dataclasses import dataclass
from pathlib import Path

# A figure has two decimals: anything up to half a unit above it is equal to it.
ROUNDING = 0.005
SLACK = 1.02


@dataclass(frozen=True, slots=True)
class Figures:
    """Published MB per rank of one program; `xla_tpu_mb` is None where there is none."""

    id: str
    program: str
    mesh: str
    xla_cpu_mb: float
    xla_tpu_mb: float | None
    opt_mb: float

    @property
    def best_xla(self) -> float:
        """XLA's best in float32: a figure below the float32 optimum has moved bfloat16."""
        if self.xla_tpu_mb is None or self.xla_tpu_mb < self.opt_mb:
            return self.xla_cpu_mb
        return min(self.xla_cpu_mb, self.xla_tpu_mb)

    def exceeded(self, ours: float) -> str:
        """Which bars a bill of `ours` MB misses: "xla", "opt", "xla opt", or nothing."""
        missed = ["xla"] if ours > self.best_xla + ROUNDING else []
        return " ".join([*missed, "opt"] if ours > self.opt_mb * SLACK + ROUNDING else missed)


def read_figures() -> dict[str, Figures]:
    """All figures by program, in the order of the table."""
    rows = json.loads((Path(__file__).parent / "figures.json").read_text(encoding="utf-8"))
    return {row["id"]: Figures(**row) for row in rows}
