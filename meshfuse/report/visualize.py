"""`mf.visualize`: which rank holds which part of a tensor, as a picture."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

from ..definition.checks import mesh_of_torch
from ..definition.tensor_view import TensorView
from ..errors import ArgumentError, SourceLine, caller_line, shown, user_error
from ..executor.dtensor import is_dtensor, sharding_of
from ..sharding.picture import Picture, picture_of
from ..sharding.value import Sharding


def visualize(tensor: Any, *shapes: Sequence[int]) -> None:
    """Show a tensor as a grid of its pieces, coloured by the ranks that hold them: in a notebook, or in text.

    tensor: one of a definition, which lies as the latest program has it (or that for these global `shapes`, one per
        input), or a DTensor. Of a tensor of more than two dims the two are shown that are cut into most pieces.

    `sharding.show(shape)` shows a Sharding. Raises ArgumentError for anything else, and for a DTensor with placements
    that are no sharding, such as Partial.
    """
    picture(tensor, shapes, caller_line()).show()


def picture(tensor: Any, shapes: Sequence[Sequence[int]], line: SourceLine) -> Picture:
    """What `visualize` shows."""
    if isinstance(tensor, TensorView):
        compiled = tensor.fd.latest(shapes)  # pyright: ignore[reportAttributeAccessIssue]
        shape, sharding = compiled.graph.shape(tensor.id), compiled.sharded.shardings.get(tensor.id)
        if sharding is not None:
            return _picture(sharding, shape, tensor.label)
        raise user_error("visualize", f"{tensor.label}, which no program computes", "a tensor that an output needs",
                         "Add it as an output.", line)  # fmt: skip
    if not is_dtensor(tensor):
        raise user_error("visualize", shown(tensor), "a tensor of a definition, or a DTensor",
                         "sharding.show(shape) shows a Sharding.", line, ArgumentError)  # fmt: skip
    shape, placements = tuple(tensor.shape), tuple(tensor.placements)
    found = sharding_of(mesh_of_torch(tensor.device_mesh), placements, shape)
    if found is None:
        raise user_error("visualize: a DTensor", str(placements), "Shard, Replicate or _StridedShard",
                         "Redistribute it first.", line, ArgumentError)  # fmt: skip
    return _picture(found, shape, "DTensor")


def _picture(sharding: Sharding, shape: tuple[int, ...], name: str) -> Picture:
    return picture_of(sharding, shape, f"{name} {list(shape)} {sharding}", sharding.note())
