"""Hypothesis strategies and checks for programs that shard, used by meshfuse's own tests and open to others.

Needs `hypothesis`, which nothing else of meshfuse imports.
"""

from .layouts import dim_layouts, layouts, meshes, shardings

__all__ = ["dim_layouts", "layouts", "meshes", "shardings"]
