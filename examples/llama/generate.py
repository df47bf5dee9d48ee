"""Generate with the small Llama and a static cache of keys and values: `generate.py --mesh tp=2 "The mesh"`."""

from __future__ import annotations

import argparse
import sys
import time
from pathlib import Path
from typing import Any

import torch
from transformers import StaticCache

sys.path.insert(0, str(Path(__file__).parent))

from model import CONFIG, WEIGHTS, mesh_of, parallel_llama

import meshfuse as mf


def generated(model: Any, prompt: str, count: int) -> tuple[bytes, float]:
    """The bytes after a prompt, the likeliest each time; and the seconds of a token, but for the first two."""
    cache = StaticCache(config=CONFIG, max_cache_len=256)
    found: list[int] = []
    ids, start = torch.tensor([list(prompt.encode())]), 0.0
    with torch.no_grad():
        for place in range(count):
            start = time.perf_counter() if place == 2 else start
            logits = model(input_ids=ids, past_key_values=cache, use_cache=True).logits
            ids = logits[:, -1].argmax(-1, keepdim=True)
            found.append(int(ids))
    return bytes(found), (time.perf_counter() - start) / max(count - 2, 1)


def main() -> None:
    words = argparse.ArgumentParser()
    words.add_argument("prompt", nargs="?", default="The mesh")
    words.add_argument("--mesh", default="tp=2")
    words.add_argument("--count", type=int, default=40)
    args = words.parse_args()
    model = parallel_llama(mesh_of(args.mesh))
    model.load(WEIGHTS)
    model.eval()
    found, seconds = generated(model, args.prompt, args.count)
    if mf.World.current().rank == 0:
        print(f"{args.prompt}{found.decode(errors='replace')}\n{1000 * seconds:.1f} ms a token on {args.mesh}")


if __name__ == "__main__":
    main()
