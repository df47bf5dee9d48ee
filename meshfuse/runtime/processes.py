"""Which process a rank is, and whether it is still there: asked of the kernel, where the rank is on this machine.

A process is known by its number and its start time, so that a number which the kernel has given again is not taken for
it. The answers are None where they cannot be had: for another machine, or on a system without /proc.
"""

from __future__ import annotations

import ctypes
import errno
import os
import signal
import socket
import sys

_PR_SET_PDEATHSIG = 1
_FILES = 16  # Open files that joining a job of few ranks takes.
GONE, STOPPED, RUNNING = "gone", "stopped", "running"


def identity_of(pid: int) -> str:
    """A process of this machine as a text that `state_of` understands there; empty without /proc."""
    place, start = _place(), _start_and_state(pid)[0]
    return f"{place} {pid} {start}" if place and start else ""


def state_of(identity: str) -> str | None:
    """GONE, STOPPED or RUNNING; None for a process of another machine."""
    place, _, rest = identity.partition(" ")
    if not rest or place != _place():
        return None
    pid, _, start = rest.partition(" ")
    found, state = _start_and_state(int(pid))
    if found != start or state in "ZX":
        return GONE
    return STOPPED if state in "Tt" else RUNNING


def goes_on(pid: int, number: int) -> bool | None:
    """Whether a process of this machine outlives a signal, as it has a handler for it, or ignores it."""
    if not os.path.exists("/proc/self/status"):
        return None
    try:
        with open(f"/proc/{pid}/status") as file:
            masks = [line.split()[1] for line in file if line.startswith(("SigIgn:", "SigCgt:"))]
    except OSError:
        return False
    return any(int(mask, 16) >> (number - 1) & 1 for mask in masks)


def pid_of(identity: str) -> str:
    """The process' number, as text."""
    return identity.split(" ")[1] if identity else "?"


def descends_from(identity: str) -> bool:
    """Whether that process started this one, or one that started this one, and so on."""
    pid = os.getppid()
    while pid > 1:
        if identity_of(pid) == identity:
            return True
        pid = _parent(pid)
    return False


def machine() -> str:
    """This machine since its last start; its name where the kernel does not say."""
    return _boot() or socket.gethostname()


def _place() -> str:
    """The machine since its last start, and the name space of process numbers; empty without /proc."""
    boot = _boot()
    try:
        return boot and boot + os.readlink("/proc/self/ns/pid")
    except OSError:
        return ""


def _boot() -> str:
    """What the kernel drew when this machine started; empty without /proc."""
    try:
        with open("/proc/sys/kernel/random/boot_id") as file:
            return file.read().strip()
    except OSError:
        return ""


def _start_and_state(pid: int) -> tuple[str, str]:
    """When a process was started, in ticks, and the letter of its state; empty texts where there is none."""
    fields = _status(pid)
    return (fields[19], fields[0]) if fields else ("", "X")


def _parent(pid: int) -> int:
    fields = _status(pid)
    return int(fields[1]) if fields else 0


def _status(pid: int) -> list[str]:
    """What the kernel says of a process, from its state on; nothing where there is none."""
    try:
        with open(f"/proc/{pid}/stat") as file:
            return file.read().rpartition(")")[2].split()
    except OSError:
        return []


def hindrance() -> str:
    """A likely reason for a failed connection, to be put before torch's error, which does not tell; "" for none."""
    held: list[int] = []
    try:
        for _ in range(_FILES):
            held.append(os.open(os.devnull, os.O_RDONLY))
    except OSError as error:
        return "too many open files, see ulimit -n; " if error.errno in (errno.EMFILE, errno.ENFILE) else ""
    finally:
        for file in held:
            os.close(file)
    return ""


def die_with_parent(number: signal.Signals) -> None:
    """Ask the kernel for this signal when the process that started this one ends. Linux only."""
    if sys.platform.startswith("linux"):
        ctypes.CDLL(None).prctl(_PR_SET_PDEATHSIG, int(number))
