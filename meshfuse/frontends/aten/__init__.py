"""aten ops in ops of a definition: `rule_for`, over the table that is assembled here.

A family of ops is a file; a new one gets a line here.
"""

from __future__ import annotations

from . import (
    attention,
    ctc,
    experts,
    factories,
    images,
    indexing,
    items,
    pointwise,
    products,
    reductions,
    shapes,
    strided,
)
from .by_name import has_rule, rule_for
from .table import Translation

FAMILIES = (
    pointwise, shapes, strided, reductions, products, images, indexing, factories, attention, experts, items, ctc,
)  # fmt: skip
__all__ = ["FAMILIES", "Translation", "has_rule", "rule_for"]
