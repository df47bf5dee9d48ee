"""A tensor as a grid of its pieces, coloured by the ranks that hold them: text, colours of a terminal, or SVG."""

from __future__ import annotations

import itertools
import math
import sys
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from typing import Any, Protocol

from ..html_text import escaped
from ..mesh import DeviceMesh

_MOST = 24  # pieces of a dim that are shown
_WIDTH, _HEIGHT, _LEFT, _TOP = 420, 260, 44, 34  # of an SVG, in pixels; what is left of and above the grid
_LEAST = 18  # pixels of a piece
_LETTER = 6  # of a letter, about
_SHOWN_RANKS = 6


class Sharded(Protocol):
    """Where the elements of a tensor are."""

    mesh: DeviceMesh

    def runs(self, shape: Sequence[int], rank: int) -> tuple[tuple[tuple[int, int], ...], ...]: ...


@dataclass(frozen=True, slots=True)
class Picture:
    """The pieces of a tensor along two of its dims (one, or none), and the ranks that hold each.

    rows, columns: the intervals of indices of the pieces along the two dims; (0, 1) stands for a dim that is not there.
    ranks: the ranks that hold a piece, by row and column.
    title: what is shown, in words.
    """

    rows: tuple[tuple[int, int], ...]
    columns: tuple[tuple[int, int], ...]
    ranks: tuple[tuple[tuple[int, ...], ...], ...]
    title: str

    def __str__(self) -> str:
        cells = [[_ranks_text(ranks) for ranks in line] for line in self.ranks]
        sides = [_span(row) for row in self.rows]
        heads = [_span(column) for column in self.columns]
        side = max(map(len, sides))
        width = max(len(text) for text in (*heads, *itertools.chain(*cells)))
        bar = " " * side + " +" + ("-" * (width + 2) + "+") * len(heads)
        lines = [self.title, " " * side + "  " + " ".join(f" {head:^{width}} " for head in heads).rstrip(), bar]
        for name, line in zip(sides, cells, strict=True):
            lines += [f"{name:>{side}} |" + "".join(f" {text:^{width}} |" for text in line), bar]
        return "\n".join(lines)

    def __rich__(self) -> Any:
        """A table of the rich library, with each set of ranks in a colour of its own."""
        from rich.table import Table  # for terminals alone
        from rich.text import Text

        table = Table(title=self.title, title_justify="left", show_lines=True)
        table.add_column("")
        for column in self.columns:
            table.add_column(_span(column), justify="center")
        hues = self._hues()
        for row, line in zip(self.rows, self.ranks, strict=True):
            cells = [Text(_ranks_text(r), style=f"black on rgb({_rgb(hues[r])})") for r in line]
            table.add_row(_span(row), *cells)
        return table

    def _repr_html_(self) -> str:
        return self.svg()

    def svg(self) -> str:
        """The picture as an SVG element: pieces have sizes in proportion to their elements."""
        xs, ys = _edges(self.columns, _WIDTH, _LEFT), _edges(self.rows, _HEIGHT, _TOP)
        hues = self._hues()
        parts = [f"<title>{escaped(self.title)}</title>", _svg_text(4, 13, self.title, "start")]
        for (y, height), line in zip(ys, self.ranks, strict=True):
            for (x, width), ranks in zip(xs, line, strict=True):
                parts.append(_svg_cell(x, y, width, height, ranks, hues[ranks]))
        parts += [
            _svg_text(x + w / 2, _TOP - 5, _span(c), "middle") for (x, w), c in zip(xs, self.columns, strict=True)
        ]
        parts += [_svg_text(_LEFT - 4, y + h / 2 + 4, _span(r), "end") for (y, h), r in zip(ys, self.rows, strict=True)]
        wide = max(math.ceil(sum(xs[-1])) + 2, 8 + _LETTER * len(self.title))
        high = math.ceil(sum(ys[-1])) + 2
        size = f'width="{wide}" height="{high}" viewBox="0 0 {wide} {high}"'
        look = 'role="img" font-family="sans-serif" font-size="11"'
        return f'<svg xmlns="http://www.w3.org/2000/svg" {look} {size}>{"".join(parts)}</svg>'

    def _hues(self) -> dict[tuple[int, ...], float]:
        """A hue from 0 to 1 for each set of ranks."""
        sets = sorted(set(itertools.chain(*self.ranks)))
        return {ranks: place / len(sets) for place, ranks in enumerate(sets)}

    def show(self) -> None:
        """Show it: as SVG in a notebook, in colours in a terminal, as text elsewhere."""
        interactive = getattr(sys.modules.get("IPython"), "get_ipython", lambda: None)()
        if getattr(interactive, "kernel", None) is not None:
            sys.modules["IPython"].display.display(self)
        elif sys.stdout.isatty():
            from rich.console import Console  # for terminals alone

            Console().print(self)
        else:
            print(self)


def picture_of(sharding: Sharded, shape: Sequence[int], name: str, note: str = "") -> Picture:
    """The picture of a tensor of this global shape, along the two dims that are cut into most pieces."""
    held = {rank: sharding.runs(shape, rank) for rank in sharding.mesh.ranks}
    pieces = [_pieces([runs[d] for runs in held.values()], n) for d, n in enumerate(shape)]
    chosen = sorted(sorted(range(len(shape)), key=lambda d: (-len(pieces[d]), d))[:2])
    both = [pieces[d][:_MOST] for d in chosen]
    both = [[(0, 1)]] * (2 - len(both)) + both
    places = [-1] * (2 - len(chosen)) + chosen
    rest = [d for d in range(len(shape)) if d not in chosen]
    there = [rank for rank, runs in held.items() if all(_holds(runs[d], 0) for d in rest)]

    def ranks_of(at: tuple[int, int]) -> tuple[int, ...]:
        pairs = [(d, i) for d, i in zip(places, at, strict=True) if d >= 0]
        return tuple(rank for rank in there if all(_holds(held[rank][d], i) for d, i in pairs))

    rows, columns = both
    ranks = tuple(tuple(ranks_of((row[0], column[0])) for column in columns) for row in rows)
    return Picture(tuple(rows), tuple(columns), ranks, name + _remark(shape, chosen, rest, pieces) + note)


def _pieces(runs: Sequence[Sequence[tuple[int, int]]], n: int) -> list[tuple[int, int]]:
    """The intervals of a dim in which no run of any rank begins or ends."""
    edges = sorted({0, n, *(edge for mine in runs for run in mine for edge in run)})
    return [(a, b) for a, b in itertools.pairwise(edges)] or [(0, 0)]


def _holds(runs: Sequence[tuple[int, int]], index: int) -> bool:
    return any(a <= index < b for a, b in runs)


def _remark(shape: Sequence[int], chosen: Sequence[int], rest: Sequence[int], pieces: Sequence[Sequence[Any]]) -> str:
    """What the picture leaves out, in words."""
    words = []
    if rest and len(chosen) == 2:
        words.append(f"dims {chosen[0]} and {chosen[1]}")
    if any(len(pieces[d]) > 1 for d in rest):
        words.append("at index 0 of the others")
    words += [f"the first {_MOST} of {len(pieces[d])} pieces of dim {d}" for d in chosen if len(pieces[d]) > _MOST]
    return f" ({', '.join(words)})" if words else ""


def _ranks_text(ranks: Sequence[int]) -> str:
    shown = ",".join(map(str, ranks[:_SHOWN_RANKS]))
    return f"{shown},.. ({len(ranks)})" if len(ranks) > _SHOWN_RANKS else shown or "-"


def _span(interval: tuple[int, int]) -> str:
    return f"{interval[0]}:{interval[1]}"


def _edges(intervals: Sequence[tuple[int, int]], most: int, start: int) -> list[tuple[float, float]]:
    """By interval where it begins and how wide it is, in pixels."""
    total = sum(b - a for a, b in intervals) or 1
    widths = [max(_LEAST, most * (b - a) / total) for a, b in intervals]
    return [(start + before, width) for before, width in zip(_sums(widths), widths, strict=True)]


def _sums(numbers: Sequence[float]) -> Iterator[float]:
    return itertools.accumulate(numbers[:-1], initial=0.0)


def _svg_text(x: float, y: float, text: str, anchor: str) -> str:
    return f'<text x="{x:.1f}" y="{y:.1f}" text-anchor="{anchor}" fill="currentColor">{escaped(text)}</text>'


def _svg_cell(x: float, y: float, width: float, height: float, ranks: tuple[int, ...], hue: float) -> str:
    text = _ranks_text(ranks)
    shown = text if len(text) * _LETTER < width else ""
    return (f'<g><title>ranks {escaped(text)}</title><rect x="{x:.1f}" y="{y:.1f}" width="{width:.1f}" '
            f'height="{height:.1f}" fill="rgb({_rgb(hue)})" stroke="#444"/><text x="{x + width / 2:.1f}" '
            f'y="{y + height / 2 + 4:.1f}" text-anchor="middle" fill="#111">{escaped(shown)}</text></g>')  # fmt: skip


def _rgb(hue: float) -> str:
    """A light colour of this hue, as three numbers."""
    return ",".join(str(round(175 + 75 * math.cos(2 * math.pi * (hue + third)))) for third in (0, -1 / 3, 1 / 3))
