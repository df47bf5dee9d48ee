"""Functions that tests call on workers. They are registered where this module is imported."""

from __future__ import annotations

import torch
from torch import nn

import meshfuse.session as di


class OddError(Exception):
    """An exception whose class takes other arguments than `args`."""

    def __init__(self, code: int, text: str):
        super().__init__(f"{code}: {text}")
        self.code = code


@di.register_global_func("tests.add_one")
def add_one(x):
    return x + 1


@di.register_global_func("tests.concat")
def concat(*parts: str) -> str:
    return "".join(parts)


@di.register_global_func("tests.identify")
def identify() -> tuple[int, int, int]:
    return di.worker_id(), di.num_workers(), di.group_id()


@di.register_global_func("tests.raise_on")
def raise_on(worker: int, kind: str) -> None:
    if di.worker_id() == worker:
        if kind == "odd":
            raise OddError(7, "seven")
        if kind == "exit":
            raise SystemExit(3)
        raise {"key": KeyError, "value": ValueError, "os": OSError}[kind]("told", worker)


class Net(nn.Module):
    """A model with a loss if there is a target, and dropout."""

    def __init__(self, width: int = 16, dropout: float = 0.0):
        super().__init__()
        self.up, self.down = nn.Linear(width, 32), nn.Linear(32, width)
        self.drop = nn.Dropout(dropout)

    def forward(self, x, y=None):
        out = self.down(self.drop(torch.relu(self.up(x))))
        return {"loss": (out - y).square().mean() if y is not None else None, "out": out}


def make_net(width: int = 16, dropout: float = 0.0) -> Net:
    return Net(width, dropout)
