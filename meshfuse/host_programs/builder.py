"""`HostProgramBuilder`: the program of one rank, written instruction by instruction."""

from __future__ import annotations

import math
from collections.abc import Callable, Sequence
from dataclasses import dataclass, replace
from typing import Any

import torch

from ..argument_checks import as_int
from ..dtypes import from_torch
from ..errors import SourceLine, caller_line, shown, user_error
from ..host_ir import HostProgram, digest_of
from ..lowering.instructions import (
    Allocate,
    Collective,
    CollectiveKind,
    Communication,
    Copy,
    Instruction,
    Kernel,
    Launch,
    MessageKind,
    Reduce,
    SendRecv,
    View,
    Wait,
    tuple_text,
)
from ..lowering.schedule import with_frees
from .checking import check_program
from .kernels import Results, function_kernel, text_kernel

REDUCTIONS = ("sum", "prod", "max", "min")


@dataclass(frozen=True, slots=True, eq=False)
class Buffer:
    """A tensor of a rank's program: its name in the text, its shape on this rank, and its dtype."""

    name: str
    shape: tuple[int, ...]
    dtype: torch.dtype

    @property
    def numel(self) -> int:
        return math.prod(self.shape)


@dataclass(frozen=True, slots=True, eq=False)
class Pending:
    """A communication that is under way. `result` is what it gives once it has been waited for; None for a send.

    `then`: what makes the result of the received buffer.
    """

    work: str
    result: Buffer | None
    then: tuple[Instruction, ...] = ()


class HostProgramBuilder:
    """Writes the program of one rank: kernels, and communication that begins at one call and ends at `wait`.

    What is computed between the two runs while the communication is under way. Buffers are written once; memory is
    freed after its last use. `program` gives the checked program.

    rank: whose program it is. Raises DefinitionError for what is no number of a rank.
    """

    def __init__(self, rank: int) -> None:
        number, line = as_int(rank), caller_line()
        if number is None or number < 0:
            raise user_error("HostProgramBuilder: rank", shown(rank), "the number of a rank", "Count from 0.", line)
        self.rank = number
        self._params: list[str] = []
        self._body: list[Instruction] = []
        self._buffers: dict[str, Buffer] = {}
        self._pending: dict[str, Pending] = {}
        self._kernels: dict[str, Kernel] = {}

    # buffers and kernels

    def input(self, name: str, shape: Sequence[int], dtype: torch.dtype = torch.float32) -> Buffer:
        """The next argument of the program. Raises DefinitionError for a name that is taken or no name of Python's."""
        line = caller_line()
        if not isinstance(name, str) or not name.isidentifier() or f"v_{name}" in self._buffers:
            raise user_error("input: name", shown(name), "a name of Python's that is free", "Give it another one.",
                             line)  # fmt: skip
        made = self._made(f"v_{name}", shape, dtype)
        self._params.append(made.name)
        return made

    def call(self, function: Callable[..., Any], *inputs: Buffer, name: str = "") -> Any:
        """What a function of tensors returns: a Buffer, or a tuple of them. It must return new tensors.

        It is called once with tensors on `meta`, for their shapes. Raises DefinitionError where that fails.
        """
        line = caller_line()
        given = [self._own(x, "call", line) for x in inputs]
        kernel, found = function_kernel(function, name, given, line)
        made = self._launch(kernel, given, found)
        return made[0] if len(made) == 1 else made

    def kernel(self, name: str, text: str, results: Results, **inputs: Buffer) -> Any:
        """What lines of Python text make: a Buffer, or a tuple of them. The text has torch, F and its inputs by name.

        results: the names of the text's results, in a list, or one as it is; or by name their (shape, dtype), where
            the text cannot run on `meta` tensors.

        Raises DefinitionError for text that is no Python, that reads names which are not there, or does not run.
        """
        line = caller_line()
        given = {key: self._own(x, "kernel", line) for key, x in inputs.items()}
        kernel, found = text_kernel(name, text, results, given, line)
        made = self._launch(kernel, list(given.values()), found)
        return made[0] if len(made) == 1 else made

    def _launch(self, kernel: Kernel, inputs: Sequence[Buffer], found: Sequence[Any]) -> tuple[Buffer, ...]:
        known = self._kernels.setdefault(kernel.name, kernel)
        if known != kernel:
            kernel = self._renamed(kernel)
        made = tuple([self._made(self._free_name(f"v_{r}"), *f) for r, f in zip(kernel.results, found, strict=True)])
        names = (tuple(x.name for x in inputs), tuple(x.name for x in made))
        self._body.append(Launch(kernel, *names))
        return made

    def _renamed(self, kernel: Kernel) -> Kernel:
        """The kernel under a name that no other one has."""
        number = next(n for n in range(1, len(self._kernels) + 2) if f"{kernel.name}_{n}" not in self._kernels)
        made = replace(kernel, name=f"{kernel.name}_{number}")
        return self._kernels.setdefault(made.name, made)

    # communication

    def all_reduce(self, x: Buffer, ranks: Sequence[int], reduce: str = "sum") -> Pending:
        """The reduction of all ranks' `x`, on each of them: "sum", "prod", "max" or "min"."""
        line = caller_line()
        x, group = self._own(x, "all_reduce", line), self._group(ranks, "all_reduce", line)
        self._check_reduction(reduce, "all_reduce", line)
        made = self._made(self._free_name(f"{x.name}_reduced"), x.shape, x.dtype)
        self._body.append(Copy(made.name, ((x.name, ""),), "clone"))
        text = f"all_reduce({made.name}, {reduce!r})"
        wire = 2 * x.numel * (len(group) - 1) / len(group)
        return self._collective("all_reduce", group, (made, made), text, made, (), (x, wire, line))

    def all_gather(self, x: Buffer, ranks: Sequence[int]) -> Pending:
        """All ranks' `x`, which are of one shape, behind each other along dim 0, in the order of `ranks`."""
        line = caller_line()
        x, group = self._own(x, "all_gather", line), self._group(ranks, "all_gather", line)
        mine, flat = self._packed(x), self._flat(x, x.numel * len(group))
        shape = (x.shape[0] * len(group), *x.shape[1:]) if x.shape else (len(group),)
        made, then = self._shaped(x, flat, shape, "gathered")
        text = f"all_gather({flat.name}, {mine.name})"
        return self._collective(
            "all_gather", group, (mine, flat), text, made, then, (x, x.numel * (len(group) - 1), line)
        )

    def all_to_all(self, x: Buffer, ranks: Sequence[int]) -> Pending:
        """Equal parts of dim 0, the n-th for the n-th rank, exchanged for theirs; the shape stays."""
        line = caller_line()
        x, group = self._own(x, "all_to_all", line), self._group(ranks, "all_to_all", line)
        flat = self._exchange(x, group, "all_to_all", line)
        made, then = self._shaped(x, flat, x.shape, "exchanged")
        return self._exchanged(x, flat, group, made, then, line)

    def reduce_scatter(self, x: Buffer, ranks: Sequence[int], reduce: str = "sum") -> Pending:
        """The n-th of equal parts of dim 0, reduced over all ranks, on the n-th rank."""
        line = caller_line()
        x, group = self._own(x, "reduce_scatter", line), self._group(ranks, "reduce_scatter", line)
        self._check_reduction(reduce, "reduce_scatter", line)
        flat = self._exchange(x, group, "reduce_scatter", line)
        made = self._made(self._free_name(f"{x.name}_part"), (x.shape[0] // len(group), *x.shape[1:]), x.dtype)
        then = (Reduce(made.name, flat.name, len(group), made.shape, reduce),)
        return self._exchanged(x, flat, group, made, then, line)

    def broadcast(self, x: Buffer, ranks: Sequence[int], root: int) -> Pending:
        """`x` of rank `root` on each of the ranks; of the others' only the shape and the dtype count."""
        line = caller_line()
        x, group = self._own(x, "broadcast", line), self._group(ranks, "broadcast", line)
        place = group.index(self._peer(root, group, "broadcast: root", line))
        made = self._made(self._free_name(f"{x.name}_of_{root}"), x.shape, x.dtype)
        self._body.append(Copy(made.name, ((x.name, ""),), "clone"))
        text, wire = f"broadcast({made.name}, {place})", x.numel if root == self.rank else 0
        return self._collective("broadcast", group, (made, made), text, made, (), (x, wire, line))

    def send(self, x: Buffer, target: int, ranks: Sequence[int] | None = None) -> Pending:
        """Send `x` to a rank, which must receive it. Waiting for it gives None.

        ranks: a group that both are in; None for the two. All of its ranks connect before the first message in it.
        """
        line = caller_line()
        packed = self._packed(self._own(x, "send", line))
        return self._message("send", packed, target, ranks, Pending(self._work(), None), (x, x.numel, line))

    def recv(
        self, shape: Sequence[int], dtype: torch.dtype, source: int, ranks: Sequence[int] | None = None
    ) -> Pending:
        """What a rank sends, of this shape; `ranks` as in `send`."""
        line = caller_line()
        like = Buffer(f"v_from_{source}", self._sizes(shape, line), dtype)
        flat = self._flat(like, like.numel)
        made, then = self._shaped(like, flat, like.shape, "received")
        return self._message("recv", flat, source, ranks, Pending(self._work(), made, then), (like, 0, line))

    def wait(self, pending: Pending) -> Any:
        """End a communication: gives its result, or None for a send.

        Raises DefinitionError for what is no communication of this program, or was waited for already.
        """
        line = caller_line()
        if not isinstance(pending, Pending) or self._pending.pop(getattr(pending, "work", ""), None) is not pending:
            raise user_error("wait", shown(pending), "a communication of this program, once",
                             "Pass what all_reduce, send and so on return.", line)  # fmt: skip
        self._body += [Wait(pending.work), *pending.then]
        return pending.result

    # the end

    def program(self, *outputs: Buffer | None) -> HostProgram:
        """The program that returns these buffers, checked. None stands for an output that this rank has no part of.

        Raises DefinitionError where something is read before its wait, or a communication is never waited for.
        """
        line = caller_line()
        names = tuple([None if x is None else self._own(x, "program", line).name for x in outputs])
        if self._pending:
            raise user_error(f"the host program of rank {self.rank}: communication that nothing waits for",
                             ", ".join(self._pending), "a wait for each", "Call builder.wait(...) for it.",
                             line)  # fmt: skip
        body = tuple(with_frees(self._body, keep=filter(None, names)))
        made = HostProgram(self.rank, tuple(self._params), body, names, digest_of("by hand"))
        check_program(made, line)
        return made

    # helpers

    def _made(self, name: str, shape: Sequence[int], dtype: torch.dtype) -> Buffer:
        made = self._buffers[name] = Buffer(name, self._sizes(shape, caller_line()), _checked_dtype(dtype))
        return made

    def _sizes(self, shape: Any, line: SourceLine) -> tuple[int, ...]:
        sizes = [as_int(n) for n in shape] if isinstance(shape, (list, tuple)) else [None]
        if any(n is None or n < 0 for n in sizes):
            raise user_error("shape", shown(shape), "a list of sizes", "Give this rank's own sizes.", line)
        return tuple([n for n in sizes if n is not None])

    def _free_name(self, name: str) -> str:
        """The name, with a number behind it where it is taken."""
        taken = (f"{name}_{n}" for n in range(1, len(self._buffers) + 2))
        return name if name not in self._buffers else next(n for n in taken if n not in self._buffers)

    def _own(self, x: Any, what: str, line: SourceLine) -> Buffer:
        if not isinstance(x, Buffer) or self._buffers.get(x.name) is not x:
            found = f"{x.name} of another program" if isinstance(x, Buffer) else shown(x)
            do = "Wait for the communication first." if isinstance(x, Pending) else "Pass what this builder returned."
            raise user_error(what, found, "a buffer of this program", do, line)
        return x

    def _group(self, ranks: Any, what: str, line: SourceLine) -> tuple[int, ...]:
        found = [as_int(rank) for rank in ranks] if isinstance(ranks, (list, tuple, range)) else []
        if self.rank not in found or None in found or len(set(found)) != len(found):
            raise user_error(f"{what}: ranks", shown(ranks), f"distinct ranks, with {self.rank} among them",
                             "List the ranks that take part.", line)  # fmt: skip
        return tuple([rank for rank in found if rank is not None])

    def _peer(self, rank: Any, group: Sequence[int], what: str, line: SourceLine) -> int:
        number = as_int(rank)
        if number is None or number not in group:
            raise user_error(what, shown(rank), f"one of {list(group)}", "Pass a rank that takes part.", line)
        return number

    def _check_reduction(self, reduce: Any, what: str, line: SourceLine) -> None:
        if reduce not in REDUCTIONS:
            raise user_error(f"{what}: reduce", shown(reduce), f"one of {', '.join(REDUCTIONS)}", "Name one of these.",
                             line)  # fmt: skip

    def _packed(self, x: Buffer) -> Buffer:
        """The elements in a flat buffer, which may be the same memory."""
        made = self._made(self._free_name(f"{x.name}_mine"), (x.numel,), x.dtype)
        self._body.append(Copy(made.name, ((x.name, ""),), "dense", ".view(-1)", aliases=True))
        return made

    def _flat(self, x: Buffer, numel: int) -> Buffer:
        made = self._made(self._free_name(f"{x.name}_flat"), (numel,), x.dtype)
        self._body.append(Allocate(made.name, made.shape, from_torch(x.dtype)))
        return made

    def _shaped(self, x: Buffer, flat: Buffer, shape: tuple[int, ...], word: str) -> tuple[Buffer, tuple[View, ...]]:
        """A buffer that a flat one is seen as, and what sees it so."""
        made = self._made(self._free_name(f"{x.name}_{word}"), shape, x.dtype)
        return made, (View(made.name, flat.name, f".view({tuple_text(shape)})"),)

    def _exchange(self, x: Buffer, group: Sequence[int], what: str, line: SourceLine) -> Buffer:
        """A buffer for what the ranks send of `x`."""
        if not x.shape or x.shape[0] % len(group):
            raise user_error(f"{what} of {x.name}", f"shape {list(x.shape)} on {len(group)} ranks",
                             "a dim 0 that the ranks divide", "Pad it first.", line)  # fmt: skip
        return self._flat(x, x.numel)

    def _exchanged(
        self, x: Buffer, flat: Buffer, group: tuple[int, ...], made: Buffer, then: tuple[Instruction, ...],
        line: SourceLine,
    ) -> Pending:  # fmt: skip
        mine, sizes = self._packed(x), [x.numel // len(group)] * len(group)
        text = f"all_to_all({flat.name}, {mine.name}, {sizes}, {sizes})"
        wire = x.numel - x.numel // len(group)
        return self._collective("all_to_all", group, (mine, flat), text, made, then, (x, wire, line))

    def _collective(
        self, kind: CollectiveKind, group: tuple[int, ...], ends: tuple[Buffer, Buffer], text: str, made: Buffer,
        then: tuple[Instruction, ...], about: tuple[Buffer, float, SourceLine],
    ) -> Pending:  # fmt: skip
        work, (read, written) = self._work(), ends
        payload = (read.numel, from_torch(read.dtype).value)
        issued = Collective(work, group, kind, (read.name,), (written.name,), text, _about(kind, about), payload)
        return self._issued(issued, Pending(work, made, then))

    def _message(
        self, kind: MessageKind, buffer: Buffer, peer: Any, ranks: Any, pending: Pending,
        about: tuple[Buffer, float, SourceLine],
    ) -> Pending:  # fmt: skip
        number, line = as_int(peer), about[2]
        if number is None or number < 0 or number == self.rank:
            raise user_error(f"{kind}: rank", shown(peer), f"a rank other than {self.rank}", "Pass the other end.",
                             line)  # fmt: skip
        group = tuple(sorted((self.rank, number))) if ranks is None else self._group(ranks, kind, line)
        self._peer(number, group, f"{kind}: rank", line)
        payload = (buffer.numel, from_torch(buffer.dtype).value)
        issued = SendRecv(pending.work, group, kind, number, buffer.name, _about(kind, about), payload)
        return self._issued(issued, pending)

    def _work(self) -> str:
        return f"w{sum(isinstance(i, (Collective, SendRecv)) for i in self._body)}"

    def _issued(self, call: Collective | SendRecv, pending: Pending) -> Pending:
        self._body.append(call)
        self._pending[pending.work] = pending
        return pending


def _about(kind: str, about: tuple[Buffer, float, SourceLine]) -> Communication:
    x, elements, line = about
    words = kind.replace("_", "-")
    return Communication(words, "", x.name, elements * x.dtype.itemsize, "by hand", line, words)


def _checked_dtype(dtype: Any) -> torch.dtype:
    try:
        from_torch(dtype)
        known = isinstance(dtype, torch.dtype)
    except ValueError:
        known = False
    if not known:
        raise user_error("dtype", shown(dtype), "a dtype of torch's", "Pass torch.float32, for example.", caller_line())
    return dtype
