"""Patterns of full names, as plans have them: `layers.*.self_attn.q_proj`."""

from __future__ import annotations

import difflib
import functools
import re
from collections.abc import Collection, Iterable

from torch import nn


@functools.cache
def _compiled(pattern: str) -> re.Pattern[str]:
    """A `*` at either end stands for anything, one between two dots for one part of a name."""
    parts = pattern.split(".")
    text = [r"[^.]+" if part == "*" else ".*".join(map(re.escape, part.split("*"))) for part in parts]
    if parts[0] == "*" and len(parts) > 1:
        text[0] = ".*"
    if parts[-1] == "*":
        text[-1] = ".*"
    return re.compile(r"\.".join(text))


def matches(pattern: str, name: str) -> bool:
    """Whether a pattern fits a full name, or the end of one that begins with a part of it."""
    compiled = _compiled(pattern)
    ends = [0, *(place.end() for place in re.finditer(r"\.", name))]
    return any(compiled.fullmatch(name, start) for start in ends)


def matching(pattern: str, names: Iterable[str]) -> list[str]:
    """The names that a pattern fits."""
    return [name for name in names if matches(pattern, name)]


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


def nearest(pattern: str, names: Collection[str]) -> list[str]:
    """Up to four names like the pattern, with `*` in the place of numbers."""
    found = dict.fromkeys(re.sub(r"(?<=\.)\d+(?=\.|$)", "*", name) for name in names)
    last = pattern.rpartition(".")[2]
    close = difflib.get_close_matches(pattern, found, 3, 0.4)
    by_last = {name.rpartition(".")[2]: name for name in found}
    return list(dict.fromkeys([*close, *(by_last[n] for n in difflib.get_close_matches(last, by_last, 2, 0.5))]))[:4]
