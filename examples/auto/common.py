"""What the three examples share: a model is planned for the machines of a cluster file, and trained a few steps.

Under no launcher ranks are simulated in this process; under `meshfuse run --ranks 4` they are real.
"""

from __future__ import annotations

import argparse
import os
from collections.abc import Callable
from pathlib import Path
from typing import Any

import torch
from torch import nn

import meshfuse as mf

CLUSTER = Path(__file__).parent / "cluster.json"


def words() -> argparse.Namespace:
    """The words of the command line."""
    parser = argparse.ArgumentParser()
    parser.add_argument("--cluster", type=Path, default=CLUSTER, help="the machines, as meshfuse or TePDist write them")
    parser.add_argument("--max-memory", type=float, help="bytes that a rank may hold")
    parser.add_argument("--steps", type=int, default=3)
    return parser.parse_args()


def plan_and_train(
    make: Callable[[], nn.Module], batch: dict[str, Any], args: argparse.Namespace, loss: Any = None
) -> None:
    """Plan the model for the cluster, print the plan, and train some steps of a batch.

    batch: the arguments of the forward by name, and with a loss the target.
    """
    mesh = mf.Cluster.load(args.cluster).mesh(("host", "gpu"))
    torch.manual_seed(0)
    model = make()
    plan = mf.plan(model, mesh, **batch, loss=loss, max_memory=args.max_memory)
    say(plan)
    model = mf.parallelize(model, mesh, plan, loss=loss)
    here = model.shard_inputs(**batch)
    optimizer = torch.optim.AdamW(model.parameters(), lr=1e-2)
    for step in range(args.steps):
        found = model.step(**here)
        optimizer.step()
        optimizer.zero_grad()
        say(f"step {step}: loss {found.item():.4f}")
    say(str(model.bill()).splitlines()[-1])


def say(what: object) -> None:
    """Print on the first rank."""
    if os.environ.get("RANK", "0") == "0":
        print(what, flush=True)
