"""A Wide-ResNet with many classes, planned for two hosts of two workers: `python examples/auto/wide_resnet.py`.

Its convolutions are cheap in weights and its classifier is not: rows are cut for the ones, classes for the other.
"""

from __future__ import annotations

import torch
from common import plan_and_train, words
from torch import nn


class Block(nn.Module):
    """Two convolutions beside a short cut (Zagoruyko and Komodakis 2016)."""

    def __init__(self, width: int, out: int, stride: int) -> None:
        super().__init__()
        self.first = nn.Conv2d(width, out, 3, stride, 1, bias=False)
        self.second = nn.Conv2d(out, out, 3, 1, 1, bias=False)
        self.norms = nn.ModuleList([nn.GroupNorm(4, width), nn.GroupNorm(4, out)])
        self.shortcut = nn.Conv2d(width, out, 1, stride, bias=False)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        hidden = self.first(torch.relu(self.norms[0](x)))
        return self.second(torch.relu(self.norms[1](hidden))) + self.shortcut(x)


class WideResNet(nn.Module):
    def __init__(self, width: int, classes: int) -> None:
        super().__init__()
        self.stem = nn.Conv2d(3, 16, 3, 1, 1, bias=False)
        self.blocks = nn.Sequential(Block(16, 16 * width, 1), Block(16 * width, 32 * width, 2))
        self.head = nn.Linear(32 * width, classes)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return self.head(self.blocks(self.stem(x)).mean((2, 3)))


def main() -> None:
    draw = torch.Generator().manual_seed(0)
    images, classes = torch.randn(32, 3, 16, 16, generator=draw), torch.randint(0, 20_000, (32,), generator=draw)
    plan_and_train(
        lambda: WideResNet(2, 20_000), {"x": images, "target": classes}, words(), nn.functional.cross_entropy
    )


if __name__ == "__main__":
    main()
