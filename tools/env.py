#!/usr/bin/env python3
"""Makes the environments that the Makefile uses. `tools/env.py main|nvfuser` prints the Python of one.

What is large (torch and the pinned tools) is installed once per machine, in a cache outside the checkout,
under a name that holds a digest of everything that goes in. What belongs to the checkout is a thin virtual
environment in it, which sees the cached packages and has this checkout's meshfuse installed editable.

Exit status: 0 done, 1 failed, 3 the nvfuser environment is not to be had here. Needs only Python 3.11 or newer.
"""

from __future__ import annotations

import contextlib
import fcntl
import hashlib
import os
import platform
import re
import shutil
import subprocess
import sys
import time
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path

if sys.version_info < (3, 11):
    sys.exit(f"meshfuse: Python {platform.python_version()} found, 3.11 or newer needed; call make PYTHON=python3.11")
import tomllib

ROOT = Path(__file__).resolve().parent.parent
_SETTING = os.environ.get("MESHFUSE_CACHE", "")  # "off" is meant for meshfuse's plans
CACHE = Path(_SETTING if _SETTING.lower() not in ("", "off", "0") else Path.home() / ".cache" / "meshfuse")
PAUSES = (5, 20, None)
LIMIT = 1800  # seconds for one command; a lock is held for a few commands at most
UNAVAILABLE = 3


class EnvError(Exception):
    """The environment cannot be made; the text is for the user."""


@dataclass(frozen=True, slots=True)
class Spec:
    """An environment: the folder in the checkout, the base interpreter and pip's arguments."""

    name: str
    folder: Path
    python: str
    install: tuple[str, ...]

    @property
    def cached(self) -> Path:
        """Where the packages live: the name changes with the interpreter and with anything installed."""
        what = "\n".join((_run(self.python, "-c", _IDENTITY), platform.machine(), *self.install))
        return CACHE / "envs" / f"{self.name}-{hashlib.sha256(what.encode()).hexdigest()[:12]}"


_IDENTITY = "import os, sys; print(sys.version, os.path.realpath(sys.executable))"
_PURELIB = "import sysconfig; print(sysconfig.get_path('purelib'))"


def main_spec() -> Spec:
    """Python as called, with the pins of `dev` and `examples`."""
    extras = tomllib.loads((ROOT / "pyproject.toml").read_text())["project"]["optional-dependencies"]
    return Spec("main", ROOT / ".venv", sys.executable, (*extras["dev"], *extras["examples"]))


def nvfuser_spec() -> Spec:
    """Python 3.12 with the set of tools/nvfuser.txt. Raises EnvError where there is none."""
    if (sys.platform, platform.machine()) != ("linux", "x86_64"):
        raise EnvError(f"nvFuser has wheels for Linux x86-64 only, not {sys.platform} {platform.machine()}")
    python = next(filter(_is_312, _pythons_312()), None)
    if python is None:
        raise EnvError("nvFuser's wheel needs Python 3.12, and none was found on PATH or in pyenv")
    lines = (ROOT / "tools" / "nvfuser.txt").read_text().splitlines()
    pins = tuple(line for line in lines if line and not line.startswith("#"))
    return Spec("nvfuser", ROOT / ".venv-nvfuser", python, ("--no-deps", *pins))


def _pythons_312() -> Iterator[str]:
    yield sys.executable
    yield "python3.12"
    pyenv = Path(os.environ.get("PYENV_ROOT") or Path.home() / ".pyenv")
    yield from map(str, sorted(pyenv.glob("versions/3.12*/bin/python3.12")))


def _is_312(python: str) -> bool:
    with contextlib.suppress(OSError, subprocess.CalledProcessError):
        return _run(python, "-c", "import sys; print(sys.version_info[:2] == (3, 12))") == "True"
    return False


def make(spec: Spec) -> Path:
    """The Python of the environment in the checkout, made or brought up to date if it has to be."""
    python = spec.folder / "bin" / "python"
    stamp = spec.folder / "meshfuse-env.txt"
    if _read(stamp) == _stamp(spec) and (spec.cached / ".complete").exists():
        return python
    with _lock(CACHE / "envs" / f"{spec.cached.name}.lock"):
        _fill_cache(spec)
    with _lock(CACHE / "envs" / f"checkout-{hashlib.sha256(str(ROOT).encode()).hexdigest()[:12]}.lock"):
        if _read(stamp) != _stamp(spec):
            _make_thin(spec)
            stamp.write_text(_stamp(spec))
    return python


def _stamp(spec: Spec) -> str:
    """What the thin environment was made from: of the checkout its console scripts and its version."""
    written = [(ROOT / name).read_bytes() for name in ("pyproject.toml", "meshfuse/version.py")]
    return f"{spec.cached}\n{hashlib.sha256(b''.join(written)).hexdigest()}\n"


def _fill_cache(spec: Spec) -> None:
    env = spec.cached
    if (env / ".complete").exists():
        return
    print(f"meshfuse: building the {spec.name} environment in {env} (minutes, once)", file=sys.stderr)
    shutil.rmtree(env, ignore_errors=True)
    start = time.monotonic()
    _venv(spec.python, env)
    python = str(env / "bin" / "python")
    _retry(python, "-m", "pip", "install", "-qq", "--no-compile", *spec.install)
    _compile(python)
    (env / ".complete").write_text(f"{time.monotonic() - start:.0f} s\n")
    print(f"meshfuse: built in {time.monotonic() - start:.0f} s", file=sys.stderr)


def _compile(python: str) -> None:
    """Bytecode of all packages, by all cores, where pip would use one; what is no Python, as templates, is left."""
    with contextlib.suppress(subprocess.CalledProcessError):
        _run(python, "-m", "compileall", "-qq", "-j", "0", _run(python, "-c", _PURELIB))


def _venv(python: str, folder: Path, *options: str) -> None:
    try:
        _run(python, "-m", "venv", *options, str(folder))
    except subprocess.CalledProcessError as e:
        raise EnvError(f"{python} -m venv failed (Debian: apt-get install python3-venv): {_output_of(e)}") from e


def _retry(*command: str) -> None:
    for pause in PAUSES:
        try:
            _run(*command)
            return
        except subprocess.CalledProcessError as e:
            if pause is None:
                raise EnvError(f"pip failed {len(PAUSES)} times: {_output_of(e)}") from e
            time.sleep(pause)


def _output_of(e: subprocess.CalledProcessError) -> str:
    return ((e.stderr or e.stdout).strip().splitlines() or ["nothing"])[-1]


def _make_thin(spec: Spec) -> None:
    """A virtual environment whose .pth file adds the cached packages; this checkout is installed editable."""
    shutil.rmtree(spec.folder, ignore_errors=True)
    _venv(spec.python, spec.folder, "--without-pip")
    python = str(spec.folder / "bin" / "python")
    packages = _run(str(spec.cached / "bin" / "python"), "-c", _PURELIB)
    pth = Path(_run(python, "-c", _PURELIB)) / "meshfuse-env.pth"
    pth.write_text(f"import site; site.addsitedir({packages!r})\n")
    _link_scripts(spec)
    _retry(python, "-m", "pip", "install", "-qq", "--no-deps", "--no-build-isolation", "-e", str(ROOT))


def _link_scripts(spec: Spec) -> None:
    """The cached packages' commands (ruff, torchrun, ...); those in Python run in the checkout's."""
    for script in (spec.cached / "bin").iterdir():
        target = spec.folder / "bin" / script.name
        if target.exists() or re.match(r"[Aa]ctivate|pip", script.name):
            continue
        content = script.read_bytes()
        ours = content.replace(bytes(spec.cached), bytes(spec.folder), 1) if content[:2] == b"#!" else content
        if ours == content:
            target.symlink_to(script)
        else:
            target.write_bytes(ours)
            target.chmod(0o755)


@contextlib.contextmanager
def _lock(path: Path) -> Iterator[None]:
    """Held by one process at a time; released by the system even if that process is killed."""
    path.parent.mkdir(parents=True, exist_ok=True)
    with path.open("w") as file:
        fcntl.flock(file, fcntl.LOCK_EX)
        yield


def _read(path: Path) -> str | None:
    return path.read_text() if path.exists() else None


def _run(*command: str) -> str:
    """The stdout of a command. The caller's PYTHONPATH must not reach another Python version."""
    env = {k: v for k, v in os.environ.items() if k not in ("PYTHONPATH", "PYTHONHOME")}
    quiet = {"stdin": subprocess.DEVNULL, "capture_output": True, "text": True}
    try:
        return subprocess.run(command, env=env, check=True, timeout=LIMIT, **quiet).stdout.strip()
    except subprocess.TimeoutExpired as e:
        raise EnvError(f"not done after {LIMIT} s: {' '.join(command[:5])}") from e


def main() -> int:
    specs = {"main": main_spec, "nvfuser": nvfuser_spec}
    name = sys.argv[1] if len(sys.argv) == 2 else ""
    if name not in specs:
        print(f"usage: {sys.argv[0]} {'|'.join(specs)}", file=sys.stderr)
        return 2
    try:
        print(make(specs[name]()))
    except EnvError as e:
        left_out = "the nvFuser tests are left out: " if name == "nvfuser" else ""
        print(f"meshfuse: {left_out}{e}", file=sys.stderr)
        return UNAVAILABLE if left_out else 1
    return 0


if __name__ == "__main__":
    sys.exit(main())
