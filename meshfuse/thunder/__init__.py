"""Lightning Thunder: definitions from its traces, data parallel by Thunder, tensor parallel by meshfuse.

`MeshSplit(mesh, plan)` is a Thunder transform that cuts weights and annotates them in the trace; `executor()` is a
Thunder executor that plans the trace between Thunder's own communication and runs it on a mesh::

    jitted = thunder.jit(
        model, executors=[mf.thunder.executor(), *thunder.get_default_executors()],
        transforms=[mf.thunder.MeshSplit(mesh["tp"], {"fc1": "colwise", "fc2": "rowwise"})],
    )
"""

from __future__ import annotations

from .installed import ThunderMissing as ThunderMissing
from .installed import import_thunder

import_thunder()

from .executor import executor as executor  # noqa: E402  # what follows imports Thunder
from .inspection import bill as bill  # noqa: E402
from .inspection import definitions as definitions  # noqa: E402
from .prims import mesh_local as mesh_local  # noqa: E402
from .prims import mesh_split as mesh_split  # noqa: E402
from .weights import MeshSplit as MeshSplit  # noqa: E402

__all__ = ["MeshSplit", "ThunderMissing", "bill", "definitions", "executor", "mesh_local", "mesh_split"]
