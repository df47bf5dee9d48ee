"""Modules whose activations are computed again in the backward rather than kept (Chen et al. 2016)."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from typing import Any

from torch import nn
from torch.utils.checkpoint import CheckpointPolicy

from ..errors import SourceLine, shown, user_error
from .captured_graph import Captured
from .lines import module_paths
from .patterns import matching, nearest


def recomputed_modules(module: nn.Module, given: Any, line: SourceLine) -> tuple[str, ...]:
    """The full names of the modules that a user gives by a pattern, or by several.

    Raises DefinitionError for patterns that fit no module.
    """
    patterns = () if given is None else (given,) if isinstance(given, str) else given
    if not isinstance(patterns, (list, tuple)) or not all(isinstance(pattern, str) for pattern in patterns):
        raise user_error("parallelize: checkpoint", shown(given), 'patterns of modules, such as "layers.*"', "", line)
    names = [name for name, _ in module.named_modules() if name]
    found: dict[str, None] = {}
    for pattern in patterns:
        fits = matching(pattern, names)
        if not fits:
            near = nearest(pattern, names)
            raise user_error(
                f"parallelize: checkpoint={pattern!r} fits no module", f"near to it {near}" if near else "",
                'patterns of modules, such as "layers.*"', "Correct the pattern.", line,
            )  # fmt: skip
        found.update(dict.fromkeys(fits))
    return tuple(found)


@contextmanager
def recomputing(graph: Captured, names: Sequence[str]) -> Iterator[None]:
    """In this context the ops of these modules are marked (`mark_recomputed`)."""
    marks = ("recompute", "ac_graph_id")
    nodes = graph.module.graph.nodes if names else ()
    before = [(node, {mark: node.meta[mark] for mark in marks if mark in node.meta}) for node in nodes]
    mark_recomputed(graph, names)
    try:
        yield
    finally:
        for node, found in before:
            for mark in marks:
                node.meta.pop(mark, None)
            node.meta.update(found)


def mark_recomputed(graph: Captured, names: Sequence[str]) -> None:
    """Mark the ops of these modules as torch.utils.checkpoint marks those of its regions.

    Each module is a region: what it hands on is kept, and so are random numbers.
    """
    regions = {name: place for place, name in enumerate(names)}
    for node in graph.module.graph.nodes if regions else ():
        inside = [regions[path] for path in module_paths(node) if path in regions]
        if inside and "recompute" not in node.meta:
            node.meta["recompute"] = CheckpointPolicy.MUST_RECOMPUTE
            node.meta["ac_graph_id"] = f"module {min(inside)}"
