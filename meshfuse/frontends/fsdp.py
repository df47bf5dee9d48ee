"""Which parameters of a model are gathered together where they are fully sharded (`rewrites.gather_units`)."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import torch

from ..definition.fsdp import FSDP
from ..errors import user_error
from ..sharding.layout import Split
from .patterns import longest_list, matching


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


def without_axes(spec: Any, axes: Sequence[str]) -> tuple[Any, ...]:
    """A spec without these axes: how a parameter lies once it is gathered."""
    return tuple(_entry_without(entry, axes) for entry in spec)


def _entry_without(entry: Any, axes: Sequence[str]) -> Any:
    if isinstance(entry, (list, tuple)) and not isinstance(entry, Split):
        return [part for part in entry if not isinstance(part, str) or part not in axes] or None
    return None if isinstance(entry, str) and entry in axes else entry
