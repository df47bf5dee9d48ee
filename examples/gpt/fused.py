"""The GPT as one FusionDefinition in nvFuser's op vocabulary, annotated on its input and its weights only."""

from __future__ import annotations

import math
from argparse import ArgumentTypeError
from collections.abc import Mapping
from dataclasses import dataclass, field

from model import GPT, LAYER_NORM_EPS, Config, param_shapes

import meshfuse as mf


def parse_mesh(text: str) -> mf.DeviceMesh:
    """``dp=2,tp=2``: sizes of the axes dp (batch), tp (weights) and sp (positions), each at most once.

    Raises ArgumentTypeError, whose text argparse prints, for other texts.
    """
    axes = [entry.partition("=")[::2] for entry in text.split(",")]
    names, sizes = [name.strip() for name, _ in axes], [size.strip() for _, size in axes]
    if len({"dp", "tp", "sp"} & set(names)) < len(axes) or not all(size.isdecimal() and int(size) for size in sizes):
        raise ArgumentTypeError(f"found {text!r}, needed axes of dp, tp and sp with their sizes. Write dp=2,tp=2.")
    return mf.DeviceMesh(tuple(map(int, sizes)), tuple(names))


@dataclass(slots=True)
class FusedGPT:
    """The definition, its inputs in order, and the weights by name. Outputs: mean loss [], logits [B, T, vocab]."""

    fd: mf.FusionDefinition
    tokens: mf.TensorView
    targets: mf.TensorView
    weights: dict[str, mf.TensorView] = field(default_factory=dict[str, mf.TensorView])

    @property
    def inputs(self) -> list[mf.TensorView]:
        return [self.tokens, self.targets, *self.weights.values()]


def define(config: Config = GPT) -> FusedGPT:
    """The model on tokens and targets [B, T] (both sizes open), with nothing said of any mesh."""
    with mf.FusionDefinition() as fd:
        tokens = fd.define_tensor([-1, -1], dtype=mf.DataType.Int)
        targets = fd.define_tensor([-1, -1], dtype=mf.DataType.Int)
        w = {name: fd.define_tensor(list(shape)) for name, shape in param_shapes(config).items()}
        gpt = FusedGPT(fd, tokens, targets, w)
        logits = _logits(gpt, config)
        fd.add_output(_mean_loss(fd, logits, targets))
        fd.add_output(logits)
    return gpt


def _logits(gpt: FusedGPT, config: Config) -> mf.TensorView:
    fd, w, tokens = gpt.fd, gpt.weights, gpt.tokens
    positions = fd.ops.iota(fd.ops.size(tokens, 1))
    x = fd.ops.embedding_fwd(tokens, w["wte"]) + fd.ops.embedding_fwd(positions, w["wpe"])
    for i in range(config.layers):
        normed = _layer_norm(fd, x, w[f"h{i}.ln1.weight"], w[f"h{i}.ln1.bias"])
        attended = _attention(fd, normed, w, f"h{i}.attn", config)
        x = x + attended
        normed = _layer_norm(fd, x, w[f"h{i}.ln2.weight"], w[f"h{i}.ln2.bias"])
        hidden = _gelu(fd, fd.ops.linear(normed, w[f"h{i}.mlp.up"]))
        x = x + fd.ops.linear(hidden, w[f"h{i}.mlp.down"])
    normed = _layer_norm(fd, x, w["lnf.weight"], w["lnf.bias"])
    return fd.ops.linear(normed, w["wte"])


def _layer_norm(fd: mf.FusionDefinition, x: mf.TensorView, weight: mf.TensorView, bias: mf.TensorView) -> mf.TensorView:
    variance, mean = fd.ops.var_mean(x, [-1], correction=0, keepdim=True)
    return (x - mean) * fd.ops.rsqrt(variance + LAYER_NORM_EPS) * weight + bias


def _gelu(fd: mf.FusionDefinition, x: mf.TensorView) -> mf.TensorView:
    """The tanh approximation (Hendrycks and Gimpel 2016)."""
    return 0.5 * x * (1.0 + fd.ops.tanh(math.sqrt(2 / math.pi) * (x + 0.044715 * (x * x * x))))


def _attention(
    fd: mf.FusionDefinition, x: mf.TensorView, w: Mapping[str, mf.TensorView], name: str, config: Config
) -> mf.TensorView:
    def heads(part: str) -> mf.TensorView:
        """[B, T, C] to [B, heads, T, C / heads]."""
        projected = fd.ops.linear(x, w[f"{name}.{part}"])
        batch, length = fd.ops.size(x, 0), fd.ops.size(x, 1)
        split = fd.ops.reshape(projected, [batch, length, config.heads, config.width // config.heads])
        return fd.ops.permute(split, [0, 2, 1, 3])

    mixed, *_ = fd.ops.sdpfa_fwd(heads("q"), heads("k"), heads("v"), is_causal=True)
    rows = fd.ops.permute(mixed, [0, 2, 1, 3])
    merged = fd.ops.reshape(rows, [fd.ops.size(x, 0), fd.ops.size(x, 1), config.width])
    return fd.ops.linear(merged, w[f"{name}.o"])


def _mean_loss(fd: mf.FusionDefinition, logits: mf.TensorView, targets: mf.TensorView) -> mf.TensorView:
    """Mean cross entropy in nats per byte."""
    shifted = logits - fd.stop_gradient(fd.ops.max(logits, [-1], keepdim=True))
    total = fd.ops.log(fd.ops.sum(fd.ops.exp(shifted), [-1]))
    picked = fd.ops.take_along_axis(shifted, fd.ops.broadcast(targets, [False, False, True]), -1)
    count = fd.ops.size(targets, 0) * fd.ops.size(targets, 1)
    return fd.ops.sum(total - fd.ops.squeeze(picked, [-1])) / count


def annotate(gpt: FusedGPT, mesh: mf.DeviceMesh, config: Config = GPT) -> None:
    """Say how tokens and weights split over the axes that the mesh has.

    dp splits the batch; tp the weights, by heads, hidden columns and vocabulary (Shoeybi et al. 2019, Megatron-LM);
    sp the positions (sequence parallelism).
    """
    batch, length = ("dp" if "dp" in mesh.names else None), ("sp" if "sp" in mesh.names else None)
    for tensor in (gpt.tokens, gpt.targets):
        gpt.fd.mesh_split(tensor, mesh, [batch, length])
    for name, weight in gpt.weights.items():
        gpt.fd.mesh_split(weight, mesh, _weight_spec(name, weight.ndim, mesh, config))


def _weight_spec(name: str, ndim: int, mesh: mf.DeviceMesh, config: Config) -> list[object]:
    """How a weight [out, in] splits: by heads, by hidden columns, by vocabulary, or not at all."""
    if "tp" not in mesh.names or ndim == 1 or name == "wpe":
        return [None] * ndim
    whole_heads = [mf.Split(None, "tp"), mf.Split(None), mf.Split(config.width // config.heads)]
    if name.endswith(".attn.o"):
        return [None, whole_heads]
    if ".attn." in name:
        return [whole_heads, None]
    return [None, "tp"] if name.endswith(".mlp.down") else ["tp", None]
