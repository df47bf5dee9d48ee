"""What a device is still at when a peer fails: the watch ends the process, whatever its main thread waits for."""

from __future__ import annotations

import threading
import time
from collections.abc import Callable
from pathlib import Path

import pytest
from rank_pool import START, run_bare

from meshfuse.errors import RankError
from meshfuse.runtime import device_watchdog
from meshfuse.runtime.device_watchdog import DeviceWatchdog, Pending, is_watched, unwatched

pytestmark = pytest.mark.ranks

# Rank 0 waits in the line behind, as it would in a copy from a device.
STUCK = (
    START
    + """
from meshfuse.runtime.device_watchdog import Pending
if world.rank == 1: {peer}
begun = time.monotonic()
world.watchdog.put(Pending("all_reduce #9 of group tp", (0, 1), lambda: {done}, lambda: "{trouble}"))
time.sleep({seconds})
"""
)
CASES = {
    "died": ("os._exit(3)", "failed on rank 0 after", "rank 1 does not answer: its process", "has ended"),
    "raised": ("raise ValueError('no more')", "cannot finish on rank 0: found rank 1 failed", "ValueError: no more"),
    "hangs": ("time.sleep(300)", "timed out on rank 0: found no end after", "within 3 s", "rank 1 runs <module> at"),
}


def stuck(folder: Path, peer: str, limit: int, done: str = "False", trouble: str = "", seconds: int = 100) -> str:
    script = STUCK.format(peer=peer, done=done, trouble=trouble, seconds=seconds)
    stopped = 1 if "sleep" in peer else None
    code, output = run_bare(script, folder, size=2, limit=limit, stopped=stopped)[0]
    assert code == (1 if seconds == 100 else 0), output
    return output


@pytest.mark.parametrize("case", CASES)
def test_the_process_ends_by_the_error_of_a_wait(case: str, tmp_path: Path) -> None:
    peer, *parts = CASES[case]
    output = stuck(tmp_path, peer, 3 if case == "hangs" else 20)
    assert output.startswith("rank 0: all_reduce #9 of group tp ") and "(at script.py:22)" in output, output
    assert all(part in output for part in parts), output


def test_what_a_backend_finds_wrong_is_enough(tmp_path: Path) -> None:
    output = stuck(tmp_path, "time.sleep(300)", 20, trouble="ErrorType.COMM_ERROR")
    assert "failed on rank 0 after" in output and "found a lost connection (ErrorType.COMM_ERROR)" in output, output


def test_what_is_done_is_forgotten(tmp_path: Path) -> None:
    """Though its peer has ended since, or has not come to the end of the job yet."""
    assert "rank 0" not in stuck(tmp_path, "os._exit(3)", 20, done="time.monotonic() > begun + 0.8", seconds=4)


# on its own -------------------------------------------------------------------------------------------------------


def pending(is_done: Callable[[], bool] = lambda: False) -> Pending:
    return Pending("all_gather", (0, 1), is_done, lambda: "")


@pytest.fixture
def hasty(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(device_watchdog, "_PATIENCE", 0.0)
    monkeypatch.setattr(device_watchdog, "_LOOK", 0.01)


@pytest.mark.parametrize("late", ["done", "another", "neither"])
def test_an_error_is_taken_back_where_the_device_went_on_since(late: str, hasty: None) -> None:
    judged, done, ended = threading.Event(), threading.Event(), list[RankError]()

    def judge(found: Pending) -> None:
        if not judged.is_set():
            done.set() if late == "done" else made.put(pending(done.is_set)) if late == "another" else None
            judged.set()
            raise RankError(f"{found.what} is in vain")

    made = DeviceWatchdog(judge, ended.append)
    made.put(pending(done.is_set))
    assert judged.wait(20)
    made.stop(20)
    assert [str(error) for error in ended] == (["all_gather is in vain"] if late == "neither" else [])


def test_works_are_not_queried_while_a_graph_is_captured(hasty: None) -> None:
    times, made = list[float](), DeviceWatchdog(lambda found: None, lambda error: None)
    made.put(pending(lambda: times.append(time.monotonic()) or False))
    while not times:
        time.sleep(0.01)
    with unwatched():
        begun = time.monotonic()
        assert not is_watched()
        time.sleep(0.2)
        assert max(times) <= begun
    made.stop(20)
    assert is_watched()
