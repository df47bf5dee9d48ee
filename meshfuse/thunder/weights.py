"""`MeshSplit`: a Thunder transform that cuts the weights of a module over a mesh, and says so in its traces."""

# pyright: reportMissingImports=false

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any

import torch
from thunder.core import prims, utils
from thunder.core.proxies import TensorProxy, variableify
from thunder.core.trace import TraceProvenance, from_trace, tracectx
from thunder.core.transform_common import Transform
from torch import nn

from ..argument_checks import check_flags
from ..definition.annotation import layouts_of_spec
from ..definition.checks import checked_mesh
from ..errors import SourceLine, caller_line, located, user_error
from ..executor.spmd import gather_output
from ..frontends.placing import check_same_weights
from ..frontends.plans import ModulePlan, module_plan
from ..mesh import DeviceMesh
from ..runtime.world import World
from ..sharding.data import shard
from ..sharding.value import Sharding
from .executor import NAME
from .prims import Layout, local_shape, mesh_split


class MeshSplit(Transform):
    """Cuts a module's weights over a mesh, and annotates them in the trace, for `executor()` to plan by.

    mesh: the mesh of tensor parallelism alone, such as `mesh["tp"]` of `init_device_mesh("cuda", (dp, tp), ...)`:
        inputs are taken to be the same on all of its ranks. Data parallelism is Thunder's, by a transform behind
        this one.
    plan: where weights lie, as of `mf.parallelize`; specs of activations are not taken.
    stationary: whether no collective may move weights that are cut, as in Megatron's tensor parallelism. Without it a
        weight is gathered where that is modelled to cost less than to move what is multiplied with it.

    Raises DefinitionError for a mesh that this rank is not on, and for a plan that does not fit the module; RankError
    where ranks of the mesh have different weights.
    """

    def __init__(self, mesh: Any, plan: Any, *, stationary: bool = False) -> None:
        self.line: SourceLine = caller_line()
        check_flags(self.line, stationary=stationary)
        with located(self.line):
            self.mesh, self._plan, self._stationary = checked_mesh(mesh, self.line), plan, stationary
            _check_rank(self.mesh, self.line)
        # Of weights that are cut, by each of their names.
        self.layouts: dict[str, Layout] = {}

    # weights

    def transform_module(self, model: Any) -> None:
        """Put this rank's shards in the place of weights that are cut. Called by thunder.jit."""
        with located(self.line):
            plan = module_plan(model._model, self.mesh, self._plan, None, {}, self.line)
            if plan.outputs:
                raise _no_activations(next(iter(plan.outputs)), self.line)
            self.layouts = self._layouts(model, plan)
            check_same_weights(model, sorted(self.mesh.ranks), "these ranks")
        made: dict[int, nn.Parameter] = {}
        for name in self.layouts:
            parameter = model.get_parameter(name)
            if id(parameter) not in made:
                made[id(parameter)] = self._cut(parameter, name)
            model._overrides_parameters[name] = made[id(parameter)]

    def _layouts(self, model: Any, plan: ModulePlan) -> dict[str, Layout]:
        names = {id(p): name for name, p in model._model.named_parameters()}
        found = {}
        for name, parameter in model._model.named_parameters(remove_duplicate=False):
            known, shape = names[id(parameter)], tuple(parameter.shape)
            layouts = layouts_of_spec(known, self.mesh, plan.spec(known, len(shape)), len(shape), self.line)
            sharding = Sharding.make(self.mesh, layouts, shape)
            if sharding.splits:
                found[name] = Layout(sharding, shape, known, self._stationary)
        return found

    def _cut(self, parameter: nn.Parameter, name: str) -> nn.Parameter:
        sharding, shape, *_ = self.layouts[name]
        if parameter.is_meta:
            local = torch.empty(local_shape(sharding, shape), dtype=parameter.dtype, device="meta")
        else:
            local = self._shard(parameter.detach(), sharding).clone()
        made = nn.Parameter(local, requires_grad=parameter.requires_grad)
        if hasattr(parameter, "_thunder_device"):
            made._thunder_device = parameter._thunder_device  # pyright: ignore[reportAttributeAccessIssue]
        return made

    def _shard(self, whole: torch.Tensor, sharding: Sharding) -> torch.Tensor:
        world = World.current()
        return whole if world.size == 1 else shard(whole, sharding, world.rank)

    # state dicts

    def transform_state_dict_for_submodule(
        self, model: Any, submodule_name: str, state_dict: dict[str, Any]
    ) -> dict[str, Any]:
        """This rank's shards of whole weights."""
        return self._each(submodule_name, state_dict, lambda tensor, layout: self._shard(tensor, layout.sharding))

    def reverse_transform_state_dict_for_submodule(
        self, model: Any, submodule_name: str, state_dict: dict[str, Any]
    ) -> dict[str, Any]:
        """Whole weights, from the shards of all ranks of the mesh, which must all call this."""
        return self._each(submodule_name, state_dict, self._whole)

    def _each(self, submodule: str, state_dict: Mapping[str, Any], change: Any) -> dict[str, Any]:
        prefix = f"{submodule}." if submodule else ""
        return {
            name: change(tensor, self.layouts[prefix + name]) if prefix + name in self.layouts else tensor
            for name, tensor in state_dict.items()
        }

    def _whole(self, local: torch.Tensor, layout: Layout) -> torch.Tensor:
        world, ranks = World.current(), tuple(sorted(self.mesh.ranks))
        if world.size == 1:
            return local
        return gather_output(world, local, layout.sharding, layout.shape, local.dtype, local.device, ranks)

    # traces

    def transform_traces_pre_prologue(
        self, prologue_trace: Any, computation_trace: Any, epilogue_trace: Any, **kwargs: Any
    ) -> tuple[Any, Any, Any]:
        """Give weights that are cut their local shapes, and make whole tensors of them at the begin of the trace."""
        self._check_executor(kwargs.get("executors_list", ()))
        found = self._found(prologue_trace, computation_trace)
        whole = _annotated(computation_trace, found)
        for pro, _, layout in found:
            _check_local_shape(prologue_trace, pro, local_shape(layout.sharding, layout.shape))
        return prologue_trace, whole, epilogue_trace

    def _check_executor(self, executors: Sequence[Any]) -> None:
        if NAME not in [ex.name for ex in executors]:
            raise user_error(
                "MeshSplit without meshfuse's executor", f"executors {[str(ex.name) for ex in executors]}",
                "mf.thunder.executor() among them",
                "Call thunder.jit(model, executors=[mf.thunder.executor(), *thunder.get_default_executors()], ...).",
                self.line,
            )  # fmt: skip

    def _found(self, prologue: Any, computation: Any) -> list[tuple[TensorProxy, TensorProxy, Layout]]:
        """(in the prologue, in the computation, layout) of each weight that is cut."""
        producers = utils.producers(prologue)
        found = []
        for pro, comp in zip(prologue.output[0], computation.args, strict=False):
            bsym = producers[pro]
            if bsym.sym.id is prims.PrimIDs.UNPACK_PARAMETER and bsym.args[1] in self.layouts:
                found.append((pro, comp, self.layouts[bsym.args[1]]))
        return found


def _check_rank(mesh: DeviceMesh, line: SourceLine) -> None:
    world = World.current()
    if world.size > 1 and world.rank not in mesh.ranks:
        raise user_error(
            "MeshSplit: a mesh that this rank is not on", f"rank {world.rank} and {mesh}", "a mesh with this rank",
            'Pass the sub-mesh of this rank: mesh["tp"] of init_device_mesh.', line,
        )  # fmt: skip


def _no_activations(name: str, line: SourceLine) -> Exception:
    return user_error(
        f"MeshSplit: the plan says how the result of {name} lies", "", "a plan of weights",
        "Leave the entry out: how activations lie follows from the weights.", line,
    )  # fmt: skip


def _annotated(trace: Any, found: Sequence[tuple[TensorProxy, TensorProxy, Layout]]) -> Any:
    """The trace with a mesh_split of each of these weights, which is what all else reads."""
    trace.push_scope([])
    first: dict[str, TensorProxy] = {}
    swaps = {}
    with tracectx(trace):
        for pro, comp, layout in found:
            for proxy in (pro, comp):
                proxy._shape = local_shape(layout.sharding, layout.shape)
            if layout.name not in first:  # A tied weight is split once.
                first[layout.name] = mesh_split(comp, *layout)
            swaps[variableify(comp)] = first[layout.name]
    splits = trace.pop_scope()
    made = from_trace(trace)
    unpacks = [b for b in trace.bound_symbols if b.sym.id is prims.PrimIDs.UNPACK_TRIVIAL]
    rest = [b for b in trace.bound_symbols if b.sym.id is not prims.PrimIDs.UNPACK_TRIVIAL]
    kept = [b.from_bsym() if b.sym.id is prims.PrimIDs.RETURN else b.from_bsym_swap_proxies(swaps) for b in rest]
    made.bound_symbols += [*unpacks, *splits, *kept]
    made.set_provenance(TraceProvenance("Mesh split"))
    return made


def _check_local_shape(prologue: Any, proxy: TensorProxy, shape: tuple[int, ...]) -> None:
    """Have the prologue check that a weight has its local shape."""
    for bsym in prologue.bound_symbols:
        if bsym.sym.id is prims.PrimIDs.CHECK_TENSOR_SHAPE_AND_METADATA and bsym.args[0].name == proxy.name:
            x, _, *rest = bsym.args
            bsym.args = (x, shape, *rest)
