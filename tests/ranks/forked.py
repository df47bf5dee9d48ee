"""Python scripts as processes that cost milliseconds: forked off one that has imported torch and meshfuse."""

from __future__ import annotations

import atexit
import contextlib
import multiprocessing
import os
import runpy
import socket
import sys
from collections.abc import Mapping
from multiprocessing.context import ForkServerProcess
from pathlib import Path

_PRELOADED = ["torch", "torch.distributed", "meshfuse.fusion_definition", "forked"]
_CONTEXT = multiprocessing.get_context("forkserver")
_CONTEXT.set_forkserver_preload(_PRELOADED)


def start(
    script: Path, variables: Mapping[str, str], log: Path, sockets: Mapping[str, socket.socket] | None = None
) -> ForkServerProcess:
    """`python script` with exactly these variables, its output in `log`.

    The process gets the sockets, too, each under a variable that holds the number of its file.
    """
    given = (str(script), dict(variables), str(log), dict(sockets or {}))
    process = _CONTEXT.Process(target=_as_main, args=given, daemon=True)
    with _one_thread():
        process.start()
    return process


@contextlib.contextmanager
def _one_thread():
    """The server starts with the first process, and torch reads the number of threads when it is imported."""
    before = os.environ.get("OMP_NUM_THREADS")
    os.environ["OMP_NUM_THREADS"] = "1"
    yield
    if before is None:
        del os.environ["OMP_NUM_THREADS"]
    else:
        os.environ["OMP_NUM_THREADS"] = before


def _as_main(script: str, variables: dict[str, str], log: str, sockets: dict[str, socket.socket]) -> None:
    """What the interpreter does with a script: its excepthook, its exit functions and its exit code."""
    file = os.open(log, os.O_WRONLY | os.O_CREAT | os.O_APPEND)
    os.dup2(file, 1)
    os.dup2(file, 2)
    os.environ.clear()
    os.environ.update(variables)
    os.environ.update({name: str(handed.detach()) for name, handed in sockets.items()})
    sys.argv = [script]
    code: object = 0
    try:
        runpy.run_path(script, run_name="__main__")
    except SystemExit as end:
        code = end.code
    except BaseException:
        sys.excepthook(*sys.exc_info())  # type: ignore[arg-type]
        code = 1
    atexit._run_exitfuncs()
    sys.stdout.flush()
    sys.stderr.flush()
    os._exit(code if isinstance(code, int) else int(code is not None))
