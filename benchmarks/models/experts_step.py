"""A step of a layer of experts beside a hand-written all-to-all, on real ranks over gloo.

.venv/bin/python benchmarks/models/experts_step.py [ranks ...]      default: 2 4

Both take turns in one process of each rank: forward and backward of a Mixtral block, 512 tokens a rank, width 256, 8
experts of 512, each token at 2 of them. Printed by rank 0 are medians in milliseconds, their ratio, and the bytes that
a rank sends: those of the bill, those of rows by hand, and those on loopback as the kernel counts them.
"""

from __future__ import annotations

import os
import statistics
import subprocess
import sys
import time
from pathlib import Path
from typing import Any

os.environ.setdefault("OMP_NUM_THREADS", "1")

import torch
import torch.distributed as dist
import torch.nn.functional as F
import transformers as hf
from torch import nn
from transformers.models.mixtral.modeling_mixtral import MixtralSparseMoeBlock

import meshfuse as mf

TOKENS, WIDTH, EXPERTS, INNER, SLOTS, ROUNDS = 512, 256, 8, 512, 2, 40


class Layer(nn.Module):
    """A Mixtral block and a loss."""

    def __init__(self) -> None:
        super().__init__()
        config = hf.MixtralConfig(hidden_size=WIDTH, intermediate_size=INNER, num_local_experts=EXPERTS,
                                  num_experts_per_tok=SLOTS)  # fmt: skip
        config._experts_implementation = "grouped_mm"
        self.block = MixtralSparseMoeBlock(config)
        for parameter in self.parameters():
            nn.init.normal_(parameter, std=WIDTH**-0.5)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return self.block(x).square().mean()


class Exchange(torch.autograd.Function):
    """Rows to other ranks, and their gradients back."""

    @staticmethod
    def forward(ctx: Any, x: torch.Tensor, went: list[int], came: list[int]) -> torch.Tensor:
        ctx.sizes = came, went
        out = x.new_empty(sum(came), x.shape[1])
        dist.all_to_all_single(out, x, came, went)
        return out

    @staticmethod
    def backward(ctx: Any, grad: torch.Tensor) -> Any:
        return Exchange.apply(grad.contiguous(), *ctx.sizes), None, None


class ByHand(nn.Module):
    """The same layer with this rank's experts, as one would write it."""

    def __init__(self, whole: Layer, rank: int, ranks: int) -> None:
        super().__init__()
        experts: Any = whole.block.experts
        self.ranks, self.mine = ranks, EXPERTS // ranks
        part = slice(rank * self.mine, (rank + 1) * self.mine)
        router: Any = whole.block.gate.weight
        self.gate = nn.Parameter(router.detach().clone())
        self.up = nn.Parameter(experts.gate_up_proj.detach()[part].clone())
        self.down = nn.Parameter(experts.down_proj.detach()[part].clone())

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        x = x.view(-1, WIDTH)
        scores, chosen = F.linear(x, self.gate).softmax(-1).topk(SLOTS, -1)
        scores = scores / scores.sum(-1, keepdim=True)
        expert, order = chosen.flatten().sort(stable=True)
        counts = torch.bincount(expert, minlength=EXPERTS)
        arriving = torch.empty_like(counts)
        dist.all_to_all_single(arriving, counts)
        went, came = (n.view(self.ranks, -1).sum(1).tolist() for n in (counts, arriving))
        rows = Exchange.apply(x[order // SLOTS], went, came)
        at = torch.arange(self.mine).repeat(self.ranks).repeat_interleave(arriving)
        by_expert = at.argsort(stable=True)
        found = self.experts(rows[by_expert], torch.bincount(at, minlength=self.mine).tolist())
        back = Exchange.apply(torch.empty_like(found).index_copy(0, by_expert, found), came, went)
        pairs = torch.empty_like(back).index_copy(0, order, back).view(-1, SLOTS, WIDTH)
        return (pairs * scores[..., None]).sum(1).square().sum() / (x.numel() * self.ranks)

    def experts(self, rows: torch.Tensor, counts: list[int]) -> torch.Tensor:
        out = []
        for part, up, down in zip(rows.split(counts), self.up, self.down, strict=True):
            gate, value = F.linear(part, up).chunk(2, -1)
            out.append(F.linear(F.silu(gate) * value, down))
        return torch.cat(out)

    def step(self, x: torch.Tensor) -> torch.Tensor:
        loss = self(x)
        loss.backward()
        dist.all_reduce(self.gate.grad)
        return loss


def on_loopback() -> int:
    """The bytes that this machine has sent to itself."""
    rows = [line.split() for line in Path("/proc/net/dev").read_text().splitlines() if line.strip().startswith("lo:")]
    return int(rows[0][9])


def timed(step: Any, model: nn.Module, x: torch.Tensor) -> tuple[float, int]:
    dist.barrier()
    sent, begin = on_loopback(), time.perf_counter()
    step(x)
    seconds = time.perf_counter() - begin
    dist.barrier()
    model.zero_grad()
    return seconds, on_loopback() - sent


def on_rank() -> None:
    torch.set_num_threads(1)
    rank, ranks = int(os.environ["RANK"]), int(os.environ["WORLD_SIZE"])
    dist.init_process_group("gloo")
    torch.manual_seed(0)
    whole, x = Layer(), torch.randn(ranks, TOKENS, WIDTH)
    hand = ByHand(whole, rank, ranks)
    mesh = mf.DeviceMesh((ranks,), ("ep",), links="laptop")
    ours = mf.parallelize(whole, mesh, inputs={"x": ["ep", None, None]}, experts=mf.Experts("ep"))
    mine = x[rank : rank + 1]
    steps = ((lambda x: ours(x).backward(), ours), (hand.step, hand))
    for step, model in steps * 3:
        timed(step, model, mine)
    found = [[timed(step, model, mine) for step, model in steps] for _ in range(ROUNDS)]
    ours(mine).backward()
    hand.step(mine)
    grad = ours.block.experts.down_proj.grad.to_local()
    torch.testing.assert_close(grad, hand.down.grad, rtol=1e-4, atol=1e-6)
    if rank == 0:
        report(found, ranks, ours.bill())
    dist.barrier()
    dist.destroy_process_group()


def report(found: list[list[tuple[float, int]]], ranks: int, bill: Any) -> None:
    ours, theirs = ([statistics.median(row[side][i] for row in found) for i in (0, 1)] for side in (0, 1))
    rows = 4 * TOKENS * SLOTS * WIDTH * 4 * (ranks - 1) / ranks
    print(
        f"{ranks:5}{ours[0] * 1e3:9.1f}{theirs[0] * 1e3:9.1f}{ours[0] / theirs[0]:7.2f}"
        f"{bill.total / 1e6:10.2f}{rows / 1e6:9.2f}{ours[1] / ranks / 1e6:10.2f}{theirs[1] / ranks / 1e6:9.2f}"
    )
    if os.environ.get("BILL"):
        print(bill)


def main() -> None:
    if "RANK" in os.environ:
        on_rank()
        return
    print("ranks  ours ms     hand  ratio   bill MB     rows   sent MB     hand")
    for ranks in map(int, sys.argv[1:] or (2, 4)):
        launcher = [sys.executable, "-m", "torch.distributed.run", "--standalone", f"--nproc-per-node={ranks}"]
        subprocess.run([*launcher, __file__], check=True, timeout=600)


if __name__ == "__main__":
    main()
