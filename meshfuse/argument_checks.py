"""Which values a user may pass for an int, for a text or for a flag."""

from __future__ import annotations

from typing import Any

from .errors import ArgumentError, SourceLine, shown, user_error


def as_int(value: Any) -> int | None:
    """The int that a Python int or numpy integer stands for; None for anything else, bools included."""
    if isinstance(value, bool) or not hasattr(value, "__index__"):
        return None
    try:
        return value.__index__()
    except (TypeError, ValueError):  # an array of several
        return None


def is_text(text: str) -> bool:
    """Whether a text can be written to a file: one with half of a surrogate pair cannot."""
    return not any("\ud800" <= letter <= "\udfff" for letter in text)


def texts(value: Any) -> tuple[str, ...] | None:
    """The texts that a text, or a list of some, stands for; None for anything else."""
    found = (value,) if isinstance(value, str) else value
    is_list = isinstance(found, (list, tuple)) and all(isinstance(text, str) for text in found)
    return tuple(found) if is_list else None


def check_flags(line: SourceLine, **flags: Any) -> None:
    """Raises ArgumentError for an option, given by name, that is neither True nor False."""
    for name, value in flags.items():
        if not isinstance(value, bool):
            raise user_error(name, shown(value), "True or False", "Pass a bool, or leave it out.", line,
                             ArgumentError)  # fmt: skip
