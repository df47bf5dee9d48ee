"""Gradients of several micro-batches that are summed over ranks once: what `no_sync` leaves, and what the last takes.

As in PyTorch's DistributedDataParallel. In `no_sync` the sums over the ranks of the data stay open: each rank has its
term, and `.grad` is a DTensor with a `Partial` placement, which torch adds up. A call after it takes these terms into
its backward, and sums them over ranks together with its own.
"""

from __future__ import annotations

from collections.abc import Iterable, Mapping
from typing import Any, NamedTuple

import torch

from ..executor.dtensor import is_dtensor
from ..mesh import DeviceMesh
from ..sharding.value import Sharding
from .cut import is_view

Node = torch.fx.Node
# By parameter the axes of the mesh along which ranks hold terms of its gradient.
Terms = Mapping[str, tuple[str, ...]]
NO_TERMS: Terms = {}


class Sync(NamedTuple):
    """How a call's gradients are summed over ranks.

    leaves: whether they are left as terms.
    runs: in how many calls they are summed once, as far as that is known.
    taken: the terms of earlier calls that are in `.grad`.
    """

    leaves: bool = False
    runs: int = 1
    taken: tuple[tuple[str, tuple[str, ...]], ...] = ()


SYNCED = Sync()


def terms_held(parameters: Iterable[tuple[str, Any]], mesh: DeviceMesh) -> Terms:
    """The parameters whose gradients are terms of a sum."""
    found: dict[str, tuple[str, ...]] = {}
    for name, parameter in parameters:
        grad = parameter.grad
        placements: Any = grad.placements if is_dtensor(grad) else ()
        axes = tuple(axis for axis, placement in zip(mesh.names, placements, strict=False) if placement.is_partial())
        if axes:
            found[name] = axes
    return found


def open_axes(node: Node, made: Mapping[Node, Sharding], mesh: DeviceMesh) -> set[str]:
    """The axes along which ranks have terms of a node, or of all that it is a view or a sum of.

    made: by node how a plan makes it.
    """
    partial = made[node].partial if node in made else ()
    found = {split.axis for split in partial if split.axis and split.size == mesh.axis_size(split.axis)}
    if found or not (is_view(node) or node.target is torch.ops.aten.add.Tensor):
        return found
    return set.intersection(*(open_axes(x, made, mesh) for x in node.all_input_nodes))
