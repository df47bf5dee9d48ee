"""Checks of strategies' arguments. They raise where a strategy is made, at the user's line, and not where it draws."""

from __future__ import annotations

from collections.abc import Collection
from typing import Any

from ..argument_checks import as_int
from ..errors import ArgumentError, caller_line, shown, user_error
from ..sharding.value import MOST_DIMS


def check_int(what: str, value: Any, low: int, high: int | None = None) -> None:
    """Raises ArgumentError unless it is an int from low to high."""
    found = as_int(value)
    if found is None or found < low or (high is not None and found > high):
        upto = "or more" if high is None else f"to {high}"
        raise user_error(what, shown(value), f"an int, {low} {upto}", "Leave it out, or pass one.", caller_line(),
                         ArgumentError)  # fmt: skip


def check_type(what: str, value: Any, kind: type, do: str) -> None:
    """Raises ArgumentError unless the value is of this class."""
    if not isinstance(value, kind):
        raise user_error(what, f"{shown(value)} ({type(value).__name__})", f"a {kind.__name__}", do, caller_line(),
                         ArgumentError)  # fmt: skip


def check_entries(what: str, values: Any, kind: type | tuple[type, ...], needed: str) -> None:
    """Raises ArgumentError unless it is a list or a tuple of values of these classes."""
    if not isinstance(values, (list, tuple)) or not all(isinstance(value, kind) for value in values):
        raise user_error(what, shown(values), needed, "Pass a list.", caller_line(), ArgumentError)


def check_any(what: str, values: Collection[Any]) -> None:
    """Raises ArgumentError where there is nothing to draw from."""
    if not values:
        raise user_error(what, shown(values), "at least one", "Leave it out, or name some.", caller_line(),
                         ArgumentError)  # fmt: skip


def check_names(what: str, names: Any, known: Collection[str]) -> None:
    """Raises ArgumentError unless it is a list or a tuple of known names."""
    check_entries(what, names, str, f"a list of {', '.join(known)}")
    for name in names:
        if name not in known:
            raise user_error(what, shown(name), f"one of {shown(sorted(known))}", "Name another.", caller_line(),
                             ArgumentError)  # fmt: skip


def check_sizes(what: str, sizes: Any) -> None:
    """Raises ArgumentError unless it is a shape of known sizes."""
    listed = isinstance(sizes, (list, tuple)) and len(sizes) <= MOST_DIMS
    if not listed or any(n is None or n < 0 for n in map(as_int, sizes)):
        raise user_error(what, shown(sizes), "a list of ints >= 0, one per dim", "Pass the tensor's shape.",
                         caller_line(), ArgumentError)  # fmt: skip
