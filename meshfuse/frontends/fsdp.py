"""Fully sharded parameters: cut over an axis, gathered unit by unit for their use, and their gradients scattered again.

As in ZeRO (Rajbhandari et al. 2020) and PyTorch's FSDP (Zhao et al. 2023). A unit, such as a layer, is gathered before
its first op, or with `prefetch` before that of a unit ahead of it, so that its parameters travel while others compute.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

import torch

from ..errors import caller_line, shown, user_error
from ..sharding.layout import Split
from .cut import is_view
from .patterns import longest_list, matching

Node = torch.fx.Node


@dataclass(frozen=True, slots=True, init=False)
class FSDP:
    """How parameters are fully sharded; `fsdp="dp"` is short for `fsdp=mf.FSDP("dp")`.

    axes: the axis, or axes, that every parameter, its gradient and its optimiser's state are cut over.
    stage: 3 gathers parameters for the forward and again for the backward; 1 and 2 keep them gathered from the forward
        to the backward (ZeRO's stages: optimiser states are cut in all of them; gradients leave a step cut in all).
    replicate: an axis that parameters are whole along, and gradients reduced over once more (HSDP).
    units: patterns of modules that are gathered at once; None for the layers of the longest list of modules.
    reshard_after_forward: False keeps parameters as stages 1 and 2 do.
    prefetch: how many units ahead of its use a unit is gathered.
    param_dtype, reduce_dtype: types to gather and compute in, and to reduce gradients in; None for their own.

    Raises DefinitionError for what is none of these.
    """

    axes: tuple[str, ...]
    stage: int
    replicate: str | None
    units: tuple[str, ...] | None
    reshard_after_forward: bool
    prefetch: int
    param_dtype: torch.dtype | None
    reduce_dtype: torch.dtype | None

    def __init__(
        self, axes: str | Sequence[str], stage: int = 3, *, replicate: str | None = None,
        units: str | Sequence[str] | None = None, reshard_after_forward: bool = True, prefetch: int = 1,
        param_dtype: torch.dtype | None = None, reduce_dtype: torch.dtype | None = None,
    ) -> None:  # fmt: skip
        line = caller_line()
        if stage not in (1, 2, 3):
            raise user_error("FSDP: stage", shown(stage), "1, 2 or 3", "", line)
        if not isinstance(prefetch, int) or isinstance(prefetch, bool) or prefetch < 0:
            raise user_error("FSDP: prefetch", shown(prefetch), "how many units ahead, 0 or more", "", line)
        values = {
            "axes": (axes,) if isinstance(axes, str) else tuple(axes), "stage": stage, "replicate": replicate,
            "units": (units,) if isinstance(units, str) else None if units is None else tuple(units),
            "reshard_after_forward": bool(reshard_after_forward) and stage == 3, "prefetch": prefetch,
            "param_dtype": param_dtype, "reduce_dtype": reduce_dtype,
        }  # fmt: skip
        for name, value in values.items():
            object.__setattr__(self, name, value)


def units_of(module: torch.nn.Module, fsdp: FSDP) -> dict[str, str]:
    """By parameter its unit: the outermost module that a pattern fits, or else the module that it belongs to.

    Raises DefinitionError for patterns that fit no module.
    """
    names = [name for name, _ in module.named_modules() if name]
    if fsdp.units is None:
        chosen = longest_list(module)
    else:
        chosen = [name for pattern in fsdp.units for name in _fitting(pattern, names)]
    found: dict[str, str] = {}
    for name, _ in module.named_parameters():
        owner = name.rpartition(".")[0]
        found[name] = min(
            (unit for unit in chosen if owner == unit or owner.startswith(f"{unit}.")), key=len, default=owner
        )
    return found


def _fitting(pattern: str, names: Sequence[str]) -> list[str]:
    found = matching(pattern, names)
    if not found:
        raise user_error(
            "FSDP: units", repr(pattern), "patterns of modules, such as 'layers.*'", "Correct the pattern."
        )
    return found


def in_turn(again: Sequence[Node], nodes: Sequence[Node], read: Callable[[Node], Iterable[Node]]) -> list[Node]:
    """Nodes in their order, with those of `again` that each needs right before it."""
    left, found = set(again), list[Node]()

    def provide(node: Node) -> None:
        waiting = [(node, False)]
        while waiting:
            here, is_ready = waiting.pop()
            if is_ready:
                found.append(here)
            elif here in left:
                left.discard(here)
                waiting.append((here, True))
                waiting += [(x, False) for x in read(here)]

    for node in nodes:
        for needed in read(node):
            provide(needed)
        found.append(node)
    for node in again:
        provide(node)
    return found


def gathers(
    nodes: Sequence[Node], unit_of: Mapping[Node, str], prefetch: int, read: Callable[[Node], Iterable[Node]]
) -> dict[Node, list[Node]]:
    """By node the parameters that are gathered before it, unit by unit.

    unit_of: by parameter its unit.
    """
    first: dict[str, Node] = {}
    wanted: dict[str, dict[Node, None]] = {}
    for node in nodes:
        for parameter in (x for x in read(node) if x in unit_of):
            first.setdefault(unit_of[parameter], node)
            wanted.setdefault(unit_of[parameter], {})[parameter] = None
    starts = [nodes[0], *first.values()][1:] if nodes else []
    found: dict[Node, list[Node]] = {}
    for place, unit in enumerate(first):
        found.setdefault(starts[max(place - prefetch, 0)], []).extend(wanted[unit])
    return found


def units_last(nodes: Sequence[Node], ends: Mapping[Node, str]) -> list[Node]:
    """Nodes with the views that gradients end in moved behind the last gradient of their unit.

    A sum over ranks is due where it is first read: those of a unit then stand side by side, and are one call.

    ends: by gradient its parameter's unit.
    """
    chains: dict[str, list[Node]] = {}
    last: dict[str, Node] = {}
    there = {node: place for place, node in enumerate(nodes)}
    for end, unit in ends.items():
        *views, base = _views_above(end, there)
        chains.setdefault(unit, []).extend(reversed(views))
        if base in there and there[base] >= there[last.setdefault(unit, base)]:
            last[unit] = base
    moved = {node for unit, chain in chains.items() if unit in last for node in chain}
    behind: dict[Node, list[Node]] = {}
    for unit, base in last.items():
        behind.setdefault(base, []).extend(chains[unit])
    return [x for node in nodes if node not in moved for x in (node, *behind.get(node, ()))]


def _views_above(end: Node, there: Mapping[Node, int]) -> list[Node]:
    """A node and what it is a view of, up to what is no view or has other readers."""
    found = [end]
    while is_view(found[-1]) and sum(user in there for user in found[-1].users) <= (len(found) > 1):
        if found[-1].all_input_nodes[0] not in there:
            break
        found.append(found[-1].all_input_nodes[0])
    return found


def without_axes(spec: Any, axes: Sequence[str]) -> tuple[Any, ...]:
    """A spec without these axes: how a parameter lies once it is gathered."""
    return tuple(_entry_without(entry, axes) for entry in spec)


def _entry_without(entry: Any, axes: Sequence[str]) -> Any:
    if isinstance(entry, (list, tuple)) and not isinstance(entry, Split):
        return [part for part in entry if not isinstance(part, str) or part not in axes] or None
    return None if isinstance(entry, str) and entry in axes else entry
