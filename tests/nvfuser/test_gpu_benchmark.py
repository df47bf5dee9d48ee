"""The GPU benchmark's programs and checks, on a CPU with fake kernels; it measures nothing without a GPU."""

from __future__ import annotations

import os
import subprocess
import sys
import time
from collections.abc import Callable
from pathlib import Path
from types import SimpleNamespace

import fake_kernels
import pytest
import torch

from meshfuse.backends.nvfuser.partition import LIBRARY
from op_references import NVIDIA_ONLY
from scripts import script

FOLDER = Path(__file__).parents[2] / "benchmarks" / "gpu"
sys.path.insert(0, str(FOLDER))

import gpu_checks  # noqa: E402  # pyright: ignore[reportMissingImports]
import gpu_times  # noqa: E402  # pyright: ignore[reportMissingImports]
import gpu_works  # noqa: E402  # pyright: ignore[reportMissingImports]
import pieces  # noqa: E402  # pyright: ignore[reportMissingImports]

pytestmark = pytest.mark.nvfuser


@pytest.mark.parametrize("work", gpu_works.elementwise(6, 16), ids=lambda work: work.name)
def test_works_are_what_is_written_by_hand(work: gpu_works.Work, monkeypatch: pytest.MonkeyPatch) -> None:
    launcher = fake_kernels.use(monkeypatch)
    fd, inputs = work.definition(), work.inputs("cpu")
    expected = work.by_hand(*(t.double() for t in inputs))
    for a, b in zip(fd.execute(inputs), expected, strict=True):
        torch.testing.assert_close(a.double(), b, rtol=2e-2, atol=2e-2)
    assert launcher.calls == len(launcher.parts) == 1
    assert gpu_times.taken_whole(fd)
    assert callable(gpu_times.native_call(fd, inputs))


@pytest.mark.parametrize("fused", [True, False])
@pytest.mark.parametrize("ranks", [1, 4])
def test_the_block_is_right(ranks: int, fused: bool, monkeypatch: pytest.MonkeyPatch) -> None:
    launcher = fake_kernels.use(monkeypatch)
    found = gpu_checks.check_simulated(gpu_works.Block(2, 8, 32, 4, fused), ranks, "cpu")
    assert found["state"] == "right", found
    assert launcher.calls
    assert {*found["by"]} <= {"nvfuser: compiled", f"eager: nvfuser: {LIBRARY}"}


def test_every_op_is_right(monkeypatch: pytest.MonkeyPatch) -> None:
    """Through the whole backend: also what the definitions of single ops are called with."""
    launcher = fake_kernels.use(monkeypatch)
    lines = [line for _, make in gpu_checks.ops("cpu") for line in make()]
    assert not [line for line in lines if line["state"] == "wrong"]
    assert {line["op"] for line in lines if line["state"].startswith("no reference")} <= NVIDIA_ONLY
    assert launcher.calls == len(launcher.parts) > len(lines) / 2


def test_the_example_is_right(monkeypatch: pytest.MonkeyPatch) -> None:
    launcher = fake_kernels.use(monkeypatch)
    (_, read), *_ = gpu_checks.example("cpu")
    (found,) = read()
    assert found["state"] == "right" and launcher.calls, found


def test_the_block_on_real_ranks(monkeypatch: pytest.MonkeyPatch) -> None:
    """Over gloo, and without nvFuser's kernels, which refuse a CPU."""
    monkeypatch.setenv("MESHFUSE_BACKEND", "nvfuser")
    (_, run), *_ = gpu_checks.ranks("cpu", (2, 8, 32, 4))
    (found,) = run()
    assert (found["ranks"], found["how"], found["state"]) == (2, "real", "right"), found


def test_a_variant_that_fails_is_named_and_the_others_go_on(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(torch.cuda, "synchronize", lambda: None)
    right = [torch.ones(3, dtype=torch.float64)]

    def failing() -> list[torch.Tensor]:
        raise RuntimeError("operation not permitted when stream is capturing")

    off, nan = [right[0] + 1], [right[0] * torch.nan]
    calls = {"good": lambda: right, "graph": failing, "off": lambda: off, "nan": lambda: nan}
    good, problems, first = gpu_times.checked(calls, right, 0.1)
    assert list(good) == ["good"] and list(first) == ["good", "off", "nan"]
    assert [(p["part"], p["problem"].partition(":")[0]) for p in problems] == [
        ("graph", "RuntimeError"), ("off", "AssertionError"), ("nan", "AssertionError"),
    ]  # fmt: skip


# pieces in processes of their own ---------------------------------------------------------------------------------

WORKER = """
import os, sys, time
sys.path.insert(0, {folder!r})
from pathlib import Path
from pieces import work

def fail():
    raise ValueError("no such thing")

def hang():
    Path({mark!r}).touch()
    time.sleep(600)

def broken():
    os.environ["BROKEN"] = "1"
    raise RuntimeError("illegal memory access")

def ok(place):
    return lambda: [dict(place=place, broken=os.environ.get("BROKEN"))]

print("what a library prints")
name, first, step, into, end = sys.argv[1:]
kinds = dict(fail=fail, crash=os.abort, hang=hang, broken=broken, part=lambda: [dict(part="graph", problem="refused")])
named = enumerate(name.split("-"))
pieces = [(f"{{kind}} {{place}}", ok(place) if kind == "ok" else kinds[kind]) for place, kind in named]
sys.exit(work(pieces, int(first), int(step), Path(into), lambda: "BROKEN" not in os.environ))
"""


def run_pieces(kinds: str, workers: int, folder: Path, end: float) -> pieces.Outcome:
    text = WORKER.format(folder=str(FOLDER), mark=str(folder / "hangs"))
    return pieces.run_section(pieces.Section(kinds, 0, workers), [sys.executable, "-c", text], end)


@pytest.mark.parametrize("workers", [1, 2, 3])
def test_pieces_that_fail_or_crash_cost_themselves_alone(workers: int, tmp_path: Path) -> None:
    """And a device left broken is not met by the piece behind it."""
    found = run_pieces("ok-fail-ok-crash-broken-ok-ok-part-crash", workers, tmp_path, time.time() + 250)
    assert found.lines == [{"place": place, "broken": None} for place in (0, 2, 5, 6)]
    assert found.failed == {
        "fail 1": "ValueError: no such thing", "crash 3": "exit status -6: what a library prints",
        "broken 4": "RuntimeError: illegal memory access", "part 7, graph": "refused",
        "crash 8": "exit status -6: what a library prints",
    }  # fmt: skip


def test_what_hangs_is_ended_and_what_it_held_up_is_named(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    late: Callable[[], float] = lambda: 100.0 if (tmp_path / "hangs").exists() else 0.0  # noqa: E731
    monkeypatch.setattr(pieces, "time", SimpleNamespace(time=late))
    found = run_pieces("ok-hang-ok", 1, tmp_path, 50.0)
    assert [line["place"] for line in found.lines] == [0]
    assert found.failed == {
        "hang 1": "not done in time: what a library prints",
        "ok 2": "not reached; not done in time: what a library prints",
    }


def test_workers_that_do_not_start(tmp_path: Path) -> None:
    command = [sys.executable, "-c", "raise ImportError('no torch')"]
    found = pieces.run_section(pieces.Section("ops", 0, 2), command, time.time() + 250)
    assert not found.lines and found.failed == {"start": "exit status 1: ImportError: no torch"}


def test_results_are_written_after_every_section(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    run = script("benchmarks/gpu/run.py")
    monkeypatch.setattr(torch.cuda, "get_device_name", lambda: "NVIDIA H100")
    off = {"op": "add", "sample": 0, "state": "wrong", "why": "off"}
    outcomes = {
        "ops": pieces.Outcome([off], {"sub 1": "exit status -11"}),
        "segments": pieces.Outcome([{"work": "softmax", "variant": "nvfuser", "ms": 0.125}]),
    }
    ends = []

    def ran(section: pieces.Section, command: list[str], end: float) -> pieces.Outcome:
        ends.append(end - time.time())
        return outcomes[section.name]

    monkeypatch.setattr(run, "run_section", ran)
    texts: list[str] = []
    found = run.measure(["segments", "ops"], 100.0, lambda so_far: texts.append(run.markdown(so_far)))
    assert len(texts) == 2 and "softmax" not in texts[0] and "| softmax | nvfuser | 0.125 |" in texts[1]
    assert "- wrong: add 0: off" in texts[0] and "- failed: ops: sub 1: exit status -11" in texts[0]
    assert 0 < ends[0] < ends[1] <= 100.0 and run.wrong(found)
    run.write_to(tmp_path / "out", found)
    assert sorted(p.suffix for p in (tmp_path / "out").iterdir()) == [".json", ".md"]


def test_without_cuda_nothing_is_written(tmp_path: Path) -> None:
    done = subprocess.run(
        [sys.executable, str(FOLDER / "run.py"), "--out", str(tmp_path / "out")],
        env={**os.environ, "CUDA_VISIBLE_DEVICES": ""}, capture_output=True, text=True, timeout=120,
    )  # fmt: skip
    assert done.returncode == 2 and "needs a CUDA device: found none" in done.stderr
    assert not (tmp_path / "out").exists()
    done = subprocess.run(
        [sys.executable, str(FOLDER / "run.py"), "--sections", "ops,speed"], capture_output=True, text=True, timeout=120
    )
    assert done.returncode == 2 and "found speed, needed some of block, ops" in done.stderr
