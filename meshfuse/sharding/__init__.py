"""How a tensor lies on a mesh."""

from .layout import WHOLE, Layout, Split
from .value import Sharding

__all__ = ["WHOLE", "Layout", "Sharding", "Split"]
