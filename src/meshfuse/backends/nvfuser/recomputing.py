"""Which values a definition computes anew where a product stands between their making and their use.

nvFuser computes a product by itself, and the ops before and behind it in kernels of their own. What one of these makes
and a later one reads goes through memory: of a GPT block's GELU, six values of Float per element for its gradient, all
of which follow from the one of BFloat16 that the product before it gave. nvFuser keeps them as they are; here pointwise
ops are done again at a later stage where that reads no more than keeping would write and read. The idea is that of
rematerialisation at a minimum cut (the min-cut partitioner of PyTorch's AOTAutograd), decided greedily, by value.

What a pointwise op broadcasts and several ops read, as a mask of scores, is done again for each of them. nvFuser would
make it in the kernel of the first and keep it for the others; of a mask over rows and columns, that kernel writes each
row where it would lie among the rows of all scores, far behind the mask's end (0.2.36; a causal mask in attention's
softmax, seen on a GPU by compute-sanitizer).
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass

from ...graph import Graph
from ...host_ir.fusing import by_element
from ...ops.base import Call, TensorType
from ...ops.pointwise import pointwise_rule
from ...resharding.resharded import Compute
from .repeated import repeats

# Ops that make nothing new of their operands, or make something of none: what is broadcast is mostly made by them.
_PLAIN = {"broadcast", "squeeze", "reshape", "permute", "slice", "set", "full", "iota", "triu"}
_SMALL = 16  # A value of so many times fewer elements than another costs nothing beside it.
_LONGEST = 24  # Ops that are done again for one value, at most.


@dataclass(frozen=True, slots=True)
class Step:
    """An op of a definition: the names of the values that it takes and gives."""

    compute: Compute
    takes: tuple[str, ...]
    gives: tuple[str, ...]


def steps(graph: Graph, computes: Sequence[Compute], kinds: Mapping[int, TensorType], outputs: set[int]) -> list[Step]:
    """The ops in their order, with those before them that are done again.

    kinds: the local types of all values that the ops take or give. `outputs` are kept in any case.
    """
    return _Recomputing(graph, computes, kinds, outputs).run()


def _is_pointwise(call: Call) -> bool:
    return call.op.rule is pointwise_rule or repeats(call)


class _Recomputing:
    """Stages count the products before a value. Only pointwise ops with one result are done again."""

    def __init__(self, graph: Graph, computes: Sequence[Compute], kinds: Mapping[int, TensorType], outputs: set[int]):
        self.graph, self.computes, self.kinds = graph, computes, kinds
        self.makers = {c.outputs[0]: c for c in computes if _is_pointwise(self._call(c)) and len(c.outputs) == 1}
        plain = (c for c in computes if self._call(c).op.name in _PLAIN)
        self.light = self.makers | {c.outputs[0]: c for c in plain}
        self.kept = outputs | self._read_by_products()
        self.readers = Counter(v for c in computes for v in c.inputs)
        self.outputs = outputs
        others = (c for c in computes if c.outputs[0] not in self.light and by_element(self._call(c)))
        self.reduced = {v for c in others for v in c.outputs}
        self.stage: dict[int, int] = {}
        self.again: dict[tuple[int, int], str] = {}
        self.copies = 0
        self.found: list[Step] = []

    def run(self) -> list[Step]:
        for compute in self.computes:
            heavy = not by_element(self._call(compute))
            stage = max((self.stage.get(v, 0) for v in compute.inputs), default=0)
            size = max((self.kinds[v].numel for v in (*compute.inputs, *compute.outputs)), default=0)
            takes = self._takes(compute, heavy, stage, size)
            self.found.append(Step(compute, tuple(takes), tuple(f"v{v}" for v in compute.outputs)))
            self.stage.update(dict.fromkeys(compute.outputs, stage + heavy))
        return self.found

    def _takes(self, compute: Compute, heavy: bool, stage: int, size: int) -> list[str]:
        if heavy:
            return [f"v{v}" for v in compute.inputs]
        broadcasts = self._call(compute).op.rule is pointwise_rule
        own = [broadcasts and self._narrow(v) < size and self._is_shared(v) for v in compute.inputs]
        return [
            self._own(v) if alone else self._at(v, stage, size) for v, alone in zip(compute.inputs, own, strict=True)
        ]

    def _narrow(self, value: int) -> int:
        """Elements of a value that only stands for repeated ones, without the repeats."""
        while value in self.makers and repeats(self._call(self.makers[value])):
            (value,) = self.makers[value].inputs
        return self.kinds[value].numel

    def _is_shared(self, value: int) -> bool:
        """Whether a value that follows from nothing but what is in memory has several readers, or one before it has."""
        seen, left = {value}, [value]
        shared = False
        while left and len(seen) <= _LONGEST:
            maker = self.light.get(v := left.pop())
            if maker is None:
                if v in self.reduced:
                    return False  # A row's statistics: nvFuser keeps these as it should.
                continue
            shared |= self.readers[v] > 1 or v in self.outputs
            left += [operand for operand in maker.inputs if operand not in seen]
            seen.update(maker.inputs)
        return shared and len(seen) <= _LONGEST

    def _own(self, value: int) -> str:
        """A value made once more for one reader."""
        self.copies += 1
        return self._made_again(value, f"_own{self.copies}", {})

    def _made_again(self, value: int, suffix: str, done: dict[int, str]) -> str:
        maker = self.light.get(value)
        if maker is None:
            return f"v{value}"
        if value not in done:
            takes = tuple(self._made_again(v, suffix, done) for v in maker.inputs)
            done[value] = f"v{value}{suffix}"
            self.found.append(Step(maker, takes, (done[value],)))
        return done[value]

    def _call(self, compute: Compute) -> Call:
        return self.graph.nodes[compute.node].call

    def _read_by_products(self) -> set[int]:
        """Values that products read, also through views of them: they are in memory."""
        found: set[int] = set()
        for compute in reversed(self.computes):
            call = self._call(compute)
            looked_at = call.op.is_view and not _is_pointwise(call) and not found.isdisjoint(compute.outputs)
            if looked_at or not by_element(call):
                found.update(compute.inputs)
        return found

    def _at(self, value: int, stage: int, size: int) -> str:
        """The name under which an op of this stage, and of so many elements, reads a value."""
        early = self.stage.get(value, 0) < stage and value in self.makers and value not in self.kept
        if not early or self.kinds[value].numel * _SMALL <= size:
            return f"v{value}"
        if (value, stage) in self.again:
            return self.again[value, stage]
        if not self._pays(value):
            self.kept.add(value)
            return f"v{value}"
        maker = self.makers[value]
        takes = tuple(self._takes(maker, False, stage, self.kinds[value].numel))
        name = self.again[value, stage] = f"v{value}_{stage}"
        self.found.append(Step(maker, takes, (name,)))
        return name

    def _pays(self, value: int) -> bool:
        """Whether to do an op again: for what is read of one value, or to keep its operand, which is smaller."""
        sources = self._sources(value)
        own = self.kinds[value].nbytes
        if sources is not None and len(sources) <= 1:
            return all(self.kinds[v].nbytes <= 2 * own for v in sources)
        large = [v for v in self.makers[value].inputs if not self._is_small(v, value)]
        return len(large) == 1 and self.kinds[large[0]].nbytes < own

    def _sources(self, value: int) -> set[int] | None:
        """The large values in memory that a value follows from; None where that takes too many ops."""
        found, seen, left = set[int](), {value}, [value]
        while left:
            for v in self._operands(left.pop(), value):
                if v not in self.makers or v in self.kept:
                    found.add(v)
                elif v not in seen:
                    seen.add(v)
                    left.append(v)
            if len(seen) > _LONGEST:
                return None
        return found

    def _operands(self, made: int, beside: int) -> Iterator[int]:
        return (v for v in self.makers[made].inputs if not self._is_small(v, beside))

    def _is_small(self, value: int, beside: int) -> bool:
        return self.kinds[value].numel * _SMALL <= self.kinds[beside].numel
