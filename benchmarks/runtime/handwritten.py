"""The works in plain torch and torch.distributed, as a Megatron-style program has them.

Fused q, k, v weights; layer_norm from one reduction of two sums; the vocabulary-parallel loss with one reduction of
its two sums; gradients of the data-parallel axis and of norms in one flat all-reduce; split parameters flat, a gather
and a reduce-scatter for each layer. The same functions are given to
torch.compile, then with torch's functional collectives, which it traces.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Any

import torch
import torch.distributed as dist
import torch.distributed._functional_collectives as functional
import torch.nn.functional as F
from torch import Tensor
from works import BATCH, HEADS, LENGTH, VOCAB, WIDE, WIDTH, chain, layered, layers

Step = Callable[[], Sequence[Tensor]]
Wrap = Callable[[Callable[..., Any]], Callable[..., Any]]


@dataclass(frozen=True, slots=True)
class Eager:
    """Collectives of a process group, in place where they can be."""

    group: Any
    size: int
    index: int

    def all_reduce(self, x: Tensor, op: str = "sum") -> Tensor:
        dist.all_reduce(x, dist.ReduceOp.MAX if op == "max" else dist.ReduceOp.SUM, group=self.group)
        return x

    def all_gather(self, x: Tensor) -> Tensor:
        out = x.new_empty(x.shape[0] * self.size, *x.shape[1:])
        dist.all_gather_into_tensor(out, x.contiguous(), group=self.group)
        return out

    def reduce_scatter(self, x: Tensor) -> Tensor:
        """By an exchange of blocks and a sum: gloo's own reduce_scatter is a whole all-reduce."""
        out = torch.empty_like(x)
        dist.all_to_all_single(out, x.contiguous(), group=self.group)
        return out.view(self.size, x.shape[0] // self.size, *x.shape[1:]).sum(0)


class Traceable(Eager):
    """The same as torch.compile can trace it."""

    def all_reduce(self, x: Tensor, op: str = "sum") -> Tensor:
        return functional.wait_tensor(functional.all_reduce(x, op, self.group))

    def all_gather(self, x: Tensor) -> Tensor:
        return functional.wait_tensor(functional.all_gather_tensor(x, 0, self.group))

    def reduce_scatter(self, x: Tensor) -> Tensor:
        out = functional.wait_tensor(functional.all_to_all_single(x.contiguous(), None, None, self.group))
        return out.view(self.size, x.shape[0] // self.size, *x.shape[1:]).sum(0)


def conjugates(comm: Eager) -> dict[str, tuple[Callable[[Tensor], Tensor], Callable[[Tensor], Tensor]]]:
    """Of each parallelism what enters and leaves a sharded layer, with the backward of either."""

    def same(x: Tensor) -> Tensor:
        return x.view_as(x)

    copy, add = _autograd(same, comm.all_reduce), _autograd(comm.all_reduce, same)
    gather = _autograd(comm.all_gather, comm.reduce_scatter)
    scatter = _autograd(comm.reduce_scatter, comm.all_gather)
    return {"tp": (copy, add), "sp": (gather, scatter)}


def _autograd(forward: Callable[[Tensor], Tensor], backward: Callable[[Tensor], Tensor]) -> Callable[[Tensor], Tensor]:
    class Pair(torch.autograd.Function):
        @staticmethod
        def forward(ctx: Any, x: Tensor) -> Tensor:
            return forward(x)

        @staticmethod
        def backward(ctx: Any, grad: Tensor) -> Tensor:
            return backward(grad.contiguous())

    return Pair.apply


def _inference(forward: Callable[..., Tensor], wrap: Wrap, inputs: dict[str, Tensor]) -> Step:
    run, arguments = wrap(forward), list(inputs.values())

    def step() -> Sequence[Tensor]:
        with torch.no_grad():
            return [run(*arguments)]

    return step


def mlp(comms: dict[str, Eager], inputs: dict[str, Tensor], wrap: Wrap) -> Step:
    comm = comms["tp"]

    def forward(x: Tensor, w1: Tensor, w2: Tensor) -> Tensor:
        return comm.all_reduce(F.linear(F.gelu(F.linear(x, w1)), w2))

    return _inference(forward, wrap, inputs)


def _block_forward(enter: Callable[[Tensor], Tensor], leave: Callable[[Tensor], Tensor]) -> Callable[..., Tensor]:
    def forward(x: Tensor, qkv: Tensor, wo: Tensor, w1: Tensor, w2: Tensor, g1: Tensor, b1: Tensor,
                g2: Tensor, b2: Tensor) -> Tensor:  # fmt: skip
        h = enter(F.layer_norm(x, [WIDTH], g1, b1))
        rows = F.linear(h, qkv).view(LENGTH, BATCH, 3, -1, WIDTH // HEADS)
        q, k, v = rows.permute(2, 1, 3, 0, 4).unbind(0)
        mixed = F.scaled_dot_product_attention(q, k, v, is_causal=True)
        x = x + leave(F.linear(mixed.permute(2, 0, 1, 3).flatten(2), wo))
        h = enter(F.layer_norm(x, [WIDTH], g2, b2))
        return x + leave(F.linear(F.gelu(F.linear(h, w1)), w2))

    return forward


def _summed(grads: Sequence[Tensor], comm: Eager) -> list[Tensor]:
    """Gradients that every rank has a term of, in one flat all-reduce."""
    flat = torch.cat([g.reshape(-1) for g in grads])
    dist.all_reduce(flat, group=comm.group)
    return [part.view(g.shape) for part, g in zip(flat.split([g.numel() for g in grads]), grads, strict=True)]


def _block(kind: str, comms: dict[str, Eager], inputs: dict[str, Tensor], wrap: Wrap) -> Step:
    comm, inputs = comms["tp"], dict(inputs)
    seed, x = inputs.pop("seed"), inputs.pop("x")
    qkv = torch.cat([inputs.pop(name) for name in ("wq", "wk", "wv")])
    leaves = [t.requires_grad_() for t in (x, qkv, *inputs.values())]
    run = wrap(_block_forward(*conjugates(comm)[kind]))

    def step() -> Sequence[Tensor]:
        y = run(*leaves)
        dx, dqkv, *grads = torch.autograd.grad(y, leaves, seed)
        if kind == "sp":
            grads[-4:] = _summed(grads[-4:], comm)
        return [y, dx, *dqkv.chunk(3), *grads]

    return step


def block_tp(comms: dict[str, Eager], inputs: dict[str, Tensor], wrap: Wrap) -> Step:
    return _block("tp", comms, inputs, wrap)


def block_sp(comms: dict[str, Eager], inputs: dict[str, Tensor], wrap: Wrap) -> Step:
    return _block("sp", comms, inputs, wrap)


def pointwise(comms: dict[str, Eager], inputs: dict[str, Tensor], wrap: Wrap) -> Step:
    return _inference(chain, wrap, inputs)


def layer_norm(comms: dict[str, Eager], inputs: dict[str, Tensor], wrap: Wrap) -> Step:
    comm = comms["tp"]

    def forward(x: Tensor, gain: Tensor, bias: Tensor) -> Tensor:
        sums = comm.all_reduce(torch.stack([x.sum(-1), (x * x).sum(-1)]))
        mean, square = (sums / WIDE).unsqueeze(-1)
        scale = torch.rsqrt(square - mean * mean + 1e-5)
        return torch.addcmul(bias, (x - mean) * scale, gain)

    return _inference(forward, wrap, inputs)


def softmax(comms: dict[str, Eager], inputs: dict[str, Tensor], wrap: Wrap) -> Step:
    comm = comms["tp"]

    def forward(x: Tensor) -> Tensor:
        top = comm.all_reduce(x.amax(-1, keepdim=True), "max")
        found = torch.exp(x - top)
        return found / comm.all_reduce(found.sum(-1, keepdim=True))

    return _inference(forward, wrap, inputs)


def cross_entropy(comms: dict[str, Eager], inputs: dict[str, Tensor], wrap: Wrap) -> Step:
    comm = comms["tp"]
    size = math.ceil(VOCAB / comm.size)
    first = comm.index * size

    def forward(logits: Tensor, targets: Tensor) -> Tensor:
        top = comm.all_reduce(logits.amax(-1), "max")
        shifted = logits - top.unsqueeze(-1)
        place = targets - first
        mine = (place >= 0) & (place < size)
        picked = shifted.gather(-1, place.clamp(0, size - 1).unsqueeze(-1)).squeeze(-1) * mine
        total, chosen = comm.all_reduce(torch.stack([shifted.exp().sum(-1), picked])).unbind(0)
        return (total.log() - chosen).mean()

    return _inference(forward, wrap, inputs)


def dp_tp_mlp(comms: dict[str, Eager], inputs: dict[str, Tensor], wrap: Wrap) -> Step:
    enter, leave = conjugates(comms["tp"])["tp"]
    leaves = [inputs[name].requires_grad_() for name in ("x", "w1", "w2")]
    seed = inputs["seed"]

    def forward(x: Tensor, w1: Tensor, w2: Tensor) -> Tensor:
        return leave(F.linear(F.gelu(F.linear(enter(x), w1)), w2))

    run = wrap(forward)

    def step() -> Sequence[Tensor]:
        y = run(*leaves)
        dx, *grads = torch.autograd.grad(y, leaves, seed)
        return [y, dx, *_summed(grads, comms["dp"])]

    return step


def layers_fsdp(comms: dict[str, Eager], inputs: dict[str, Tensor], wrap: Wrap) -> Step:
    """Each layer's shards in one flat parameter, as FullyShardedDataParallel has them."""
    comm, inputs = comms["dp"], dict(inputs)
    gather, _ = conjugates(comm)["sp"]
    x, seed = inputs.pop("x"), inputs.pop("seed")
    parts = layered(inputs)
    flats = [torch.cat([t.reshape(-1) for t in layer]).requires_grad_() for layer in parts]
    sizes = [t.numel() for t in parts[0]]

    def whole(flat: Tensor) -> list[Tensor]:
        rows = gather(flat).view(comm.size, -1).split(sizes, 1)
        return [row.reshape(-1, *t.shape[1:]) for row, t in zip(rows, parts[0], strict=True)]

    def forward(x: Tensor, *flats: Tensor) -> Tensor:
        return layers(x, **dict(zip(inputs, [t for flat in flats for t in whole(flat)], strict=True)))

    run = wrap(forward)

    def step() -> Sequence[Tensor]:
        y = run(x, *flats)
        grads = torch.autograd.grad(y, flats, seed)
        return [y, *(part.view(t.shape) for grad, layer in zip(grads, parts, strict=True)
                     for part, t in zip(grad.split(sizes), layer, strict=True))]  # fmt: skip

    return step
