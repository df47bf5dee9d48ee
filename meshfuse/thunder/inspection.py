"""What was planned for a function of thunder.jit."""

# pyright: reportMissingImports=false, reportAttributeAccessIssue=false

from __future__ import annotations

from typing import Any

import thunder

from ..errors import caller_line, shown, user_error
from ..frontends.traced import TracedDefinition
from ..report.bill import Bill, bill_of
from .executor import RegionCall


def definitions(jitted: Any) -> dict[str, TracedDefinition]:
    """The definitions of the latest traces by the names that they have there, forward and then backward.

    Each can be asked for its `bill()`, `explain()` and host programs. Raises DefinitionError where nothing has been
    traced yet.
    """
    traces = [*_latest(jitted, thunder.last_traces), *_latest(jitted, thunder.last_backward_traces)]
    if not traces:
        raise user_error("no traces yet", shown(jitted), "a function of thunder.jit that has been called",
                         "Call it first: plans depend on shapes.", caller_line())  # fmt: skip
    calls = {name: call for trace in traces for b in trace.bound_symbols for name, call in (b._call_ctx or {}).items()}
    return {name: call.fd for name, call in calls.items() if isinstance(call, RegionCall)}


def bill(jitted: Any) -> Bill:
    """The bytes that each rank sends in the definitions of the latest traces, forward and backward.

    What Thunder sends by itself is not in it: what DDP and FSDP do, unless the executor has a mesh. Raises
    DefinitionError where nothing has run yet.
    """
    found = [bill_of(fd.latest()) for fd in definitions(jitted).values()]
    return Bill(tuple(entry for part in found for entry in part.entries))


def _latest(jitted: Any, traces: Any) -> list[Any]:
    try:
        return traces(jitted)[-1:] or []
    except (TypeError, AttributeError, ValueError):  # none yet
        return []
