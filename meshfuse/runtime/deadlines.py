"""Actions with a time limit.

The store of a job is another process, which may be stopped in the middle of an answer, and a collective may be under
way to a rank that never comes. So such an action runs in a thread, and is left behind there when its time is over.
"""

from __future__ import annotations

import threading
import time
from collections.abc import Callable
from typing import TypeVar
from weakref import WeakSet

from ..errors import MeshfuseError

T = TypeVar("T")


class Silent(RuntimeError):
    """An action took too long: the store's host is stopped, say."""


STORE, COLLECTIVES = "the store of the job", "collectives that were issued and not waited for"
# In seconds: the limit while an earlier action on the same is overdue, and the time between two calls of `hopeless`.
_PATIENCE, _LOOK = 0.2, 0.2
_overdue: WeakSet[threading.Thread] = WeakSet()


def is_of_torch(error: RuntimeError) -> bool:
    """Whether torch raised an error for this package, or the package for itself.

    A signal's handler runs in any wait, and what it raises is often a RuntimeError, too: that is the script's own.
    """
    trace, module = error.__traceback__, ""
    while trace is not None:
        trace, module = trace.tb_next, str(trace.tb_frame.f_globals.get("__name__"))
    return module.startswith((f"{__package__}.", "torch.")) and not isinstance(error, MeshfuseError)


def bounded(
    seconds: float, action: Callable[[], T], on: str = STORE, hopeless: Callable[[], bool] = lambda: False
) -> T:
    """The action's result, or its error; Silent where it takes longer than `seconds`, or is `hopeless`.

    `on` says what the action waits for. If an earlier action on the same is still overdue, this one gets a fraction of
    a second.
    """
    result: list[T] = []
    errors: list[BaseException] = []

    def attempt() -> None:
        try:
            result.append(action())
        except BaseException as error:
            errors.append(error)

    thread = threading.Thread(target=attempt, name=on, daemon=True)
    try:
        thread.start()
    except RuntimeError:
        return action()  # An exiting interpreter cannot start threads.
    # What waits behind an action that already took too long has no better chance.
    until = time.monotonic() + (min(seconds, _PATIENCE) if on in _overdue_on() else seconds)
    while thread.is_alive() and (left := until - time.monotonic()) > 0 and not hopeless():
        thread.join(min(left, _LOOK))
    if thread.is_alive():
        _overdue.add(thread)
    if errors:
        raise errors[0]
    if not result:
        raise Silent(f"no answer within {seconds:g} s")
    return result[0]


def within(seconds: float, action: Callable[[], T], on: str = STORE) -> T | None:
    """The action's result; None where it fails or takes longer than `seconds`. For what may be left undone."""
    try:
        return bounded(seconds, action, on)
    except RuntimeError as error:
        if not is_of_torch(error):
            raise
        return None  # The store's host is gone or stopped.


def left_running(seconds: float) -> set[str]:
    """What overdue actions wait for, after up to `seconds` more: their threads must not outlive the interpreter."""
    until = time.monotonic() + seconds
    for thread in list(_overdue):
        thread.join(max(0.0, until - time.monotonic()))
    return _overdue_on()


def _overdue_on() -> set[str]:
    """What the actions that are overdue now wait for."""
    return {thread.name for thread in list(_overdue) if thread.is_alive()}
