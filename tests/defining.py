"""What tests of several modules take from a definition: its graph, operands for it, its calls, the twin of its text."""

from __future__ import annotations

import math
from typing import Any

import torch

import meshfuse as mf
import meshfuse.nvfuser_direct as nvfuser
from meshfuse.compiler import CompiledProgram, compile_sharded, graph_to_plan
from meshfuse.executor.arguments import Inputs
from meshfuse.graph import Graph, specialize
from meshfuse.lowering.instructions import Collective
from meshfuse.plans.shape_reuse import Plans


def graph_of(fd: mf.FusionDefinition) -> Graph:
    """Its graph at the sizes that it was defined with."""
    return specialize(fd.recording, {i: fd.recording.tensors[i].type.shape for i in fd.recording.input_tensors()}, {})


def taken_over(fd: mf.FusionDefinition, other: mf.FusionDefinition) -> CompiledProgram | None:
    """`fd` compiled with the plan of `other`, the same program of other sizes; None where that plan does not fit."""
    plans, world = Plans(), mf.DeviceMesh([0])
    sizes, others = (
        {i: tuple(d.tensors[i].type.shape) for i in d.input_tensors()} for d in (fd.recording, other.recording)
    )
    plans.keep(graph_to_plan(other.recording, others, {}), world, other.compile().planned)
    taken = plans.near(graph_to_plan(fd.recording, sizes, {}), world, math.inf)
    if taken is None:
        return None
    key = fd._programs.key(Inputs({}, {}, torch.device("cpu")), sizes, world)
    fd._programs.compiled[key] = compile_sharded(taken.plan, taken_from=taken.source)
    return fd._programs.compiled[key]


def random_inputs(fd: mf.FusionDefinition) -> list[torch.Tensor]:
    """The same normal numbers at each call, in single precision."""
    generator = torch.Generator().manual_seed(0)
    return [torch.randn(fd.recording.tensors[i].type.shape, generator=generator) for i in fd.recording.input_tensors()]


def collectives(fd: mf.FusionDefinition, rank: int = 0) -> list[Collective]:
    """What a rank's program calls, in its order."""
    return [i for i in fd.host_program(rank).instructions if isinstance(i, Collective)]


def rebuilt(fd: mf.FusionDefinition) -> mf.FusionDefinition:
    """What the text of a definition defines."""
    scope: dict[str, Any] = {}
    exec(repr(fd), scope)
    return scope["fd"]


def nvfuser_rebuilt(fd: nvfuser.FusionDefinition) -> nvfuser.FusionDefinition:
    """The same of one in nvFuser's words."""
    space: dict[str, Any] = {"FusionDefinition": nvfuser.FusionDefinition, "DataType": nvfuser.DataType}
    exec(repr(fd), space)
    with nvfuser.FusionDefinition() as twin:
        space["nvfuser_fusion"](twin)
    return twin


def nvfuser_relu() -> nvfuser.FusionDefinition:
    """The simplest definition in nvFuser's words: of rows of three."""
    with nvfuser.FusionDefinition() as fd:
        x = fd.define_tensor([-1, 3])
        fd.add_output(fd.ops.relu(x))
    return fd
