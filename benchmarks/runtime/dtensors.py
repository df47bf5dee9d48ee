"""The works on DTensors: plain torch code, with redistributes placed by hand where collectives belong."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any

import torch
import torch.nn.functional as F
import works
from torch import Tensor
from torch.distributed.device_mesh import DeviceMesh
from torch.distributed.tensor import DTensor, Replicate, Shard
from torch.distributed.tensor.experimental import local_map
from works import HEADS, WIDTH, Spec, Work

Wrap = Callable[[Callable[..., Any]], Callable[..., Any]]


def placements(spec: Spec, axes: Sequence[str]) -> list[Any]:
    return [Shard(spec.index(axis)) if axis in spec else Replicate() for axis in axes]


def distributed(work: Work, mesh: DeviceMesh, locals_: dict[str, Tensor]) -> dict[str, DTensor]:
    return {
        name: DTensor.from_local(t, mesh, placements(work.specs[name], work.axes)) for name, t in locals_.items()
    }  # fmt: skip


def _attention(q: Tensor, k: Tensor, v: Tensor) -> Tensor:
    return F.scaled_dot_product_attention(q, k, v, is_causal=True)


# DTensor has no sharding of the CPU's attention: each rank has whole heads, which it may treat as plain tensors.
_HEADS = [Shard(1)]
attention: Any = local_map(_attention, out_placements=_HEADS, in_placements=(_HEADS, _HEADS, _HEADS))


def _block(x: Tensor, wq: Tensor, wk: Tensor, wv: Tensor, wo: Tensor, w1: Tensor, w2: Tensor,
           g1: Tensor, b1: Tensor, g2: Tensor, b2: Tensor) -> Tensor:  # fmt: skip
    home: Any = x.placements  # type: ignore[attr-defined]

    def enter(t: Any) -> Any:
        return t.redistribute(placements=[Replicate()])

    def leave(t: Any) -> Any:
        return t.redistribute(placements=home)

    h = enter(F.layer_norm(x, [WIDTH], g1, b1))
    q, k, v = (F.linear(h, w).unflatten(2, (HEADS, WIDTH // HEADS)).permute(1, 2, 0, 3) for w in (wq, wk, wv))
    mixed = attention(q, k, v)
    x = x + leave(F.linear(mixed.permute(2, 0, 1, 3).flatten(2), wo))
    h = enter(F.layer_norm(x, [WIDTH], g2, b2))
    return x + leave(F.linear(F.gelu(F.linear(h, w1)), w2))


def _mlp(x: Any, w1: Any, w2: Any) -> Any:
    made: Any = works.mlp(x, w1, w2)
    return made.redistribute(placements=x.placements)


def _layers(x: Any, **parameters: Any) -> Tensor:
    return works.layers(x, **{name: t.redistribute(placements=[Replicate()]) for name, t in parameters.items()})


FORWARDS: dict[str, Callable[..., Any]] = {
    "mlp": _mlp,
    "block_tp": _block,
    "block_sp": _block,
    "pointwise": works.chain,
    "layer_norm": works.layer_norm,
    "softmax": works.softmax,
    "cross_entropy": works.cross_entropy,
    "dp_tp_mlp": _mlp,
    "layers_fsdp": _layers,
}


def step_of(work: Work, inputs: dict[str, DTensor], wrap: Wrap) -> Callable[[], Sequence[Tensor]]:
    """One step: local outputs in the work's specs."""
    inputs = dict(inputs)
    seed = inputs.pop("seed", None)
    run, wanted = wrap(FORWARDS[work.name]), [placements(spec, work.axes) for spec in work.results]
    leaves = [inputs[name].requires_grad_() for name in work.trained]

    def step() -> Sequence[Tensor]:
        with torch.set_grad_enabled(bool(leaves)):
            y = run(**inputs)
        grads = torch.autograd.grad(y, leaves, seed) if leaves else ()
        return [_settled(t, where) for t, where in zip((y, *grads), wanted, strict=True)]

    return step


def _settled(value: Any, where: Sequence[Any]) -> Tensor:
    with torch.no_grad():
        if list(value.placements) != list(where):
            value = value.redistribute(placements=where)
        local = value.to_local()
    wait = getattr(local, "wait", None)
    return local if wait is None else wait()
