"""The table's ops and their samples, as tests walk them."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import torch

from meshfuse.ops import OPS
from meshfuse.ops.binding import make_call
from meshfuse.ops.values import TensorRef
from meshfuse.testing.calls import SALT, operands_of, run_lowering, whole

__all__ = ["SALT", "argument", "make_call", "operands_of", "run_lowering", "sample_ids", "whole"]


def sample_ids() -> list[tuple[str, int]]:
    return [(name, i) for name, op in OPS.items() for i in range(len(op.samples()) or 1)]


def argument(arg: Any, tensors: Sequence[torch.Tensor]) -> Any:
    """An argument of a call with these tensors in the places of its operands."""
    if isinstance(arg, TensorRef):
        return tensors[arg.id]
    if isinstance(arg, tuple) and arg and isinstance(arg[0], TensorRef):
        return [tensors[ref.id] for ref in arg]
    return arg
