"""Train the example's model on a mesh: ``python examples/gpt/train_mesh.py --mesh dp=2,tp=2``.

The forward pass is ``fused.py``'s definition, the backward is appended to it by ``fd.grad``; parameters and their
gradients are annotated alike.  The ranks are simulated in this process, or real ones where a launcher started
several.  The losses are those of one rank, whatever the mesh.
"""

from __future__ import annotations

import argparse
import math
from dataclasses import dataclass

import data
import fused
import model
import torch
import train
from torch import Tensor

import meshfuse as mf

BATCH = 8


@dataclass(slots=True)
class TrainingProgram:
    """A definition whose outputs are the mean loss [], the logits and the gradient of every weight, by name."""

    fd: mf.FusionDefinition
    names: tuple[str, ...]

    def loss_and_gradients(self, params: model.Params, tokens: Tensor, targets: Tensor) -> tuple[Tensor, model.Params]:
        """Of one batch, ``tokens`` and ``targets`` both [B, T]; tensors in and out are global."""
        with torch.no_grad():
            loss, _, *grads = self.fd(tokens, targets, *(params[name] for name in self.names))
        return loss, dict(zip(self.names, grads, strict=True))


def define(config: model.Config, mesh: mf.DeviceMesh) -> TrainingProgram:
    """The model, its loss and the loss's gradients by all weights, sharded like the weights."""
    gpt = fused.define(config)
    loss, _ = gpt.fd.fusion.outputs()
    grads = dict(zip(gpt.weights, gpt.fd.grad(loss, list(gpt.weights.values())), strict=True))
    for grad in grads.values():
        gpt.fd.add_output(grad)
    fused.annotate(gpt, mesh, config)
    fused.annotate(fused.FusedGPT(gpt.fd, gpt.tokens, gpt.targets, grads), mesh, config)
    return TrainingProgram(gpt.fd, tuple(grads))


def sample_batch(text: Tensor, block: int, generator: torch.Generator) -> tuple[Tensor, Tensor]:
    """``(tokens, targets)`` of ``BATCH`` windows at random offsets, both ``[BATCH, block]``."""
    offsets = torch.randint(len(text) - block, (BATCH, 1), generator=generator) + torch.arange(block)
    return text[offsets], text[offsets + 1]


def run(text: Tensor, steps: int, mesh: mf.DeviceMesh, config: model.Config = model.GPT) -> list[float]:
    """The loss (nats per token) of every step of AdamW from fresh parameters, in float32."""
    params = {name: value.requires_grad_() for name, value in model.init_params(train.SEED, config).items()}
    program, optimizer = define(config, mesh), train.make_optimizer(params)
    generator = torch.Generator().manual_seed(train.SEED)
    losses = []
    for step in range(1, steps + 1):
        train.set_rate(optimizer, train.learning_rate(step, steps))
        loss, grads = program.loss_and_gradients(params, *sample_batch(text, config.block, generator))
        for name, value in params.items():
            value.grad = grads[name]
        torch.nn.utils.clip_grad_norm_(params.values(), train.GRADIENT_LIMIT)
        optimizer.step()
        losses.append(loss.item())
    return losses


def parse_mesh(text: str) -> mf.DeviceMesh:
    """``dp=2,tp=2``: sizes of the axes dp (batch), tp (weights) and sp (positions)."""
    axes = [entry.partition("=")[::2] for entry in text.split(",")]
    if not all(name in ("dp", "tp", "sp") and size.isdigit() for name, size in axes):
        raise SystemExit(f"--mesh: found {text!r}, needed axes of dp, tp and sp with their sizes. Write dp=2,tp=2.")
    return mf.DeviceMesh(tuple(int(size) for _, size in axes), tuple(name for name, _ in axes))


def main() -> None:
    """Train on the shipped held-out text, which needs no download, and print the losses."""
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--mesh", type=parse_mesh, default=parse_mesh("tp=1"))
    parser.add_argument("--steps", type=int, default=50)
    options = parser.parse_args()
    text = data.to_tokens(data.EVAL_PATH.read_bytes())
    for step, loss in enumerate(run(text, options.steps, options.mesh), 1):
        print(f"step {step:4d}  {loss:.6f} nats/byte, {loss / math.log(2):.4f} bits/byte", flush=True)


if __name__ == "__main__":
    main()
