"""Which parameters of a model are gathered together where they are fully sharded (`rewrites.gather_units`)."""

from __future__ import annotations

from collections import Counter
from collections.abc import Collection, Mapping, Sequence
from typing import Any

import torch

from ..definition.fsdp import FSDP
from ..errors import user_error
from ..sharding.layout import Split
from .patterns import longest_list, matching


def units_of(module: torch.nn.Module, fsdp: FSDP) -> dict[str, str]:
    """By parameter its unit: the outermost module that a pattern fits, or else the module that it belongs to, with
    neighbours of its kind, such as a norm and a head, as long as they are together no larger than the largest unit.

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
    sizes = Counter[str]()
    for name, parameter in module.named_parameters():
        sizes[found[name]] += parameter.numel()
    joined = _joined(sizes, {*chosen})
    return {name: joined[unit] for name, unit in found.items()}


def _joined(sizes: Mapping[str, int], chosen: Collection[str]) -> dict[str, str]:
    """By unit the one that it goes with. Units are in order, and those that patterns fit stay as they are."""
    largest, found = max(sizes.values(), default=0), dict[str, str]()
    head, size = "", 0
    for unit, more in sizes.items():
        if unit in chosen or not head or size + more > largest:
            head, size = unit, 0
        found[unit], size = head, size + more
        head = "" if unit in chosen else head
    return found


def _fitting(pattern: str, names: Sequence[str]) -> list[str]:
    found = matching(pattern, names)
    if not found:
        raise user_error(
            "FSDP: units", repr(pattern), "patterns of modules, such as 'layers.*'", "Correct the pattern."
        )
    return found


def without_axes(spec: Any, axes: Sequence[str]) -> tuple[Any, ...]:
    """A spec without these axes: how a parameter lies once it is gathered."""
    return tuple(_entry_without(entry, axes) for entry in spec)


def _entry_without(entry: Any, axes: Sequence[str]) -> Any:
    if isinstance(entry, (list, tuple)) and not isinstance(entry, Split):
        return [part for part in entry if not isinstance(part, str) or part not in axes] or None
    return None if isinstance(entry, str) and entry in axes else entry
