"""What a user may pass for an int or for a text."""

from __future__ import annotations

from typing import Any


def as_int(value: Any) -> int | None:
    """The int that a Python int or numpy integer stands for; None for anything else, bools included."""
    if isinstance(value, bool) or not hasattr(value, "__index__"):
        return None
    try:
        return value.__index__()
    except (TypeError, ValueError):  # an array of several
        return None


def is_text(text: str) -> bool:
    """Whether a text can be written to a file: half of a surrogate pair cannot."""
    return not any("\ud800" <= letter <= "\udfff" for letter in text)
