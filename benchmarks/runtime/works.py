"""What is timed: each work's global inputs, how they lie over the mesh, and unsharded torch's version of it."""

from __future__ import annotations

import math
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from typing import Any, TypeVar

import torch
import torch.nn.functional as F
from torch import Tensor

T = TypeVar("T")
# Per dim the name of the mesh axis that splits it, or None.
Spec = tuple[str | None, ...]

ROWS, WIDTH, HIDDEN = 256, 256, 1024
HEADS, LENGTH, BATCH = 8, 128, 2
SQUARE, CHAIN = 64, 50
WIDE, VOCAB = 1024, 4096
# Layers whose parameters are all split: rows enough that gathering weights is cheaper than gathering rows.
LAYERS, TOKENS, CHANNELS = 4, 4096, 128
WEIGHTS = ("wq", "wk", "wv", "wo", "w1", "w2", "g1", "b1", "g2", "b2")


@dataclass(frozen=True, slots=True)
class Work:
    """Inputs by name, the specs of inputs and of outputs, and the unsharded outputs of the same inputs.

    `axes` are the mesh's names; with two of them the ranks form a square. `trained` inputs are those whose gradients
    are outputs, after the result; `seed` then is the input that the backward starts from.
    """

    name: str
    axes: tuple[str, ...]
    shapes: dict[str, tuple[int, ...]]
    specs: dict[str, Spec]
    results: tuple[Spec, ...]
    reference: Callable[..., Tensor]
    trained: tuple[str, ...] = ()

    def mesh_shape(self, ranks: int) -> tuple[int, ...]:
        return (ranks,) if len(self.axes) == 1 else (math.isqrt(ranks),) * 2

    def inputs(self) -> dict[str, Tensor]:
        """Normal numbers, scaled so that products keep their size; class numbers for `targets`."""
        generator = torch.Generator().manual_seed(1)
        return {name: _random(name, shape, generator) for name, shape in self.shapes.items()}

    def expected(self) -> list[Tensor]:
        """Global outputs of unsharded torch in float64."""
        wide = {n: t.double() if t.is_floating_point() else t for n, t in self.inputs().items()}
        seed = wide.pop("seed", None)
        leaves = [wide[n].requires_grad_() for n in self.trained]
        y = self.reference(**wide)
        grads = torch.autograd.grad(y, leaves, seed) if leaves else ()
        return [y.detach(), *grads]


def _random(name: str, shape: Sequence[int], generator: torch.Generator) -> Tensor:
    if name == "targets":
        return torch.randint(0, VOCAB, tuple(shape), generator=generator)
    scale = 1 / math.sqrt(shape[-1]) if name.startswith("w") else 1.0
    return torch.randn(tuple(shape), generator=generator) * scale


def mlp(x: Tensor, w1: Tensor, w2: Tensor) -> Tensor:
    return F.linear(F.gelu(F.linear(x, w1)), w2)


def block(x: Tensor, wq: Tensor, wk: Tensor, wv: Tensor, wo: Tensor, w1: Tensor, w2: Tensor,
          g1: Tensor, b1: Tensor, g2: Tensor, b2: Tensor) -> Tensor:  # fmt: skip
    """Pre-LN decoder block on x [S, B, D]."""
    h = F.layer_norm(x, [WIDTH], g1, b1)
    q, k, v = (F.linear(h, w).unflatten(2, (HEADS, -1)).permute(1, 2, 0, 3) for w in (wq, wk, wv))
    mixed = F.scaled_dot_product_attention(q, k, v, is_causal=True)
    x = x + F.linear(mixed.permute(2, 0, 1, 3).flatten(2), wo)
    return x + mlp(F.layer_norm(x, [WIDTH], g2, b2), w1, w2)


def layers(x: Tensor, **parameters: Tensor) -> Tensor:
    """Pre-LN MLPs with residuals: of each layer gain, bias, and two weights with a bias each."""
    for g, b, w1, c1, w2, c2 in layered(parameters):
        h = F.layer_norm(x, [CHANNELS], g, b)
        x = x + F.linear(F.gelu(F.linear(h, w1, c1)), w2, c2)
    return x


def layered(parameters: Mapping[Any, T]) -> list[list[T]]:
    """The parameters of each layer."""
    found = list(parameters.values())
    return [found[start : start + len(_LAYER)] for start in range(0, len(found), len(_LAYER))]


def chain(x: Tensor, y: Tensor) -> Tensor:
    """200 pointwise ops."""
    for _ in range(CHAIN):
        x = F.relu(x * 0.9 + y) - 0.1
    return x


def layer_norm(x: Tensor, gain: Tensor, bias: Tensor) -> Tensor:
    return F.layer_norm(x, [WIDE], gain, bias)


def softmax(x: Tensor) -> Tensor:
    return F.softmax(x, -1)


def cross_entropy(logits: Tensor, targets: Tensor) -> Tensor:
    return F.cross_entropy(logits, targets)


_MLP_SHAPES = {"x": (ROWS, WIDTH), "w1": (HIDDEN, WIDTH), "w2": (WIDTH, HIDDEN)}
_MLP_SPECS: dict[str, Spec] = {"x": (None, None), "w1": ("tp", None), "w2": (None, "tp")}
_BLOCK_SHAPES = {
    "x": (LENGTH, BATCH, WIDTH), **dict.fromkeys(("wq", "wk", "wv", "wo"), (WIDTH, WIDTH)),
    "w1": (HIDDEN, WIDTH), "w2": (WIDTH, HIDDEN), **dict.fromkeys(("g1", "b1", "g2", "b2"), (WIDTH,)),
    "seed": (LENGTH, BATCH, WIDTH),
}  # fmt: skip
_BLOCK_SPECS: dict[str, Spec] = {
    "wq": ("tp", None), "wk": ("tp", None), "wv": ("tp", None), "wo": (None, "tp"), "w1": ("tp", None),
    "w2": (None, "tp"), "g1": (None,), "b1": (None,), "g2": (None,), "b2": (None,),
}  # fmt: skip


def _block(name: str, x: Spec) -> Work:
    specs = {"x": x, **_BLOCK_SPECS, "seed": x}
    return Work(
        name, ("tp",), _BLOCK_SHAPES, specs, (x, x, *_BLOCK_SPECS.values()), block, ("x", *_BLOCK_SPECS),
    )  # fmt: skip


_LAYER = {
    "g": (CHANNELS,), "b": (CHANNELS,), "w1": (4 * CHANNELS, CHANNELS), "c1": (4 * CHANNELS,),
    "w2": (CHANNELS, 4 * CHANNELS), "c2": (CHANNELS,),
}  # fmt: skip
_PARAMETERS = {f"{name}_{i}": shape for i in range(LAYERS) for name, shape in _LAYER.items()}
_FSDP_SPECS: dict[str, Spec] = {n: ("dp", *[None] * (len(s) - 1)) for n, s in _PARAMETERS.items()}


_DP_SPECS: dict[str, Spec] = {**_MLP_SPECS, "x": ("dp", None)}
WORKS = (
    Work("mlp", ("tp",), _MLP_SHAPES, _MLP_SPECS, ((None, None),), mlp),
    _block("block_tp", (None, None, None)),
    _block("block_sp", ("tp", None, None)),
    Work(
        "pointwise", ("tp",), dict.fromkeys("xy", (SQUARE, SQUARE)), dict.fromkeys("xy", ("tp", None)), (("tp", None),),
        chain,
    ),
    Work(
        "layer_norm", ("tp",), {"x": (ROWS, WIDE), "gain": (WIDE,), "bias": (WIDE,)},
        {"x": (None, "tp"), "gain": ("tp",), "bias": ("tp",)}, ((None, "tp"),), layer_norm,
    ),
    Work("softmax", ("tp",), {"x": (ROWS, WIDE)}, {"x": (None, "tp")}, ((None, "tp"),), softmax),
    Work(
        "cross_entropy", ("tp",), {"logits": (ROWS, VOCAB), "targets": (ROWS,)},
        {"logits": (None, "tp"), "targets": (None,)}, ((),), cross_entropy,
    ),
    Work(
        "dp_tp_mlp", ("dp", "tp"), {**_MLP_SHAPES, "seed": (ROWS, WIDTH)}, {**_DP_SPECS, "seed": ("dp", None)},
        (("dp", None), *_DP_SPECS.values()), mlp, ("x", "w1", "w2"),
    ),
    Work(
        "layers_fsdp", ("dp",), {"x": (TOKENS, CHANNELS), **_PARAMETERS, "seed": (TOKENS, CHANNELS)},
        {"x": ("dp", None), **_FSDP_SPECS, "seed": ("dp", None)}, (("dp", None), *_FSDP_SPECS.values()), layers,
        tuple(_PARAMETERS),
    ),
)  # fmt: skip


def local_part(whole: Tensor, spec: Spec, place: dict[str, tuple[int, int]]) -> Tensor:
    """The shard of a global tensor; `place` gives (index, size) of the rank along each axis."""
    for dim, axis in enumerate(spec):
        if axis is not None:
            index, size = place[axis]
            whole = whole.chunk(size, dim)[index]
    return whole.contiguous()
