"""Fork servers of sessions for a few milliseconds: forked off a process that has loaded torch and meshfuse.

Otherwise each session of a test loads them anew. `python -m meshfuse.session.remote`, the command and scripts of tests
start theirs as users do, and so do tests with `started_servers`.
"""

from __future__ import annotations

import json
import os
import socket
import subprocess
import sys
import tempfile
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

sys.path.insert(0, str(Path(__file__).parents[1] / "ranks"))

import forked

# What `python -c` of a fork server does.
_SERVER = """
import json, os, sys
os.setsid()
sys.path[:] = json.loads(os.environ.pop("SERVER_PATH"))
from meshfuse.session.forkserver import main
main(int(os.environ.pop("SERVER_SOCKET")))
"""


class Popen:
    """A fork server's process, as `ForkServer` uses subprocess.Popen: its words, then wait, poll, kill and pid."""

    def __init__(self, words: Sequence[str], *, pass_fds: Sequence[int], env: Mapping[str, str], **_: Any) -> None:
        assert words[0] == sys.executable and "meshfuse.session.forkserver" in words[-1]
        self._folder = tempfile.TemporaryDirectory(prefix="meshfuse-server-")
        folder = Path(self._folder.name)
        (folder / "server.py").write_text(_SERVER)
        with socket.socket(fileno=os.dup(pass_fds[0])) as theirs:
            self._process = forked.start(
                folder / "server.py", {**env, "SERVER_PATH": json.dumps(sys.path)}, folder / "log",
                {"SERVER_SOCKET": theirs},
            )  # fmt: skip
        self.pid = self._process.pid

    def poll(self) -> int | None:
        """The exit code, once there is one."""
        return self._process.exitcode

    def wait(self, timeout: float | None = None) -> int | None:
        """The exit code. Raises TimeoutExpired."""
        self._process.join(timeout)
        if self._process.exitcode is None:
            raise subprocess.TimeoutExpired("a fork server", timeout or 0.0)
        self._folder.cleanup()
        return self._process.exitcode

    def kill(self) -> None:
        """End it at once."""
        self._process.kill()
