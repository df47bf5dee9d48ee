"""A definition with every size known: what the compiler's passes work on.

`nodes` has the graph, `concrete` makes one of a definition, `calls` has its ops' calls, `order` an order of its nodes.
"""

from .calls import CallTable
from .concrete import shape_scalars, specialize
from .nodes import Carried, Graph, Node, Rewriting, Stream, Tensor, needed, numbered, reordered, rewritten, users
from .order import depth_first

__all__ = [
    "CallTable",
    "Carried",
    "Graph",
    "Node",
    "Rewriting",
    "Stream",
    "Tensor",
    "depth_first",
    "needed",
    "numbered",
    "reordered",
    "rewritten",
    "shape_scalars",
    "specialize",
    "users",
]  # fmt: skip
