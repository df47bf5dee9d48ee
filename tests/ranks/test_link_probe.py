"""`meshfuse doctor --links`: the fit of a link, and the whole command on real ranks."""

from __future__ import annotations

import json
import re
from pathlib import Path

import forked
import pytest
from hypothesis import given
from hypothesis import strategies as st
from rank_pool import base_environment

import meshfuse as mf
from meshfuse import costs
from meshfuse.runtime import link_probe

LINKS = st.builds(mf.Link, st.floats(1e7, 1e12), st.floats(1e-7, 1e-3))


@given(LINKS, st.integers(2, 64))
def test_the_link_behind_exact_times_is_found(link: mf.Link, n: int) -> None:
    times = [(float(size), costs.all_gather(link, n, size)) for size in link_probe.SIZES]
    found, error = link_probe.fit(n, times)
    assert error < 0.05
    for size, seconds in times:
        assert costs.all_gather(found, n, size) == pytest.approx(seconds, rel=0.05)


@given(LINKS, st.integers(2, 16), st.lists(st.floats(0.7, 1.4), min_size=6, max_size=6))
def test_noise_moves_the_fit_no_further_than_it_moves_the_times(link: mf.Link, n: int, noise: list[float]) -> None:
    exact = [costs.all_gather(link, n, size) for size in link_probe.SIZES]
    times = [(float(s), t * factor) for s, t, factor in zip(link_probe.SIZES, exact, noise, strict=True)]
    found, error = link_probe.fit(n, times)
    assert found.bandwidth > 0 and found.latency >= 0
    squares = sum((costs.all_gather(found, n, s) / t - 1) ** 2 for s, t in times)
    assert squares <= sum((e / t - 1) ** 2 for e, (_, t) in zip(exact, times, strict=True)) + 0.02
    assert error == pytest.approx(max(abs(costs.all_gather(found, n, s) / t - 1) for s, t in times))


@pytest.mark.parametrize(
    "times", [[(1e3, 1e-3), (1e6, 1e-4)], [(1e3, 1e-9), (1e9, 1.0)], [(1e6, 1e-3)], [(1e6, 1e-3), (1e6, 2e-3)]]
)
def test_times_that_are_no_line_still_give_a_link(times: list[tuple[float, float]]) -> None:
    found, _ = link_probe.fit(4, times)
    assert found.bandwidth > 0 and found.latency >= 0


def test_the_report_can_be_pasted() -> None:
    measured = [
        link_probe.Measured("dp", 2, mf.Link(1.25e9, 8.5e-5), 0.04),
        link_probe.Measured("tp", 4, mf.Link(3e9, 0.0), 0.2),
    ]
    machine = mf.Machine(mf.Link(1.25e9, 8.5e-5), mf.Link(1.25e9, 8.5e-5), 8, 7.1e10, 1e10)
    lines = link_probe.report(measured, "cpu", machine, Path("/cache/links.json"), (131072, 65536)).splitlines()
    assert lines[0].split() == ["axis", "ranks", "latency", "bandwidth", "fits", "within"]
    assert lines[1].split() == ["dp", "2", "85", "us", "1.25", "GB/s", "4%"]
    text = next(line for line in lines if line.startswith("links="))
    mesh = eval(f"mf.DeviceMesh((2, 4), ('dp', 'tp'), {text})", {"mf": mf})
    assert mesh.links == tuple(m.link for m in measured) and (mesh.flops, mesh.memory) == (7.1e10, 1e10)
    assert lines[-3].startswith("kept in /cache/links.json: meshes without links have these from now on")
    assert lines[-1] == "a gather and a sum beats gloo's all-reduce up to 128 KiB; meshfuse uses it up to 64 KiB"


@pytest.mark.parametrize(
    ("text", "ranks"), [("dp=2,tp=4", 4), ("dp", 2), ("dp=x", 2), ("", 2), ("dp=-1,tp=-2", 2), ("a=1,a=2", 2)]
)
def test_a_mesh_that_the_ranks_do_not_fill(text: str, ranks: int) -> None:
    with pytest.raises(mf.ArgumentError, match=rf"--mesh: found '{text}', needed axes of {ranks} ranks in all"):
        link_probe.mesh_of(text, ranks)


@pytest.mark.ranks
def test_links_measured_on_real_ranks(tmp_path: Path) -> None:
    words = ["-m", "meshfuse", "doctor", "--links", "--ranks", "4", "--mesh", "dp=2,tp=2", "--limit", "1"]
    done = forked.finished(words, base_environment(MESHFUSE_CACHE=str(tmp_path)), tmp_path, 120)
    assert done.returncode == 0, done.stderr
    assert f"kept in {tmp_path / 'links.json'}: meshes without links" in done.stdout
    kept = json.loads((tmp_path / "links.json").read_text())
    assert kept["host"] == 4 and 1e8 < kept["flops"] < 1e14 and 1e8 < kept["memory"] < 1e13
    text = next(line for line in done.stdout.splitlines() if line.startswith("links="))
    mesh = eval(f"mf.DeviceMesh((2, 2), ('dp', 'tp'), {text})", {"mf": mf})
    assert all(0 < link.bandwidth < 1e12 and link.latency < 10 for link in mesh.links)
    assert re.search(
        r"a gather and a sum beats gloo's all-reduce (up to \d+ KiB|at no size); meshfuse uses", done.stdout
    )


@pytest.mark.ranks
def test_a_wrong_mesh_is_one_error_and_nothing_hangs(tmp_path: Path) -> None:
    words = ["-m", "meshfuse", "doctor", "--links", "--ranks", "2", "--mesh", "dp=3"]
    done = forked.finished(words, base_environment(), tmp_path, 120)
    assert done.returncode == 1
    assert done.stderr.count("--mesh: found 'dp=3', needed axes of 2 ranks in all") == 1
