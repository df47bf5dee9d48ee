"""Numbers as text that people read: three figures, thousands set apart, and never an exponent."""

from __future__ import annotations

_LEAST = 1e-3  # Smaller numbers are written as "< 0.001".
_UNITS = ((1.0, "s"), (1e-3, "ms"))


def number(count: float) -> str:
    """A count as text, with its thousands set apart."""
    return f"{count:,.0f}"


def figures(value: float) -> str:
    """A number of 0 or more as text, with three figures."""
    if 0 < value < _LEAST:
        return f"<{_LEAST:g}"
    return number(value) if value >= 100 else f"{value:.3g}"


def micro(seconds: float) -> str:
    """Seconds as text in microseconds, with three figures."""
    return figures(seconds * 1e6)


def duration(seconds: float) -> str:
    """Seconds as text with the unit that suits them: from 1 ms on no microseconds."""
    for unit, name in _UNITS:
        if seconds >= unit:
            return f"{figures(seconds / unit)} {name}"
    return f"{micro(seconds)} us"
