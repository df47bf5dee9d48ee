"""For the site: lines `name: what it is` of our docstrings become a list."""

from __future__ import annotations

import re
from typing import Any

import griffe

_ENTRY = re.compile(r"^\*{0,2}`?\w+`?(, `?\w+`?)*: ")


def listed(text: str) -> str:
    """The text with each paragraph of such lines as a list; continuation lines are indented below theirs."""
    return "\n\n".join(_as_list(part) for part in text.split("\n\n"))


def _as_list(part: str) -> str:
    lines = part.split("\n")
    outer = [line for line in lines if not line.startswith(" ")]
    if "::" in part or not outer or not all(map(_ENTRY.match, outer)):
        return part
    return "\n".join(f"  {line.strip()}" if line.startswith(" ") else f"- {line}" for line in lines)


class DocstringLists(griffe.Extension):
    """Applies `listed` to every docstring that is shown."""

    def on_object(self, *, obj: griffe.Object, **_: Any) -> None:
        """griffe calls it for each object that it has read."""
        if obj.docstring is not None:
            obj.docstring.value = listed(obj.docstring.value)
