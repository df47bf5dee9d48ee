"""`python -m meshfuse` several times for the price of one import of torch: each command in a fork of one process, and
the ranks that it starts in forks of that.
"""

from __future__ import annotations

import json
import os
import subprocess
import sys
from collections.abc import Sequence
from pathlib import Path
from typing import NamedTuple

import meshfuse

SOURCE = str(Path(meshfuse.__file__).parents[1])
# Where a command's output goes: into a file; to a device that is full; its standard output is closed, as the
# interpreter finds it when it starts; or all three standard files are.
PLACES = ("file", "/dev/full", "closed", "all closed")
_FORKS = """
import json, os, subprocess, sys
import forked
import meshfuse.fusion_definition
from meshfuse.cli import main

def redirect(number, path):
    file = os.open(path, os.O_WRONLY | os.O_CREAT)
    os.dup2(file, number)
    os.close(file)

def close(*numbers):
    for number in numbers:
        os.close(number)
        setattr(sys, ("stdin", "stdout", "stderr")[number], None)

codes = []
for number, (place, words) in enumerate(json.loads(sys.argv[1])):
    child = os.fork()
    if not child:
        redirect(1, "/dev/full" if place == "/dev/full" else f"stdout{number}")
        redirect(2, f"stderr{number}")
        close(*{"closed": (1,), "all closed": (0, 1, 2)}.get(place, ()))
        if "--ranks" in words:
            subprocess.Popen = forked._Forked
        sys.argv[1:] = words
        raise SystemExit(main())
    codes.append(os.waitstatus_to_exitcode(os.waitpid(child, 0)[1]))
print(json.dumps(codes))
"""


class Done(NamedTuple):
    """A finished command."""

    code: int
    out: bytes
    errors: bytes


def forked(commands: Sequence[tuple[str, Sequence[str]]], folder: Path, **variables: str) -> list[Done]:
    """Each command, a place of `PLACES` and the words after `meshfuse`, run to its end in this working directory."""
    environment = os.environ | {"PYTHONPATH": f"{SOURCE}:{Path(__file__).parent / 'ranks'}"} | variables
    words = [sys.executable, "-c", _FORKS, json.dumps(commands)]
    done = subprocess.run(words, env=environment, capture_output=True, text=True, timeout=240, cwd=folder)
    assert done.returncode == 0, done.stderr
    return [
        Done(code, *(_read(folder / f"{name}{number}") for name in ("stdout", "stderr")))
        for number, code in enumerate(json.loads(done.stdout))
    ]


def _read(path: Path) -> bytes:
    return path.read_bytes() if path.exists() else b""
