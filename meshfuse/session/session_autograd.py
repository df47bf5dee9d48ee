"""Autograd contexts of a session, as its controller sees them: gradients through calls and collectives of workers."""

from __future__ import annotations

import itertools
from collections.abc import Sequence
from typing import Any

from ..errors import ArgumentError, caller_line, shown, user_error
from . import tape
from .dref import DRef

_numbers = itertools.count(1)


class SessionContext:
    """The context of a session: `with autograd.context(s) as context_id`. A session has one at a time."""

    def __init__(self, session: Any):
        self.session, self.number = session, next(_numbers)

    def begin(self) -> None:
        """Have the workers remember their collectives."""
        if self.session.autograd_context is not None:
            raise user_error("an autograd context inside of another", repr(self.session.autograd_context),
                             "one at a time", "", caller_line(), ArgumentError)  # fmt: skip
        self.session.call(tape.begin, self.number)
        self.session.autograd_context = self

    def end(self) -> None:
        """Have the workers forget them."""
        self.session.autograd_context = None
        self.session.call(tape.end, self.number)

    def backward(self, roots: Sequence[Any], retain_graph: bool, worker: int | None) -> None:
        """Run the backward pass on all workers, from the roots of one worker or of all that have some."""
        if not isinstance(roots, (list, tuple)) or not roots or not all(isinstance(root, DRef) for root in roots):
            raise user_error("backward of a session's context", shown(roots), "a list of DRefs to scalars", "",
                             caller_line(), ArgumentError)  # fmt: skip
        if worker is not None:
            roots[0]._worker(worker)
        self.session.call(tape.run_backward, self.number, list(roots), worker, retain_graph)

    def __repr__(self) -> str:
        return f"<autograd context {self.number} of {self.session!r}>"


class Gradients:
    """The gradients that backward passes of a session's context have accumulated: `gradients[w]` is a DRef."""

    def __init__(self, context: SessionContext):
        self._context = context

    def __getitem__(self, leaf: DRef) -> DRef:
        """A DRef to the gradient of what each worker has in a DRef; None where it has none."""
        return self._context.session.call(tape.gradient_of, self._context.number, leaf)
