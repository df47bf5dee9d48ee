"""What the leaves of a call's arguments are called, on the ranks that run it and in the process that asks for it."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any

from torch.utils import _pytree as pytree


def names_of_leaves(parameters: Sequence[str], args: Sequence[Any], kwargs: Mapping[str, Any]) -> list[str]:
    """What each leaf of a call's arguments is called: the argument's name, and the path in it."""
    paths, _ = pytree.tree_flatten_with_path((tuple(args), dict(kwargs)))
    return [_name(parameters, path) for path, _ in paths]


def _name(parameters: Sequence[str], path: Sequence[Any]) -> str:
    side, first, *rest = path
    keys = [str(getattr(key, "idx", getattr(key, "key", key))) for key in rest]
    if side.idx == 0:
        head = str(parameters[first.idx]) if first.idx < len(parameters) else f"argument {first.idx}"
    else:
        head = str(first.key)
    return ".".join([head, *keys])
