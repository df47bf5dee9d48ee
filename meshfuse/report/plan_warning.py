"""A warning for plans that send more than they need, with the annotation to change and what that saves."""

from __future__ import annotations

import math
import os
import warnings
from collections.abc import Sequence
from typing import Any

from ..compiler import CompiledProgram
from ..errors import SourceLine, shown, user_error
from ..number_text import number
from ..resharding import Reshard
from .alternatives import Alternative, Alternatives, Total, total, wire_bytes
from .causes import Causes

# Of the bytes on the wire, and of those that a rank holds.
MAX_WIRE, MAX_MEMORY = "max_wire", "max_memory"
# Without a bound: one collective of so many bytes per rank is looked at, so many ops are planned again for it in all,
# and a warning needs a plan that moves less than half.
NOTABLE = 256e6
OPS = 400
WORTH = 0.5
# How many of the largest collectives are looked behind.
LOOKED_AT = 3


class PlanWarning(UserWarning):
    """A plan sends or holds more bytes than its bound, or sends far more than with another annotation."""


def bound(name: str, given: Any, line: SourceLine | None = None) -> float | None:
    """A bound in bytes per rank: as given, else from MESHFUSE_MAX_WIRE or MESHFUSE_MAX_MEMORY; None for no bound.

    Raises DefinitionError where it is not a number from 0 on.
    """
    variable = f"MESHFUSE_{name.upper()}"
    text = os.environ.get(variable) if given is None else given
    if text is None or (isinstance(text, str) and not text):
        return None
    try:
        found = math.nan if isinstance(text, bool) else float(text)
    except (TypeError, ValueError, OverflowError):
        found = math.nan
    if not found >= 0:
        source = name if given is not None else variable
        raise user_error(source, shown(text), "bytes per rank, 0 or more", "64e6 is 64 MB.", line)
    return found


def watch(compiled: CompiledProgram, max_wire: float | None, line: SourceLine) -> None:
    """Warn (PlanWarning, at the user's line) of a plan over its bound, or one that another annotation would halve."""
    reshards = compiled.resharded.collectives
    if not reshards or max_wire == math.inf or (max_wire is None and not _notable(compiled, reshards)):
        return
    now = total(compiled.resharded)
    if max_wire is not None and now.wire <= max_wire:
        return
    text = _text(compiled, now, max_wire)
    if text:
        warnings.warn_explicit(text, PlanWarning, line.file, line.line)


def _notable(compiled: CompiledProgram, reshards: Sequence[Reshard]) -> bool:
    """Whether a program is small enough to be planned again, and gathers a large tensor somewhere."""
    large = (compiled.resharded.type_of(s.source).nbytes >= NOTABLE for s in reshards)
    return len(compiled.graph.nodes) <= OPS and any(large)


def _text(compiled: CompiledProgram, now: Total, max_wire: float | None) -> str:
    """The text of the warning; "" where there is nothing to warn of."""
    largest = _largest(compiled)
    statement, wire = largest[0]
    causes = Causes(compiled)
    behind = dict.fromkeys(i for s, _ in largest for i in causes.of(s).annotated)
    most = OPS // max(len(compiled.graph.nodes), 1) if max_wire is None else None
    other = Alternatives(compiled).best(tuple(behind), most)
    limit = now.wire if max_wire is not None else WORTH * now.wire
    if other is not None and other.total.wire >= limit:
        other = None
    if max_wire is None and (other is None or wire < NOTABLE):
        return ""
    label = compiled.graph.tensors[compiled.resharded.values[statement.source].tensor].label
    over = f", more than max_wire={number(max_wire)}" if max_wire is not None else ""
    most = f"{statement.step.kind.value} of {label} for {statement.why} at {statement.line}, {number(wire)} bytes"
    advice = _advice(causes, other, now) if other is not None else "No other annotation behind the largest moves less."
    return f"the plan moves {number(now.wire)} bytes per rank{over}; the largest collective is the {most}. {advice}"


def _largest(compiled: CompiledProgram) -> list[tuple[Reshard, float]]:
    """The collectives that send most, with their bytes."""
    graph, values = compiled.graph, compiled.resharded.values
    found = [(s, wire_bytes(graph, values[s.source].tensor, s.step)) for s in compiled.resharded.collectives]
    return sorted(found, key=lambda entry: -entry[1])[:LOOKED_AT]


def _advice(causes: Causes, other: Alternative, now: Total) -> str:
    first = other.tensors[0]
    label, more = causes.graph.tensors[first].label, len(other.tensors) - 1
    alike = f" (and {more} more annotated there)" if more else ""
    change = "Leave out the annotation of" if other.new is None else f"Annotate as {other.new}, not {other.old},"
    saved = f"that saves {number(now.wire - other.total.wire)} bytes per rank"
    return f"{change} {label}{alike} at {causes.line(first)}: {saved}."
