"""nvFuser's graphs of equal loop axes. meshfuse has none; here the names exist, and say what to use instead."""

from __future__ import annotations

from typing import Any, NoReturn

from ..errors import DefinitionError, caller_line, user_error


class NoLoopGraphError(DefinitionError, NotImplementedError):
    """Loop axes are no values of a graph in meshfuse."""


def refuse(name: str) -> NoReturn:
    """Raises NoLoopGraphError, which says what answers such questions here."""
    raise user_error(
        f"{name}: meshfuse keeps no graph of loop axes", "", "a question of dims",
        "The factor rule of an op says which dims go together: print(fd.compile(...).graph), or fd.explain(t).",
        caller_line(), NoLoopGraphError,
    )  # fmt: skip


class _Missing:
    def __init__(self, *options: Any, **named: Any):
        refuse(f"idm.{type(self).__name__}")


class IdModel(_Missing):
    """nvFuser's graphs of equal loop axes. Raises NoLoopGraphError."""

    def maybe_build_graph(self, mode: Any) -> NoReturn:
        refuse("idm.IdModel.maybe_build_graph")


class ValGraph(_Missing):
    """One of these graphs. Raises NoLoopGraphError."""

    def disjoint_val_sets(self) -> NoReturn:
        refuse("idm.ValGraph.disjoint_val_sets")

    def map_vals(self, val0: Any, val1: Any) -> NoReturn:
        refuse("idm.ValGraph.map_vals")


class DisjointValSets(_Missing):
    """The sets of such a graph. Raises NoLoopGraphError."""

    def strict_are_mapped(self, entry0: Any, entry1: Any) -> NoReturn:
        refuse("idm.DisjointValSets.strict_are_mapped")
