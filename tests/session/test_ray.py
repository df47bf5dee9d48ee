"""Sessions whose workers Ray places, on a Ray of this machine that the tests start and stop on loopback."""

from __future__ import annotations

import importlib.util
import os
import signal
import subprocess
import sys
import time
from collections.abc import Iterator

import pytest
import torch

import meshfuse.session as di
from meshfuse.errors import ArgumentError

needs_ray = pytest.mark.skipif(
    importlib.util.find_spec("ray") is None, reason="Ray is not installed: pip install meshfuse[cluster]"
)


def ray_command(*words: str) -> None:
    command = [sys.executable, "-m", "ray.scripts.scripts", *words]
    done = subprocess.run(command, capture_output=True, text=True, timeout=150)
    assert done.returncode == 0, done.stdout + done.stderr


@pytest.fixture(scope="module")
def ray() -> Iterator[None]:
    """A Ray of four CPUs."""
    ray_command("start", "--head", "--node-ip-address=127.0.0.1", "--num-cpus=4", "--include-dashboard=false",
                "--port=0", "--disable-usage-stats")  # fmt: skip
    yield
    import ray as package

    package.shutdown()
    ray_command("stop", "--grace-period=5")


@needs_ray
@pytest.mark.slow
def test_calls_errors_and_a_killed_worker(ray: None) -> None:
    with di.RaySession(3, timeout=60) as session:
        x = session.call(lambda: torch.full((2,), di.worker_id() + 1.0))
        assert session.allreduce(x)[2].tolist() == [6.0, 6.0]
        session.call(lambda: 1 // (di.worker_id() - 1))
        with pytest.raises(ZeroDivisionError) as error:
            session.sync()
        assert isinstance(error.value, di.WorkerError) and error.value.worker == 1
        assert session.allreduce(x)[0].tolist() == [6.0, 6.0]
        before = time.monotonic()
        session.call(lambda: os.kill(os.getpid(), signal.SIGKILL) if di.worker_id() == 2 else None)
        with pytest.raises(di.WorkerLost, match="worker 2 is gone"):
            session.sync()
        assert time.monotonic() - before < 10
        session.restart()
        assert [session.call(di.worker_id)[worker] for worker in range(3)] == [0, 1, 2]
    # Ray has its room again.
    with di.RaySession(4, timeout=60) as session:
        assert session.call(di.num_workers)[3] == 4


@needs_ray
@pytest.mark.slow
def test_a_dead_actor_is_a_lost_worker(ray: None) -> None:
    import ray as package

    with di.RaySession(2, timeout=60) as session:
        session.sync()
        package.kill(session._actors._actors[0])
        with pytest.raises(di.WorkerLost, match="worker 1 is gone"):
            for _ in range(100):
                session.call(int)
                session.sync()
                time.sleep(0.1)
    with pytest.raises(di.SessionError, match="Ray has no room for 7 workers"):
        di.RaySession(8, timeout=2)


def test_what_a_ray_session_needs() -> None:
    with pytest.raises(ArgumentError, match="a RaySession's num_workers: found 1, needed two or more"):
        di.RaySession(1)
    if importlib.util.find_spec("ray") is None:
        with pytest.raises(di.SessionError, match=r"Ray is not installed: .*`pip install meshfuse\[cluster\]"):
            di.RaySession(2)
