"""Who asked for a collective: the op that reads its result, and the annotations behind both of its shardings."""

from __future__ import annotations

from collections.abc import Iterable
from dataclasses import dataclass

from ..compiler import CompiledProgram
from ..errors import SourceLine
from ..graph import Graph, Node
from ..resharding import Compute, Reshard, Statement
from ..sharding.value import Sharding, conflicting
from .provenance import Provenance


@dataclass(frozen=True, slots=True)
class Cause:
    """What a move is for.

    reader: the op that reads its result; None for an output or an annotation.
    held: the tensors whose annotations the source sharding follows, nearest first.
    needed: those whose annotations the target sharding follows.
    """

    reader: Node | None
    held: tuple[int, ...]
    needed: tuple[int, ...]

    @property
    def annotated(self) -> tuple[int, ...]:
        """All annotated tensors behind the move, each once."""
        return tuple(dict.fromkeys((*self.needed, *self.held)))


class Causes:
    """Traces the moves of a compiled program."""

    def __init__(self, compiled: CompiledProgram, provenance: Provenance | None = None):
        self.graph, self.resharded = compiled.graph, compiled.resharded
        self.choices = compiled.sharded.choices
        self.provenance = provenance or Provenance(compiled.sharded)
        self._makers = {i: node for node in self.graph.nodes for i in node.outputs}
        self._readers = _readers(self.resharded.statements)

    def of(self, reshard: Reshard) -> Cause:
        """The cause of a move of the program."""
        tensor = self.resharded.values[reshard.source].tensor
        reader = self.graph.nodes[reshard.node] if reshard.node is not None else self._reader(reshard)
        held = self._held(reshard.source)
        if reader is None:
            return Cause(None, held, (tensor,) if tensor in self.graph.annotations else ())
        return Cause(reader, held, self._needed(reader, tensor, reshard.step.dst))

    def _reader(self, reshard: Reshard) -> Node | None:
        """The op that the value is moved for, perhaps after more moves; None for an output or an annotation."""
        for later in self._readers.get(reshard.target, ()):
            if isinstance(later, Compute):
                return self.graph.nodes[later.node] if reshard.why.startswith("operand") else None
            if later.why == reshard.why:
                return self.graph.nodes[later.node] if later.node is not None else self._reader(later)
        return None

    def _held(self, value: int) -> tuple[int, ...]:
        """Annotated tensors that a value's sharding comes from.

        If it is what an op makes, before a move to the tensor's own annotation, these are the tensors behind the op's
        operands.
        """
        tensor, sharding = self.resharded.values[value].tensor, self.resharded.values[value].sharding
        maker = self._makers.get(tensor)
        if maker is None or sharding == self.graph.annotations.get(tensor, sharding):
            return self._behind(tensor)
        if sharding not in self.choices[maker.id].placement.results:
            return self._behind(tensor)
        return tuple(dict.fromkeys(a for i in maker.inputs for a in self._behind(i)))

    def _behind(self, tensor: int) -> tuple[int, ...]:
        """Annotated tensors that a tensor's sharding comes from; the tensor itself where it is annotated."""
        if tensor in self.graph.annotations:
            return (tensor,)
        origins = self.provenance.origins(tensor)
        return tuple(dict.fromkeys(o.way.end for o in origins if o.way is not None and o.way.annotated))

    def _needed(self, reader: Node, tensor: int, target: Sharding) -> tuple[int, ...]:
        """Annotated tensors behind what the reader follows.

        Also those behind its other operands, if they have splits that the operand moved must have.
        """
        source = self.choices[reader.id].source
        followed: list[int] = []
        if source.kind in ("operand", "carry"):
            followed.append(reader.inputs[source.place])
        elif source.kind in ("result", "pieces"):
            followed.append(reader.outputs[source.place])
        followed += self._with_splits_of(reader, tensor, target)
        return tuple(dict.fromkeys(a for i in followed for a in self._behind(i)))

    def _with_splits_of(self, reader: Node, tensor: int, target: Sharding) -> Iterable[int]:
        shardings = self.provenance.sharded.shardings
        for other in reader.inputs:
            splits = shardings[other].splits if other in shardings and other != tensor else ()
            if any(conflicting(a, b) for a in splits for b in target.splits):
                yield other

    def line(self, tensor: int) -> SourceLine:
        """The line of a tensor's annotation; that which makes the tensor where the user gave it none."""
        return self.graph.annotation_lines[tensor]


def annotated_where(graph: Graph, tensor: int) -> str:
    """Of an annotated tensor in words who annotated it: the user, with the line's text, or what it follows from."""
    return graph.implied.get(tensor) or f"annotated at {quoted(graph.annotation_lines[tensor])}"


def _readers(statements: Iterable[Statement]) -> dict[int, list[Statement]]:
    """By value, the ops and moves that read it, in their order."""
    found: dict[int, list[Statement]] = {}
    for statement in statements:
        for value in statement.inputs:
            found.setdefault(value, []).append(statement)
    return found


def quoted(line: SourceLine) -> str:
    """A source line as place and text."""
    return f"{line}: {' '.join(line.text.split())}" if line.text else str(line)
