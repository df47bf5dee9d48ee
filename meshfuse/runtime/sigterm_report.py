"""What a rank says when it is ended from outside: where it was, and why, as far as it knows."""

from __future__ import annotations

import os
import signal
import sys
import threading
from collections.abc import Callable
from types import FrameType

from .exit_hooks import end_at_once, ending


def install_sigterm_report(words: Callable[[], str]) -> None:
    """Have this process, at SIGTERM, print `words()` and end; launchers so end ranks that a failed peer leaves behind.

    A thread of its own does it at once, as the main thread may be inside a wait. A script that handles SIGTERM itself,
    before or later, or has a wakeup file of its own, keeps its ways.
    """
    main = threading.current_thread() is threading.main_thread()
    if not main or signal.getsignal(signal.SIGTERM) is not signal.SIG_DFL:
        return
    read = _wakeup_file()
    if read is None:
        return

    def end(number: int = signal.SIGTERM, frame: FrameType | None = None) -> None:
        if ending.acquire(blocking=False):
            try:
                print(words(), file=sys.stderr)
            finally:
                end_at_once(128 + number)

    def listen() -> None:
        while numbers := os.read(read, 1):
            if numbers[0] == signal.SIGTERM and signal.getsignal(signal.SIGTERM) is end:
                end()

    def forget() -> None:
        # A signal to a forked child, such as a data loader's worker, does not concern this rank.
        if signal.getsignal(signal.SIGTERM) is end:
            signal.set_wakeup_fd(-1)
            signal.signal(signal.SIGTERM, signal.SIG_DFL)

    signal.signal(signal.SIGTERM, end)
    os.register_at_fork(after_in_child=forget)
    threading.Thread(target=listen, name="meshfuse-signals", daemon=True).start()


def _wakeup_file() -> int | None:
    """A pipe from which the numbers of signals can be read as they come.

    None where the script has its own, or no room.
    """
    try:
        read, write = os.pipe()
    except OSError:
        return None
    os.set_blocking(write, False)
    before = signal.set_wakeup_fd(write, warn_on_full_buffer=False)
    if before == -1:
        return read
    signal.set_wakeup_fd(before)
    os.close(read)
    os.close(write)
    return None
