"""Lowers rows that go between tokens and experts on several ranks: counts first, then as many rows as there are."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

from ..dtypes import DataType
from ..graph import Node
from ..ops.values import TensorType
from ..placement.exchanges import exchange_wire
from ..placement.factors import Placement
from ..reshard.steps import axis_keys
from ..sharding.value import Sharding
from .instructions import Allocate, Collective, Communication, Instruction, Kernel, Launch, Wait, tuple_text
from .kernel_text import origin

_COUNTS = DataType.Int
# What the names of buffers end in: rows to send, how many for each expert, how many that come, a place for these rows,
# elements to each rank, elements from each.
_PARTS = ("sent", "counts", "arriving", "room", "went", "came")


@dataclass(frozen=True, slots=True)
class ExchangeContext:
    """An op that moves rows, as one rank sees it, with the names of its operands and results."""

    rank: int
    node: Node
    placement: Placement
    operands: tuple[str, ...]
    results: tuple[str, ...]
    tensor: str
    name: str

    @property
    def group(self) -> tuple[int, ...]:
        """The ranks that this one sends rows to, itself among them."""
        return self.placement.results[0].mesh.group(self.rank, axis_keys(self.placement.exchange))

    @property
    def ragged(self) -> tuple[Sharding, TensorType]:
        """The rows."""
        call, placed = self.node.call, self.placement
        pairs = [*zip(placed.results, call.results, strict=True), *zip(placed.operands, call.types, strict=True)]
        return next(pair for pair in pairs if pair[1].rows)

    @property
    def count(self) -> int:
        """The number of all experts."""
        return self.ragged[1].shape[0]

    def experts(self, rank: int) -> list[int]:
        """The experts that a rank has."""
        sharding, ttype = self.ragged
        return [i for a, b in sharding.runs(ttype.shape, rank)[0] for i in range(a, b)]

    @property
    def order(self) -> list[int]:
        """The experts of the group, rank by rank."""
        return [expert for rank in self.group for expert in self.experts(rank)]

    @property
    def sizes(self) -> tuple[int, ...]:
        """How many experts each rank of the group has."""
        return tuple([len(self.experts(rank)) for rank in self.group])

    def about(self, wire: float, what: str) -> Communication:
        axes = ",".join(str(split) for split in self.placement.exchange)
        why = f"{what} of {self.node.name}"
        return Communication("exchange", axes, self.tensor, wire, why, self.node.line, f"exchange over {axes}")

    def launch(self, part: str, text: str, inputs: Sequence[str], outputs: Sequence[str]) -> Launch:
        """A call of a kernel of its own."""
        line = f"{', '.join(outputs)} = {text}"
        kernel = Kernel(f"{self.name}_{part}", tuple(inputs), (line,), tuple(outputs), origins=(origin(self.node),))
        return Launch(kernel, tuple(inputs), tuple(outputs))

    def rows(self, room: str, sent: str, went: str, came: str) -> list[Instruction]:
        """The rows themselves, from `sent` to `room`; `went` and `came` are the elements to and from each rank."""
        text = f"all_to_all({room}.view(-1), {sent}.view(-1), {came}.tolist(), {went}.tolist())"
        payload = (0, self.ragged[1].dtype.value)
        about = self.about(exchange_wire(self.node.call, self.placement), "rows")
        work = f"w{self.results[0]}"
        call = Collective(work, self.group, "all_to_all", (sent, went, came), (room,), text, about, payload)
        return [call, Wait(work)]

    def counts(self, arriving: str, counts: str) -> list[Instruction]:
        """How many rows go to each expert, from every rank to those that have it."""
        mine = len(self.experts(self.rank))
        text = f"all_to_all({arriving}, {counts}, {tuple_text((mine,) * len(self.group))}, {tuple_text(self.sizes)})"
        wire = 8.0 * sum(size for rank, size in zip(self.group, self.sizes, strict=True) if rank != self.rank)
        work = f"w{self.results[0]}_counts"
        about = self.about(wire, "numbers of rows")
        room = Allocate(arriving, (mine * len(self.group),), _COUNTS)
        call = Collective(work, self.group, "all_to_all", (counts,), (arriving,), text, about, (0, _COUNTS.value))
        return [room, call, Wait(work)]


def lower_exchange(c: ExchangeContext) -> list[Instruction]:
    """The instructions of an exchange on this rank."""
    assert c.node.call.op.exchange is not None
    return _dispatched(c) if c.node.call.op.exchange.kind == "dispatch" else _collected(c)


def _dispatched(c: ExchangeContext) -> list[Instruction]:
    made, (x, experts) = c.results[0], c.operands
    sent, counts, arriving, room, went, came = (f"{made}_{part}" for part in _PARTS)
    sizes = tuple_text(c.sizes)
    return [
        c.launch("route", f"K.moe_route({x}, {experts}, {c.order}, {c.count})", [x, experts], [sent, counts]),
        *c.counts(arriving, counts),
        c.launch("room", f"K.moe_room({sent}, {counts}, {arriving}, {sizes})", [sent, counts, arriving],
                 [room, went, came]),
        *c.rows(room, sent, went, came),
        c.launch("arrive", f"K.moe_arrive({room}, {arriving}, {len(c.group)})", [room, arriving], c.results),
    ]  # fmt: skip


def _collected(c: ExchangeContext) -> list[Instruction]:
    made, (rows, block, experts) = c.results[0], c.operands
    sent, _, _, room, went, came = (f"{made}_{part}" for part in _PARTS)
    text = f"K.moe_return({rows}, {block}, {experts}, {c.order}, {tuple_text(c.sizes)}, {c.count})"
    back = f"K.moe_returned({room}, {experts}, {c.order}, {c.count})"
    return [
        c.launch("return", text, [rows, block, experts], [sent, room, went, came]),
        *c.rows(room, sent, went, came),
        c.launch("returned", back, [room, experts], c.results),
    ]
