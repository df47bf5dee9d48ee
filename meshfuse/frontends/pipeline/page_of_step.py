"""The page of a played step: a timeline of all stages and a table of what ranks do and hold, in one HTML text."""

from __future__ import annotations

from collections.abc import Iterator

from ...html_text import escaped
from ...number_text import duration, number
from .schedule import KINDS, Timed
from .step_figures import Row, StepFigures

_WIDTH, _HEIGHT, _LEFT = 1200, 18, 60  # Of the timeline, of a row of it, and of the rows' names; pixels.
_COLOURS = {"F": "#4c78a8", "B": "#f58518", "I": "#f58518", "W": "#b8b33c"}
_SUMS = "#8c6bb1"
_STYLE = """body{font:14px system-ui,sans-serif;margin:24px;max-width:1300px;background:#fff;color:#222}
table{border-collapse:collapse;font-size:13px}td,th{padding:3px 12px;text-align:right;border-bottom:1px solid #ddd}
.key span{display:inline-block;width:12px;height:12px;margin:0 4px 0 14px;vertical-align:-1px}
.sum b{font-size:20px;display:block}.sum{display:flex;flex-wrap:wrap;gap:28px;margin:12px 0}"""
_HEADS = ("ranks at", "stages", "busy", "bubble", "exposed communication", "memory", "share of peak")


def page_of_step(step: StepFigures) -> str:
    """The page, which works offline and without scripts."""
    title = " x ".join(f"{name} {number(size)}" for name, size in step.axes)
    return (
        f'<!DOCTYPE html><html lang="en"><head><meta charset="utf-8"><title>{escaped(title)}</title>'
        f"<style>{_STYLE}</style></head><body><h1>{number(step.ranks)} ranks: {escaped(title)}</h1>"
        f"<p>{escaped(step.schedule.name)}: {step.schedule.stages} stages, {step.schedule.microbatches} micro-batches. "
        f"{number(step.programs)} programs were verified; they stand for {number(step.in_all)} of ranks.</p>"
        f"{_summary(step)}{_key()}{_timeline(step)}<h2>By place on the pipeline's axis</h2>{_table(step)}"
        "<p>All times are modelled: a rank computes at the rates of its mesh and its links take turns; a step has all "
        "forwards and backwards and sums of gradients. Memory has weights, gradients, activations and an optimiser's "
        "states.</p></body></html>"
    )


def _summary(step: StepFigures) -> str:
    facts = (
        (duration(step.seconds), "a step"), (f"{step.bubble:.1%}", "bubble"),
        (f"{step.exposed:.1%}", "exposed communication"), (f"{step.peak:.1%}", "of peak operations"),
        (_gigabytes(step.memory), "on the rank that holds most"),
    )  # fmt: skip
    return f'<div class="sum">{"".join(f"<div><b>{value}</b>{what}</div>" for value, what in facts)}</div>'


def _gigabytes(nbytes: float) -> str:
    return f"{nbytes / 1e9:,.1f} GB"


def _key() -> str:
    names = [(_COLOURS[kind], name) for kind, name in KINDS.items() if kind != "I"]
    entries = "".join(f'<span style="background:{colour}"></span>{name}'
                      for colour, name in (*names, (_SUMS, "sums of gradients")))  # fmt: skip
    return f'<p class="key">{entries}; odd micro-batches are lighter</p>'


def _timeline(step: StepFigures) -> str:
    scale = (_WIDTH - _LEFT) / step.seconds
    rows = "".join(_lane(place, timed, row, scale)
                   for place, (timed, row) in enumerate(zip(step.timed, step.rows, strict=True)))  # fmt: skip
    height = _HEIGHT * len(step.rows) + 20
    foot = f'<text x="{_WIDTH}" y="{height - 4}" text-anchor="end">{duration(step.seconds)}</text>'
    return (
        f'<svg viewBox="0 0 {_WIDTH} {height}" width="100%" role="img" aria-label="timeline" font-size="11" '
        f'fill="currentColor">{rows}<text x="{_LEFT}" y="{height - 4}">0</text>{foot}</svg>'
    )


def _lane(place: int, timed: tuple[Timed, ...], row: Row, scale: float) -> str:
    y = place * _HEIGHT
    bars = "".join(_bars(timed, y, scale))
    sums = row.sums.end - row.sums.begin
    last = _bar(row.sums.begin, sums, y, scale, _SUMS, 1.0, "sums of gradients") if sums else ""
    return f'<text x="0" y="{y + 13}">{place}: {", ".join(map(str, row.stages[:3]))}</text>{bars}{last}'


def _bars(timed: tuple[Timed, ...], y: int, scale: float) -> Iterator[str]:
    for each in timed:
        action, odd = each.action, each.action.microbatch % 2
        yield _bar(each.begin, each.end - each.begin, y, scale, _COLOURS[action.kind], 0.7 if odd else 1.0, str(action))


def _bar(begin: float, seconds: float, y: int, scale: float, colour: str, opacity: float, title: str) -> str:
    x, width = _LEFT + begin * scale, max(seconds * scale, 0.2)
    return (
        f'<rect x="{x:.1f}" y="{y + 1}" width="{width:.2f}" height="{_HEIGHT - 2}" fill="{colour}" '
        f'opacity="{opacity}"><title>{escaped(title)}</title></rect>'
    )


def _table(step: StepFigures) -> str:
    head = "".join(f"<th>{name}</th>" for name in _HEADS)
    rows = "".join(_table_row(place, row, step) for place, row in enumerate(step.rows))
    return f"<table><thead><tr>{head}</tr></thead><tbody>{rows}</tbody></table>"


def _table_row(place: int, row: Row, step: StepFigures) -> str:
    seconds = step.seconds
    cells = (
        str(place), ", ".join(map(str, row.stages)), duration(row.busy), f"{1 - row.busy / seconds:.1%}",
        f"{row.exposed / seconds:.1%}", _gigabytes(row.memory), f"{row.flops / (seconds * step.flops):.1%}",
    )  # fmt: skip
    return f"<tr>{''.join(f'<td>{cell}</td>' for cell in cells)}</tr>"
