"""Lowers rows that go between tokens and experts on several ranks: an all-to-all of as many as there are."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

from ..graph import Node
from ..ops.values import TensorType
from ..placement.exchanges import exchange_wire, rows_of
from ..placement.factors import Placement
from ..reshard.steps import axis_keys
from ..sharding import layout as lay
from ..sharding.value import Sharding
from .instructions import Collective, Communication, Instruction, Kernel, Launch, Wait
from .kernel_text import origin

# Rows to send, room for those that come, elements to each rank and from each.
_PARTS = ("sent", "room", "went", "came")


@dataclass(frozen=True, slots=True)
class ExchangeContext:
    """An op that moves rows, as one rank sees it, with the names of its operands and results.

    tensor: what bills call its result. name: that of its segment.
    """

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
    def tokens(self) -> tuple[Sharding, TensorType]:
        """What this rank's tokens have: the first operand before a dispatch, the result of a collect."""
        call, placed = self.node.call, self.placement
        if not call.types[0].rows:
            return placed.operands[0], call.types[0]
        return placed.results[0], call.results[0]

    def buffers(self, *parts: str) -> list[str]:
        """Names of buffers of this exchange."""
        return [f"{self.results[0]}_{part}" for part in parts]

    def text(self) -> str:
        """The arguments that say where everything is: by rank its tokens and experts, this rank, all experts."""
        call, (sharding, ttype) = self.node.call, self.tokens
        assert call.op.exchange is not None
        choice = call.op.exchange.choice
        whole = self.placement.operands[choice].runs(call.types[choice].shape, self.rank)[0]
        tokens = [lay.positions(sharding.runs(ttype.shape, rank)[0], whole) for rank in self.group]
        ragged, rows = rows_of(call, self.placement)
        members = [[i for a, b in ragged.runs(rows.shape, rank)[0] for i in range(a, b)] for rank in self.group]
        return f"{tokens}, {members}, {self.group.index(self.rank)}, {rows.shape[0]}"

    def launch(self, part: str, text: str, inputs: Sequence[str], outputs: Sequence[str]) -> Launch:
        """A call of a kernel of its own."""
        line = f"{', '.join(outputs)} = {text}"
        kernel = Kernel(f"{self.name}_{part}", tuple(inputs), (line,), tuple(outputs), origins=(origin(self.node),))
        return Launch(kernel, tuple(inputs), tuple(outputs))

    def rows(self, sent: str, room: str, went: str, came: str) -> list[Instruction]:
        """The rows, from `sent` to `room`; `went` and `came` are the elements to and from each rank."""
        axes = ",".join(str(split) for split in self.placement.exchange)
        wire, why = exchange_wire(self.node.call, self.placement), f"rows of {self.node.name}"
        about = Communication("exchange", axes, self.tensor, wire, why, self.node.line, f"exchange over {axes}")
        text = f"all_to_all({room}.view(-1), {sent}.view(-1), {came}.tolist(), {went}.tolist())"
        dtype = rows_of(self.node.call, self.placement)[1].dtype
        payload, work = (0, dtype.value), f"w{self.results[0]}"
        call = Collective(work, self.group, "all_to_all", (sent, went, came), (room,), text, about, payload)
        return [call, Wait(work)]


def lower_exchange(c: ExchangeContext) -> list[Instruction]:
    """The instructions of an exchange on this rank."""
    assert c.node.call.op.exchange is not None
    return _dispatched(c) if c.node.call.op.exchange.kind == "dispatch" else _collected(c)


def _dispatched(c: ExchangeContext) -> list[Instruction]:
    buffers, (order, place) = c.buffers(*_PARTS), c.buffers("order", "place")
    arrived = [buffers[1], order, place]
    return [
        c.launch("send", f"K.moe_send({', '.join(c.operands)}, {c.text()})", c.operands, [*buffers, order, place]),
        *c.rows(*buffers),
        c.launch("arrive", f"K.moe_arrive({', '.join(arrived)})", arrived, c.results),
    ]


def _collected(c: ExchangeContext) -> list[Instruction]:
    buffers, (pairs,), (sharding, ttype) = c.buffers(*_PARTS), c.buffers("pairs"), c.tokens
    tokens, slots = sharding.local_shape(ttype.shape, c.rank)[:2]
    back = f"K.moe_returned({buffers[1]}, {pairs}, {tokens}, {slots})"
    return [
        c.launch("return", f"K.moe_return({', '.join(c.operands)}, {c.text()})", c.operands, [*buffers, pairs]),
        *c.rows(*buffers),
        c.launch("returned", back, [buffers[1], pairs], c.results),
    ]
