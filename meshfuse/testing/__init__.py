"""Hypothesis strategies and checks for programs that shard: for meshfuse's own tests, and for others' ops.

Needs `hypothesis`, which nothing else in meshfuse imports.
"""

from .check import assert_same_as_unsharded, inputs_for, shapes_for
from .check_op import check_op
from .definitions import annotations, definitions
from .layouts import dim_layouts, layouts, meshes, shardings

__all__ = [
    "annotations",
    "assert_same_as_unsharded",
    "check_op",
    "definitions",
    "dim_layouts",
    "inputs_for",
    "layouts",
    "meshes",
    "shapes_for",
    "shardings",
]
