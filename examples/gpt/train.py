"""Train the example's model: ``python examples/gpt/train.py`` writes weights.safetensors and eval.txt."""

from __future__ import annotations

import argparse
import math
import os
import time
from pathlib import Path

# Threads that spin while they wait make training several times slower on a shared machine.
# OpenMP reads this when torch is loaded.
os.environ.setdefault("OMP_WAIT_POLICY", "passive")

import data
import model
import torch
from torch import Tensor

SEED = 1611
BATCH = 16
PEAK_RATE = 2e-3
WARMUP_STEPS = 100
WEIGHT_DECAY = 0.1
GRADIENT_LIMIT = 1.0
REPORT_STEPS = 100
PROBE_WINDOWS = 128
WEIGHTS_PATH = data.HERE / "weights.safetensors"


def main() -> None:
    """Fetch the text, train, store the quantised weights and evaluate what was stored."""
    options = parse_options()
    torch.set_num_threads(options.threads)
    training_text, eval_text = data.fetch_text()
    data.EVAL_PATH.write_bytes(eval_text)
    print(f"{len(training_text):,} bytes to train on, {len(eval_text):,} held out")
    params = train(data.to_tokens(training_text), options.steps)
    report_loss("before rounding to int8", params)
    model.save_params(params, options.output)
    stored = model.load_params(options.output)
    report_loss(f"stored in {options.output.name} ({options.output.stat().st_size:,} bytes)", stored)
    print(model.generate(stored, b"And it came to pass", 300, temperature=0.7, seed=SEED).decode("latin-1"))


def parse_options() -> argparse.Namespace:
    """The command line; the defaults make the shipped weights."""
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--steps", type=int, default=3600)
    parser.add_argument("--threads", type=int, default=2)
    parser.add_argument("--output", type=Path, default=WEIGHTS_PATH)
    return parser.parse_args()


def train(text: Tensor, steps: int) -> model.Params:
    """Parameters after ``steps`` of AdamW on random windows of ``text`` ``[bytes]``."""
    params = {name: value.requires_grad_() for name, value in model.init_params(SEED).items()}
    optimizer = make_optimizer(params)
    generator = torch.Generator().manual_seed(SEED)
    tokens, targets = data.eval_windows(model.GPT.block)
    started = time.perf_counter()
    smooth = math.log(model.GPT.vocab)
    for step in range(1, steps + 1):
        set_rate(optimizer, learning_rate(step, steps))
        smooth += 0.05 * (train_step(params, optimizer, *sample_batch(text, generator)) - smooth)
        if step % REPORT_STEPS == 0 or step == steps:
            probe = model.evaluate(params, tokens[:PROBE_WINDOWS], targets[:PROBE_WINDOWS])
            report_step(step, steps, smooth, probe, time.perf_counter() - started)
    return {name: value.detach() for name, value in params.items()}


def report_step(step: int, steps: int, train_loss: float, held_out_loss: float, seconds: float) -> None:
    """One progress line; losses in nats per byte."""
    left = seconds / step * (steps - step)
    print(
        f"step {step:5d}/{steps}  train {train_loss:.3f}  held out {held_out_loss:.3f} nats/byte  "
        f"{seconds:4.0f} s, {left:4.0f} s left",
        flush=True,
    )


def make_optimizer(params: model.Params) -> torch.optim.AdamW:
    """AdamW that decays matrices only."""
    matrices = [value for value in params.values() if value.ndim == 2]
    vectors = [value for value in params.values() if value.ndim == 1]
    groups = [{"params": matrices, "weight_decay": WEIGHT_DECAY}, {"params": vectors, "weight_decay": 0.0}]
    return torch.optim.AdamW(groups, betas=(0.9, 0.98), fused=True)


def learning_rate(step: int, steps: int) -> float:
    """Linear warm-up to ``PEAK_RATE``, then half a cosine down to zero at the last step."""
    if step <= WARMUP_STEPS:
        return PEAK_RATE * step / WARMUP_STEPS
    progress = (step - WARMUP_STEPS) / max(1, steps - WARMUP_STEPS)
    return PEAK_RATE * 0.5 * (1 + math.cos(math.pi * progress))


def set_rate(optimizer: torch.optim.Optimizer, rate: float) -> None:
    """Use ``rate`` in every parameter group from the next update on."""
    for group in optimizer.param_groups:
        group["lr"] = rate


def sample_batch(text: Tensor, generator: torch.Generator) -> tuple[Tensor, Tensor]:
    """``(tokens, targets)`` of ``BATCH`` windows at random offsets, both ``[BATCH, block]``."""
    block = model.GPT.block
    starts = torch.randint(len(text) - block, (BATCH, 1), generator=generator)
    offsets = starts + torch.arange(block)
    return text[offsets], text[offsets + 1]


def train_step(params: model.Params, optimizer: torch.optim.Optimizer, tokens: Tensor, targets: Tensor) -> float:
    """One update; matrix products run in bfloat16, weights and updates stay in float32."""
    with torch.autocast("cpu", torch.bfloat16):
        value = model.loss(params, tokens, targets)
    optimizer.zero_grad()
    value.backward()
    torch.nn.utils.clip_grad_norm_(params.values(), GRADIENT_LIMIT)
    optimizer.step()
    return value.item()


def report_loss(what: str, params: model.Params) -> None:
    """Print the loss on the whole held-out text, in float32."""
    nats = model.evaluate(params, *data.eval_windows(model.GPT.block))
    print(f"held-out loss, {what}: {nats:.4f} nats/byte, {nats / math.log(2):.4f} bits/byte", flush=True)


if __name__ == "__main__":
    main()
