"""Segments: runs of ops between reshards, each computed by one kernel."""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass

from ..reshard.hoist_reshards import WORTH_A_LAUNCH, Seconds
from ..resharding import Compute, Reshard, ReshardedDefinition
from .overlapped import ChunkLoop, OverlappedDefinition


@dataclass(frozen=True, slots=True)
class Segment:
    """Ops that run one after another on every rank of their mesh, with no communication between them."""

    id: int
    computes: tuple[Compute, ...]
    inputs: tuple[int, ...]
    outputs: tuple[int, ...]

    @classmethod
    def of(cls, number: int, computes: Sequence[Compute], is_read: Callable[[int], bool]) -> Segment:
        """The segment of these ops; its outputs are those of their results that `is_read` says others read."""
        made = dict.fromkeys(v for c in computes for v in c.outputs)
        taken = dict.fromkeys(v for c in computes for v in c.inputs if v not in made)
        return cls(number, tuple(computes), tuple(taken), tuple(filter(is_read, made)))

    @property
    def name(self) -> str:
        return f"segment_{self.id}"

    @property
    def is_exchange(self) -> bool:
        """Whether it is an op alone for which ranks send each other rows."""
        return bool(self.computes[0].placement.exchange)


@dataclass(frozen=True, slots=True)
class SegmentedDefinition:
    """Segments, reshards and loops, in order."""

    overlapped: OverlappedDefinition
    parts: tuple[Segment | Reshard | ChunkLoop, ...]

    @property
    def resharded(self) -> ReshardedDefinition:
        return self.overlapped.resharded

    def verify(self) -> None:
        """Assert that segments hold every op once, and give what others read."""
        nodes = [c.node for part in self.parts if not isinstance(part, Reshard) for c in part.computes]
        nodes += [part.node for part in self.parts if isinstance(part, Reshard) and part.node is not None]
        assert sorted(nodes) == list(range(len(self.resharded.graph.nodes)))

    def __str__(self) -> str:
        graph, lines = self.resharded.graph, list(filter(None, [str(self.overlapped)]))
        for part in self.parts:
            if isinstance(part, ChunkLoop):
                reads, made = (", ".join(f"v{v}" for v in values) for values in (part.inputs, part.outputs))
                lines.append(f"{made} = loop_{part.id}({reads})")
                continue
            if isinstance(part, Reshard):
                lines.append(f"v{part.target} = set v{part.source}: {part.step}")
                continue
            names = ", ".join(graph.nodes[c.node].name for c in part.computes)
            made = ", ".join(f"v{v}" for v in part.outputs)
            lines.append(f"{made} = {part.name}({', '.join(f'v{v}' for v in part.inputs)})  # {names}")
        return "\n".join(lines)


def segment(overlapped: OverlappedDefinition) -> SegmentedDefinition:
    """Put ops into segments: as many in a row as possible that run on one mesh."""
    read_after = _readers(overlapped)
    parts: list[Segment | Reshard | ChunkLoop] = []
    count = 0
    for group in _groups(overlapped.parts, Seconds(overlapped.resharded)):
        if isinstance(group, (Reshard, ChunkLoop)):
            parts.append(group)
        else:
            parts.append(_make(count, group, read_after))
            count += 1
    done = SegmentedDefinition(overlapped, tuple(parts))
    done.verify()
    return done


def _groups(
    parts: Sequence[Compute | Reshard | ChunkLoop], seconds: Seconds
) -> Iterator[Reshard | ChunkLoop | list[Compute]]:
    """Runs of ops that one kernel computes, on one mesh; none waits for a reshard that the others could hide."""
    run: list[Compute] = []
    work = 0.0
    moving: set[int] = set()
    for statement in parts:
        joins = isinstance(statement, Compute) and (not run or _may_join(run[-1], statement))
        if isinstance(statement, Compute):
            if not moving.isdisjoint(statement.inputs):
                joins = joins and work < WORTH_A_LAUNCH
                moving.difference_update(statement.inputs)
        elif isinstance(statement, Reshard) and seconds.of(statement) >= WORTH_A_LAUNCH:
            moving.add(statement.target)
        if run and not joins:
            yield run
            run, work = [], 0.0
        if isinstance(statement, Compute):
            run.append(statement)
            work += seconds.of(statement) if moving else 0.0
        else:
            yield statement
    if run:
        yield run


def _may_join(a: Compute, b: Compute) -> bool:
    """Whether one kernel may compute both: they are on one mesh, and neither is an exchange of rows."""
    if a.placement.exchange or b.placement.exchange:
        return False
    one, other = a.placement.results[0].mesh, b.placement.results[0].mesh
    return one is other or one == other


def _readers(overlapped: OverlappedDefinition) -> dict[int, set[int]]:
    """By value the nodes that read it; -1 stands for reshards, loops and outputs."""
    found: defaultdict[int, set[int]] = defaultdict(set, {value: {-1} for value in overlapped.resharded.outputs})
    for part in overlapped.parts:
        reader = part.node if isinstance(part, Compute) else -1
        for value in part.inputs:
            found[value].add(reader)
    return found


def _make(number: int, computes: list[Compute], readers: dict[int, set[int]]) -> Segment:
    inside = {c.node for c in computes}
    return Segment.of(number, computes, lambda v: bool(readers.get(v, set()) - inside))
