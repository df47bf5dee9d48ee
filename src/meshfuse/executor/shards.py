"""The part of a global tensor that a rank passes to a program."""

from __future__ import annotations

from typing import Any

import torch

from ..definition.tensor_view import TensorView
from ..errors import ArgumentError, SourceLine, caller_line, shown, user_error
from ..ops.base import TensorType
from ..ops.shapes import UNKNOWN
from ..runtime.world import World
from ..sharding.data import shard
from ..user_values import as_int


def shard_tensor(tensor: torch.Tensor, tv: TensorView, rank: int | None = None) -> torch.Tensor:
    """The shard of a global tensor that a rank (this process' by default) holds of an annotated tensor view.

    The whole tensor where `tv` has no mesh. On a rank outside the mesh one element that stands for a tensor of the
    global shape: the rank takes no part in it, and knows the sizes that the definition leaves open. Raises
    ArgumentError for what is no dense tensor of the view's sizes, and for what is no rank.
    """
    _check_whole(tensor, tv, line := caller_line())
    place = World.current().rank if rank is None else as_int(rank)
    if place is None or place < 0:
        raise user_error("shard_tensor: rank", shown(rank), "an int of 0 or more, or None for this process' own",
                         "Pass a rank.", line, ArgumentError)  # fmt: skip
    annotation = tv.fd.placed(tv.id)
    if annotation is None:
        return tensor
    assert annotation.mesh is not None
    if place not in annotation.mesh:
        return tensor.new_zeros(()).expand(tensor.shape)
    return shard(tensor, annotation.sharding(tv.name, tuple(tensor.shape)).placement(tuple(tensor.shape)), place)


def _check_whole(tensor: Any, tv: Any, line: SourceLine) -> None:
    """Raises ArgumentError for what is no dense tensor of the sizes that a TensorView has, where these are known."""
    view = isinstance(tv, TensorView)
    needed = f"a dense tensor of shape {_sizes(tv.type)} for {tv.label}" if view else "a tensor and a TensorView"
    whole = isinstance(tensor, torch.Tensor)
    dense = whole and not tensor.is_nested and tensor.layout == torch.strided and not hasattr(tensor, "placements")
    pairs = zip(tv.type.shape, tensor.shape, strict=False) if view and dense else ()
    if view and dense and len(tensor.shape) == tv.ndim and all(n in (UNKNOWN, m) for n, m in pairs):
        return
    found = f"shape {list(tensor.shape)}" if dense else type(tensor).__name__
    found = f"a {tensor.layout} tensor" if whole and not dense and not hasattr(tensor, "placements") else found
    raise user_error("shard_tensor", f"{found}, {shown(tv)}", needed, "Pass the global tensor.", line, ArgumentError)


def _sizes(kind: TensorType) -> str:
    return f"[{', '.join('?' if n == UNKNOWN else str(n) for n in kind.shape)}]"
