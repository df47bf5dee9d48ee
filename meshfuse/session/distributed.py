"""Distributed tensors and definitions on a session's workers."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any

import torch

from ..checkpoint.safetensors import StoredTensor
from ..sharding.data import shard
from ..sharding.value import Sharding
from .executor import current


@dataclass(frozen=True, slots=True)
class Placed:
    """How a global tensor of this shape lies on the workers."""

    sharding: Sharding
    shape: tuple[int, ...]

    def readers(self) -> list[int]:
        """Workers whose shards make up the tensor: one of each replica."""
        found: dict[Any, int] = {}
        for rank in self.sharding.mesh.ranks:
            found.setdefault(tuple(self.sharding.runs(self.shape, rank)), rank)
        return sorted(found.values())


@dataclass(frozen=True, slots=True)
class ModuleFacts:
    """What a controller knows of a model: its class, its parameters in all, the names of its forward's arguments."""

    kind: str
    parameters: int
    names: tuple[str, ...]


def load_shard(stored: StoredTensor, sharding: Sharding) -> torch.Tensor | None:
    """This worker's shard of a stored tensor; None where it is not in the mesh."""
    rank = current().worker
    if rank not in sharding.mesh:
        return None
    whole = stored.mapped()
    part = shard(whole, sharding.placement(stored.shape), rank)
    return part.clone() if part.untyped_storage().data_ptr() == whole.untyped_storage().data_ptr() else part


class WorkerDefinition:
    """A definition on a worker, made again from its text: in each epoch its groups are others."""

    def __init__(self, text: str):
        self._text = text
        self._made: Any = None
        self._epoch = -1
        self.calls = 0

    def __call__(self, *arguments: Any) -> list[Any]:
        fd = self._definition()
        return fd.execute(list(arguments), idle_ranks=True)

    def _definition(self) -> Any:
        if self._made is None or self._epoch != current().epoch:
            space: dict[str, Any] = {"torch": torch}
            exec(compile(self._text, "<definition of the session's controller>", "exec"), space)
            self._made, self._epoch = space["fd"], current().epoch
        return self._made

    def placed_outputs(self) -> list[Placed]:
        """How the outputs of the latest call lie on the workers."""
        compiled = self._definition().latest()
        shapes = [tuple(compiled.graph.shape(tensor)) for tensor in compiled.graph.outputs]
        return [Placed(sharding, shape) for sharding, shape in zip(compiled.output_shardings(), shapes, strict=True)]


def make_definition(text: str) -> WorkerDefinition:
    """A definition on this worker."""
    return WorkerDefinition(text)


def placed_outputs(definition: WorkerDefinition) -> list[Placed]:
    """How its outputs lie on the workers."""
    return definition.placed_outputs()


def item(values: Sequence[Any], index: int) -> Any:
    """One of several results."""
    return values[index]


def input_shardings(fd: Any, arguments: Sequence[Any]) -> Mapping[int, Sharding]:
    """By place, the shardings in which the definition takes global tensors that are among the arguments."""
    annotations, tensors, found = fd.recording.annotations, fd.recording.tensors, {}
    for place, (ref, value) in enumerate(zip(fd.recording.inputs, arguments, strict=True)):
        number = getattr(ref, "id", None)
        if isinstance(value, torch.Tensor) and number in annotations:
            annotated = annotations[number].sharding(tensors[number].name, tuple(value.shape))
            found[place] = annotated.placement(tuple(value.shape))
    return found
