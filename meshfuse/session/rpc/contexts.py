"""Autograd contexts: what of a distributed forward pass this process must remember for the backward.

A message that carries tensors which require a gradient is remembered by its sender (the tensors) and by its receiver
(the leaves that stand for them). The design is that of torch's distributed autograd (pytorch.org/docs/rpc/
distributed_autograd), whose SMART mode the backward pass follows.
"""

from __future__ import annotations

import itertools
import threading
from collections.abc import Iterable
from dataclasses import dataclass, field
from typing import Any

import torch

from ...errors import ArgumentError, caller_line, shown, user_error
from ..pickling import Tracked
from .graph import Received, Sent
from .hooked import Engine, leaves_of

Message = tuple[int, int]  # (rank of the sender, its number there)
Edges = dict[Message, tuple[Message, ...]]
_REMEMBERED = 4096  # So many of the contexts that have ended are known to have ended.
_RANK_BITS = 48  # The bits of a context's number above these are the rank that began it.


@dataclass(slots=True)
class Context:
    """What this process knows of one context.

    sent: by message the tensors that it carried from here. received: by message the leaves of those that came.
    edges: by message the messages that its tensors follow from, as far as this process has heard.
    peers: other workers that take part. grads: of this process' leaves, by tensor. engine: what has run their hooks,
    and has gradients of its own, if some may have hooks.
    """

    number: int
    sent: dict[Message, list[torch.Tensor]] = field(default_factory=dict)
    received: dict[Message, list[torch.Tensor]] = field(default_factory=dict)
    edges: Edges = field(default_factory=dict)
    peers: set[int] = field(default_factory=set)
    grads: dict[torch.Tensor, torch.Tensor] = field(default_factory=dict)
    passes: dict[Any, Any] = field(default_factory=dict)
    engine: Engine | None = None
    lock: threading.RLock = field(default_factory=threading.RLock)

    def add_grad(self, leaf: torch.Tensor, grad: torch.Tensor) -> None:
        """Accumulate a leaf's gradient; not into its `.grad`, which other contexts would share."""
        with self.lock:
            self.grads[leaf] = added(self.grads[leaf], grad) if leaf in self.grads else grad

    def gradients(self) -> dict[torch.Tensor, torch.Tensor]:
        """What has been accumulated, by leaf."""
        with self.lock:
            found = dict(self.grads)
            received = {id(leaf) for leaves in self.received.values() for leaf in leaves}
        found = with_engine(found, self.engine)
        return {leaf: grad for leaf, grad in found.items() if id(leaf) not in received}

    def _context_id(self) -> int:
        return self.number

    def _known_worker_ids(self) -> set[int]:
        return self.peers - {self.number >> _RANK_BITS}

    def _recv_functions(self) -> dict[Message, Received]:
        with self.lock:
            return {message: Received(leaves) for message, leaves in self.received.items()}

    def _send_functions(self) -> dict[Message, Sent]:
        came = {id(leaf): one for one in self._recv_functions().values() for leaf in one.leaves}
        with self.lock:
            return {message: Sent(tensors, came) for message, tensors in self.sent.items()}


class _Current(threading.local):
    number: int | None = None


class Contexts:
    """The contexts of this process; each thread has at most one that is current."""

    def __init__(self, rank: int):
        self._rank, self._numbers, self._messages = rank, itertools.count(1), itertools.count(1)
        self._all: dict[int, Context] = {}
        self._ended: dict[int, None] = {}  # the latest ones, oldest first
        self._current = _Current()
        self._lock = threading.Lock()

    def begin(self) -> Context:
        """A new context, current in this thread. Raises ArgumentError inside of another one."""
        if self._current.number is not None:
            wrong, found = "Already have an autograd context id for this thread", shown(self._current.number)
            raise user_error(wrong, found, "one at a time", "", caller_line(), ArgumentError)
        context = self.get_or_make((self._rank << _RANK_BITS) + next(self._numbers))
        self._current.number = context.number
        return context

    def current(self) -> Context | None:
        """The context of this thread, if there is one."""
        number = self._current.number
        return None if number is None else self.get_or_make(number)

    def enter(self, number: int | None) -> int | None:
        """Let a context be current in this thread; the one before."""
        before, self._current.number = self._current.number, number
        return before

    def get_or_make(self, number: int) -> Context:
        """The context of that number; of one that has ended one that nothing remembers.

        A call that belongs to a context may go on here after that has ended where it began.
        """
        with self._lock:
            found = self._all.get(number)
            if found is None:
                found = Context(number)
                if number not in self._ended:
                    self._all[number] = found
            return found

    def get(self, number: Any) -> Context:
        """The context of that number. ArgumentError where it has ended, or never was."""
        with self._lock:
            if number not in self._all:
                raise user_error(
                    f"Could not find autograd context with id: {shown(number)}, no such autograd context",
                    shown(number), "the id of one that is open",
                    "Call backward and get_gradients inside of the context.", caller_line(), ArgumentError,
                )  # fmt: skip
            return self._all[number]

    def end(self, number: int) -> Context | None:
        """Forget a context."""
        with self._lock:
            self._ended[number] = None
            if len(self._ended) > _REMEMBERED:
                del self._ended[next(iter(self._ended))]
            return self._all.pop(number, None)

    def count(self) -> int:
        """How many there are."""
        return len(self._all)

    def last(self) -> int:
        """The largest number that a context of this process can have."""
        return (self._rank << _RANK_BITS) + (1 << _RANK_BITS) - 1

    def new_message(self) -> Message:
        """A number for a message of this process."""
        return self._rank, next(self._messages)


def added(one: torch.Tensor, other: torch.Tensor) -> torch.Tensor:
    """The sum of two gradients, of which either may be sparse."""
    return other + one if one.is_sparse and not other.is_sparse else one + other


def with_engine(grads: dict[torch.Tensor, torch.Tensor], engine: Engine | None) -> dict[torch.Tensor, torch.Tensor]:
    """Gradients by leaf, and those that an engine has accumulated."""
    found = dict(grads)
    for leaf, grad in engine.grads().items() if engine is not None else ():
        found[leaf] = added(found[leaf], grad) if leaf in found else grad
    return found


Told = tuple[Message, Edges]  # a message, and the edges that can be reached from it


def written(context: Context | None, message: Message, tracked: Tracked) -> Told | None:
    """Remember what a message took along; what its receiver must know of it, None for nothing."""
    if context is None or not tracked.tensors:
        return None
    with context.lock:
        context.sent[message] = tracked.tensors
        context.edges[message] = sources(context, tracked.tensors)
        return message, reachable(context.edges, [message])


def arrived(context: Context, told: Told | None, tracked: Tracked) -> None:
    """Remember what a message has brought."""
    if told is not None and tracked.tensors:
        message, edges = told
        with context.lock:
            context.received[message] = tracked.tensors
            context.edges.update(edges)


def sources(context: Context, tensors: list[torch.Tensor]) -> tuple[Message, ...]:
    """The received messages that tensors follow from, on this worker."""
    by_leaf = {id(leaf): message for message, leaves in context.received.items() for leaf in leaves}
    if not by_leaf:
        return ()
    return tuple({by_leaf[id(leaf)]: None for leaf in leaves_of(tensors) if id(leaf) in by_leaf})


def reachable(
    edges: dict[Message, tuple[Message, ...]], roots: Iterable[Message]
) -> dict[Message, tuple[Message, ...]]:
    """The messages that these follow from, over all workers, with their edges."""
    found: Edges = {}
    waiting = list(roots)
    while waiting:
        message = waiting.pop()
        if message not in found:
            found[message] = edges[message]
            waiting += edges[message]
    return found
