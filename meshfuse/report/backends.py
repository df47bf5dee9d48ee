"""What runs each segment, and why."""

from __future__ import annotations

from collections.abc import Mapping

from ..backends.assignment import Chosen
from ..compiler import CompiledProgram
from ..lowering.segments import Segment
from .bill import table

# How many ops of a segment are named.
_SHOWN = 6


def backends_table(compiled: CompiledProgram, chosen: Mapping[str, Chosen]) -> str:
    """One row per segment: its name and ops, which backend computes it from which call on, and why."""
    nodes = compiled.graph.nodes
    rows = [("segment", "backend", "why", "ops")]
    for part in compiled.segmented.parts:
        if isinstance(part, Segment) and part.name in chosen:
            names = [nodes[c.node].name for c in part.computes]
            rows.append((part.name, chosen[part.name].backend, chosen[part.name].why, _shortened(names)))
    return table(rows) if len(rows) > 1 else "no segments: what loops over chunks compute runs in eager torch"


def _shortened(names: list[str]) -> str:
    left = f" and {len(names) - _SHOWN} more" if len(names) > _SHOWN else ""
    return ", ".join(names[:_SHOWN]) + left
