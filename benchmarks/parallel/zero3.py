"""ZeRO-3 by hand over plain torch.distributed: the floor that a fully sharded step is measured against.

A unit's parameters are views of one flat buffer, whose storage is there from its gather to its last use only, as in
torch's FullyShardedDataParallel: what autograd has saved of them is the same storage, gathered again for the backward.
Each unit is one all-gather in the forward, one in the backward, each under way while the unit before computes, and one
reduction. That is an all-to-all and a sum, as gloo's own reduce-scatter sends twice its share.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import torch
import torch.distributed as dist
from torch import nn


class Unit:
    """A module's parameters in one flat buffer, of which each rank keeps a shard."""

    def __init__(self, module: nn.Module, owned: Sequence[nn.Parameter]) -> None:
        self.module, self.parameters = module, list(owned)
        self.ranks, self.rank = dist.get_world_size(), dist.get_rank()
        self.sizes = [p.numel() for p in self.parameters]
        self.part = -(-sum(self.sizes) // self.ranks)
        flat = torch.zeros(self.part * self.ranks)
        torch.cat([p.detach().flatten() for p in self.parameters], out=flat[: sum(self.sizes)])
        self.shard = flat[self.rank * self.part : (self.rank + 1) * self.part].clone()
        self.flat, self.bytes = flat, flat.nbytes
        pieces = flat[: sum(self.sizes)].split(self.sizes)
        for parameter, piece in zip(self.parameters, pieces, strict=True):
            parameter.data = piece.view(parameter.shape)
        self.work: Any = None
        self.is_there, self.gradients, self.arrived = True, torch.empty(0), 0
        self.terms, self.sum = torch.empty(0), torch.empty(0)
        self.free()

    def gather(self) -> None:
        """Begin to gather, unless it is there or under way."""
        if not self.is_there and self.work is None:
            self.flat.untyped_storage().resize_(self.bytes)
            self.work = dist.all_gather_into_tensor(self.flat, self.shard, async_op=True)

    def wait(self) -> None:
        self.gather()
        if self.work is not None:
            self.work.wait()
            self.work, self.is_there = None, True

    def free(self) -> None:
        self.flat.untyped_storage().resize_(0)
        self.is_there = False

    def take(self, place: int, parameter: torch.Tensor) -> bool:
        """Put a gradient into its place; whether it was the last."""
        if not self.arrived:
            self.gradients = torch.empty(self.part * self.ranks)
        begin = sum(self.sizes[:place])
        assert parameter.grad is not None
        self.gradients[begin : begin + self.sizes[place]].copy_(parameter.grad.flatten())
        parameter.grad = None
        self.arrived = (self.arrived + 1) % len(self.parameters)
        return not self.arrived

    def reduce(self) -> None:
        """Begin to send other ranks their terms of the gradients."""
        self.gradients[sum(self.sizes) :] = 0
        self.terms = torch.empty_like(self.gradients)
        self.work_of_sum = dist.all_to_all_single(self.terms, self.gradients, async_op=True)

    def finish(self) -> None:
        """The mean of the ranks' terms, which is this rank's shard of the gradient."""
        assert self.work_of_sum is not None
        self.work_of_sum.wait()
        self.sum = self.terms.view(self.ranks, -1).mean(0)
        self.terms = self.gradients = torch.empty(0)


class Zero3:
    """A model whose parameters are fully sharded, unit by unit. `layers` are units, in order, and the rest is one."""

    def __init__(self, model: nn.Module, layers: Sequence[nn.Module]) -> None:
        inner = {id(p) for layer in layers for p in layer.parameters()}
        self.model, self.root = model, Unit(model, [p for p in model.parameters() if id(p) not in inner])
        self.units = [Unit(layer, list(layer.parameters())) for layer in layers]
        self.reducing: list[Unit] = []
        for number, unit in enumerate(self.units):
            unit.module.register_forward_pre_hook(lambda *_, n=number: self._before(n))
            unit.module.register_forward_hook(lambda module, _, out, n=number: self._behind(n, out))
        for unit in (self.root, *self.units):
            for place, parameter in enumerate(unit.parameters):
                parameter.register_post_accumulate_grad_hook(lambda p, u=unit, n=place: self._arrived(u, n, p))

    def step(self, x: torch.Tensor, target: torch.Tensor, loss: Any) -> torch.Tensor:
        """A forward and a backward; `unit.sum` is then this rank's shard of the gradients."""
        self.root.wait()
        self.units[0].gather()
        value = loss(self.model(x), target)
        value.backward()
        while self.reducing:
            self.reducing.pop(0).finish()
        return value

    def _before(self, number: int) -> None:
        self.units[number].wait()
        if number + 1 < len(self.units):
            self.units[number + 1].gather()

    def _behind(self, number: int, out: Any) -> None:
        """The last layer's backward follows at once: it stays."""
        if number + 1 < len(self.units):
            self.units[number].free()
        hidden = out[0] if isinstance(out, tuple) else out
        hidden.register_hook(lambda _: self._before_backward(number))

    def _before_backward(self, number: int) -> None:
        self.units[number].wait()
        if number:
            self.units[number - 1].gather()

    def _arrived(self, unit: Unit, place: int, parameter: torch.Tensor) -> None:
        if unit.take(place, parameter):
            unit.free()
            unit.reduce()
            self.reducing.append(unit)
            if len(self.reducing) > 1:  # Terms of two units at most are there at once.
                self.reducing.pop(0).finish()
