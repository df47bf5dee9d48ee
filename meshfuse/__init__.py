"""meshfuse: write the math of a model once, say how a few tensors split over a device mesh, run it on every rank.

The names below are loaded when they are first used: importing meshfuse loads neither torch nor nvFuser.
"""

from __future__ import annotations

import importlib
import importlib.util
import os
import sys
from typing import TYPE_CHECKING, Any

from .version import __version__ as __version__

_HOME = {
    "FusionDefinition": "fusion_definition",
    "shard_tensor": "executor.shards",
    "TensorView": "definition.tensor_view",
    "Val": "definition.tensor_view",
    "DeviceMesh": "mesh",
    "Link": "costs",
    "Machine": "costs",
    "ParallelType": "mesh",
    "DataType": "dtypes",
    "Sharding": "sharding.value",
    "Split": "sharding.layout",
    "World": "runtime.world",
    "OpDef": "ops.opdef",
    "Partial": "ops.opdef",
    "Sample": "ops.opdef",
    "TensorType": "ops.values",
    "register_op": "ops.registry",
    "torch_op": "ops.torch_ops",
    "unregister_op": "ops.registry",
    "MeshfuseError": "errors",
    "PlanWarning": "report.plan_warning",
    "DefinitionError": "errors",
    "ArgumentError": "errors",
    "RankError": "errors",
    "RankTimeout": "errors",
    "CheckpointError": "errors",
    "KernelError": "errors",
    "OutOfMemoryError": "executor.kernel_errors",
    "compile": "frontends.compiled_function",
    "optim_params": "frontends.optim_params",
    "parallelize": "frontends.parallel_module",
    "Experts": "frontends.experts",
    "Context": "frontends.context",
    "FSDP": "definition.fsdp",
    "Pipeline": "frontends.pipeline.options",
    "Plan": "frontends.plan_value",
    "plan": "frontends.automatic.planning",
    "Precision": "frontends.precision",
    "visualize": "report.visualize",
    "Cluster": "cluster",
    "save": "checkpoint",
    "load": "checkpoint",
}
# Modules that users name in full. They are no part of `from meshfuse import *`, which would load them.
_MODULES = ("costs", "host_programs", "nvfuser_direct", "session", "testing", "thunder")
__all__ = [
    "FSDP",
    "ArgumentError",
    "CheckpointError",
    "Cluster",
    "Context",
    "DataType",
    "DefinitionError",
    "DeviceMesh",
    "Experts",
    "FusionDefinition",
    "KernelError",
    "Link",
    "Machine",
    "MeshfuseError",
    "OpDef",
    "OutOfMemoryError",
    "ParallelType",
    "Partial",
    "Pipeline",
    "Plan",
    "PlanWarning",
    "Precision",
    "RankError",
    "RankTimeout",
    "Sample",
    "Sharding",
    "Split",
    "TensorType",
    "TensorView",
    "Val",
    "World",
    "compile",
    "load",
    "optim_params",
    "parallelize",
    "plan",
    "register_op",
    "save",
    "shard_tensor",
    "torch_op",
    "unregister_op",
    "visualize",
]

if TYPE_CHECKING:
    from . import costs as costs
    from . import host_programs as host_programs
    from . import nvfuser_direct as nvfuser_direct
    from . import session as session
    from . import testing as testing
    from . import thunder as thunder
    from .checkpoint import load, save
    from .cluster import Cluster
    from .costs import Link, Machine
    from .definition.fsdp import FSDP
    from .definition.tensor_view import TensorView, Val
    from .dtypes import DataType
    from .errors import (
        ArgumentError,
        CheckpointError,
        DefinitionError,
        KernelError,
        MeshfuseError,
        RankError,
        RankTimeout,
    )
    from .executor.kernel_errors import OutOfMemoryError
    from .executor.shards import shard_tensor
    from .frontends.automatic.planning import plan
    from .frontends.compiled_function import compile
    from .frontends.context import Context
    from .frontends.experts import Experts
    from .frontends.optim_params import optim_params
    from .frontends.parallel_module import parallelize
    from .frontends.pipeline.options import Pipeline
    from .frontends.plan_value import Plan
    from .frontends.precision import Precision
    from .fusion_definition import FusionDefinition
    from .mesh import DeviceMesh, ParallelType
    from .ops.opdef import OpDef, Partial, Sample
    from .ops.registry import register_op, unregister_op
    from .ops.torch_ops import torch_op
    from .ops.values import TensorType
    from .report.plan_warning import PlanWarning
    from .report.visualize import visualize
    from .runtime.world import World
    from .sharding.layout import Split
    from .sharding.value import Sharding


if "MESHFUSE_FOLLOWER_CODE" in os.environ:  # A rank of `meshfuse run`; exit_hooks says what for.
    importlib.import_module(".runtime.exit_hooks", __name__).report_user_errors()


def __getattr__(name: str) -> Any:
    if name in _MODULES:
        return importlib.import_module(f".{name}", __name__)
    if name not in _HOME:
        # With these Python suggests names that are near.
        raise AttributeError(f"module 'meshfuse' has no attribute {name!r}", name=name, obj=sys.modules[__name__])
    value = getattr(importlib.import_module(f".{_HOME[name]}", __name__), name)
    globals()[name] = value
    return value


def __dir__() -> list[str]:
    found = importlib.util.find_spec("thunder")
    missing = {"thunder"} if found is None or found.origin is None else set[str]()  # Getting it would be an error.
    return sorted([*__all__, *(name for name in _MODULES if name not in missing), "__version__"])
