"""Small collectives of one kind brought together, as each costs a start.

Reductions are put off until a result is needed. Gradients and statistics are many small ones over the same ranks. The
first statement that reads a reduced value waits, and so do those after it that depend on it; what does not depend on it
goes first, and the reductions met on the way are done together (as PyTorch's DistributedDataParallel buckets gradients:
Li et al., VLDB 2020). Reductions that only outputs read come last. All-gathers of inputs, such as the biases and scales
of a layer, go with the first of them (as its FullyShardedDataParallel gathers a layer's parameters: Zhao et al., VLDB
2023). Exchanges are brought together where they are neighbours.
"""

from __future__ import annotations

import dataclasses
from collections import Counter, deque
from collections.abc import Sequence

from ..resharding import Compute, Reshard, ReshardedDefinition, Statement
from .steps import StepKind

# A larger all-reduce goes where it stands, and one of at most the second size also goes with one that is not its own.
LARGEST, _SMALL = 4 << 20, 64 << 10
# Of the larger side of any other reshard: putting pieces together and apart is a copy of each.
LARGEST_COPIED = 1 << 20
# How many statements may be put off for one reduction: keeps the work linear and buffers' lives short.
_WINDOW = 32
# And how many statements sooner an input is gathered, about a layer's, after so many ops on it.
_SOONER, _CHAIN = 128, 4
_REDUCTIONS = (StepKind.ALL_REDUCE, StepKind.REDUCE_SCATTER)
_EXCHANGES = (StepKind.ALL_TO_ALL, StepKind.EXCHANGE, StepKind.WINDOW)


def bucket_key(resharded: ReshardedDefinition, statement: Statement) -> object:
    """Equal for reshards that can be one call; None for statements that are always one of their own."""
    if not isinstance(statement, Reshard) or statement.step.kind in (StepKind.SLICE, StepKind.TRANSFER):
        return None
    kind, src = statement.step.kind, statement.step.src
    sizes = resharded.nbytes(statement.source), resharded.nbytes(statement.target)
    if sizes[0] > LARGEST if kind is StepKind.ALL_REDUCE else max(sizes) > LARGEST_COPIED:
        return None
    dtype = resharded.type_of(statement.source).dtype
    unit = unit_of(resharded, statement)
    return StepKind.EXCHANGE if kind in _EXCHANGES else kind, src.mesh, statement.step.axes, src.reduce, dtype, unit


def unit_of(resharded: ReshardedDefinition, reshard: Reshard) -> str:
    """Of a weight or its gradient what goes in one call with it (`Graph.units`); "" for anything else."""
    return resharded.graph.units.get(resharded.values[reshard.source].tensor, "")


def bucket_collectives(resharded: ReshardedDefinition, sparing: bool = False) -> ReshardedDefinition:
    """The same statements, with reshards that can be one call as neighbours. The order is the same on all ranks.

    `sparing` puts off all-reduces only: their operands take no more memory than their results.
    """
    kinds = _REDUCTIONS[:1] if sparing else _REDUCTIONS
    statements = _Postponer(resharded, kinds).run()
    return dataclasses.replace(resharded, statements=tuple(statements if sparing else _sooner(resharded, statements)))


def _sooner(resharded: ReshardedDefinition, statements: list[Statement]) -> list[Statement]:
    """The statements with small all-gathers of inputs, or of a few ops on inputs, beside the first of their kind."""
    keys = {place: key for place, statement in enumerate(statements)
            if _is_gather(statement) and (key := bucket_key(resharded, statement)) is not None}  # fmt: skip
    if len(keys) == len(set(keys.values())):
        return statements
    made_by = _made_by(resharded, statements)
    first: dict[object, int] = {}
    moved: dict[int, int] = {}
    for place, key in keys.items():
        before = made_by.get(statements[place].inputs[0])
        if before is not None:
            if place - first.setdefault(key, place) > _SOONER:
                first[key] = place
            late = [made for made in before if moved.get(made, made) > first[key]]
            moved.update(dict.fromkeys((place, *late), first[key]))
    turns = [
        (moved.get(place, place), isinstance(statement, Reshard), place) for place, statement in enumerate(statements)
    ]
    return [statements[place] for *_, place in sorted(turns)]


def _made_by(resharded: ReshardedDefinition, statements: Sequence[Statement]) -> dict[int, tuple[int, ...]]:
    """By value that a few ops make of inputs alone, such as a cast, the places of these ops."""
    known: dict[int, tuple[int, ...]] = dict.fromkeys(resharded.inputs, ())
    for place, statement in enumerate(statements):
        if isinstance(statement, Compute) and all(v in known for v in statement.inputs):
            chain = (*sorted({made for v in statement.inputs for made in known[v]}), place)
            if len(chain) <= _CHAIN:
                known.update(dict.fromkeys(statement.outputs, chain))
    return known


def _is_gather(statement: Statement) -> bool:
    return isinstance(statement, Reshard) and statement.step.kind is StepKind.ALL_GATHER


class _Postponer:
    """`held`: postponed reductions. `waiting`: statements that depend on them. `done`: all others, in order.

    travelling: what follows from the reductions of the latest unit that is complete. Statements that read it are
        `late`: they come once those of the next unit have begun, so that a unit's reductions run beside the next one's
        backward.
    """

    def __init__(self, resharded: ReshardedDefinition, kinds: Sequence[StepKind]):
        self.resharded, self.kinds = resharded, kinds
        self.left: deque[Statement] = deque(resharded.statements)
        self.done: list[Statement] = []
        self.held: list[Reshard] = []
        self.waiting: list[Statement] = []
        self.missing: set[int] = set()
        self.late: list[Statement] = []
        self.travelling: set[int] = set()
        moves = [s for s in resharded.statements if isinstance(s, Reshard) and unit_of(resharded, s)]
        self.to_come = Counter(self._key(s) for s in moves)

    def run(self) -> list[Statement]:
        while self.left or self.late or self.waiting:
            if not self.left and self.late:
                self._arrive([])
            elif not self.left or len(self.waiting) > _WINDOW:
                self._release()
            else:
                self._take(self.left.popleft())
        keys = list(map(self._key, self.held))
        return [
            *self.done,
            *(s for key in dict.fromkeys(keys) for s, k in zip(self.held, keys, strict=True) if k == key),
        ]

    def _key(self, statement: Statement) -> object:
        return bucket_key(self.resharded, statement)

    def _take(self, statement: Statement) -> None:
        if not self.missing.isdisjoint(statement.inputs):
            self.waiting.append(statement)
            self.missing.update(statement.outputs)
        elif not self.travelling.isdisjoint(statement.inputs):
            self.late.append(statement)
            self.travelling.update(statement.outputs)
        elif isinstance(statement, Reshard) and statement.step.kind in self.kinds and self._key(statement) is not None:
            self.held.append(statement)
            self.missing.add(statement.target)
            self._close_unit(self._key(statement))
        else:
            self.done.append(statement)

    def _close_unit(self, key: object) -> None:
        """Put off the reductions of a unit no longer than its last."""
        self.to_come[key] -= 1
        if not self.to_come[key]:
            go = [s for s in self.held if self._key(s) == key]
            self._resume(go)
            self._arrive(go)

    def _arrive(self, go: Sequence[Reshard]) -> None:
        """Take up what is late; what reads the reductions that have just begun is late from here on."""
        self.left.extendleft(reversed(self.late))
        self.late, self.travelling = [], {s.target for s in go}

    def _release(self) -> None:
        """Release the reductions that the first waiting statement needs; then resume the others.

        Those of their kind that other waiting statements need go with them, and small ones.
        """
        needed, wanted = set(self.waiting[0].inputs), {v for statement in self.waiting for v in statement.inputs}
        # In the order of the reductions: that of a set of texts is another one on every rank.
        keys = list(dict.fromkeys(self._key(s) for s in self.held if s.target in needed))
        go = [s for s in self.held if self._key(s) in keys and (s.target in wanted or self._is_small(s))]
        go.sort(key=lambda s: keys.index(self._key(s)))
        self._resume(go)

    def _resume(self, go: Sequence[Reshard]) -> None:
        """Let reductions go, and take up what has waited."""
        self.done += go
        self.held = [s for s in self.held if s not in go]
        self.left.extendleft(reversed(self.waiting))
        self.waiting, self.missing = [], {s.target for s in self.held}

    def _is_small(self, reshard: Reshard) -> bool:
        return self.resharded.nbytes(reshard.source) <= _SMALL
