"""Small all-reduces put off until their results are needed, so that those of one kind come together.

Gradients and statistics are many small reductions over the same ranks, each of which costs a collective's start. The
step that makes a program wait is the first that reads a reduced value: what does not depend on it goes first, and the
reductions that it meets on its way go with it (PyTorch's DistributedDataParallel buckets gradients so: Li et al., VLDB
2020). Reductions that only outputs read come last.
"""

from __future__ import annotations

from collections import deque

from .insert import ReshardedDefinition, Set, Step
from .moves import MoveKind

# A larger all-reduce goes where it stands, and one of at most the second size also goes with one that is not its own.
LARGEST, _SMALL = 4 << 20, 64 << 10
# How many steps may be put off for one reduction: keeps the work linear and buffers' lives short.
_WINDOW = 32


def bucket_key(resharded: ReshardedDefinition, step: Step) -> object:
    """Equal for all-reduces that may be one call; None for any other step."""
    if (
        not isinstance(step, Set)
        or step.move.kind is not MoveKind.ALL_REDUCE
        or resharded.nbytes(step.source) > LARGEST
    ):
        return None
    dtype = resharded.graph.tensors[resharded.values[step.source].tensor].type.dtype
    return step.move.src.mesh, step.move.axes, step.move.src.reduce, dtype


def postponed(resharded: ReshardedDefinition) -> list[Step]:
    """The steps in an order in which all-reduces that may be one call are neighbours; the same on all ranks."""
    return _Order(resharded).run()


class _Order:
    """`held` reductions and the `waiting` steps that depend on them; all others are `done` in their order."""

    def __init__(self, resharded: ReshardedDefinition):
        self.resharded = resharded
        self.left: deque[Step] = deque(resharded.steps)
        self.done: list[Step] = []
        self.held: list[Set] = []
        self.waiting: list[Step] = []
        self.missing: set[int] = set()

    def run(self) -> list[Step]:
        while self.left or self.waiting:
            if not self.left or len(self.waiting) > _WINDOW:
                self._release()
            else:
                self._take(self.left.popleft())
        keys = list(map(self._key, self.held))
        return [
            *self.done,
            *(s for key in dict.fromkeys(keys) for s, k in zip(self.held, keys, strict=True) if k == key),
        ]

    def _key(self, step: Step) -> object:
        return bucket_key(self.resharded, step)

    def _take(self, step: Step) -> None:
        if not self.missing.isdisjoint(step.inputs):
            self.waiting.append(step)
            self.missing.update(step.outputs)
        elif isinstance(step, Set) and self._key(step) is not None:
            self.held.append(step)
            self.missing.add(step.target)
        else:
            self.done.append(step)

    def _release(self) -> None:
        """Reduce what the first waiting step needs, and small ones with it; then go on with what waited."""
        needed = set(self.waiting[0].inputs)
        # In the order of the reductions: that of a set of texts is another one on every rank.
        keys = list(dict.fromkeys(self._key(s) for s in self.held if s.target in needed))
        go = [s for s in self.held if s.target in needed or (self._key(s) in keys and self._is_small(s))]
        go.sort(key=lambda s: keys.index(self._key(s)))
        self.done += go
        self.held = [s for s in self.held if s not in go]
        self.left.extendleft(reversed(self.waiting))
        self.waiting, self.missing = [], {s.target for s in self.held}

    def _is_small(self, step: Set) -> bool:
        return self.resharded.nbytes(step.source) <= _SMALL
