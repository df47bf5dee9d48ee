"""A session over two network namespaces as hosts, which see each other over a pair of virtual interfaces alone."""

from __future__ import annotations

import os
import shutil
import subprocess
import sys
import textwrap
from collections.abc import Iterator
from pathlib import Path

import pytest

HERE, THERE = "10.231.7.1", "10.231.7.2"
PORT, TOKEN = 5077, "a token of the tests"


def ip(*words: str) -> None:
    """Run ip(8). Raises CalledProcessError."""
    subprocess.run(["ip", *words], check=True, capture_output=True, text=True, timeout=20)


@pytest.fixture
def hosts() -> Iterator[tuple[str, str]]:
    """Two namespaces of their own, with an address each."""
    if shutil.which("ip") is None:
        pytest.skip("no ip(8) on this machine")
    names = [f"mf{os.getpid()}{side}" for side in "ab"]
    made = []
    try:
        for name in names:
            ip("netns", "add", name)
            made.append(name)
        ip("link", "add", names[0], "netns", names[0], "type", "veth", "peer", "name", names[1], "netns", names[1])
        for name, address in zip(names, (HERE, THERE), strict=True):
            ip("-n", name, "address", "add", f"{address}/24", "dev", name)
            for device in ("lo", name):
                ip("-n", name, "link", "set", device, "up")
        yield names[0], names[1]
    except subprocess.CalledProcessError as error:
        pytest.skip(f"no network namespaces for this user: {error.stderr.strip()}")
    finally:
        for name in made:
            ip("netns", "delete", name)


CONTROLLER = """
    import os, socket, sys
    import pytest
    import torch
    import meshfuse as mf
    import meshfuse.session as di
    from session.functions import Net, make_net

    if __name__ == "__main__":
        with di.SocketSession(2, 2, 2, {here!r}, {port}, timeout=60) as s:
            spaces = s.call(os.readlink, "/proc/self/ns/net")
            assert [spaces[w] == spaces[0] for w in range(4)] == [True, True, False, False]
            x = s.call(lambda: torch.full((3,), di.worker_id() + 1.0))
            assert s.allreduce(x, in_group=False)[3].tolist() == [10.0] * 3
            assert s.allgather(x, in_group=True)[2].tolist() == [3.0] * 3 + [4.0] * 3
            x.debug_copy_from(3, torch.arange(3.0))
            assert x[3].tolist() == [0.0, 1.0, 2.0]
            mesh = mf.DeviceMesh((2, 2), ("dp", "tp"))
            plan = {{"up": "colwise", "down": "rowwise"}}
            m = s.load_module(make_net, mesh, plan, inputs={{"x": ["dp", None]}}, seed=1)
            plain, data = make_net(), torch.randn(4, 16)
            plain.load_state_dict(m.state_dict())
            torch.testing.assert_close(m(data)["out"].full_tensor(), plain(data)["out"].detach())
            with pytest.raises(di.WorkerError, match="worker 3 raised ZeroDivisionError"):
                s.call(lambda: 1 // (di.worker_id() - 3))
                s.sync()
            pid = s.call(os.getpid)[3]
            s.call(lambda: os._exit(9) if di.worker_id() == 3 else None)
            with pytest.raises(di.WorkerLost, match="worker 3 is gone: its process exited with code 9"):
                s.sync()
            s.restart()
            assert s.call(os.getpid)[3] != pid
        print("all is well")
"""


@pytest.mark.slow
def test_calls_collectives_and_models_go_over_the_wire(hosts: tuple[str, str], tmp_path: Path) -> None:
    script = tmp_path / "controller.py"
    script.write_text(textwrap.dedent(CONTROLLER).format(here=HERE, port=PORT))
    path = os.pathsep.join([os.getcwd(), os.path.join(os.getcwd(), "tests")])
    env = {**os.environ, "MESHFUSE_TOKEN": TOKEN, "PYTHONPATH": path}
    env.pop("GLOO_SOCKET_IFNAME", None)
    commands = ([str(script)], ["-m", "meshfuse.session.remote", HERE, str(PORT), "2"])
    processes = [
        subprocess.Popen(["ip", "netns", "exec", host, sys.executable, *command], env=env, text=True,
                         stdout=subprocess.PIPE, stderr=subprocess.STDOUT)
        for host, command in zip(hosts, commands, strict=True)
    ]  # fmt: skip
    try:
        found = processes[0].communicate(timeout=240)[0]
        assert processes[0].returncode == 0 and "all is well" in found, found
        assert processes[1].wait(20) == 0
    finally:
        for process in processes:
            process.kill()
            process.wait()
