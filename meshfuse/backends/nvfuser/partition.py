"""A segment as runs of ops that nvFuser computes and runs that are left to torch, each with its reason."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, replace

from ...lowering.effects import effects
from ...lowering.instructions import Instruction, Kernel
from ...lowering.segments import Segment, SegmentedDefinition
from ...ops.opdef import ToTorch
from ...ops.values import TensorType
from ...resharding import Compute
from ..gpu_costs import is_product, keeps_a_gpu_busy
from .segment import Copies, build_segment, value_types
from .stages import stages

LIBRARY = "products and attention are in torch's libraries"


@dataclass(frozen=True, slots=True)
class Partition:
    """Consecutive ops of a segment, for nvFuser or for torch; `reason` says why for torch, "" for nvFuser.

    `unpacks` and `packs` are the copies done with them. `takes` and `gives` are names of values.
    """

    segment: Segment
    reason: str
    takes: tuple[str, ...]
    gives: tuple[str, ...]
    unpacks: tuple[Instruction, ...] = ()
    packs: tuple[Instruction, ...] = ()

    @classmethod
    def of(cls, segment: Segment, reason: str) -> Partition:
        """A partition of ops alone, without copies."""
        takes, gives = (tuple(f"v{v}" for v in values) for values in (segment.inputs, segment.outputs))
        return cls(segment, reason, takes, gives)

    def __str__(self) -> str:
        return f"torch: {self.reason}" if self.reason else "nvFuser"


def partitioned(segmented: SegmentedDefinition, segment: Segment, rank: int) -> tuple[Partition, ...]:
    """The segment's ops in stages, those of nvFuser and those of torch in turn.

    Raises NvfuserMissing without nvFuser.
    """
    reasons = [torch_reason(segmented, _alone(segment, compute), rank) for compute in segment.computes]
    if _is_worth_stages(segmented, segment):
        reasons = [reason or _library(segmented, c) for c, reason in zip(segment.computes, reasons, strict=True)]
    if len({reason is None for reason in reasons}) == 1:
        return (Partition.of(segment, _text(reasons)),)
    inner = list(dict.fromkeys(v for c in segment.computes for v in (*c.inputs, *c.outputs)))
    ttypes = dict(zip(inner, value_types(segmented, inner, rank), strict=True))
    found = stages(segmented.resharded.graph, segment.computes, ttypes, segment.outputs, reasons)
    parts = [(Segment.of(segment.id, s.computes, set(s.outputs).__contains__), _text(s.reasons)) for s in found]
    return tuple(Partition.of(part, reason) for part, reason in parts)


def _alone(segment: Segment, compute: Compute) -> Segment:
    return Segment(segment.id, (compute,), tuple(dict.fromkeys(compute.inputs)), compute.outputs)


def _library(segmented: SegmentedDefinition, compute: Compute) -> str | None:
    """Why an op that nvFuser takes is torch's."""
    return LIBRARY if is_product(segmented, compute) else None


def _is_worth_stages(segmented: SegmentedDefinition, segment: Segment) -> bool:
    """Whether products are torch's. Products alone always are.

    A segment that waits for the host stays one definition of all its ops, which takes less of that.
    """
    products = sum(is_product(segmented, c) for c in segment.computes)
    if products in (0, len(segment.computes)):
        return products > 0
    return keeps_a_gpu_busy(segmented, segment)


def partitioned_kernel(
    segmented: SegmentedDefinition, segment: Segment, rank: int, kernel: Kernel, types: Mapping[str, TensorType]
) -> tuple[Partition, ...]:
    """The same for a segment's kernel with its copies; `types` are those of the kernel's parameters.

    Each copy is done with the ops that first read its value or that make it; alone, in torch, where nvFuser cannot
    express it.
    """
    runs = partitioned(segmented, segment, rank)
    drafts = [
        replace(run, unpacks=_unpacks_of(kernel, runs, i), packs=_packs_of(kernel, runs, i))
        for i, run in enumerate(runs)
    ]
    parts = [p for part in _flowing(drafts, kernel.results) for p in _expressed(segmented, part, rank, types)]
    return tuple(part for part in _flowing(parts, kernel.results) if part.gives)


def halves(part: Partition) -> list[Partition]:
    """A part of several ops as two, the copies before the first and behind the second."""
    computes, middle = part.segment.computes, len(part.segment.computes) // 2
    first, second = (_part(part.segment, some, part.reason) for some in (computes[:middle], computes[middle:]))
    return _flowing([replace(first, unpacks=part.unpacks), replace(second, packs=part.packs)], part.gives)


def without_packs(part: Partition) -> list[Partition]:
    """A part as two, of which the second only does its packs."""
    none = Segment(part.segment.id, (), (), ())
    alone = Partition(none, part.reason, (), (), packs=part.packs)
    return _flowing([replace(part, packs=()), alone], part.gives)


def _unpacks_of(kernel: Kernel, runs: Sequence[Partition], place: int) -> tuple[Instruction, ...]:
    """The copies that make values which this run is the first to read."""
    seen = {name for run in runs[:place] for name in run.takes}
    mine = set(runs[place].takes) - seen
    return tuple(step for step in kernel.unpacks if not mine.isdisjoint((*effects(step).makes, *effects(step).writes)))


def _packs_of(kernel: Kernel, runs: Sequence[Partition], place: int) -> tuple[Instruction, ...]:
    """The copies that read values of which this run makes the last."""
    later = {name for run in runs[place + 1 :] for name in run.gives}
    mine = set(runs[place].gives)
    return tuple(
        s for s in kernel.packs if not mine.isdisjoint(effects(s).reads) and later.isdisjoint(effects(s).reads)
    )


def _flowing(parts: Sequence[Partition], results: Sequence[str]) -> list[Partition]:
    """The parts with the names that each takes, and gives to later parts or as a result."""
    needed, found = set(results), list[Partition]()
    for part in reversed(parts):
        steps = [effects(step) for step in (*part.unpacks, *part.packs)]
        computes = part.segment.computes
        made = dict.fromkeys(
            [*(f"v{v}" for c in computes for v in c.outputs), *(name for step in steps for name in step.makes)]
        )
        read = [*(f"v{v}" for v in part.segment.inputs), *(name for step in steps for name in step.reads)]
        takes = tuple(dict.fromkeys(name for name in read if name not in made))
        found.append(replace(part, takes=takes, gives=tuple(name for name in made if name in needed)))
        needed.difference_update(made)  # An earlier part that makes the same makes it for its own use.
        needed.update(takes)
    return found[::-1]


def _expressed(
    segmented: SegmentedDefinition, part: Partition, rank: int, types: Mapping[str, TensorType]
) -> list[Partition]:
    """The part as one. Where nvFuser cannot do its copies, three parts: copies in torch, its ops, copies in torch."""
    copies = (*part.unpacks, *part.packs)
    if part.reason or not copies:
        return [part]
    reason = torch_reason(segmented, part.segment, rank, copies_of(segmented, part, rank, types))
    if reason is None:
        return [part]
    none = Segment(part.segment.id, (), (), ())
    alone = [Partition(none, reason, (), (), unpacks=part.unpacks), Partition(none, reason, (), (), packs=part.packs)]
    return [alone[0], replace(part, unpacks=(), packs=()), alone[1]]


def copies_of(segmented: SegmentedDefinition, part: Partition, rank: int, types: Mapping[str, TensorType]) -> Copies:
    """The copies that a definition of the part does; `types` has the types of the kernel's parameters."""
    takes = {name: types.get(name) or value_types(segmented, [int(name[1:])], rank)[0] for name in part.takes}
    return Copies(part.unpacks, part.packs, takes, part.gives)


def torch_reason(
    segmented: SegmentedDefinition, segment: Segment, rank: int, copies: Copies | None = None
) -> str | None:
    """Why a segment on a rank is left to torch; None where nvFuser takes it, with these copies."""
    try:
        build_segment(segmented, segment, rank, copies=copies)
    except ToTorch as reason:
        return str(reason)
    except RuntimeError as error:
        return f"nvFuser refuses it: {refusal(error)}"
    return None


def refusal(error: Exception) -> str:
    """The sentence of an error, of nvFuser's internal ones too, without its stack; a compiler's first error."""
    lines = [line.strip() for line in str(error).splitlines() if line.strip()]
    if wrong := [line for line in lines if ": error: " in line]:
        return f"the kernel does not compile: {wrong[0].partition(': error: ')[2]}"
    told = [line for line in lines if not line.startswith(("INTERNAL", "Exception"))]
    return (told or lines or [""])[0]


def _text(reasons: Sequence[str | None]) -> str:
    return "; ".join(dict.fromkeys(r for r in reasons if r is not None))


def _part(segment: Segment, computes: Sequence[Compute], reason: str) -> Partition:
    inside = {c.node for c in computes}
    read = {v for c in segment.computes if c.node not in inside for v in c.inputs} | set(segment.outputs)
    return Partition.of(Segment.of(segment.id, computes, read.__contains__), reason)
