"""A small Llama of transformers over bytes, its text, and the mesh of the command line."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import torch
from transformers import LlamaConfig, LlamaForCausalLM

import meshfuse as mf

HERE = Path(__file__).parent
WEIGHTS = HERE / "model.safetensors"
LENGTH = 128  # Bytes that the model sees at once.

CONFIG = LlamaConfig(
    vocab_size=256, hidden_size=96, intermediate_size=256, num_hidden_layers=3, num_attention_heads=4,
    num_key_value_heads=2, max_position_embeddings=256, tie_word_embeddings=False, bos_token_id=None,
    eos_token_id=None, pad_token_id=None, use_cache=False,
)  # fmt: skip


def mesh_of(text: str) -> mf.DeviceMesh:
    """The mesh of `dp=2,tp=2`."""
    axes = dict(part.split("=") for part in text.split(","))
    return mf.DeviceMesh(tuple(map(int, axes.values())), tuple(axes))


def parallel_llama(mesh: mf.DeviceMesh, fsdp: bool = False) -> Any:
    """The model over a mesh, by the plan that transformers has for it; its weights have no memory before."""
    with torch.device("meta"):
        model = LlamaForCausalLM(CONFIG)
    batch = ["dp" if "dp" in mesh.names else None, None]
    plan = "hf" if "tp" in mesh.names else None
    return mf.parallelize(
        model, mesh, plan, inputs={"input_ids": batch, "labels": batch},
        fsdp="dp" if fsdp and "dp" in mesh.names else None,
    )  # fmt: skip


def text() -> torch.Tensor:
    """The pages of this repository, as bytes."""
    root = HERE.parent.parent
    pages = [root / "README.md", *sorted((root / "docs").glob("*.md"))]
    return torch.frombuffer(bytearray(b"\n".join(page.read_bytes() for page in pages)), dtype=torch.uint8).long()


def batch_of(data: torch.Tensor, step: int, size: int) -> torch.Tensor:
    """The rows of a step, on every rank the same: [size, LENGTH]."""
    generator = torch.Generator().manual_seed(step)
    starts = torch.randint(len(data) - LENGTH, (size,), generator=generator)
    return torch.stack([data[s : s + LENGTH] for s in starts])


def rows_of_this_rank(rows: torch.Tensor, mesh: mf.DeviceMesh) -> torch.Tensor:
    """This rank's part of a batch; all of it where ranks are simulated."""
    world = mf.World.current()
    if world.size == 1 or "dp" not in mesh.names:
        return rows
    sharding = mf.Sharding.make(mesh, [(mf.Split(mesh.axis_size("dp"), "dp"),), ()], tuple(rows.shape))
    return mf.shard_tensor(rows, sharding)
