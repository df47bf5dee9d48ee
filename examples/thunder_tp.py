# pyright: basic, reportPrivateImportUsage=false
"""A transformer block trained by Thunder: tensor parallel by meshfuse, data parallel by Thunder's DDP or FSDP.

    python examples/thunder_tp.py                                  two tensor parallel ranks, simulated in this process
    meshfuse run --ranks 2 examples/thunder_tp.py                  two real ones
    meshfuse run --ranks 4 examples/thunder_tp.py                  two by two, by Thunder's DDP
    meshfuse run --ranks 4 examples/thunder_tp.py --fsdp           two by two, by Thunder's FSDP

All of them print the same losses. Needs lightning-thunder 0.2.6.
"""

# pyright: reportMissingImports=false

from __future__ import annotations

import argparse
import os
from typing import Any

import torch
import torch.distributed as dist
import torch.nn.functional as F
from thunder.distributed.transforms.ddp_v2 import DDPTransform
from thunder.distributed.transforms.fsdp_v2 import FSDPTransform
from torch import nn
from torch.distributed.device_mesh import init_device_mesh

import meshfuse as mf
import thunder

WIDTH, HEADS, TOKENS, ROWS = 64, 4, 16, 8
PLAN: dict[str, Any] = {"out": "rowwise", "up": "colwise", "down": "rowwise"}
PLAN |= {"qkv.weight": [[mf.Split(3), "tp"], None], "qkv.bias": [[mf.Split(3), "tp"]]}


class Block(nn.Module):
    """Attention and an MLP, each behind a layer norm; the result is a loss."""

    def __init__(self) -> None:
        super().__init__()
        self.norm1, self.norm2 = nn.LayerNorm(WIDTH), nn.LayerNorm(WIDTH)
        self.qkv, self.out = nn.Linear(WIDTH, 3 * WIDTH), nn.Linear(WIDTH, WIDTH)
        self.up, self.down = nn.Linear(WIDTH, 4 * WIDTH), nn.Linear(4 * WIDTH, WIDTH)

    def forward(self, x: torch.Tensor, y: torch.Tensor) -> torch.Tensor:
        q, k, v = (self.heads(part) for part in self.qkv(self.norm1(x)).split(WIDTH, -1))
        attended = F.scaled_dot_product_attention(q, k, v, is_causal=True)
        x = x + self.out(attended.transpose(1, 2).reshape(x.shape))
        return F.mse_loss(x + self.down(F.gelu(self.up(self.norm2(x)))), y)

    def heads(self, x: torch.Tensor) -> torch.Tensor:
        return x.view(*x.shape[:2], HEADS, -1).transpose(1, 2)


def meshes() -> tuple[Any, Any]:
    """(the mesh of tensor parallelism, torch's mesh of all ranks); the latter is None in a single process."""
    world = mf.World.current()
    if world.size == 1:
        return mf.DeviceMesh((2,), ("tp",)), None
    if not dist.is_initialized():
        os.environ.setdefault("GLOO_SOCKET_IFNAME", "lo")
        store = dist.PrefixStore("example", world.store)
        dist.init_process_group("gloo", store=store, rank=world.rank, world_size=world.size)
    both = init_device_mesh("cpu", (world.size // 2, 2), mesh_dim_names=("dp", "tp"))
    return both["tp"], both


def transforms(tensor: Any, both: Any, fsdp: bool) -> list[Any]:
    """Tensor parallelism first; Thunder's data parallelism has its shards."""
    split = mf.thunder.MeshSplit(tensor, PLAN)
    if both is None or both.size(0) == 1:
        return [split]
    group = both["dp"].get_group()
    data = FSDPTransform(torch.device("cpu"), process_group=group) if fsdp else DDPTransform(group, 25.0, None)
    return [split, data]


def main() -> None:
    options = argparse.ArgumentParser()
    options.add_argument("--fsdp", action="store_true")
    options.add_argument("--steps", type=int, default=3)
    args = options.parse_args()
    torch.manual_seed(0)
    tensor, both = meshes()
    executors = [mf.thunder.executor(), *thunder.get_default_executors()]
    model = thunder.jit(Block(), executors=executors, transforms=transforms(tensor, both, args.fsdp))
    optimizer = torch.optim.AdamW(model.parameters(), lr=1e-2)
    x, y = torch.randn(ROWS, TOKENS, WIDTH), torch.randn(ROWS, TOKENS, WIDTH)
    parts, part = (1, 0) if both is None else (both.size(0), both.get_local_rank("dp"))
    group = None if both is None else both["dp"].get_group()
    is_first = both is None or dist.get_rank() == 0
    for step in range(args.steps):
        loss = model(x.chunk(parts)[part], y.chunk(parts)[part])
        loss.backward()
        optimizer.step()
        optimizer.zero_grad()
        shown = loss.detach()
        if parts > 1:
            dist.all_reduce(shown, group=group)
        if is_first:
            print(f"step {step}: loss {float(shown) / parts:.5f}")
    if is_first:
        print(mf.thunder.bill(model))


if __name__ == "__main__":
    main()
