"""Context parallelism: the rows of a sequence over axes of the mesh, and attention that sees all of them.

As in Ring Attention (Liu et al. 2023), DeepSpeed-Ulysses (Jacobs et al. 2023) and both (USP, Fang & Zhao 2024). What a
user says here decides how queries, keys and values of each captured attention lie; all else follows from that.
"""

from __future__ import annotations

import itertools
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

from ..argument_checks import texts
from ..errors import SourceLine, caller_line, shown, user_error
from ..mesh import DeviceMesh

RING, ULYSSES = "ring", "ulysses"
METHODS = (RING, ULYSSES, "auto")


@dataclass(frozen=True, slots=True, init=False)
class Context:
    """Attention over a sequence whose rows are cut over axes of the mesh.

    axes: an axis or several, as `inputs` of `mf.parallelize` cuts the arguments' rows over them, major to minor.
    method: of all of them, or one of each. "ring" has keys and values travel from rank to rank, "ulysses" gives each
        rank all rows of some heads; where axes have both, keys and values of some heads travel (USP, Fang & Zhao 2024).
        "auto" takes what the planner's model says takes less time.
    zigzag: whether rows of a ring are in zig-zag order where attention is causal, so that all ranks compute as much.
        None for yes, where there is a ring.

    Raises DefinitionError for what is none of these.
    """

    axes: tuple[str, ...]
    methods: tuple[str, ...]
    zigzag: bool

    def __init__(
        self, axes: str | Sequence[str], method: str | Sequence[str] = "auto", *, zigzag: bool | None = None
    ) -> None:
        line = caller_line()
        names = _axes(axes, line)
        methods = _methods(method, names, line)
        if zigzag is not None and not isinstance(zigzag, bool):
            raise user_error("Context: zigzag", shown(zigzag), "True, False or None", "", line)
        by_heads = set(methods) == {ULYSSES}
        if zigzag and by_heads:
            raise user_error("Context: zigzag", 'True with method="ulysses"', 'method="ring" or "auto"',
                             "Leave it out: under ulysses a rank has all rows, in order.", line)  # fmt: skip
        values = {"axes": names, "methods": methods, "zigzag": not by_heads if zigzag is None else zigzag}
        for name, value in values.items():
            object.__setattr__(self, name, value)

    def by(self, method: str) -> tuple[str, ...]:
        """The axes of a method."""
        return tuple([axis for axis, its in zip(self.axes, self.methods, strict=True) if its == method])

    def ways(self) -> list[Context]:
        """The contexts among which a plan chooses: of one method for each axis."""
        each = [(RING, ULYSSES) if method == "auto" else (method,) for method in self.methods]
        return [Context(self.axes, ways, zigzag=self.zigzag and RING in ways) for ways in itertools.product(*each)]


def _axes(axes: Any, line: SourceLine) -> tuple[str, ...]:
    """The names of axes that a context is given. Raises DefinitionError for anything else."""
    given = texts(axes)
    if not given or len({*given}) < len(given):
        raise user_error("Context: axes", shown(axes), "the name of an axis of the mesh, or of different ones",
                         'Pass "cp", or ("cp", "up").', line)  # fmt: skip
    return given


def _methods(method: Any, axes: Sequence[str], line: SourceLine) -> tuple[str, ...]:
    """The method of each axis. Raises DefinitionError for one that there is not, and for another number of them."""
    given = texts(method) or ()
    given = given * len(axes) if isinstance(method, str) else given
    if len(given) != len(axes) or not {*given} <= {*METHODS}:
        several = f", or {len(axes)} of them, one for each axis" if len(axes) > 1 else ""
        raise user_error("Context: method", shown(method), f"one of {list(METHODS)}{several}", "", line)
    return given


def checked_context(context: Any, mesh: DeviceMesh, line: SourceLine) -> Context | None:
    """What `context` of `mf.parallelize` is. Raises DefinitionError for no Context, and for an axis the mesh lacks."""
    if context is None:
        return None
    if not isinstance(context, Context):
        raise user_error("parallelize: context", shown(context), "an mf.Context, or None",
                         'Pass mf.Context("cp", method="ring").', line)  # fmt: skip
    for axis in context.axes:
        if axis not in mesh.names:
            raise user_error("parallelize: context: unknown mesh axis", repr(axis), f"one of {list(mesh.names)}",
                             "Use an axis of the mesh.", line)  # fmt: skip
    return context
