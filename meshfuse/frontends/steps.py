"""What a captured graph is planned with, and the programs that come of it."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field, replace
from typing import Any

import torch

from ..definition import annotating
from ..definition.annotation import layouts_of_spec
from ..definition.tensor_view import TensorView
from ..errors import SourceLine
from ..mesh import DeviceMesh
from ..sharding.layout import Split
from ..sharding.value import Sharding
from .accumulating import SYNCED, Sync, Terms
from .captured_graph import Source
from .context import Context
from .fsdp import without_axes
from .plans import ModulePlan, Spec
from .traced import TracedDefinition


@dataclass(frozen=True, slots=True)
class Setting:
    """What a captured graph is planned with.

    names, shapes, specs: by place of an argument what it is called, its global shape, and how it is cut if it is.
    dtypes: by name of a parameter, or place of an argument, the type in which it is kept, where the graph computes in
        another.
    numbers: by place of an argument the whole number that it is.
    reduce: the type in which gradients are summed over ranks; None for that of the graph.
    batch: (size, axes) of the first dim of arguments, by which the first dim of results is cut; None for not cut.
    free: whether results lie as the plan leaves them, rather than whole but for the batch.
    replicate: whether ops without a rule are computed whole on every rank.
    is_dynamic: whether other sizes take over the plan that was made for the first.
    line: the user's, of annotations.
    ends: by place of a result how it is cut, where that is said.
    is_split: whether the backward comes in two parts, the gradients of arguments first.
    sync: whether gradients are left as terms of sums over ranks, and which such terms are added to them.
    context: how attention over a sequence is cut over ranks; None for as the planner finds.
    """

    plan: ModulePlan
    names: Mapping[int, str]
    shapes: Mapping[int, tuple[int, ...]]
    specs: Mapping[int, Spec]
    line: SourceLine
    dtypes: Mapping[Any, torch.dtype]
    numbers: Mapping[int, int] = field(default_factory=dict)
    reduce: torch.dtype | None = None
    batch: tuple[int, Any] | None = None
    free: bool = False
    replicate: bool = False
    is_dynamic: bool = False
    max_memory: float | None = None
    ends: Mapping[int, Spec] = field(default_factory=dict)
    is_split: bool = False
    sync: Sync = SYNCED
    context: Context | None = None

    @property
    def mesh(self) -> DeviceMesh:
        return self.plan.mesh

    def named(self, name: str) -> SourceLine:
        """The user's line, with a name of what is defined there."""
        return replace(self.line, name=name)

    def annotate(self, fd: TracedDefinition, view: TensorView, spec: Spec) -> None:
        """Annotate a tensor by a spec."""
        layouts = layouts_of_spec(view.label, self.mesh, spec, view.ndim, self.line)
        annotating.annotate(fd.recording, view.id, self.mesh, layouts, self.line)

    def gradient(self, name: str, shape: Sequence[int], axes: Sequence[str] = ()) -> Sharding:
        """Where a parameter's gradient lies of which ranks along these axes have terms."""
        spec = without_axes(self.plan.spec(name, len(shape)), axes)
        dims = layouts_of_spec(name, self.mesh, spec, len(shape), self.line)
        terms = [Split(self.mesh.axis_size(axis), axis) for axis in axes]
        return Sharding.make(self.mesh, dims, shape, terms, "sum" if terms else "")


@dataclass(frozen=True, slots=True)
class Half:
    """A definition for one half.

    inputs: what each of its inputs is; a saved tensor has the kind "saved", and its number; one that the first part of
        a backward hands to the second the kind "held"; terms of a parameter's gradient the kind "terms".
    outputs: what each of its outputs is, in the same words.
    """

    fd: TracedDefinition
    inputs: tuple[Source, ...]
    outputs: tuple[Source, ...]


@dataclass(frozen=True, slots=True)
class Step:
    """The two halves of a captured graph; without a gradient there is no backward.

    results: the shardings of the forward's outputs.
    saved: how many tensors the forward hands to the backward.
    rest: of a backward in two parts the second.
    left: by parameter how its gradient is returned, where that is not as the parameter lies: as terms of a sum.
    taken: by parameter the axes along which ranks have terms of it of earlier calls, which are added to it.
    attention: under context parallelism, by name of an attention in words how it lies.
    fixed: by place the results that are no tensors.
    """

    forward: Half
    backward: Half | None
    joint: TracedDefinition
    results: tuple[Sharding, ...]
    saved: int
    rest: Half | None = None
    left: Mapping[str, Sharding] = field(default_factory=dict)
    taken: Terms = field(default_factory=dict)
    attention: Mapping[str, str] = field(default_factory=dict)
    fixed: Mapping[int, Any] = field(default_factory=dict)

    @property
    def halves(self) -> list[Half]:
        """All that there are."""
        return [half for half in (self.forward, self.backward, self.rest) if half is not None]
