"""What a rank's program holds, instruction by instruction: also buffers of communications, and what waits for these."""

from __future__ import annotations

import math
import re
from collections import Counter
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field

from ..dtypes import DataType
from ..host_ir import HostProgram
from ..lowering.effects import effects
from ..lowering.instructions import Allocate, Collective, Copy, Free, Instruction, Kernel, Launch, Reduce, View
from ..resharding import Compute, ReshardedDefinition

_ASSIGNED = re.compile(r"^(v\d+(?:, v\d+)*),? = (.*)$")
_NAME = re.compile(r"\bv\d+\b")
_ITEMSIZES = {dtype.value: dtype.itemsize for dtype in DataType}


def program_peak(program: HostProgram, resharded: ReshardedDefinition) -> int:
    """The most bytes that a program holds: arguments all the time, all else until nothing names it.

    What ops need inside (a scratch buffer of a library) is not known.
    """
    walk = _Walk(resharded, _payloads(program.instructions), _views(resharded))
    walk.make_all(program.params)
    kept = Counter(walk.roots[name] for name in program.params if name in walk.roots)
    walk.names.update(kept)
    for instruction in program.instructions:
        walk.do(instruction)
    return walk.peak


def _payloads(instructions: Sequence[Instruction]) -> dict[str, int]:
    """By buffer that a collective reads its bytes."""
    found: dict[str, int] = {}
    for i in instructions:
        for inside in (*i.kernel.packs, i) if isinstance(i, Launch) else (i,):
            if isinstance(inside, Collective):
                count, dtype = inside.payload
                found.update(dict.fromkeys(inside.reads, count * _ITEMSIZES.get(dtype, 4)))
    return found


def _views(resharded: ReshardedDefinition) -> frozenset[str]:
    """The names of values that are views of others."""
    nodes = resharded.graph.nodes
    views = [s for s in resharded.statements if isinstance(s, Compute) and nodes[s.node].call.op.is_view]
    return frozenset(f"v{v}" for s in views for v in s.outputs)


@dataclass(slots=True)
class _Walk:
    """The memory at one place of a program.

    roots: by name the name of the memory that it lies in. names: how many names there are for each memory.
    """

    resharded: ReshardedDefinition
    payloads: Mapping[str, int]
    views: frozenset[str]
    roots: dict[str, str] = field(default_factory=dict)
    names: Counter[str] = field(default_factory=Counter)
    sizes: dict[str, int] = field(default_factory=dict)
    held: int = 0
    peak: int = 0
    _made: int = 0

    def size_of(self, name: str) -> int:
        """The bytes of a value, or of a buffer to send."""
        if name in self.payloads:
            return self.payloads[name]
        return self.resharded.nbytes(int(name[1:])) if name[1:].isdigit() else 0

    def make_all(self, names: Sequence[str]) -> None:
        for name in names:
            if name.startswith("v"):
                self.make(name, self.size_of(name))

    def make(self, name: str, nbytes: int, shares: str = "") -> None:
        """A name for new memory, or for that of another name."""
        if shares and shares in self.roots:
            root = self.roots[shares]
        else:
            self._made += 1
            root = f"{name}#{self._made}"
            self.sizes[root] = nbytes
            self.held += nbytes
            self.peak = max(self.peak, self.held)
        self.roots[name] = root
        self.names[root] += 1

    def drop(self, name: str) -> None:
        """Forget a name, and the memory that has no other."""
        root = self.roots.pop(name, None)
        if root is not None:
            self.names[root] -= 1
            if not self.names[root]:
                self.held -= self.sizes[root]

    def do(self, instruction: Instruction) -> None:
        if isinstance(instruction, Launch):
            self._launch(instruction)
        elif isinstance(instruction, Free):
            for name in instruction.names:
                self.drop(name)
        elif isinstance(instruction, Allocate):
            self.make(instruction.target, math.prod(instruction.shape) * instruction.dtype.itemsize)
        elif isinstance(instruction, View):
            self.make(instruction.target, 0, instruction.source_name)
        elif isinstance(instruction, Reduce):
            nbytes = self.size_of(instruction.target)
            self.peak = max(self.peak, self.held + 2 * nbytes if instruction.own else 0)  # the fold, and the sum
            self.make(instruction.target, nbytes)
        elif isinstance(instruction, Copy) and instruction.box is None:
            shares = effects(instruction).shares or ("" if instruction.how else instruction.sources[0][0])
            self.make(instruction.target, self.size_of(instruction.target), shares)

    def _launch(self, launch: Launch) -> None:
        """Run a kernel: its own names die with it, but for its results."""
        kernel, outer = launch.kernel, self.roots
        given = [(p, n) for p, n in zip(kernel.params, launch.inputs, strict=True) if n in outer]
        self.roots = {}
        for param, name in given:
            self.roots[param] = outer[name]
            self.names[outer[name]] += 1
        self._body(kernel)
        made = [self.roots.get(result) for result in kernel.results]
        for root in filter(None, made):
            self.names[root] += 1
        for name in list(self.roots):
            self.drop(name)
        self.roots = outer
        for name, root in zip(launch.outputs, made, strict=True):
            if root is not None:
                self.roots[name] = root

    def _body(self, kernel: Kernel) -> None:
        for step in kernel.unpacks:
            self.do(step)
        for line in kernel.lines:
            if line.startswith("del "):
                for name in line[4:].split(", "):
                    self.drop(name)
            elif (found := _ASSIGNED.match(line)) is not None:
                self._assign(found[1].split(", "), found[2])
        for step in kernel.packs:
            self.do(step)

    def _assign(self, targets: Sequence[str], text: str) -> None:
        """What a line makes; a view, or another name, of the first tensor that it reads."""
        read = _NAME.search(text)
        for name in targets:
            is_other = read is not None and (name in self.views or read[0] == text)
            self.make(name, self.size_of(name), read[0] if is_other and read is not None else "")
