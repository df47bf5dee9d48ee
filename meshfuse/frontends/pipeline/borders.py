"""What stages of a pipeline hand to each other."""

from __future__ import annotations

from dataclasses import dataclass

import torch


@dataclass(frozen=True, slots=True)
class Crossing:
    """A tensor that one stage makes and others read.

    place: its number among all arguments, behind those of the call.
    name: what bills call it.
    back: whether it is of the backward, and goes to stages before.
    """

    place: int
    name: str
    shape: tuple[int, ...]
    dtype: torch.dtype
    source: int
    targets: tuple[int, ...]
    back: bool


@dataclass(frozen=True, slots=True)
class Borders:
    """What crosses a stage's borders.

    received, sent: what it takes from others and gives to them. Of the forward, `sent[i]` is result i; behind these
        comes the loss on the last stage.
    """

    received: tuple[Crossing, ...]
    sent: tuple[Crossing, ...]

    def taken(self, back: bool) -> list[Crossing]:
        """What the forward, or the backward, has to have received."""
        return [crossing for crossing in self.received if crossing.back is back]

    def given(self, back: bool) -> list[Crossing]:
        """What the forward, or the backward, sends."""
        return [crossing for crossing in self.sent if crossing.back is back]
