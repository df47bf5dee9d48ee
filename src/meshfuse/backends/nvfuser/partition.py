"""A segment as runs of ops that nvFuser computes and runs that are left to torch, each with its reason."""

from __future__ import annotations

import itertools
from collections.abc import Sequence
from dataclasses import dataclass

from ...ops.nvfuser_lowering import ToTorch
from ...resharding.resharded import Compute
from ...segmentation import Segment, SegmentedDefinition
from .segment import build_segment


@dataclass(frozen=True, slots=True)
class Partition:
    """Ops of a segment in a row. `reason` says why they are left to torch; empty for nvFuser's."""

    segment: Segment
    reason: str

    def __str__(self) -> str:
        return f"torch: {self.reason}" if self.reason else "nvFuser"


def partitioned(segmented: SegmentedDefinition, segment: Segment, rank: int) -> tuple[Partition, ...]:
    """The segment's ops in their order, cut wherever the ops change between nvFuser and torch.

    Raises NvfuserMissing without nvFuser.
    """
    alone = [Segment(segment.id, (c,), tuple(dict.fromkeys(c.inputs)), c.outputs) for c in segment.computes]
    reasons = [torch_reason(segmented, one, rank) for one in alone]
    pairs = zip(segment.computes, reasons, strict=True)
    runs = [list(run) for _, run in itertools.groupby(pairs, key=lambda pair: pair[1] is None)]
    if len(runs) == 1:
        return (Partition(segment, _text(reasons)),)
    return tuple(_part(segment, [c for c, _ in run], _text([r for _, r in run])) for run in runs)


def torch_reason(segmented: SegmentedDefinition, segment: Segment, rank: int) -> str | None:
    """Why a segment on a rank is left to torch; None where nvFuser takes it."""
    try:
        build_segment(segmented, segment, rank)
    except ToTorch as reason:
        return str(reason)
    except RuntimeError as error:
        return f"nvFuser refuses it: {refusal(error)}"
    return None


def refusal(error: Exception) -> str:
    """The sentence of an error, of nvFuser's internal ones too, without its stack."""
    lines = [line.strip() for line in str(error).splitlines() if line.strip()]
    told = [line for line in lines if not line.startswith(("INTERNAL", "Exception"))]
    return (told or lines or [""])[0]


def _text(reasons: Sequence[str | None]) -> str:
    return "; ".join(dict.fromkeys(r for r in reasons if r is not None))


def _part(segment: Segment, computes: Sequence[Compute], reason: str) -> Partition:
    inside = {c.node for c in computes}
    read = {v for c in segment.computes if c.node not in inside for v in c.inputs} | set(segment.outputs)
    return Partition(Segment.of(segment.id, computes, read.__contains__), reason)
