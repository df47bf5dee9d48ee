"""What a pointwise op broadcasts and several ops read, as a mask of scores, is made for each of them.

nvFuser would make it in the kernel of the first and keep it for the others; of a mask over rows and columns, that
kernel writes each row where it would lie among the rows of all scores, far behind the mask's end (0.2.36; a causal mask
in attention's softmax, seen on a GPU by compute-sanitizer).
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Mapping, Sequence
from dataclasses import dataclass

from ...graph import Graph
from ...lowering.fusable_copies import by_element
from ...ops.opdef import Call
from ...ops.pointwise import pointwise_rule
from ...ops.values import TensorType
from ...resharding import Compute
from .repeated import repeats

LONGEST = 24  # Ops that are done again for one value, at most.


def is_pointwise(call: Call) -> bool:
    return call.op.rule is pointwise_rule or repeats(call)


@dataclass(frozen=True, slots=True)
class Step:
    """An op of a definition: the names of the values that it takes and gives."""

    compute: Compute
    takes: tuple[str, ...]
    gives: tuple[str, ...]


def steps(graph: Graph, computes: Sequence[Compute], ttypes: Mapping[int, TensorType], outputs: set[int]) -> list[Step]:
    """The ops in their order, with those before them that are done again.

    ttypes: the local types of all values that the ops take or give.
    """
    return _Unsharing(graph, computes, ttypes, outputs).run()


class _Unsharing:
    def __init__(self, graph: Graph, computes: Sequence[Compute], ttypes: Mapping[int, TensorType], outputs: set[int]):
        self.graph, self.computes, self.ttypes, self.outputs = graph, computes, ttypes, outputs
        cheap = [c for c in computes if is_pointwise(self._call(c)) or self._call(c).op.is_cheap]
        self.makers = {c.outputs[0]: c for c in cheap if len(c.outputs) == 1}
        self.readers = Counter(v for c in computes for v in c.inputs)
        others = (c for c in computes if c.outputs[0] not in self.makers and by_element(self._call(c)))
        self.reduced = {v for c in others for v in c.outputs}
        self.copies = 0
        self.found: list[Step] = []

    def run(self) -> list[Step]:
        for compute in self.computes:
            takes = tuple(self._takes(compute))
            self.found.append(Step(compute, takes, tuple(f"v{v}" for v in compute.outputs)))
        return self.found

    def _takes(self, compute: Compute) -> list[str]:
        if self._call(compute).op.rule is not pointwise_rule:
            return [f"v{v}" for v in compute.inputs]
        size = max((self.ttypes[v].numel for v in (*compute.inputs, *compute.outputs)), default=0)
        own = [self._narrow(v) < size and self._is_shared(v) for v in compute.inputs]
        return [self._own(v) if alone else f"v{v}" for v, alone in zip(compute.inputs, own, strict=True)]

    def _call(self, compute: Compute) -> Call:
        return self.graph.nodes[compute.node].call

    def _narrow(self, value: int) -> int:
        """Elements of a value that only stands for repeated ones, without the repeats."""
        while value in self.makers and repeats(self._call(self.makers[value])):
            (value,) = self.makers[value].inputs
        return self.ttypes[value].numel

    def _is_shared(self, value: int) -> bool:
        """Whether a value that follows from nothing but what is in memory has several readers, or one before it has."""
        seen, left = {value}, [value]
        shared = False
        while left and len(seen) <= LONGEST:
            maker = self.makers.get(v := left.pop())
            if maker is None:
                if v in self.reduced:
                    return False  # A row's statistics: nvFuser keeps these as it should.
                continue
            shared |= self.readers[v] > 1 or v in self.outputs
            left += [operand for operand in maker.inputs if operand not in seen]
            seen.update(maker.inputs)
        return shared and len(seen) <= LONGEST

    def _own(self, value: int) -> str:
        """A value made once more for one reader."""
        self.copies += 1
        return self._made_again(value, f"_own{self.copies}", {})

    def _made_again(self, value: int, suffix: str, done: dict[int, str]) -> str:
        maker = self.makers.get(value)
        if maker is None:
            return f"v{value}"
        if value not in done:
            takes = tuple(self._made_again(v, suffix, done) for v in maker.inputs)
            done[value] = f"v{value}{suffix}"
            self.found.append(Step(maker, takes, (done[value],)))
        return done[value]
