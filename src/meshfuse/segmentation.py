"""Runs of ops between moves, as the segments that one kernel (or one generated function) computes."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass

from .resharding.insert import Compute, ReshardedDefinition, Set


@dataclass(frozen=True, slots=True)
class Segment:
    """Ops that run one after another on every rank of their mesh, with no communication between them."""

    id: int
    computes: tuple[Compute, ...]
    inputs: tuple[int, ...]
    outputs: tuple[int, ...]

    @property
    def name(self) -> str:
        return f"segment_{self.id}"


@dataclass(frozen=True, slots=True)
class SegmentedDefinition:
    """Segments and moves in order."""

    resharded: ReshardedDefinition
    parts: tuple[Segment | Set, ...]

    def verify(self) -> None:
        """Segments hold every op once, and what they give is what others read."""
        nodes = [c.node for part in self.parts if isinstance(part, Segment) for c in part.computes]
        nodes += [part.node for part in self.parts if isinstance(part, Set) and part.node is not None]
        assert sorted(nodes) == list(range(len(self.resharded.graph.nodes)))

    def __str__(self) -> str:
        graph, lines = self.resharded.graph, []
        for part in self.parts:
            if isinstance(part, Set):
                lines.append(f"v{part.target} = set v{part.source}: {part.move}")
                continue
            names = ", ".join(graph.nodes[c.node].name for c in part.computes)
            made = ", ".join(f"v{v}" for v in part.outputs)
            lines.append(f"{made} = {part.name}({', '.join(f'v{v}' for v in part.inputs)})  # {names}")
        return "\n".join(lines)


def segment(resharded: ReshardedDefinition) -> SegmentedDefinition:
    """Cut the steps into segments: as many ops in a row as run on one mesh."""
    read_after = _readers(resharded)
    parts: list[Segment | Set] = []
    count = 0
    for group in _groups(resharded):
        if isinstance(group, Set):
            parts.append(group)
        else:
            parts.append(_make(count, group, read_after))
            count += 1
    done = SegmentedDefinition(resharded, tuple(parts))
    done.verify()
    return done


def _groups(resharded: ReshardedDefinition) -> Iterator[Set | list[Compute]]:
    run: list[Compute] = []
    for step in resharded.steps:
        same_mesh = isinstance(step, Compute) and (not run or _mesh(run[-1]) == _mesh(step))
        if run and not same_mesh:
            yield run
            run = []
        if isinstance(step, Compute):
            run.append(step)
        else:
            yield step
    if run:
        yield run


def _mesh(step: Compute) -> object:
    return step.placement.results[0].mesh


def _readers(resharded: ReshardedDefinition) -> dict[int, set[int]]:
    """For every value the nodes that read it; -1 stands for moves and outputs."""
    found: dict[int, set[int]] = {value: {-1} for value in resharded.outputs}
    for step in resharded.steps:
        taken = step.inputs if isinstance(step, Compute) else (step.source,)
        for value in taken:
            found.setdefault(value, set()).add(step.node if isinstance(step, Compute) else -1)
    return found


def _make(number: int, computes: list[Compute], readers: dict[int, set[int]]) -> Segment:
    inside = {c.node for c in computes}
    made = [v for c in computes for v in c.outputs]
    taken = dict.fromkeys(v for c in computes for v in c.inputs if v not in set(made))
    given = [v for v in made if readers.get(v, set()) - inside]
    return Segment(number, tuple(computes), tuple(taken), tuple(given))
