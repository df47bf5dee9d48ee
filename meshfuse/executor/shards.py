"""The part of a global tensor that a rank passes to a program."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import torch

from ..argument_checks import as_int
from ..definition.tensor_view import TensorView
from ..errors import ArgumentError, SourceLine, caller_line, shown, user_error
from ..ops.shape_arithmetic import UNKNOWN
from ..ops.values import TensorType
from ..runtime.world import World
from ..sharding.data import shard
from ..sharding.value import Sharding


def shard_tensor(tensor: torch.Tensor, tv: TensorView | Sharding, rank: int | None = None) -> torch.Tensor:
    """The shard of a global tensor that a rank holds (this process' rank by default), of an annotated TensorView.

    In place of the view there may be a Sharding, such as one of `fd.output_shardings()`. Returns the whole tensor where
    the view has no mesh. A rank outside the mesh takes no part: it gets a stand-in of the global shape that takes the
    memory of one element, so that it knows the sizes that the definition leaves open.

    Raises ArgumentError for anything but a dense tensor of the view's sizes, for a partial Sharding, and for what is no
    rank.
    """
    _check_whole(tensor, tv, line := caller_line())
    place = World.current().rank if rank is None else as_int(rank)
    if place is None or place < 0:
        raise user_error("shard_tensor: rank", shown(rank), "an int of 0 or more, or None for this process' own",
                         "Pass a rank.", line, ArgumentError)  # fmt: skip
    shape = tuple(tensor.shape)
    sharding = _sharding(tv, shape)
    if sharding is None:
        return tensor
    if place not in sharding.mesh:
        return tensor.new_zeros(()).expand(shape)
    return shard(tensor, sharding.placement(shape), place)


def _sharding(tv: TensorView | Sharding, shape: tuple[int, ...]) -> Sharding | None:
    if isinstance(tv, Sharding):
        return tv
    annotation = tv.fd.recording.placed(tv.id)
    return annotation.sharding(tv.name, shape) if annotation is not None else None


def _check_whole(tensor: Any, tv: Any, line: SourceLine) -> None:
    """Raises ArgumentError for anything but a dense tensor of the TensorView's sizes, as far as these are known."""
    wanted, needed = _wanted(tv)
    whole = isinstance(tensor, torch.Tensor)
    dense = whole and not tensor.is_nested and tensor.layout == torch.strided and not hasattr(tensor, "placements")
    pairs = zip(wanted, tensor.shape, strict=False) if wanted is not None and dense else ()
    if wanted is not None and dense and len(tensor.shape) == len(wanted) and all(n in (UNKNOWN, m) for n, m in pairs):
        return
    found = f"shape {list(tensor.shape)}" if dense else type(tensor).__name__
    found = f"a {tensor.layout} tensor" if whole and not dense and not hasattr(tensor, "placements") else found
    raise user_error("shard_tensor", f"{found}, {shown(tv)}", needed, _hint(tensor, tv), line, ArgumentError)


def _hint(tensor: Any, tv: Any) -> str:
    """What to do, by which of the two is wrong."""
    if isinstance(tensor, (TensorView, Sharding)):
        return "Pass the tensor first."
    if isinstance(tv, Sharding) and tv.partial:
        return "Its terms are no shards of one tensor: pass the sharding's reduced()."
    if not isinstance(tv, (TensorView, Sharding)):
        return "Pass the TensorView that was annotated, or one of fd.output_shardings()."
    return "Pass the global tensor, and the view of the input or output that it is."


def _wanted(tv: Any) -> tuple[Sequence[int] | None, str]:
    """The sizes that the tensor must have (-1 for any), and those in words; None where `tv` is nothing to cut by."""
    if isinstance(tv, TensorView):
        return tv.type.shape, f"a dense tensor of shape {_sizes(tv.type)} for {tv.label}"
    if isinstance(tv, Sharding) and not tv.partial:
        return [UNKNOWN] * len(tv.dims), f"a dense tensor of {len(tv.dims)} dims"
    return None, "a tensor and a TensorView, or a Sharding of what is reduced"


def _sizes(ttype: TensorType) -> str:
    return f"[{', '.join('?' if n == UNKNOWN else str(n) for n in ttype.shape)}]"
