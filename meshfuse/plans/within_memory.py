"""Of plans at several prices of memory the fastest that is within a bound.

A bound on what a rank holds enters an optimisation by a price per byte (a Lagrange multiplier). The best plan
at some price is the fastest of all that hold no more of what has the price (Everett, 1963, "Generalized Lagrange
multiplier method"). The dearer memory is, the less is held, so that the cheapest price at which a plan is within the
bound is found by halving.
"""

from __future__ import annotations

import math
from collections.abc import Callable
from typing import Protocol, TypeVar


class Planned(Protocol):
    """A plan: its modelled seconds, and the most bytes that a rank holds."""

    @property
    def seconds(self) -> float: ...
    @property
    def memory(self) -> float: ...


P = TypeVar("P", bound=Planned)
# Prices that are tried, as times the seconds per byte of the plan without a bound, and how many between them. At the
# dearest memory alone decides, also where a message takes far longer to start than all of a small step takes.
_PRICES, _DEAREST, _HALVINGS = (1e-4, 1e3), 1e9, 6


def fastest_within(
    limit: float, free: P, at: Callable[[float], P], halvings: int = _HALVINGS, is_small: bool = True
) -> P:  # fmt: skip
    """The fastest plan within a limit in bytes; where even at the dearest price too much is held, one that holds least.

    free: the plan without a bound. at: the best plan at a price, in seconds per byte. halvings: of the price, at most.
    is_small: whether a step may take less time than its messages take to start: the dearest price is then tried, too.
    """
    usual = free.seconds / free.memory
    low, high = usual * _PRICES[0], usual * _PRICES[1]
    best = at(high)
    tried = [free, best]
    if best.memory > limit and is_small:
        low, high = high, usual * _DEAREST
        best = at(high)
        tried.append(best)
    if best.memory > limit:
        return min(tried, key=lambda each: each.memory)
    for _ in range(halvings):
        price = math.sqrt(low * high)
        found = at(price)
        if found.memory > limit:
            low = price
        else:
            high, best = price, min(best, found, key=lambda each: each.seconds)
    return best
