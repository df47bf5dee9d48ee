"""Small HTML for notebooks: escaped, without scripts, and with no style but its own."""

from __future__ import annotations

import html
from collections.abc import Collection, Sequence

_MOST_ROWS, _MOST_LINES = 102, 400
_BLOCK = "margin:0;padding:4px 8px;overflow-x:auto;line-height:1.35;font-size:12px"


def escaped(text: object) -> str:
    """Text as it is, for the inside of an element."""
    return html.escape(str(text))


def html_table(rows: Sequence[Sequence[str]], right: Collection[int] = (), caption: str = "") -> str:
    """A table whose first row is the heading; the columns in `right` are aligned to the right."""
    rows = rows if len(rows) <= _MOST_ROWS else [*rows[: _MOST_ROWS - 2], _left_out(rows), rows[-1]]
    lines = [f"<tr>{''.join(_cell(text, c in right, kind) for c, text in enumerate(row))}</tr>"
             for row, kind in zip(rows, ("th", *("td",) * len(rows)), strict=False)]  # fmt: skip
    below = f'<div style="padding:2px 8px;font-size:12px">{escaped(caption)}</div>' if caption else ""
    look = 'cellpadding="4" style="font-size:12px;white-space:nowrap"'
    return f'<div style="overflow-x:auto"><table {look}>{"".join(lines)}</table>{below}</div>'


def _left_out(rows: Sequence[Sequence[str]]) -> list[str]:
    return [f"{len(rows) - _MOST_ROWS + 1:,} more", *("",) * (len(rows[0]) - 1)]


def _cell(text: str, is_right: bool, kind: str) -> str:
    return f'<{kind} align="{"right" if is_right else "left"}">{escaped(text)}</{kind}>'


def html_lines(text: str, summary: str = "") -> str:
    """Text of several lines; with a summary it is folded away below that."""
    lines = text.split("\n")
    if len(lines) > _MOST_LINES:
        text = "\n".join([*lines[:_MOST_LINES], f"and {len(lines) - _MOST_LINES:,} more lines"])
    block = f'<pre style="{_BLOCK}">{escaped(text)}</pre>'
    return f"<details><summary>{escaped(summary)}</summary>{block}</details>" if summary else block


class Lines(str):
    """Text of several lines that a notebook, and a terminal's prompt, show as such."""

    __slots__ = ()

    def __repr__(self) -> str:
        return str(self)

    def _repr_html_(self) -> str:
        return html_lines(self)
