"""Gradients through a session's collectives: what each worker remembers of them inside of a context.

All workers run the same collectives, so a backward pass runs their adjoints in the reverse order on all of them: what
comes out of a collective is a leaf of the worker's own graph, whose gradient the adjoint takes to where the tensor came
from. The gradients are those of the sum of all workers' roots.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Sequence
from dataclasses import dataclass, field
from typing import Any

import torch

from ..errors import ArgumentError, shown, user_error
from .executor import current
from .rpc.contexts import added, with_engine
from .rpc.hooked import Engine, gradients

Adjoint = Callable[[Any], Any]


@dataclass(frozen=True, slots=True)
class _Entry:
    """A collective: what this worker gave and has got (None for nothing that has a gradient), and its adjoint."""

    given: torch.Tensor | None
    got: torch.Tensor | None
    adjoint: Adjoint


@dataclass(slots=True)
class Tape:
    """What a context has seen on this worker. is_spent: a backward pass has run that was the last.

    engine: what has run hooks of leaves, and has gradients of its own.
    """

    number: int
    entries: list[_Entry] = field(default_factory=list)
    grads: dict[torch.Tensor, torch.Tensor] = field(default_factory=dict)
    is_spent: bool = False
    engine: Engine | None = None

    def add_grad(self, leaf: torch.Tensor, grad: torch.Tensor) -> None:
        """Accumulate a gradient."""
        self.grads[leaf] = added(self.grads[leaf], grad) if leaf in self.grads else grad

    def own_engine(self) -> Engine:
        """The engine, from its first use on."""
        self.engine = self.engine or Engine(current().worker)
        return self.engine

    def gradients(self) -> dict[torch.Tensor, torch.Tensor]:
        """What has been accumulated, by leaf."""
        return with_engine(self.grads, self.engine)


def begin(number: int) -> None:
    """Remember collectives from here on."""
    current().tape = Tape(number)


def end(number: int) -> None:
    """Forget them."""
    current().tape = None


def record(given: Any, got: Any, dst: Any, adjoint: Adjoint, what: str) -> Any:
    """Remember a collective, if this worker is inside of a context; returns `got`.

    Raises ArgumentError for a destination that is part of a graph: a gradient cannot tell its old value from the new.
    """
    tape: Tape | None = current().tape
    like = got if isinstance(got, torch.Tensor) else given
    if tape is None or not isinstance(like, torch.Tensor) or not (like.is_floating_point() or like.is_complex()):
        return got
    if got is not None:
        if dst is not None and dst.requires_grad:
            raise user_error(f"{what} in an autograd context", "a destination that has a gradient or has been one",
                             "a plain tensor, or none", "Leave dst out.", cls=ArgumentError)  # fmt: skip
        got.requires_grad_()
    needs = isinstance(given, torch.Tensor) and given.requires_grad
    tape.entries.append(_Entry(given if needs else None, got, adjoint))
    return got


def refuse(src: torch.Tensor, what: str) -> None:
    """Raises ArgumentError for a tensor with a gradient, inside of a context: what follows has no adjoint."""
    if current().tape is not None and isinstance(src, torch.Tensor) and src.requires_grad:
        raise user_error(f"{what} in an autograd context", "a tensor that requires a gradient", "sum or avg", "",
                         cls=ArgumentError)  # fmt: skip


def run_backward(number: int, roots: Sequence[Any], worker: int | None, retain: bool) -> None:
    """This worker's part of a backward pass. worker: whose roots they are; None for all that have some."""
    tape = _open(number)
    if tape.is_spent:
        raise RuntimeError("Trying to backward through the graph a second time: pass retain_graph=True the first time")
    tape.is_spent = not retain
    own = [] if worker not in (None, current().worker) else [root for root in roots if _is_root(root)]
    arrived: dict[int, torch.Tensor] = {}
    kept = {id(entry.got) for entry in tape.entries if entry.got is not None}
    _accumulate(tape, kept, arrived, own, [torch.ones_like(root) for root in own])
    for entry in reversed(tape.entries):
        grad = None if entry.got is None else arrived.pop(id(entry.got), None)
        if grad is None and entry.got is not None:
            grad = torch.zeros_like(entry.got)
        back = entry.adjoint(grad)
        if entry.given is not None and back is not None:
            _accumulate(tape, kept, arrived, [entry.given], [back.reshape(entry.given.shape)])


def _open(number: int) -> Tape:
    tape = current().tape
    if tape is None or tape.number != number:
        raise user_error("no such autograd context", shown(number), "one that is open",
                         "Call backward and get_gradients inside of the context.", cls=ArgumentError)  # fmt: skip
    return tape


def _is_root(value: Any) -> bool:
    """Whether a worker has a root there: some have none. Raises ArgumentError for a tensor that is no number."""
    if not isinstance(value, torch.Tensor) or not value.requires_grad:
        return False
    if value.numel() != 1:
        raise user_error("a root of backward", f"shape {list(value.shape)}", "scalar tensors", "", cls=ArgumentError)
    return True


def _accumulate(
    tape: Tape, kept: set[int], arrived: dict[int, torch.Tensor], tensors: list[torch.Tensor], grads: Iterable[Any]
) -> None:
    """Go from tensors to the leaves of this worker's graph, which the tape has, or collectives gave."""
    for leaf, grad in gradients(list(zip(tensors, grads, strict=True)), kept, True, tape.own_engine):
        if grad is None:
            continue
        if id(leaf) not in kept:
            tape.add_grad(leaf, grad)
        else:
            arrived[id(leaf)] = arrived[id(leaf)] + grad if id(leaf) in arrived else grad


def gradient_of(number: int, leaf: Any) -> torch.Tensor | None:
    """The gradient of a leaf of this worker; None if it has none."""
    return _open(number).gradients().get(leaf)


def step(number: int, optimizer: Any) -> None:
    """Let a worker's optimizer use the context's gradients."""
    optimizer.step_with(_open(number).gradients())
