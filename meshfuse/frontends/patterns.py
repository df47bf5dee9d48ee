"""Patterns of full names, and the layers of a model by name."""

from __future__ import annotations

from torch import nn

from ..definition.name_patterns import matches, matching, nearest

__all__ = ["longest_list", "matches", "matching", "nearest"]


def longest_list(module: nn.Module) -> list[str]:
    """The full names of the layers of the longest nn.ModuleList or nn.Sequential; none where there is no list."""
    lists = [(name, part) for name, part in module.named_modules() if isinstance(part, (nn.ModuleList, nn.Sequential))]
    name, layers = max(lists, key=lambda found: len(found[1]), default=("", nn.ModuleList()))
    return [f"{name}.{child}" if name else child for child, _ in layers.named_children()]
