"""The bills of `benchmarks/bills`: no program moves more than its best so far, and ranks send what is billed."""

from __future__ import annotations

import sys
from pathlib import Path

import pytest

BENCHMARK = Path(__file__).parent.parent / "benchmarks" / "bills"
sys.path.insert(0, str(BENCHMARK))

import counting  # noqa: E402
import figures  # noqa: E402
import programs  # noqa: E402

FIGURES = figures.read_figures()

# MB per rank at full size, the best that has been reached: a bill above is a regression, one below belongs here.
BEST = {
    "a1": 29.3601, "b": 58.7203, "c2": 47.7102, "d2": 106.4305, "d3": 49.5452, "d4": 132.1492, "d7": 1.8350,
    "e2": 47.7102, "e3": 88.1091, "f1": 20.9715, "f2": 50.3542, "g1": 0.0860, "g2": 0.0860, "h1": 0.0573,
    "i1": 7.3400, "i3": 14.6801, "j2": 14.6801, "j4": 13.1072, "k1": 0.0, "k2": 0.0, "k3": 1.0486, "l1": 0.0,
    "l2": 0.9175, "l5": 0.0164, "l7": 1.3107, "m1": 5.7672, "m2": 14.6801, "m5": 14.6801, "n2": 0.0, "n4": 0.0215,
    "n6": 0.0072,
}  # fmt: skip

# The programs that miss a bar of the table, and why.
MISSES = {
    "d4": "the search ends at gathered MLP weights and all-reduced gradients of them; without gains it finds 104.6 MB",
    "i3": "what the experts read is sent to them once for the forward and again, transposed, for the gradient of w1",
    "k3": "a rank holds one and a half heads, which no box of [heads, head] is: half a head moves",
}


def test_every_program_of_the_table_is_built() -> None:
    assert list(programs.PROGRAMS) and set(programs.PROGRAMS) == set(FIGURES) == set(BEST)


@pytest.mark.parametrize("name", FIGURES)
def test_the_bill_is_at_its_best(name: str) -> None:
    billed = programs.PROGRAMS[name].define().bill().total / 1e6
    assert billed <= BEST[name] + 1e-4
    assert (name in MISSES) == bool(FIGURES[name].exceeded(billed)), MISSES.get(name)


@pytest.mark.parametrize("name", FIGURES)
def test_ranks_send_what_is_billed(name: str) -> None:
    fd = programs.PROGRAMS[name].define(programs.SMALL)
    assert counting.executed_bytes(fd, counting.random_inputs(fd)) == fd.bill().total


def test_a_bill_is_held_against_float32_figures() -> None:
    gathered_in_bfloat16 = figures.Figures("x", "", "", 30.0, 7.0, 14.0)
    assert gathered_in_bfloat16.best_xla == 30.0
    assert figures.Figures("x", "", "", 30.0, 20.0, 14.0).best_xla == 20.0
    assert gathered_in_bfloat16.exceeded(14.28) == ""
    assert gathered_in_bfloat16.exceeded(14.3) == "opt"
    assert gathered_in_bfloat16.exceeded(30.1) == "xla opt"
