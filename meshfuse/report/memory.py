"""What a rank holds at its peak, and an error where that is more than the bound."""

from __future__ import annotations

from dataclasses import dataclass

from ..compiler import CompiledProgram
from ..errors import SourceLine, user_error
from ..html_text import html_table
from ..layer_folding import FoldedRow, fold_rows
from ..number_text import number
from ..reshard.rematerialize import Peak, peak
from ..resharding import Compute, ReshardedDefinition
from .bill import table
from .program_memory import program_peak

# How many of the values at the peak are shown.
_TOLD = 12


@dataclass(frozen=True, slots=True)
class Held:
    """A value that a rank holds at the peak: bytes, the tensor's name, its sharding, its origin and its line.

    `origin` is "argument", "op" (and its name), or the collective that made it.
    """

    nbytes: int
    tensor: str
    sharding: str
    origin: str
    line: str


@dataclass(frozen=True, slots=True)
class Memory:
    """The most bytes that a rank holds at once, in which op of which line, and the values held, largest first.

    `print` shows equal values of equal layers as one, `h*.mlp.up x32`, with their bytes in all.

    peak: of values.
    buffers: how many more the program holds, in buffers of communications and in what waits for these.
    """

    peak: int
    step: str
    held: tuple[Held, ...]
    buffers: int = 0

    @property
    def total(self) -> int:
        """The most bytes that the program holds."""
        return self.peak + self.buffers

    def __str__(self) -> str:
        return f"{self._head()}\n{table(self._rows(), right=(0,))}"

    def __repr__(self) -> str:
        return str(self)

    def _repr_html_(self) -> str:
        return html_table(self._rows(), right=(0,), caption=self._head())

    def _head(self) -> str:
        more = f"; {number(self.buffers)} more in buffers of communications" if self.buffers else ""
        return f"at most {number(self.peak)} bytes per rank, {self.step}{more}"

    def _rows(self) -> list[tuple[str, ...]]:
        """A heading, and a row for each of the values that most of it is held in."""
        rows: list[tuple[str, ...]] = [("bytes", "tensor", "sharding", "from", "line")]
        found = sorted(self._folded(), key=lambda pair: -pair[0])
        rows += [(number(nbytes), row.cells[0] + row.times, *row.cells[1:]) for nbytes, row in found[:_TOLD]]
        left = found[_TOLD:]
        if left:
            count = sum(len(row.places) for _, row in left)
            rows.append((number(sum(nbytes for nbytes, _ in left)), f"{count} more", "", "", ""))
        return rows

    def _folded(self) -> list[tuple[int, FoldedRow]]:
        """The values that are held, those of equal layers as one, with their bytes."""
        cells = [(h.tensor, h.sharding, h.origin, h.line) for h in self.held]
        rows = fold_rows(cells, (0,), [h.nbytes for h in self.held])
        return [(sum(self.held[i].nbytes for i in row.places), row) for row in rows]


def modelled_memory(compiled: CompiledProgram) -> Memory:
    """The peak memory of a compiled program, as modelled; what ops need for themselves is not known."""
    resharded = compiled.resharded
    found = peak(resharded)
    made = {v: statement for statement in resharded.statements for v in statement.outputs}
    held = []
    for v in found.held:
        tensor, sharding = resharded.graph.tensors[resharded.values[v].tensor], resharded.values[v].sharding
        origin = resharded.name_of(made[v]) if v in made else "argument"
        held.append(Held(resharded.nbytes(v), tensor.label, str(sharding), origin, str(tensor.line)))
    more = max(program_peak(compiled.host_program(_a_rank(resharded, found)), resharded) - found.nbytes, 0)
    return Memory(found.nbytes, _step(resharded, found.place), tuple(held), more)


def _a_rank(resharded: ReshardedDefinition, found: Peak) -> int:
    """A rank that holds what is held at a peak."""
    meshes = [resharded.values[v].sharding.mesh for v in found.held or resharded.inputs]
    return next((rank for rank in meshes[0].ranks if all(rank in mesh for mesh in meshes)), meshes[0].ranks[0])


def _step(resharded: ReshardedDefinition, place: int) -> str:
    if place == len(resharded.statements):
        return "at the end"
    statement = resharded.statements[place]
    line = resharded.graph.nodes[statement.node].line if isinstance(statement, Compute) else statement.line
    return f"in {resharded.name_of(statement)} at {line}"


def check_memory(compiled: CompiledProgram, limit: float | None, line: SourceLine) -> None:
    """Raises DefinitionError, at the user's line, where the plan that holds least holds more than `limit` bytes."""
    if limit is None or not compiled.graph.nodes or compiled.memory <= limit:
        return
    found = modelled_memory(compiled)
    if found.peak > limit:
        most = "; ".join(f"{h.tensor} {h.sharding} at {h.line}, {number(h.nbytes)}" for h in found.held[:3])
        raise user_error(
            "max_memory", f"{number(limit)} bytes",
            f"{number(found.peak)}, the least that a plan was found to hold: {found.step}; the largest: {most}",
            "Allow a rank more, or split one of these over another mesh axis by fd.mesh_split. What can be gathered "
            "again is already.", line,
        )  # fmt: skip
