"""How the benchmark counts what XLA and DTensor move: texts and programs small enough to count by hand."""

from __future__ import annotations

import json
import subprocess
import sys
from pathlib import Path

import pytest

BENCHMARK = Path(__file__).parent.parent / "benchmarks" / "bills"
sys.path.insert(0, str(BENCHMARK))

import figures  # noqa: E402
import hlo  # noqa: E402
import run  # noqa: E402


def module(*body: str, more: str = "") -> str:
    lines = "\n".join(f"  {line}" for line in body)
    entry = f"ENTRY %main (p: f32[8,4]) -> f32[8,4] {{\n{lines}\n}}\n"
    return f"HloModule m, entry_computation_layout={{()->f32[]}}\n\n{more}\n{entry}"


GROUPS = [
    ("replica_groups=[2,4]<=[8]", 4),
    ("replica_groups=[4,2]<=[2,4]T(1,0)", 2),
    ("replica_groups={{0,1,2,3},{4,5,6,7}}", 4),
    ("replica_groups={}", 8),
    ("replica_groups=mesh['a'=4,'b'=2] {'b'}", 2),
    ("replica_groups=mesh['a'=4,'b'=2] {'a','b'}", 8),
    ("replica_groups=mesh['a'=8] {'a':(2)4}", 4),
]


@pytest.mark.parametrize(("groups", "n"), GROUPS)
def test_every_form_of_groups_is_read(groups: str, n: int) -> None:
    text = module(f"ROOT %r = f32[8,4]{{1,0}} all-reduce(%p), channel_id=1, {groups}, to_apply=%add")
    assert hlo.wire_bytes(text, 8) == 2 * (n - 1) / n * 8 * 4 * 4


def test_an_unknown_form_of_groups_is_no_guess() -> None:
    with pytest.raises(ValueError, match="replica_groups of an unknown form"):
        hlo.wire_bytes(module("ROOT %r = f32[8]{0} all-reduce(%p), replica_groups=@cluster, to_apply=%add"), 8)


@pytest.mark.parametrize(
    ("line", "wire"),
    [
        ("%g = f32[8,4]{1,0} all-gather(%p), replica_groups=[2,4]<=[8], dimensions={0}", 3 / 4 * 128),
        ("%g = bf16[8,4]{1,0} all-gather(%p), replica_groups=[2,4]<=[8], dimensions={0}", 3 / 4 * 128),
        ("%s = f32[2,4]{1,0} reduce-scatter(%p), replica_groups=[2,4]<=[8], dimensions={0}", 3 * 32),
        ("%a = (f32[1,4]{1,0}, f32[1,4]{1,0}) all-to-all(%p, %p), replica_groups=[4,2]<=[8]", 1 / 2 * 32),
        ("%c = f32[8,4]{1,0} collective-permute(%p), source_target_pairs={{0,1},{1,2},{2,2},{3,0}}", 3 / 8 * 128),
        ("%m = f32[8,4]{1,0} dot(%p, %p)", 0),
    ],
)
def test_every_kind_of_collective_is_counted(line: str, wire: float) -> None:
    assert hlo.wire_bytes(module(line, "ROOT %t = f32[8,4]{1,0} copy(%p)"), 8) == wire


SLICING = """%slicing (a: f32[8,4], b: s32[]) -> f32[1,4] {
  %a = f32[8,4]{1,0} parameter(0)
  %b = s32[] parameter(1)
  ROOT %d = f32[1,4]{1,0} dynamic-slice(%a, %b, %b), dynamic_slice_sizes={1,4}
}
"""
REDUCED = "%r = f32[8,4]{1,0} all-reduce(%p), replica_groups=[1,8]<=[8], to_apply=%add"
BOTH = "%r = (f32[8,4]{1,0}, f32[8,4]{1,0}) all-reduce(%p, %p), replica_groups=[1,8]<=[8], to_apply=%add"


@pytest.mark.parametrize(
    ("body", "passes"),
    [
        ((REDUCED, "ROOT %d = f32[1,4]{1,0} dynamic-slice(%r, %i, %i), dynamic_slice_sizes={1,4}"), 1),
        ((REDUCED, "ROOT %f = f32[1,4]{1,0} fusion(%r, %i), kind=kLoop, calls=%slicing"), 1),
        ((REDUCED, "%c = f32[8,4]{1,0} copy(%r)", "ROOT %d = f32[1,4]{1,0} dynamic-slice(%c, %i, %i)"), 1),
        ((REDUCED, "%d = f32[1,4]{1,0} dynamic-slice(%r, %i, %i)", "ROOT %n = f32[8,4]{1,0} negate(%r)"), 2),
        ((REDUCED, "ROOT %n = f32[8,4]{1,0} negate(%r)"), 2),
        (
            (
                BOTH,
                "%x = f32[8,4]{1,0} get-tuple-element(%r), index=0",
                "%y = f32[8,4]{1,0} get-tuple-element(%r), index=1",
                "%d = f32[1,4]{1,0} dynamic-slice(%x, %i, %i)", "ROOT %n = f32[8,4]{1,0} negate(%y)",
            ),
            3,
        ),
    ],
)  # fmt: skip
def test_an_all_reduce_that_is_sliced_is_a_reduce_scatter(body: tuple[str, ...], passes: int) -> None:
    assert hlo.wire_bytes(module(*body, more=SLICING), 8) == passes * 7 / 8 * 128


def test_loops_count_as_often_as_they_run() -> None:
    body = "%body (p: f32[8,4]) -> f32[8,4] {\n  ROOT " + REDUCED + "\n}\n"
    loop = "ROOT %w = f32[8,4]{1,0} while(%p), condition=%cond, body=%body"
    known = loop + ', backend_config={"known_trip_count":{"n":"5"}}'
    assert hlo.wire_bytes(module(known, more=body), 8) == 5 * 2 * 7 / 8 * 128
    with pytest.raises(ValueError, match="loop with collectives of unknown length"):
        hlo.wire_bytes(module(loop, more=body), 8)


@pytest.mark.slow
def test_dtensor_is_counted_as_by_hand() -> None:
    """One all-reduce of the result; two gathers and an all-reduce; what it cannot say is told."""
    ids = ["a1", "j4", "n6", "k2"]
    found = run.measure_rival("rival_dtensor.py", sys.executable, ids)
    t, d = 4096, 1024
    assert found.mb["a1"] == pytest.approx(2 * 7 / 8 * t * d * 4 / 1e6)
    assert found.mb["j4"] == pytest.approx((1 / 2 * (d * d / 4) + 2 * 3 / 4 * (t / 2 * d)) * 4 / 1e6)
    assert found.mb["n6"] == pytest.approx(7 / 8 * t * d * 4 / 1e6)
    assert "k2" not in found.mb and "not evenly divisible" in found.failed["k2"]


@pytest.mark.slow
def test_a_rival_that_fails_is_an_error() -> None:
    with pytest.raises(subprocess.CalledProcessError):
        run.measure_rival("rival_dtensor.py", sys.executable, ["no such program"])


def test_plans_of_xla_that_are_not_as_published_are_marked() -> None:
    published = {name: row.xla_cpu_mb for name, row in figures.read_figures().items()}
    assert run.differences(run.Rival("", published, {})) == []
    (line, _) = run.differences(run.Rival("", {**published, "a1": 31.0}, {}))
    assert line == "xla a1: 31.00 MB measured, 29.36 published"


def test_the_results_are_complete() -> None:
    results = json.loads((BENCHMARK / "results.json").read_text())
    assert [line["id"] for line in results] == list(figures.read_figures())
    for line in results:
        assert set(line) == {"id", "ours_mb", "opt_mb", "xla_cpu_mb", "dtensor_mb", "executed_mb"}
        assert line["ours_mb"] == line["executed_mb"] and line["xla_cpu_mb"] is not None
        assert (line["dtensor_mb"] is None) == (line["id"] in ("k2", "k3"))
