"""A byte-level GPT in plain torch: the unsharded reference of this example.

The model is a pre-LayerNorm decoder (GPT-2, Radford et al. 2019) on bytes: learned positions, causal
attention with separate bias-free q, k, v and o projections, a tanh-gelu MLP and logits from the tied
embedding.  It is a function of a flat dict of tensors, so that another implementation can be compared with it
weight by weight, in float32 or float64.  Shapes below use B = batch, T = positions, C = width.
"""

from __future__ import annotations

import math
from dataclasses import dataclass
from pathlib import Path

import torch
import torch.nn.functional as F
from safetensors.torch import load_file, save_file  # pyright: ignore[reportUnknownVariableType]
from torch import Tensor

SCALE_SUFFIX = ".scale"
LAYER_NORM_EPS = 1e-5
EMBEDDING_STD = 0.02
# GPT-2's 0.02 is for a width of 768; the narrower this model, the more each weight has to carry.
MATRIX_STD = 0.04

Params = dict[str, Tensor]


@dataclass(frozen=True, slots=True)
class Config:
    """Sizes of the model; the MLP's hidden width is ``4 * width``."""

    layers: int = 4
    width: int = 256
    heads: int = 8
    block: int = 128
    vocab: int = 256


GPT = Config()


def param_shapes(config: Config = GPT) -> dict[str, tuple[int, ...]]:
    """Name and shape of every parameter; matrices are ``[out, in]`` as in ``torch.nn.Linear``."""
    shapes: dict[str, tuple[int, ...]] = {
        "wte": (config.vocab, config.width),
        "wpe": (config.block, config.width),
    }
    for i in range(config.layers):
        shapes.update(_layer_shapes(f"h{i}", config.width))
    return shapes | _norm_shapes("lnf", config.width)


def _layer_shapes(layer: str, width: int) -> dict[str, tuple[int, ...]]:
    attention: dict[str, tuple[int, ...]] = {f"{layer}.attn.{name}": (width, width) for name in "qkvo"}
    mlp: dict[str, tuple[int, ...]] = {
        f"{layer}.mlp.up": (4 * width, width),
        f"{layer}.mlp.down": (width, 4 * width),
    }
    return _norm_shapes(f"{layer}.ln1", width) | attention | _norm_shapes(f"{layer}.ln2", width) | mlp


def _norm_shapes(name: str, width: int) -> dict[str, tuple[int, ...]]:
    return {f"{name}.weight": (width,), f"{name}.bias": (width,)}


def init_params(seed: int, config: Config = GPT) -> Params:
    """Fresh float32 parameters: normal, with GPT-2's 1 / sqrt(2 * layers) on what enters the residual."""
    generator = torch.Generator().manual_seed(seed)
    return {name: _init_one(name, shape, generator, config) for name, shape in param_shapes(config).items()}


def _init_one(name: str, shape: tuple[int, ...], generator: torch.Generator, config: Config) -> Tensor:
    if name.endswith(".weight"):
        return torch.ones(shape)
    if name.endswith(".bias"):
        return torch.zeros(shape)
    std = EMBEDDING_STD if name in ("wte", "wpe") else MATRIX_STD
    if name.endswith((".attn.o", ".mlp.down")):
        std /= math.sqrt(2 * config.layers)
    return torch.randn(shape, generator=generator) * std


def forward(params: Params, tokens: Tensor, config: Config = GPT) -> Tensor:
    """Logits ``[B, T, vocab]`` of the next byte, in the parameters' dtype.

    ``tokens`` is an integer tensor ``[B, T]`` of bytes with ``T <= config.block``.
    Raises ``ValueError`` for more positions than the model has.
    """
    positions = tokens.shape[1]
    if positions > config.block:
        raise ValueError(
            f"the sequence is too long for this model: found {positions} positions, need at most "
            f"{config.block}; pass the last {config.block} bytes"
        )
    x = F.embedding(tokens, params["wte"]) + params["wpe"][:positions]
    for i in range(config.layers):
        x = x + attention(params, f"h{i}.attn", layer_norm(params, f"h{i}.ln1", x), config.heads)
        x = x + mlp(params, f"h{i}.mlp", layer_norm(params, f"h{i}.ln2", x))
    return F.linear(layer_norm(params, "lnf", x), params["wte"])


def layer_norm(params: Params, name: str, x: Tensor) -> Tensor:
    """LayerNorm over the last dim, with scale and shift."""
    return F.layer_norm(x, x.shape[-1:], params[f"{name}.weight"], params[f"{name}.bias"], eps=LAYER_NORM_EPS)


def attention(params: Params, name: str, x: Tensor, heads: int) -> Tensor:
    """Causal self-attention ``[B, T, C] -> [B, T, C]``; head h is the h-th block of C/heads columns."""
    q, k, v = (_split_heads(F.linear(x, params[f"{name}.{part}"]), heads) for part in "qkv")
    mixed = F.scaled_dot_product_attention(q, k, v, is_causal=True)
    return F.linear(mixed.transpose(1, 2).flatten(2), params[f"{name}.o"])


def _split_heads(x: Tensor, heads: int) -> Tensor:
    """``[B, T, C]`` to ``[B, heads, T, C / heads]``."""
    return x.view(*x.shape[:2], heads, -1).transpose(1, 2)


def mlp(params: Params, name: str, x: Tensor) -> Tensor:
    """``down(gelu(up(x)))`` with the tanh approximation of gelu."""
    return F.linear(F.gelu(F.linear(x, params[f"{name}.up"]), approximate="tanh"), params[f"{name}.down"])


def loss(params: Params, tokens: Tensor, targets: Tensor, config: Config = GPT) -> Tensor:
    """Mean cross entropy (scalar, nats per byte) of ``targets`` ``[B, T]`` after ``tokens`` ``[B, T]``."""
    logits = forward(params, tokens, config)
    return F.cross_entropy(logits.flatten(0, 1), targets.flatten())


@torch.no_grad()
def evaluate(params: Params, tokens: Tensor, targets: Tensor, config: Config = GPT, batch: int = 32) -> float:
    """Loss in nats per byte over all windows ``[N, T]``, ``batch`` windows at a time."""
    total = 0.0
    for start in range(0, len(tokens), batch):
        part = slice(start, start + batch)
        total += loss(params, tokens[part], targets[part], config).item() * tokens[part].numel()
    return total / tokens.numel()


@torch.no_grad()
def generate(
    params: Params,
    prompt: bytes,
    length: int,
    temperature: float = 0.0,
    seed: int = 0,
    config: Config = GPT,
) -> bytes:
    """``prompt`` and ``length`` more bytes: greedy at temperature 0, else sampled from a seeded generator.

    Raises ``ValueError`` for an empty prompt, because the model has no start token.
    """
    if not prompt:
        raise ValueError("the prompt is empty: found 0 bytes, need at least 1; pass a newline to start a verse")
    generator = torch.Generator().manual_seed(seed)
    text = bytearray(prompt)
    for _ in range(length):
        tokens = torch.tensor([list(text[-config.block :])])
        text.append(pick_byte(forward(params, tokens, config)[0, -1], temperature, generator))
    return bytes(text)


def pick_byte(logits: Tensor, temperature: float, generator: torch.Generator | None = None) -> int:
    """The next byte from its logits ``[vocab]``: the largest at temperature 0, else a softmax draw."""
    if temperature == 0.0:
        return int(logits.argmax())
    weights = F.softmax(logits / temperature, dim=-1)
    return int(torch.multinomial(weights, 1, generator=generator))


def quantise_rows(weight: Tensor) -> tuple[Tensor, Tensor]:
    """Round a matrix to int8 with one float32 scale per row (largest absolute value / 127)."""
    scale = weight.abs().amax(dim=1).clamp_min(torch.finfo(torch.float32).tiny) / 127
    return torch.round(weight / scale[:, None]).to(torch.int8), scale


def dequantise_rows(rounded: Tensor, scale: Tensor) -> Tensor:
    """The float32 matrix that ``quantise_rows`` stands for."""
    return rounded.to(torch.float32) * scale[:, None]


def save_params(params: Params, path: str | Path) -> None:
    """Write the parameters: matrices as int8 ``name`` and float32 ``name.scale``, vectors as float32."""
    stored: Params = {}
    for name, value in params.items():
        if value.ndim == 2:
            stored[name], stored[name + SCALE_SUFFIX] = quantise_rows(value.detach().float())
        else:
            stored[name] = value.detach().float()
    save_file(stored, str(path))


def load_params(path: str | Path) -> Params:
    """Read a file of ``save_params`` and return every parameter in float32."""
    stored = load_file(str(path))
    return {
        name: dequantise_rows(value, stored[name + SCALE_SUFFIX]) if value.dtype == torch.int8 else value
        for name, value in stored.items()
        if not name.endswith(SCALE_SUFFIX)
    }
