"""Boxes of local tensors, and the Python that takes them."""

from __future__ import annotations

import itertools
from collections.abc import Sequence

from ..sharding.layout import Runs

# Per dim the positions within a local tensor.
Box = tuple[Runs, ...]


def whole_box(shape: Sequence[int]) -> Box:
    """All of a tensor of this shape."""
    return tuple(((0, n),) for n in shape)


def box_text(box: Box, shape: Sequence[int], assign: bool = False) -> str:
    """Python index text of a box; nothing where it is the whole tensor."""
    parts = [_part_text(part, n) for part, n in zip(box, shape, strict=True)]
    lists = sum(part.startswith("K.") for part in parts)
    if not lists:
        while parts and parts[-1] == ":":
            parts.pop()
        return f"[{', '.join(parts)}]" if parts else "[...]" if assign else ""
    return f"[K.grid({', '.join(f'K.positions({part!r})' for part in box)})]"


def _part_text(part: Runs, n: int) -> str:
    if part == ((0, n),):
        return ":"
    if len(part) == 1:
        return f"{part[0][0]}:{part[0][1]}"
    if not part:
        return "0:0"
    step = _stride(part)
    return step if step else f"K.positions({part!r})"


def _stride(part: Runs) -> str:
    """Slice text where the runs are single steps at equal distances."""
    if any(b - a != 1 for a, b in part):
        return ""
    step = part[1][0] - part[0][0]
    if any(b[0] - a[0] != step for a, b in itertools.pairwise(part)):
        return ""
    return f"{part[0][0]}:{part[-1][1]}:{step}"
