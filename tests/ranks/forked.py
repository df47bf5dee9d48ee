"""Python scripts as processes that cost milliseconds: forked off one that has imported torch and meshfuse, with what
captures models and saves them, which takes as long again.
"""

from __future__ import annotations

import atexit
import contextlib
import gc
import importlib.util
import multiprocessing
import os
import runpy
import signal
import socket
import subprocess
import sys
from collections.abc import Callable, Mapping, Sequence
from multiprocessing import forkserver, resource_tracker
from multiprocessing.context import ForkServerProcess
from pathlib import Path
from subprocess import CompletedProcess

LAUNCHERS = {"meshfuse.runtime.launcher": "run", "torch.distributed.run": "torchrun", "meshfuse": "meshfuse"}
_PRELOADED = [
    "torch", "torch.distributed.run", "torch.distributed.elastic.agent.server.local_elastic_agent",
    "meshfuse.fusion_definition", "meshfuse.runtime.launcher", "meshfuse.frontends.parallel_module",
    "meshfuse.checkpoint.api", "forked",
]  # fmt: skip
# In the environment that has it.
_THUNDER = ["thunder.distributed.transforms.ddp_v2", "thunder.distributed.transforms.fsdp_v2", "meshfuse.thunder"]
# What `meshfuse doctor --links` has ranks run.
_OF_DOCTOR = ["-m", "meshfuse.runtime.link_probe"]
_READ_ONCE = {"OMP_NUM_THREADS": "1", "TORCH_CPP_LOG_LEVEL": "ERROR"}
_CONTEXT = multiprocessing.get_context("forkserver")
_thunder = importlib.util.find_spec("thunder")  # The folder of its tests is found under the name, without an origin.
_CONTEXT.set_forkserver_preload(_PRELOADED + (_THUNDER if _thunder and _thunder.origin else []))


def start_job(
    command: str, words: Sequence[str], variables: Mapping[str, str], log: Path, errors: Path | None = None
) -> ForkServerProcess:
    """`meshfuse run`, torchrun or `meshfuse` ("run", "torchrun", "meshfuse") with these words; the ranks are forked off
    it, too.
    """
    given = (command, list(words), dict(variables), str(log), str(errors or log))
    process = _CONTEXT.Process(target=_as_launcher, args=given)
    with _read_once_variables():
        process.start()
    return process


def start(
    script: Path, variables: Mapping[str, str], log: Path, sockets: Mapping[str, socket.socket] | None = None,
    errors: Path | None = None, args: Sequence[str] = (),
) -> ForkServerProcess:  # fmt: skip
    """`python script args...` with exactly these variables, its output in `log`, or some of it in `errors`.

    The process gets the sockets, too, each under a variable that holds the number of its file.
    """
    given = ([str(script), *args], dict(variables), str(log), str(errors or log), dict(sockets or {}))
    process = _CONTEXT.Process(target=_as_main, args=given, daemon=True)
    with _read_once_variables():
        process.start()
    return process


@contextlib.contextmanager
def _read_once_variables():
    """The server starts with the first process, and torch reads these variables when it is imported."""
    before = {name: os.environ.get(name) for name in _READ_ONCE}
    os.environ.update(_READ_ONCE)
    yield
    for name, value in before.items():
        if value is None:
            del os.environ[name]
        else:
            os.environ[name] = value


def finished(words: Sequence[str], variables: Mapping[str, str], folder: Path, limit: float) -> CompletedProcess[str]:
    """`python words...`, run to its end: a script, or `-m` with one of the launchers and a script."""
    outputs = [folder / "stdout", folder / "stderr"]
    for path in outputs:
        path.write_text("")
    if words[0] == "-m":
        process = start_job(LAUNCHERS[words[1]], words[2:], variables, outputs[0], outputs[1])
    else:
        process = start(Path(words[0]), variables, outputs[0], errors=outputs[1], args=words[1:])
    process.join(limit)
    out, errors = (path.read_text() for path in outputs)
    if process.exitcode is None:
        process.kill()
        process.join()
        raise subprocess.TimeoutExpired(list(words), limit, out, errors)
    return CompletedProcess(list(words), process.exitcode, out, errors)


def _as_main(
    words: list[str], variables: dict[str, str], log: str, errors: str, sockets: dict[str, socket.socket]
) -> None:
    _prepare(variables, log, errors)
    os.environ.update({name: str(handed.detach()) for name, handed in sockets.items()})
    _run_script(words)


def _as_launcher(command: str, words: list[str], variables: dict[str, str], log: str, errors: str) -> None:
    _prepare(variables, log, errors)
    os.setsid()
    subprocess.Popen = _Forked  # type: ignore[misc]
    from meshfuse.runtime import launcher

    if command == "torchrun":
        import torch.distributed.elastic.multiprocessing.subprocess_handler.subprocess_handler as handler
        import torch.distributed.run as torchrun

        handler.Popen = _Forked  # type: ignore[attr-defined]
        _end_as_python_does(lambda: torchrun.main(words))
    if command == "meshfuse":
        from meshfuse.cli import main

        sys.argv = [command, *words]
        _end_as_python_does(lambda: sys.exit(main()))
    parser = launcher.argparse.ArgumentParser()
    launcher.add_arguments(parser)
    _end_as_python_does(lambda: sys.exit(launcher.main(parser.parse_args(words))))


class _Forked(subprocess.Popen):  # type: ignore[type-arg]
    """`Popen([python, script, ...])` without the import of torch; anything else as ever."""

    def _execute_child(self, args, executable, preexec_fn, close_fds, pass_fds, cwd, env, *more):  # type: ignore[override]
        words = [word for word in args[1:] if word != "-u"]
        if str(words[0]).startswith("-") and words[:2] != _OF_DOCTOR:
            super()._execute_child(args, executable, preexec_fn, close_fds, pass_fds, cwd, env, *more)  # type: ignore[misc]
            return
        pipes = more[3:9]
        self.pid = os.fork()
        if self.pid:
            self._child_created = True
            self._close_pipe_fds(*pipes)  # type: ignore[attr-defined]
            return
        try:
            os.setsid()
            for number, given in enumerate((pipes[0], pipes[3], pipes[5])):
                if given != -1:
                    os.dup2(given, number)
            kept = {0, 1, 2, *pass_fds}
            for name in os.listdir("/proc/self/fd"):
                if int(name) not in kept:
                    with contextlib.suppress(OSError):
                        os.close(int(name))
            if preexec_fn is not None:
                preexec_fn()
            for number in signal.valid_signals():
                if callable(signal.getsignal(number)):
                    signal.signal(number, signal.default_int_handler if number == signal.SIGINT else signal.SIG_DFL)
            os.environ.clear()
            os.environ.update(env if env is not None else {})
            atexit._clear()
            sys.excepthook = sys.__excepthook__
            _forget_closed_files()
            _as_if_imported_now()
            _run_script(words)
        finally:
            os._exit(99)


def _forget_closed_files() -> None:
    """multiprocessing keeps numbers of files that were closed here, and writes there as soon as a lock is made (tqdm's
    is, in any capture): into a socket of the rank's, to which the kernel has given the number.
    """
    for owner in (resource_tracker._resource_tracker, forkserver._forkserver):
        type(owner).__init__(owner)


def _as_if_imported_now() -> None:
    """What importing meshfuse does in a rank of `meshfuse run`: it was imported where no launcher said anything."""
    from meshfuse.runtime import exit_hooks

    exit_hooks.report_user_errors()


def _prepare(variables: dict[str, str], log: str, errors: str) -> None:
    # What is loaded stays: to look through it takes a third of a second, and copies the server's pages.
    gc.freeze()
    gc.set_threshold(20_000, 50, 100)  # as of the tests' own process
    for number, path in ((1, log), (2, errors)):
        file = os.open(path, os.O_WRONLY | os.O_CREAT | os.O_APPEND)
        os.dup2(file, number)
        os.close(file)
    os.chdir(os.path.dirname(log))
    os.environ.clear()
    os.environ.update(variables)


def _run_script(words: list[str]) -> None:
    if words[:2] == _OF_DOCTOR:
        sys.argv = words[1:]
        _end_as_python_does(lambda: runpy.run_module(words[1], run_name="__main__"))
    sys.argv, sys.path[:1] = words, [os.path.dirname(os.path.abspath(words[0]))]
    _end_as_python_does(lambda: runpy.run_path(words[0], run_name="__main__"))


def _end_as_python_does(main: Callable[[], object]) -> None:
    """What the interpreter does with a script: its excepthook, its exit functions and its exit code."""
    code: object = 0
    try:
        main()
    except SystemExit as end:
        code = end.code
    except BaseException:
        sys.excepthook(*sys.exc_info())  # type: ignore[arg-type]
        code = 1
    atexit._run_exitfuncs()
    sys.stdout.flush()
    sys.stderr.flush()
    os._exit(code if isinstance(code, int) else int(code is not None))
