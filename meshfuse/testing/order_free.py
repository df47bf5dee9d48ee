"""Check of `OpDef.order_free`: operands in another order along a factor give the results in that order.

`rewrites.carry_block_orders` relies on it, and on the same of `OpDef.concat_distributive`.
"""

from __future__ import annotations

import math
from collections.abc import Sequence

import torch

from ..ops.binding import make_call
from ..ops.opdef import OpDef, Sample
from ..ops.rules import DimFactors, Rule, letter
from ..rewrites.carry_block_orders import keeps_order
from .calls import operands_of, whole
from .cases import report, tolerance, wrong_results


def order_problem(op: OpDef, sample: Sample) -> str | None:
    """Compare the op on operands that are in the opposite order along a factor, for every factor that allows it."""
    call = make_call(op, sample)
    rule = op.rule(call)
    factors = [f for f, factor in enumerate(rule.factors) if factor.size > 1 and keeps_order(call, rule, f)]
    if not factors:
        return None
    operands = operands_of(call, sample)
    made = whole(call, operands)
    for factor in factors:
        found = whole(call, _turned(operands, rule, rule.operands, factor))
        wrong = wrong_results(found, _turned(made, rule, rule.results, factor), 10 * tolerance(call))
        if wrong is not None:
            facts = [("order", f"factor {letter(factor)} backwards"), ("wrong", wrong[2])]
            return report(op, call, "it is not the same in another order", facts, "Say order_free=().")
    return None


def _turned(
    tensors: Sequence[torch.Tensor], rule: Rule, sides: Sequence[DimFactors], factor: int
) -> list[torch.Tensor]:
    """Tensors with a factor backwards."""
    return [_backwards(x, rule, dims, factor) for x, dims in zip(tensors, sides, strict=True)]


def _backwards(x: torch.Tensor, rule: Rule, dims: DimFactors, factor: int) -> torch.Tensor:
    for dim, factors in enumerate(dims):
        if factor in factors:
            outer = math.prod(rule.factors[f].size for f in factors[: factors.index(factor)])
            size = rule.factors[factor].size
            return x.unflatten(dim, (outer, size, x.shape[dim] // (outer * size))).flip(dim + 1).flatten(dim, dim + 2)
    return x
