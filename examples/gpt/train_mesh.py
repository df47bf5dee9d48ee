"""Train the example's model on a mesh: ``python examples/gpt/train_mesh.py --mesh dp=2,tp=2``.

The forward pass is ``fused.py``'s definition, the backward is appended to it by ``fd.grad``; parameters and their
gradients are annotated alike.  The ranks are simulated in this process, or real ones where a launcher started
several.  The losses are those of one rank, whatever the mesh.

With ``--checkpoint DIR`` training goes on where the last checkpoint in DIR was made, on any mesh and number of ranks:
``meshfuse run --ranks 4 --max-restarts 3 examples/gpt/train_mesh.py --mesh dp=2,tp=2 --checkpoint DIR``.
"""

from __future__ import annotations

import argparse
import math
from collections.abc import Callable
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

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


@dataclass(slots=True)
class Training:
    """All that the next step follows from: parameters, AdamW's moments, the generator of batches, losses so far."""

    params: model.Params
    optimizer: torch.optim.AdamW
    generator: torch.Generator
    losses: list[float] = field(default_factory=list[float])

    @classmethod
    def fresh(cls, config: model.Config) -> Training:
        """The beginning: seeded parameters and generator."""
        params = {name: value.requires_grad_() for name, value in model.init_params(train.SEED, config).items()}
        return cls(params, train.make_optimizer(params), torch.Generator().manual_seed(train.SEED))

    def state(self) -> dict[str, Any]:
        """Everything by name, as ``mf.save`` takes it."""
        moments = {
            f"{kind}.{name}": self.optimizer.state[value][kind]
            for name, value in self.params.items()
            for kind in ("exp_avg", "exp_avg_sq", "step")
            if self.optimizer.state[value]
        }
        losses = torch.tensor(self.losses, dtype=torch.float64)
        params = {f"param.{name}": value for name, value in self.params.items()}
        return params | moments | {"generator": self.generator.get_state(), "losses": losses}

    def load(self, path: Path) -> None:
        """Go on from a checkpoint."""
        stored = mf.load(path)
        with torch.no_grad():
            for name, value in self.params.items():
                value.copy_(stored[f"param.{name}"])
                kinds = [kind for kind in ("exp_avg", "exp_avg_sq", "step") if f"{kind}.{name}" in stored]
                self.optimizer.state[value] = {kind: stored[f"{kind}.{name}"] for kind in kinds}
        self.generator.set_state(stored["generator"])
        self.losses = stored["losses"].tolist()


def run(
    text: Tensor,
    steps: int,
    mesh: mf.DeviceMesh,
    config: model.Config = model.GPT,
    checkpoint: Path | None = None,
    every: int = 10,
    before_step: Callable[[int], None] = lambda step: None,
    after_step: Callable[[int, float], None] = lambda step, loss: None,
) -> list[float]:
    """The loss (nats per token) of every step of AdamW in float32, from fresh parameters or from the checkpoint.

    A checkpoint is made after ``every`` so many steps and after the last.  ``before_step`` is called with each step,
    ``after_step`` with each step and its loss.
    """
    state, program = Training.fresh(config), define(config, mesh)
    if checkpoint is not None and (checkpoint / "checkpoint.json").exists():
        state.load(checkpoint)
    for step in range(len(state.losses) + 1, steps + 1):
        before_step(step)
        train_step(state, program, step, steps, *sample_batch(text, config.block, state.generator))
        after_step(step, state.losses[-1])
        if checkpoint is not None and (step % every == 0 or step == steps):
            mf.save(checkpoint, state.state())
    return state.losses


def train_step(
    state: Training, program: TrainingProgram, step: int, steps: int, tokens: Tensor, targets: Tensor
) -> None:
    """One update of all parameters."""
    train.set_rate(state.optimizer, train.learning_rate(step, steps))
    loss, grads = program.loss_and_gradients(state.params, tokens, targets)
    for name, value in state.params.items():
        value.grad = grads[name]
    torch.nn.utils.clip_grad_norm_(state.params.values(), train.GRADIENT_LIMIT)
    state.optimizer.step()
    state.losses.append(loss.item())


def main() -> None:
    """Train on the shipped held-out text, which needs no download, and print each step's loss."""
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--mesh", type=fused.parse_mesh, default="tp=1")
    parser.add_argument("--steps", type=int, default=50)
    parser.add_argument("--checkpoint", type=Path, help="a folder: go on from the checkpoint in it, and make new ones")
    parser.add_argument("--every", type=int, default=10, help="steps between checkpoints")
    options = parser.parse_args()
    text = data.to_tokens(data.EVAL_PATH.read_bytes())

    def print_loss(step: int, loss: float) -> None:
        print(f"step {step:4d}  {loss:.6f} nats/byte, {loss / math.log(2):.4f} bits/byte", flush=True)

    run(text, options.steps, options.mesh, checkpoint=options.checkpoint, every=options.every, after_step=print_loss)


if __name__ == "__main__":
    main()
