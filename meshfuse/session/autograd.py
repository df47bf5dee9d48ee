"""Gradients through `rpc` calls, as `torch.distributed.autograd` has them.

A backward pass has two parts. First the workers mark the messages that the roots follow from, so that each knows how
many gradients it will get for every message that it has received. Then each worker runs its own part as soon as these
are complete. Messages that the roots do not follow from take no part, so nothing waits for them.
"""

from __future__ import annotations

import itertools
from collections.abc import Sequence
from dataclasses import dataclass, field
from typing import Any

import torch

from ..errors import ArgumentError, caller_line, shown, user_error
from .rpc.calls import Calls, calls, provide_backward
from .rpc.contexts import Context, Message, leaves_of
from .rpc.rref import DROP

_ROOT: Message = (-1, -1)
Pass = tuple[int, int]  # (rank of the root, its number there)


@dataclass(slots=True)
class _State:
    """This worker's part in one backward pass.

    reach: by marked message that was sent from here (and for the roots) the received messages that it follows from.
    open: by received message how many of those have not got their gradients yet. grads: what has been collected so far.
    """

    retain: bool
    reach: dict[Message, list[Message]] = field(default_factory=dict)
    open: dict[Message, int] = field(default_factory=dict)
    grads: dict[Message, list[torch.Tensor | None]] = field(default_factory=dict)


class context:
    """A context in which calls take gradients along; `with context() as context_id`. It ends on all workers."""

    def __enter__(self) -> int:
        self._context = calls().contexts.begin()
        return self._context.number

    def __exit__(self, *_: object) -> None:
        part = calls()
        part.contexts.enter(None)
        _release(self._context.number)


def backward(context_id: int, roots: Sequence[torch.Tensor], retain_graph: bool = False) -> None:
    """Run the backward pass from scalar tensors of this worker. The gradients accumulate in the context.

    Raises ArgumentError for roots that are none and for a context that has ended, and what any worker's part raises.
    """
    part = calls()
    found = part.contexts.get(context_id)
    _check_roots(roots)
    number: Pass = (part.me.id, next(_numbers))
    found.sent[_ROOT] = list(roots)
    with _inside(part, context_id):
        try:
            _mark(context_id, number, _ROOT, retain_graph)
            _run(context_id, number, _ROOT, [torch.ones_like(root) for root in roots])
        finally:
            del found.sent[_ROOT]


def get_gradients(context_id: int) -> dict[torch.Tensor, torch.Tensor]:
    """The gradients of this worker's leaves that backward passes of the context have accumulated."""
    found = calls().contexts.get(context_id)
    with found.lock:
        return dict(found.grads)


_numbers = itertools.count(1)


class _inside:
    """A context in which calls belong to no autograd context: they carry gradients, and need none."""

    def __init__(self, part: Calls, number: int):
        self._part = part

    def __enter__(self) -> None:
        self._before = self._part.contexts.enter(None)

    def __exit__(self, *_: object) -> None:
        self._part.contexts.enter(self._before)


def _check_roots(roots: Any) -> None:
    if not isinstance(roots, (list, tuple)) or not roots:
        raise user_error("backward: No tensors provided for gradient computation", shown(roots), "a list of scalars",
                         "", caller_line(), ArgumentError)  # fmt: skip
    for root in roots:
        if not isinstance(root, torch.Tensor) or not root.requires_grad or root.numel() != 1:
            found = f"shape {list(root.shape)}" if isinstance(root, torch.Tensor) else shown(root)
            found += "" if getattr(root, "requires_grad", True) else ", requires_grad not set"
            raise user_error("a root of backward", found, "scalar tensors that require a gradient", "", caller_line(),
                             ArgumentError)  # fmt: skip


def _mark(context_id: int, number: Pass, message: Message, retain: bool) -> None:
    """Mark a message that was sent from here, and those that its tensors follow from, on the workers that sent them."""
    found = calls().contexts.get(context_id)
    with found.lock:
        state: _State = found.passes.setdefault(number, _State(retain))
        if message in state.reach:
            return
        reached = state.reach[message] = _reached(found, found.sent[message])
        new = [other for other in reached if other not in state.open]
        for other in reached:
            state.open[other] = state.open.get(other, 0) + 1
    for other in new:
        calls().internal(other[0], _mark, context_id, number, other, retain)


def _reached(found: Context, tensors: list[torch.Tensor]) -> list[Message]:
    """The received messages that tensors follow from."""
    by_leaf = {id(leaf): message for message, leaves in found.received.items() for leaf in leaves}
    return list({by_leaf[id(leaf)]: None for leaf in leaves_of(tensors) if id(leaf) in by_leaf})


def _run(context_id: int, number: Pass, message: Message, grads: Sequence[torch.Tensor | None]) -> None:
    """The gradients of a message that was sent from here have come: go on from its tensors."""
    part = calls()
    found = part.contexts.get(context_id)
    state: _State = found.passes[number]
    _accumulate(found, state, message, grads)
    with found.lock:
        ready = [other for other in state.reach[message] if _is_last(state, other)]
    waits = [
        part.agent.submit(
            lambda other=other: part.internal(other[0], _run, context_id, number, other, state.grads[other])
        )
        for other in ready[1:]
    ]
    for other in ready[:1]:
        part.internal(other[0], _run, context_id, number, other, state.grads[other])
    for wait in waits:
        wait.wait()


def _is_last(state: _State, message: Message) -> bool:
    state.open[message] -= 1
    return state.open[message] == 0


def _accumulate(found: Context, state: _State, message: Message, grads: Sequence[torch.Tensor | None]) -> None:
    """This worker's own part of the pass."""
    pairs = [(tensor, grad) for tensor, grad in zip(found.sent[message], grads, strict=True) if grad is not None]
    leaves = list(leaves_of([tensor for tensor, _ in pairs]))
    retain = state.retain or len(state.reach) > 1
    places = {id(leaf): (other, i) for other, own in found.received.items() for i, leaf in enumerate(own)}
    values = torch.autograd.grad(
        [tensor for tensor, _ in pairs], leaves, [grad for _, grad in pairs], retain_graph=retain, allow_unused=True
    ) if leaves else ()  # fmt: skip
    with found.lock:
        for other in state.reach[message]:
            state.grads.setdefault(other, [None] * len(found.received[other]))
        for leaf, value in zip(leaves, values, strict=True):
            if value is None:
                continue
            if id(leaf) not in places:
                found.add_grad(leaf, value)
                continue
            other, i = places[id(leaf)]
            before = state.grads[other][i]
            state.grads[other][i] = value if before is None else before + value


def _release(context_id: int) -> None:
    """End a context here, and on the workers that it has reached from here."""
    part = calls()
    found = part.contexts.end(context_id)
    for rank in sorted(found.peers - {part.me.id}) if found is not None else ():
        part.table.later(DROP, rank, _release, context_id)


provide_backward(backward)

__all__ = ["backward", "context", "get_gradients"]
