"""What a captured graph takes for granted of sizes that it leaves open.

Where a forward branches on a size, torch takes the branch of the size that it traces with, and notes what it asked as
a guard. A graph is right for the sizes for which its guards hold.
"""

from __future__ import annotations

import re
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

import torch

Shapes = Mapping[int, Sequence[int]]
_SIZE = re.compile(r"(.*)\.size\(\)\[(\d+)\]")


@dataclass(frozen=True, slots=True)
class SizeGuards:
    """symbols: of the graph's sizes, each with the place of an argument among the leaves and the dim that has it.

    told: by place and dim of an argument the size that the graph has there, as an expression of symbols.
    guards: expressions that have to be true.
    """

    symbols: tuple[tuple[Any, int, int], ...] = ()
    told: tuple[tuple[int, int, Any], ...] = ()
    guards: tuple[Any, ...] = ()

    def hold(self, shapes: Shapes) -> bool:
        """Whether the graph is right for arguments of these shapes."""
        known = {symbol: shapes[place][dim] for symbol, place, dim in self.symbols if place in shapes}
        told = [expr.subs(known) == shapes[place][dim] for place, dim, expr in self.told if place in shapes]
        return all(told) and not any(guard.subs(known) == False for guard in self.guards)  # noqa: E712

    def fixed(self, dims: Iterable[tuple[int, int]]) -> set[tuple[int, int]]:
        """Those of some dims of arguments, each by place and number, that have one size in the graph."""
        return {(place, dim) for place, dim, expr in self.told if expr.is_number} & set(dims)


NO_GUARDS = SizeGuards()


def guards_of(env: Any, inputs: Sequence[tuple[torch.fx.Node, Any]], leaves: Sequence[Any], given: Any) -> SizeGuards:
    """The guards of a trace.

    env: torch's ShapeEnv. inputs: the graph's placeholders with their sources. leaves: the arguments of the trace, and
    `given` the same as (args, kwargs).
    """
    shapes = [(source.place, node.meta["val"].shape) for node, source in inputs
              if source.kind == "argument" and isinstance(node.meta["val"], torch.Tensor)]  # fmt: skip
    told = [(place, dim, size.node.expr) for place, shape in shapes
            for dim, size in enumerate(shape) if isinstance(size, torch.SymInt)]  # fmt: skip
    named = [*_of_sources(env, leaves, given)]
    told += [(place, dim, env.replacements.get(symbol, symbol)) for symbol, place, dim in named]
    own = [(expr, place, dim) for place, dim, expr in told if expr.is_symbol]
    return SizeGuards((*named, *own), tuple(told), tuple([guard.expr for guard in env.guards]))


def _of_sources(env: Any, leaves: Sequence[Any], given: Any) -> Iterable[tuple[Any, int, int]]:
    """Symbols of sizes that Dynamo names by where it has them from, such as L['args'][0].size()[1]."""
    places = {id(leaf): place for place, leaf in enumerate(leaves)}
    scope = {"L": dict(zip(("args", "kwargs"), given, strict=True))}
    for text, symbol in env.source_to_var.items():
        found = _SIZE.fullmatch(text)
        try:
            place = places.get(id(eval(found[1], {}, scope))) if found else None
        except (NameError, LookupError, AttributeError, TypeError):
            place = None  # of something that is not an argument
        if found and place is not None:
            yield symbol, place, int(found[2])
