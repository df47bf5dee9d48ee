"""Parameters of a plain definition for torch's optimisers."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

import torch
from torch import nn

from ..definition.tensor_view import TensorView
from ..errors import SourceLine, caller_line, shown, user_error
from ..executor.shards import shard_tensor
from ..mesh import DeviceMesh
from ..runtime.world import World
from ..sharding.value import Sharding
from .placing import check_world, placed, torch_mesh_of


def optim_params(tensors: Mapping[TensorView, torch.Tensor]) -> list[nn.Parameter]:
    """Parameters for inputs of a definition, from their whole tensors: this rank's shards, as DTensors.

    Pass them to `fd.execute`, beside shards of the other inputs, and to any optimiser of torch: after
    `loss.backward()` their gradients are DTensors, too, of which `torch.nn.utils.clip_grad_norm_` takes the norm over
    all ranks. Without a launcher ranks are simulated, and the parameters are copies of the whole tensors, for
    `fd(*tensors)`.

    Raises DefinitionError for anything but inputs of one definition with their tensors, ArgumentError where DTensor
    cannot say how an input is cut, and for a mesh of other ranks than the job has.
    """
    line = caller_line()
    fd = _checked(tensors, line)
    if World.current().size == 1:
        return [nn.Parameter(tensor.detach().clone()) for tensor in tensors.values()]
    annotations = fd.recording.annotations
    meshes = dict.fromkeys(a.mesh for a in annotations.values() if a.mesh is not None)
    if not meshes:
        raise user_error("optim_params: nothing is annotated", "no mesh", "annotated inputs",
                         "Annotate them with fd.mesh_split.", line)  # fmt: skip
    device = next(iter(tensors.values())).device
    made: dict[DeviceMesh, Any] = {}
    for mesh in meshes:
        check_world(mesh, line, "optim_params")
        made[mesh] = torch_mesh_of(mesh, device)
    return [_parameter(view, tensor, made, line) for view, tensor in tensors.items()]


def _checked(tensors: Any, line: SourceLine) -> Any:
    """The definition of the inputs. Raises DefinitionError for anything but inputs of one with their tensors."""
    views = list(tensors) if isinstance(tensors, Mapping) else []
    fits = all(isinstance(v, TensorView) and isinstance(tensors[v], torch.Tensor) for v in views)
    if not views or not fits or any(v.fd is not views[0].fd for v in views):
        raise user_error("optim_params", shown(tensors), "a dict of the inputs of one definition to their tensors",
                         "Pass {w1: torch.randn(...), w2: ...}.", line)  # fmt: skip
    return views[0].fd


def _parameter(view: TensorView, tensor: torch.Tensor, meshes: Mapping[DeviceMesh, Any], line: SourceLine) -> Any:
    shape, annotation = tuple(tensor.shape), view.fd.recording.placed(view.id)
    local = shard_tensor(tensor.detach(), view).clone()
    if annotation is None or annotation.mesh is None:
        sharding = Sharding.replicated(next(iter(meshes)), len(shape))
    else:
        sharding = annotation.sharding(view.name, shape).placement(shape)
    place = placed(view.label, sharding, shape, meshes[sharding.mesh], line)
    return nn.Parameter(place.wrapped(local, shape))
