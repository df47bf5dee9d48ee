"""Patterns of full names, as plans and units have them: `layers.*.self_attn.q_proj`."""

from __future__ import annotations

import difflib
import functools
import re
from collections.abc import Collection, Iterable


@functools.cache
def _compiled(pattern: str) -> re.Pattern[str]:
    """A `*` at either end stands for anything, one between two dots for one part of a name."""
    parts = pattern.split(".")
    text = [r"[^.]+" if part == "*" else ".*".join(map(re.escape, part.split("*"))) for part in parts]
    if parts[0] == "*" and len(parts) > 1:
        text[0] = ".*"
    if parts[-1] == "*":
        text[-1] = ".*"
    return re.compile(r"\.".join(text))


def matches(pattern: str, name: str) -> bool:
    """Whether a pattern fits a full name, or the end of one that begins with a part of it."""
    compiled = _compiled(pattern)
    ends = [0, *(place.end() for place in re.finditer(r"\.", name))]
    return any(compiled.fullmatch(name, start) for start in ends)


def matching(pattern: str, names: Iterable[str]) -> list[str]:
    """The names that a pattern fits."""
    return [name for name in names if matches(pattern, name)]


def nearest(pattern: str, names: Collection[str]) -> list[str]:
    """Up to four names like the pattern, with `*` in the place of numbers."""
    found = dict.fromkeys(re.sub(r"(?<=\.)\d+(?=\.|$)", "*", name) for name in names)
    last = pattern.rpartition(".")[2]
    close = difflib.get_close_matches(pattern, found, 3, 0.4)
    by_last = {name.rpartition(".")[2]: name for name in found}
    return list(dict.fromkeys([*close, *(by_last[n] for n in difflib.get_close_matches(last, by_last, 2, 0.5))]))[:4]
