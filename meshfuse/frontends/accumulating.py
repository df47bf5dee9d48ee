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
from .plans import Spec, axes_in

Node = torch.fx.Node
# By parameter the axes of the mesh along which ranks hold terms of its gradient.
Terms = Mapping[str, tuple[str, ...]]
NO_TERMS: Terms = {}


class Sync(NamedTuple):
    """How a call's gradients are summed over ranks.

    leaves: whether they are left as terms.
    taken: the terms of earlier calls that are in `.grad`.
    """

    leaves: bool = False
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


def terms_left(
    gradients: Mapping[str, Node], made: Mapping[Node, Sharding], specs: Iterable[Spec], mesh: DeviceMesh
) -> Terms:  # fmt: skip
    """The gradients that a plan has as terms over axes of the data, before it sums them.

    made: by node how a plan makes it. specs: how the arguments of the call are cut.
    """
    data, found = axes_in(specs), dict[str, tuple[str, ...]]()
    for name, node in gradients.items():
        open_axes = _open_axes(node, made, mesh) & data
        if open_axes:
            found[name] = tuple(axis for axis in mesh.names if axis in open_axes)
    return found


def _open_axes(node: Node, made: Mapping[Node, Sharding], mesh: DeviceMesh) -> set[str]:
    """The axes along which ranks have terms of a node, or of all that it is a view or a sum of."""
    partial = made[node].partial if node in made else ()
    found = {split.axis for split in partial if split.axis and split.size == mesh.axis_size(split.axis)}
    if found or not (is_view(node) or node.target is torch.ops.aten.add.Tensor):
        return found
    return set.intersection(*(_open_axes(x, made, mesh) for x in node.all_input_nodes))
