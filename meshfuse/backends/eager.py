"""The reference: a segment's own text, run by torch op by op."""

from __future__ import annotations

from . import Prepared, Task


class Eager:
    """Compiles nothing."""

    name = "eager"

    def prepare(self, task: Task) -> Prepared:
        return task.eager
