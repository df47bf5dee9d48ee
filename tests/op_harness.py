"""The table's ops and their samples, as tests walk them."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import torch

from meshfuse.ops import OPS
from meshfuse.ops.binding import make_call
from meshfuse.ops.opdef import Call
from meshfuse.ops.values import TensorRef
from meshfuse.testing.calls import SALT, operands_of, run_lowering, whole

__all__ = ["SALT", "argument", "make_call", "operands_of", "run_lowering", "sample_ids", "splits", "whole"]


def sample_ids() -> list[tuple[str, int]]:
    return [(name, i) for name, op in OPS.items() for i in range(len(op.samples()) or 1)]


def argument(arg: Any, tensors: Sequence[torch.Tensor]) -> Any:
    """An argument of a call with these tensors in the places of its operands."""
    if isinstance(arg, TensorRef):
        return tensors[arg.id]
    if isinstance(arg, tuple) and arg and isinstance(arg[0], TensorRef):
        return [tensors[ref.id] for ref in arg]
    return arg


def splits(call: Call) -> list[tuple[int, int]]:
    """(operand, dim) of dims of more than one element that between them have every factor of the op's rule, and are of
    every operand: what is decided of a factor is decided of all dims that have it.
    """
    found, seen = list[tuple[int, int]](), set[object]()
    for operand, dims in enumerate(call.op.rule(call).operands):
        for dim, factors in enumerate(dims):
            new = {f"operand {operand}", *factors} - seen
            if call.types[operand].shape[dim] > 1 and (new or not factors):
                found.append((operand, dim))
                seen |= new
    return found
