"""Patterns of full names, and the layers of a model by name."""

from __future__ import annotations

from torch import nn

from ..definition.name_patterns import matches, matching, nearest

__all__ = ["longest_list", "matches", "matching", "nearest"]


def longest_list(module: nn.Module) -> list[str]:
    """The full names of the layers of the longest nn.ModuleList or nn.Sequential; none where there is no list.

    What layers of a stack are made of, such as the three modules of a feed-forward net, is no list of layers.
    """
    lists = {n: part for n, part in module.named_modules() if isinstance(part, (nn.ModuleList, nn.Sequential))}
    stacks = [f"{name}." if name else "" for name, part in lists.items() if _is_stack(part)]
    outer = {name: part for name, part in lists.items() if not any(name and name.startswith(s) for s in stacks)}
    name, layers = max(outer.items(), key=lambda found: len(found[1]), default=("", nn.ModuleList()))
    return [f"{name}.{child}" if name else child for child, _ in layers.named_children()]


def _is_stack(part: nn.Module) -> bool:
    """Whether two modules of a list are of one class that has modules of its own."""
    classes = [type(child) for child in part.children() if next(child.children(), None) is not None]
    return len(set(classes)) < len(classes)
