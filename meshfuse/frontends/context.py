"""Context parallelism: the rows of a sequence over an axis of the mesh, and attention that sees all of them.

As in Ring Attention (Liu et al. 2023) and DeepSpeed-Ulysses (Jacobs et al. 2023). What a user says here decides how
queries, keys and values of each captured attention lie; all else follows from that.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

from ..errors import SourceLine, caller_line, shown, user_error
from ..mesh import DeviceMesh

METHODS = ("ring", "ulysses", "auto")


@dataclass(frozen=True, slots=True, init=False)
class Context:
    """Attention over a sequence whose rows are cut over an axis of the mesh.

    axis: that axis; `inputs` of `mf.parallelize` cuts the arguments' rows over it.
    method: "ring" has keys and values travel from rank to rank, "ulysses" gives each rank all rows of some heads,
        "auto" takes what the planner's model says takes less time.
    zigzag: whether rows of a ring are in zig-zag order where attention is causal, so that all ranks compute as much.
        None for yes, where there is a ring.

    Raises DefinitionError for what is none of these.
    """

    axis: str
    method: str
    zigzag: bool

    def __init__(self, axis: str, method: str = "auto", *, zigzag: bool | None = None) -> None:
        line = caller_line()
        if not isinstance(axis, str):
            raise user_error("Context: axis", shown(axis), "the name of an axis of the mesh", "", line)
        if method not in METHODS:
            raise user_error("Context: method", shown(method), f"one of {list(METHODS)}", "", line)
        if zigzag is not None and not isinstance(zigzag, bool):
            raise user_error("Context: zigzag", shown(zigzag), "True, False or None", "", line)
        if zigzag and method == "ulysses":
            raise user_error("Context: zigzag", 'True with method="ulysses"', 'method="ring" or "auto"',
                             "Leave it out: under ulysses a rank has all rows, in order.", line)  # fmt: skip
        values = {"axis": axis, "method": method, "zigzag": method != "ulysses" if zigzag is None else zigzag}
        for name, value in values.items():
            object.__setattr__(self, name, value)

    def ways(self) -> list[Context]:
        """The contexts among which a plan chooses: of one method each."""
        if self.method != "auto":
            return [self]
        return [Context(self.axis, "ring", zigzag=self.zigzag), Context(self.axis, "ulysses")]


def checked_context(context: Any, mesh: DeviceMesh, line: SourceLine) -> Context | None:
    """What `context` of `mf.parallelize` is. Raises DefinitionError for no Context, and for an axis the mesh lacks."""
    if context is None:
        return None
    if not isinstance(context, Context):
        raise user_error("parallelize: context", shown(context), "an mf.Context, or None",
                         'Pass mf.Context("cp", method="ring").', line)  # fmt: skip
    if context.axis not in mesh.names:
        raise user_error("parallelize: context: unknown mesh axis", repr(context.axis), f"one of {list(mesh.names)}",
                         "Use an axis of the mesh.", line)  # fmt: skip
    return context
