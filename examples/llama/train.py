"""Train the small Llama: `train.py --mesh dp=2,tp=2`, under no launcher, `meshfuse run --ranks 4` or torchrun."""

from __future__ import annotations

import argparse
import sys
import time
from pathlib import Path

import torch
from safetensors.torch import save_file  # pyright: ignore[reportUnknownVariableType]

sys.path.insert(0, str(Path(__file__).parent))

from model import WEIGHTS, batch_of, mesh_of, parallel_llama, rows_of_this_rank, text

import meshfuse as mf


def main() -> None:
    words = argparse.ArgumentParser()
    words.add_argument("--mesh", default="dp=2,tp=2")
    words.add_argument("--fsdp", action="store_true", help="cut weights over dp as well")
    words.add_argument("--steps", type=int, default=20)
    words.add_argument("--batch", type=int, default=8)
    words.add_argument("--fresh", action="store_true", help="begin with new weights, not with model.safetensors")
    words.add_argument("--checkpoint", type=Path, help="a folder to save to, and to resume from on any mesh")
    words.add_argument("--export", type=Path, help="a safetensors file to write at the end")
    args = words.parse_args()
    torch.manual_seed(0)
    mesh = mesh_of(args.mesh)
    model = parallel_llama(mesh, args.fsdp)
    model.init_weights(0) if args.fresh else model.load(WEIGHTS)
    optimizer = torch.optim.AdamW(model.parameters(), lr=2e-3, foreach=True)
    first = resume(args.checkpoint, model) if args.checkpoint else 0
    data = text()
    for step in range(first, first + args.steps):
        rows, start = rows_of_this_rank(batch_of(data, step, args.batch), mesh), time.perf_counter()
        loss = model(input_ids=rows, labels=rows).loss
        loss.backward()
        torch.nn.utils.clip_grad_norm_(model.parameters(), 1.0)
        optimizer.step()
        optimizer.zero_grad()
        if step % 10 == 0 or step == first + args.steps - 1:
            say(f"step {step}: loss {loss.item():.4f}, {1000 * (time.perf_counter() - start):.0f} ms")
    if args.checkpoint:
        mf.save(args.checkpoint, {**model.state_dict(), "step": first + args.steps})
    if args.export:
        export(args.export, model)
    say(str(model.bill()).splitlines()[-1])


def resume(folder: Path, model: torch.nn.Module) -> int:
    """Load a checkpoint, if there is one, into the model; returns the step to go on with."""
    if not folder.exists():
        return 0
    found = mf.load(folder, {**model.state_dict(), "step": None})
    model.load_state_dict({name: value for name, value in found.items() if name != "step"})
    say(f"resumed at step {found['step']}")
    return int(found["step"])


def export(path: Path, model: torch.nn.Module) -> None:
    """Write all weights whole, by the first rank."""
    whole = {name: t.full_tensor() if hasattr(t, "full_tensor") else t for name, t in model.state_dict().items()}
    if mf.World.current().rank == 0:
        save_file({name: t.detach().contiguous() for name, t in whole.items()}, str(path), {"format": "pt"})


def say(line: str) -> None:
    if mf.World.current().rank == 0:
        print(line, flush=True)


if __name__ == "__main__":
    main()
