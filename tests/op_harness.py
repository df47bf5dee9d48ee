"""The table's ops and their samples, as tests walk them."""

from __future__ import annotations

from meshfuse.ops import OPS
from meshfuse.ops.binding import make_call
from meshfuse.testing.calls import SALT, evaluate, operands_of, whole

__all__ = ["SALT", "evaluate", "make_call", "operands_of", "sample_ids", "whole"]


def sample_ids() -> list[tuple[str, int]]:
    return [(name, i) for name, op in OPS.items() for i in range(len(op.samples()) or 1)]
