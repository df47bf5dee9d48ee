"""Gradients through `rpc` calls and those of a session, as `torch.distributed.autograd` has them.

Each message tells its receiver which messages its tensors follow from, so the worker that has the roots knows all that
take part in a backward pass before it begins: how many gradients each worker will get for every message that it has
received. A worker runs its own part as soon as these are complete. Messages that the roots do not follow from take no
part, so nothing waits for them.
"""

from __future__ import annotations

import itertools
import marshal
from collections import Counter
from collections.abc import Sequence
from dataclasses import dataclass, field
from typing import Any

import torch

from ..errors import ArgumentError, caller_line, shown, user_error
from .errors import WrongType, of_backward
from .rpc.calls import Calls, calls, provide_backward
from .rpc.contexts import Context, Message, added, reachable, sources
from .rpc.hooked import Engine, gradients
from .rpc.rref import DROP
from .session_autograd import Gradients, SessionContext

_ROOT: Message = (-1, -1)
_NOBODY = -1  # A rank that is nobody's.
Grads = Sequence[torch.Tensor | None]
Due = tuple[Message, Grads]  # a message, and the gradients of its tensors
Pass = tuple[int, int]  # (rank of the root, its number there)


@dataclass(frozen=True, slots=True)
class _Plan:
    """One backward pass: its number, and the messages that the roots follow from with their edges."""

    number: Pass
    retain: bool
    edges: dict[Message, tuple[Message, ...]]

    def text(self) -> bytes:
        """The plan in a form that is quick to send."""
        return marshal.dumps((self.number, self.retain, self.edges))

    def count(self, message: Message) -> int:
        """How many sent messages (or roots) follow from a received one: each brings a part of its gradient."""
        return sum(message in reached for reached in self.edges.values())

    def parts(self, rank: int) -> list[Message]:
        """The messages that one worker has sent, and the roots if they are there."""
        own = _ROOT if self.number[0] == rank else None
        return [message for message in self.edges if message[0] == rank or message == own]

    def group(self, message: Message) -> list[Message]:
        """The messages of one worker that follow from the same received ones as this.

        None of them waits for another one, so that their gradients can be awaited and run together.
        """
        reached = set(self.edges[message])
        return [other for other in self.parts(message[0]) if set(self.edges[other]) == reached]


@dataclass(slots=True)
class _State:
    """This worker's part in one backward pass.

    come: by sent message its gradients. open: by received message how many parts have not run that follow from it.
    grads: by received message what has been collected so far.
    """

    come: dict[Message, Grads] = field(default_factory=dict)

    open: dict[Message, int] = field(default_factory=dict)
    grads: dict[Message, list[torch.Tensor | None]] = field(default_factory=dict)


class context:
    """A context in which calls take gradients along; `with context() as context_id`. It ends on all workers.

    session: a session, for gradients through its own calls and collectives; None for those of `rpc` calls.
    """

    def __init__(self, session: Any = None) -> None:
        self._of_session = None if session is None else SessionContext(session)

    def __enter__(self) -> Any:
        if self._of_session is not None:
            self._of_session.begin()
            return self._of_session
        self._context = calls().contexts.begin()
        return self._context.number

    def __exit__(self, *_: object) -> None:
        if self._of_session is not None:
            self._of_session.end()
            return
        part = calls()
        part.contexts.enter(None)
        _release(self._context.number)


def backward(
    context_id: Any, roots: Sequence[Any], retain_graph: bool = False, worker: int | None = None
) -> None:  # fmt: skip
    """Run the backward pass from scalar tensors of this worker. The gradients accumulate in the context.

    In a session's context the roots are DRefs: those of one `worker`, or the sum of all that have some. Nothing waits.

    Raises ArgumentError for roots that are none and for a context that has ended, and what any worker's part raises.
    """
    if isinstance(context_id, SessionContext):
        context_id.backward(roots, retain_graph, worker)
        return
    part = calls()
    _check_roots(roots)
    found = part.contexts.get(context_id)
    with found.lock:
        edges = reachable(found.edges, own := sources(found, list(roots)))
    plan = _Plan((part.me.id, next(_numbers)), retain_graph, {**edges, _ROOT: own})
    found.sent[_ROOT] = list(roots)
    with _inside(part, context_id):
        try:
            _run(context_id, plan, [(_ROOT, [torch.ones_like(root) for root in roots])], _NOBODY)
        finally:
            del found.sent[_ROOT]


def get_gradients(context_id: Any) -> Any:
    """The gradients of this worker's leaves that backward passes of the context have accumulated: a dict by leaf.

    In a session's context `get_gradients(context_id)[w]` is a DRef to the gradients of a DRef's leaves.
    """
    if isinstance(context_id, SessionContext):
        return Gradients(context_id)
    return calls().contexts.get(context_id).gradients()


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
    """Raises ArgumentError for roots that are none, also a TypeError where they are no tensors."""
    if not isinstance(roots, (list, tuple)) or not all(isinstance(root, torch.Tensor) for root in roots):
        raise user_error("backward: incompatible function arguments", shown(roots), "a list of scalar tensors", "",
                         caller_line(), WrongType)  # fmt: skip
    if not roots:
        raise user_error("backward: No tensors provided for gradient computation", shown(roots), "a list of scalars",
                         "", caller_line(), ArgumentError)  # fmt: skip
    for root in roots:
        if wrong := _wrong_root(root):
            raise user_error(wrong, f"shape {list(root.shape)}", "scalar tensors that follow from ones that require a "
                             "gradient", "", caller_line(), ArgumentError)  # fmt: skip


def _wrong_root(root: torch.Tensor) -> str:
    if not root.requires_grad:
        return "requires_grad not set on a root of backward"
    if root.numel() != 1:
        return "a root of backward is not a scalar, all roots need to be scalar"
    return "a root of backward does not have a valid gradient function" if root.grad_fn is None else ""


def _run(context_id: int, plan: _Plan, due: list[Due], caller: int) -> list[Due]:
    """Gradients of messages that were sent from here have come: go on from their tensors.

    What is then due to other workers they are told. What is due to the one who has called this is the result: it goes
    on from there when it hears so, which takes a message less and no thread.
    """
    part, back = calls(), []
    while due:
        ready = [found for message, grads in due for found in _pass(context_id, plan, message, grads)]
        back += [one for one in ready if one[0][0] == caller]
        told = [one for one in ready if one[0][0] not in (caller, part.me.id)]
        text = plan.text() if told else b""
        answers = part.internal_all(
            [(message[0], _continue, (context_id, text, message, grads, part.me.id)) for message, grads in told]
        )
        due = [one for one in ready if one[0][0] == part.me.id != caller]
        due += [one for answer in answers for one in answer]
    return back


def _pass(context_id: int, plan: _Plan, message: Message, grads: Grads) -> list[Due]:
    """Run this worker's part from a message, if all of it has come; gradients that are then due."""
    found = calls().contexts.get(context_id)
    group = [message] if message == _ROOT else plan.group(message)
    with found.lock:
        state: _State = found.passes.setdefault(plan.number, _State())
        state.come[message] = grads
        if not all(other in state.come for other in group):
            return []
        pairs = [pair for other in group for pair in zip(found.sent[other], state.come.pop(other), strict=True)]
    _accumulate(found, state, plan, message, [(tensor, grad) for tensor, grad in pairs if grad is not None])
    with found.lock:
        ready = [other for other in plan.edges[message] if _is_last(state, plan, other, len(group))]
        return [(other, tuple(state.grads.pop(other))) for other in ready]


def _continue(context_id: int, plan: bytes, message: Message, grads: Grads, caller: int) -> tuple[Due, ...]:
    return tuple(_run(context_id, _Plan(*marshal.loads(plan)), [(message, grads)], caller))


def _is_last(state: _State, plan: _Plan, message: Message, parts: int) -> bool:
    state.open[message] = state.open.get(message, plan.count(message)) - parts
    return state.open[message] == 0


def _accumulate(
    found: Context, state: _State, plan: _Plan, message: Message, pairs: Sequence[tuple[torch.Tensor, torch.Tensor]]
) -> None:
    """This worker's own part of the pass."""
    retain = plan.retain or len(plan.parts(calls().me.id)) > 1
    with found.lock:
        places = {id(leaf): (other, i) for other, own in found.received.items() for i, leaf in enumerate(own)}
        for other in plan.edges[message]:
            state.grads.setdefault(other, [None] * len(found.received[other]))
    try:
        values = gradients(pairs, places, retain, lambda: _engine(found))
    except Exception as error:
        raise of_backward(error, calls().me.id, caller_line()) from None
    with found.lock:
        used = Counter(_memory(value) for _, value in values if value is not None)
        for leaf, value in values:
            if value is not None and id(leaf) in places:
                _add(state.grads[places[id(leaf)][0]], places[id(leaf)][1], value)
            elif value is not None:
                found.add_grad(leaf, value if used[_memory(value)] == 1 and _is_dense(value) else _copy(value))


def _engine(found: Context) -> Engine:
    with found.lock:
        if found.engine is None:
            found.engine = Engine(calls().me.id)
        return found.engine


def _memory(value: torch.Tensor) -> int:
    if value.layout not in (torch.strided, torch.sparse_coo):
        return id(value)
    return (value._values() if value.is_sparse else value).data_ptr()


def _is_dense(value: torch.Tensor) -> bool:
    """Whether no two elements of a gradient share memory, so that its owner may write to it."""
    if value.is_sparse:
        return value._indices().is_contiguous() and value._values().is_contiguous()
    return value.layout != torch.strided or value.is_contiguous()


def _copy(value: torch.Tensor) -> torch.Tensor:
    return value.clone(memory_format=torch.contiguous_format) if value.layout == torch.strided else value.clone()


def _add(grads: list[torch.Tensor | None], place: int, value: torch.Tensor) -> None:
    before = grads[place]
    grads[place] = value if before is None else added(before, value)


def _release(context_id: int, by: int = _NOBODY) -> None:
    """End a context here, and on the workers that it has reached from here; `by` has ended it and told this one."""
    part = calls()
    found = part.contexts.end(context_id)
    for rank in sorted(found.peers - {part.me.id, by}) if found is not None else ():
        part.table.later(DROP, rank, _release, context_id, part.me.id)


provide_backward(backward)


# Names of torch that its own tests and some scripts use.


def _new_context() -> Context:
    return calls().contexts.begin()


def _release_context(context_id: int) -> None:
    contexts = calls().contexts
    current = contexts.current()
    if current is not None and current.number == context_id:
        contexts.enter(None)
    _release(context_id)


def _retrieve_context(context_id: int) -> Context:
    """The context of that number here. Raises ArgumentError where it has ended."""
    return calls().contexts.get(context_id)


def _current_context() -> Context:
    """The context of this thread. Raises ArgumentError outside of one."""
    contexts = calls().contexts
    return contexts.current() or contexts.get(None)


def _is_valid_context(context_id: int) -> None:
    calls().contexts.get(context_id)


def _get_max_id() -> int:
    return calls().contexts.last()


__all__ = ["backward", "context", "get_gradients"]
