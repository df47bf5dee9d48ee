"""How tensors get from stage to stage: between ranks without blocking, or from hand to hand in one process.

A rank posts receives in the order in which its peer sends, a few ahead of what it reads, so that tensors arrive while
it computes. What it has sent it holds until the peer has shown, by a later message of its own, that it has read it.
"""

from __future__ import annotations

from collections import deque
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any, Protocol

import torch

from ...errors import RankError
from ...runtime.work import Work
from ...runtime.world import World
from .assignment import Assignment
from .borders import Borders, Crossing
from .schedule import FORWARD, OF_WEIGHTS, Action

AHEAD = 2  # Receives of a peer that are posted before they are read: one arrives while the other is computed with.


@dataclass(frozen=True, slots=True)
class Message:
    """A tensor on its way to a stage, by its number among crossings, and of a micro-batch."""

    place: int
    target: int
    microbatch: int


@dataclass(frozen=True, slots=True)
class Expected:
    """A message before it has come: the shape of a rank's part, its type, and what it is in words."""

    shape: tuple[int, ...]
    dtype: torch.dtype
    what: str


class Transport(Protocol):
    """Moves tensors between stages."""

    def send(self, message: Message, tensor: torch.Tensor) -> None:
        """Hand a tensor over; it must not change any more."""
        ...

    def take(self, message: Message, action: Action) -> torch.Tensor:
        """What was sent; `action` needs it."""
        ...

    def finish(self) -> None:
        """Wait until all that was sent has arrived."""
        ...


@dataclass(slots=True)
class InProcess:
    """For simulated ranks: all stages are in one process."""

    there: dict[Message, torch.Tensor] = field(default_factory=dict)

    def send(self, message: Message, tensor: torch.Tensor) -> None:
        """Keep a tensor."""
        self.there[message] = tensor

    def take(self, message: Message, action: Action) -> torch.Tensor:
        """The tensor, which is kept no longer."""
        return self.there.pop(message)

    def finish(self) -> None:
        """Nothing is on its way."""
        assert not self.there


def messages_of(action: Action, graphs: Sequence[Borders]) -> Iterator[Message]:
    """What an action sends, in order."""
    if action.kind != OF_WEIGHTS:
        for crossing in graphs[action.stage].given(action.kind != FORWARD):
            for target in crossing.targets:
                yield Message(crossing.place, target, action.microbatch)


def needs_of(action: Action, graphs: Sequence[Borders]) -> list[tuple[Message, Crossing]]:
    """What an action takes."""
    if action.kind == OF_WEIGHTS:
        return []
    taken = graphs[action.stage].taken(action.kind != FORWARD)
    return [(Message(crossing.place, action.stage, action.microbatch), crossing) for crossing in taken]


@dataclass(slots=True)
class _Sent:
    message: Message
    tensor: torch.Tensor
    work: Any


@dataclass(slots=True)
class _Link:
    """What goes to and fro between this rank and one peer.

    incoming: what the peer sends, in its order, that is not posted yet.
    posted: receives under way, and their buffers.
    outgoing: what was sent, and is held.
    """

    rank: int
    group: Any
    incoming: deque[Message]
    posted: dict[Message, tuple[Any, torch.Tensor]] = field(default_factory=dict)
    outgoing: deque[_Sent] = field(default_factory=deque)

    @property
    def index(self) -> int:
        """The peer's place in the group of two."""
        return self.group.ranks.index(self.rank)


@dataclass(frozen=True, slots=True)
class Route:
    """What a rank does and receives in every step of a schedule: worked out once.

    order: its actions. incoming: by place of another rank on the pipeline's axis what that sends here, in its order.
    expected: by message the shape of this rank's part, its type, and what it is in words.
    seen_at, sent_at: by message the number of the action that reads it, and of the one that sends it, on its own rank.
    """

    order: tuple[Action, ...]
    incoming: Mapping[int, tuple[Message, ...]]
    expected: Mapping[Message, Expected]
    seen_at: Mapping[Message, int]
    sent_at: Mapping[Message, int]


def route_of(
    assignment: Assignment, orders: Sequence[Sequence[Action]], graphs: Mapping[int, Sequence[Borders]],
    expected: Callable[[Message], Expected],
) -> Route:  # fmt: skip
    """The route of this rank. orders: by place on the axis the actions. graphs: the stages, by micro-batch."""
    own, rank_of = assignment.row_of(World.current().rank), assignment.schedule.rank_of
    incoming: dict[int, tuple[Message, ...]] = {}
    for row, order in enumerate(orders):
        if row != own:
            messages = [m for action in order for m in messages_of(action, graphs[action.microbatch])]
            incoming[row] = tuple(m for m in messages if rank_of(m.target) == own)
    made = {m: expected(m) for messages in incoming.values() for m in messages}
    return Route(tuple(orders[own]), incoming, made, *_times(orders, graphs))


class BetweenRanks:
    """For real ranks: one step of a schedule, in which every message and its order are known."""

    def __init__(self, assignment: Assignment, route: Route, device: torch.device) -> None:
        self._world = World.current()
        self._assignment, self._device, self._route = assignment, device, route
        self._row = assignment.row_of(self._world.rank)
        self._own = InProcess()
        self._links: dict[int, _Link] = {}
        for row, messages in route.incoming.items():
            self._connect(row, messages)

    def _row_of(self, stage: int) -> int:
        return self._assignment.schedule.rank_of(stage)

    def _connect(self, row: int, incoming: Iterable[Message]) -> None:
        stage = self._assignment.schedule.stages_of(row)[0]
        rank = self._assignment.peer(self._world.rank, stage)
        ranks = tuple(sorted((rank, self._world.rank)))
        group = self._world.group(ranks, f"of pipeline axis {self._assignment.axis}")
        self._links[row] = _Link(rank, group, deque(incoming))

    def send(self, message: Message, tensor: torch.Tensor) -> None:
        """Send a tensor to the rank of its stage."""
        row = self._row_of(message.target)
        if row == self._row:
            self._own.send(message, tensor)
            return
        link, dense = self._links[row], tensor.contiguous()
        link.outgoing.append(_Sent(message, dense, link.group.send(dense, link.index)))

    def take(self, message: Message, action: Action) -> torch.Tensor:
        """Wait for a tensor. An error of the wait names the action and the rank that did not send."""
        link = next((link for link in self._links.values() if message in link.posted or message in link.incoming), None)
        if link is None:
            return self._own.take(message, action)
        while message not in link.posted:
            self._post(link)
        work, buffer = link.posted.pop(message)
        for _ in range(AHEAD - len(link.posted)):
            self._post(link)
        try:
            work.wait()
        except RankError as error:
            error.args = (f"{action.in_words()} waits for rank {link.rank}: {error.args[0]}", *error.args[1:])
            raise
        self._release(link, self._route.sent_at[message])
        return buffer

    def _post(self, link: _Link) -> None:
        if link.incoming:
            message = link.incoming.popleft()
            expected = self._route.expected[message]
            buffer = torch.empty(expected.shape, dtype=expected.dtype, device=self._device)
            work = link.group.recv(buffer, link.index)
            if isinstance(work, Work):
                work.name = f"recv of {expected.what}"
            link.posted[message] = work, buffer

    def _release(self, link: _Link, when: int) -> None:
        """Let go what the peer had read before it sent, as its action number `when`, what has just come."""
        while link.outgoing and self._route.seen_at[link.outgoing[0].message] <= when:
            link.outgoing.popleft().work.wait()

    def finish(self) -> None:
        """Wait until all that was sent has arrived."""
        for link in self._links.values():
            while link.outgoing:
                link.outgoing.popleft().work.wait()


def _times(
    orders: Sequence[Sequence[Action]], graphs: Mapping[int, Sequence[Borders]]
) -> tuple[dict[Message, int], dict[Message, int]]:
    """By message the number of the action that reads it, and of the one that sends it, each on its own rank."""
    seen, sent = dict[Message, int](), dict[Message, int]()
    for order in orders:
        for number, action in enumerate(order):
            stages = graphs[action.microbatch]
            seen.update((message, number) for message, _ in needs_of(action, stages))
            sent.update((message, number) for message in messages_of(action, stages))
    return seen, sent
