"""A training step of a Llama layer under Thunder, by meshfuse's executor beside Thunder's own for torch.

$(python3 tools/env.py nvfuser) benchmarks/models/thunder_step.py [width ...]      default: 128 256 512

Both jitted modules take turns in one process, forward and backward of the same layer. Printed are medians and least
times in milliseconds, and their ratios: what the executor adds to a step.
"""

# pyright: reportMissingImports=false, reportAttributeAccessIssue=false

from __future__ import annotations

import os
import statistics
import sys
import time
from typing import Any

os.environ.setdefault("OMP_NUM_THREADS", "1")

import torch
import torch.nn.functional as F
from torch import nn

import meshfuse as mf
import meshfuse.thunder
import thunder

HEADS, SHARED, ROWS, LENGTH, ROUNDS = 8, 4, 2, 128, 60


class Layer(nn.Module):
    """RMS norms, rotary positions, fewer keys than queries, SwiGLU."""

    cos: torch.Tensor
    sin: torch.Tensor

    def __init__(self, width: int) -> None:
        super().__init__()
        narrow, wide = width * SHARED // HEADS, width * 11 // 4
        self.norm1, self.norm2 = (nn.Parameter(torch.ones(width)) for _ in range(2))
        self.q, self.k, self.v = (nn.Linear(width, n, bias=False) for n in (width, narrow, narrow))
        self.o = nn.Linear(width, width, bias=False)
        self.gate, self.up = (nn.Linear(width, wide, bias=False) for _ in range(2))
        self.down = nn.Linear(wide, width, bias=False)
        half = width // HEADS // 2
        angles = torch.outer(torch.arange(float(LENGTH)), 1e4 ** (-torch.arange(half) / half)).repeat(1, 2)
        self.register_buffer("cos", angles.cos())
        self.register_buffer("sin", angles.sin())

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        y = F.rms_norm(x, x.shape[-1:], self.norm1)
        q, k, v = (part.unflatten(-1, (n, -1)).transpose(1, 2)
                   for part, n in ((self.q(y), HEADS), (self.k(y), SHARED), (self.v(y), SHARED)))  # fmt: skip
        q, k, v = self.turned(q), self.wide(self.turned(k)), self.wide(v)
        x = x + self.o(F.scaled_dot_product_attention(q, k, v, is_causal=True).transpose(1, 2).flatten(2))
        y = F.rms_norm(x, x.shape[-1:], self.norm2)
        return x + self.down(F.silu(self.gate(y)) * self.up(y))

    def wide(self, x: torch.Tensor) -> torch.Tensor:
        return x.repeat_interleave(HEADS // SHARED, 1)

    def turned(self, x: torch.Tensor) -> torch.Tensor:
        a, b = x.chunk(2, -1)
        return x * self.cos + torch.cat((-b, a), -1) * self.sin


def step(module: Any, x: torch.Tensor) -> float:
    """Seconds of a forward and a backward."""
    begin = time.perf_counter()
    module(x).square().mean().backward()
    return time.perf_counter() - begin


def measured(width: int) -> None:
    torch.manual_seed(0)
    x, layer = torch.randn(ROWS, LENGTH, width), Layer(width)
    theirs = thunder.jit(layer, executors=thunder.get_default_executors())
    ours = thunder.jit(layer, executors=[mf.thunder.executor(), *thunder.get_default_executors()])
    for _ in range(10):
        step(ours, x)
        step(theirs, x)
    times = [(step(ours, x), step(theirs, x)) for _ in range(ROUNDS)]
    cells = [f"{kind([t[i] for t in times]) * 1e3:9.2f}" for kind in (statistics.median, min) for i in (0, 1)]
    ratios = [kind([t[0] for t in times]) / kind([t[1] for t in times]) for kind in (statistics.median, min)]
    print(f"{width:6}{''.join(cells)}{ratios[0]:9.2f}{ratios[1]:7.2f}", flush=True)


def main() -> None:
    torch.set_num_threads(1)
    print(" width  ours ms   theirs ours min      min   median    min")
    for width in map(int, sys.argv[1:] or (128, 256, 512)):
        measured(width)


if __name__ == "__main__":
    main()
