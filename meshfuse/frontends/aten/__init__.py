"""aten ops in ops of a definition: `RULES`, assembled here. A family of ops is a file; a new one gets a line here."""

from __future__ import annotations

from . import attention, factories, indexing, pointwise, products, reductions, shapes
from .table import NAMED, RULES, Translation

FAMILIES = (pointwise, shapes, reductions, products, indexing, factories, attention)
__all__ = ["FAMILIES", "NAMED", "RULES", "Translation"]
