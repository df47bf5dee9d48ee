"""A decode step of a small GPT on two ranks, through a session and under `meshfuse run`: the same model.

    python benchmarks/session/decode.py [--count N]

Each token is read before the next step, as a script that generates does. The cache of keys and values stays in place.
"""

from __future__ import annotations

import argparse
import json
import os
import subprocess
import sys
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

import torch
from torch import nn

import meshfuse as mf
import meshfuse.session as di

LAYERS, WIDTH, HEADS, LENGTH, WORDS, BATCH = 4, 512, 8, 128, 2048, 4
CACHE = (BATCH, LAYERS, HEADS, LENGTH, WIDTH // HEADS)
# Each rank has rows of the batch: results that are cut by their first dim stay where they are.
INPUTS = {"token": ["dp", None], "keys": ["dp", *[None] * 4], "values": ["dp", *[None] * 4]}
RANKS = 2


class Layer(nn.Module):
    """Attention to a cache, and an MLP."""

    def __init__(self) -> None:
        super().__init__()
        self.q, self.k, self.v, self.o = (nn.Linear(WIDTH, WIDTH, bias=False) for _ in range(4))
        self.up, self.down = nn.Linear(WIDTH, 4 * WIDTH), nn.Linear(4 * WIDTH, WIDTH)
        self.norms = nn.ModuleList([nn.LayerNorm(WIDTH) for _ in range(2)])

    def forward(
        self, x: torch.Tensor, keys: torch.Tensor, values: torch.Tensor, here: torch.Tensor, seen: torch.Tensor
    ) -> tuple[torch.Tensor, torch.Tensor, torch.Tensor]:  # fmt: skip
        y = self.norms[0](x)
        q, k, v = (f(y).view(x.shape[0], 1, HEADS, -1).transpose(1, 2) for f in (self.q, self.k, self.v))
        keys, values = torch.where(here, k, keys), torch.where(here, v, values)
        scores = (q @ keys.transpose(-1, -2)) * (WIDTH // HEADS) ** -0.5 + seen
        y = (scores.softmax(-1) @ values).transpose(1, 2).reshape(x.shape)
        x = x + self.o(y)
        return x + self.down(torch.nn.functional.gelu(self.up(self.norms[1](x)))), keys, values


class Decoder(nn.Module):
    """A GPT that takes one token and the cache, and gives the likeliest next one and the cache."""

    def __init__(self) -> None:
        super().__init__()
        self.words = nn.Embedding(WORDS, WIDTH)
        self.layers = nn.ModuleList([Layer() for _ in range(LAYERS)])
        self.out = nn.Linear(WIDTH, WORDS, bias=False)

    def forward(self, token: torch.Tensor, place: torch.Tensor, keys: torch.Tensor, values: torch.Tensor):
        places = torch.arange(LENGTH, device=token.device)
        here = (places == place).view(1, 1, LENGTH, 1)
        seen = torch.where(places <= place, 0.0, float("-inf")).view(1, 1, 1, LENGTH)
        x, kept = self.words(token), []
        for layer, k, v in zip(self.layers, keys.unbind(1), values.unbind(1), strict=True):
            x, *both = layer(x, k, v, here, seen)
            kept.append(both)
        keys, values = (torch.stack(list(parts), 1) for parts in zip(*kept, strict=True))
        return self.out(x).argmax(-1), keys, values


def mesh() -> mf.DeviceMesh:
    """All ranks."""
    return mf.DeviceMesh((RANKS,), ("dp",))


def median_step(step: Callable[..., Any], read: Callable[[Any], int], rows: int, count: int) -> float:
    """The median time of a step, in microseconds, once segments are compiled. rows: those that are passed first."""
    token: Any = torch.zeros(rows, 1, dtype=torch.long)
    keys, values = (torch.zeros(rows, *CACHE[1:]) for _ in range(2))
    times = []
    for place in range(count + 40):
        start = time.perf_counter()
        token, keys, values = step(token, torch.tensor([place % LENGTH]), keys, values)
        read(token)
        times.append((time.perf_counter() - start) * 1e6)
    return sorted(times[40:])[count // 2]


def of_ranks(count: int) -> float | None:
    """Under `meshfuse run`; None on ranks other than the first."""
    torch.manual_seed(0)
    model = mf.parallelize(Decoder(), mesh(), {}, inputs=INPUTS)
    with torch.no_grad():
        found = median_step(model, lambda token: int(token[0]), BATCH // RANKS, count)
    return found if mf.World.current().rank == 0 else None


def of_session(count: int) -> float:
    """Through a session."""
    with di.ProcessSession(RANKS, timeout=300) as session, torch.no_grad():
        model = session.load_module("decode:Decoder", mesh(), {}, inputs=INPUTS, seed=0)
        return median_step(model, lambda token: int(token[0][0]), BATCH, count)


def measured(kind: str, count: int) -> float:
    """One of the two in processes of its own."""
    here = Path(__file__).resolve()
    command = [sys.executable, "-m", "meshfuse", "run", "--ranks", str(RANKS)] if kind == "ranks" else [sys.executable]
    path = os.pathsep.join([str(here.parents[2]), str(here.parent), os.environ.get("PYTHONPATH", "")])
    # One thread for each rank, as `meshfuse run` has it on this machine's cores.
    env = {**os.environ, "PYTHONPATH": path, "OMP_NUM_THREADS": "1"}
    words = [*command, str(here), "--kind", kind, "--count", str(count)]
    done = subprocess.run(words, env=env, stdout=subprocess.PIPE, text=True, check=True)
    return json.loads(done.stdout.splitlines()[-1].rpartition("] ")[2])


def main() -> None:
    """Print the median of one kind, or of both with their ratio."""
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--count", type=int, default=100)
    parser.add_argument("--kind", choices=["session", "ranks"])
    args = parser.parse_args()
    if args.kind is None:
        session, ranks = (measured(kind, args.count) for kind in ("session", "ranks"))
        print(f"session {session:.0f} us, meshfuse run {ranks:.0f} us, ratio {session / ranks:.3f}")
        return
    found = (of_session if args.kind == "session" else of_ranks)(args.count)
    if found is not None:
        print(json.dumps(found), flush=True)


if __name__ == "__main__":
    main()
