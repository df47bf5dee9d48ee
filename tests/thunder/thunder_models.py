"""Models for the tests of Thunder, their plans, and steps of training beside eager torch."""

from __future__ import annotations

import copy
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from typing import Any

import torch
import torch.nn.functional as F
from torch import nn

import meshfuse.thunder
import thunder

WIDTH, HEADS, SHARED, TOKENS, VOCABULARY = 16, 4, 2, 8, 24
ANGLES = torch.outer(torch.arange(float(TOKENS)), torch.tensor([1.0, 0.1])).repeat(1, 2)


class Mlp(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.fc1, self.fc2 = nn.Linear(WIDTH, 32), nn.Linear(32, WIDTH)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return self.fc2(F.gelu(self.fc1(x)))


class Block(nn.Module):
    """GPT-2's: layer norms, fused qkv, as many keys as queries."""

    def __init__(self) -> None:
        super().__init__()
        self.norm1, self.norm2, self.mlp = nn.LayerNorm(WIDTH), nn.LayerNorm(WIDTH), Mlp()
        self.qkv, self.out = nn.Linear(WIDTH, 3 * WIDTH), nn.Linear(WIDTH, WIDTH)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        q, k, v = (heads(part, HEADS) for part in self.qkv(self.norm1(x)).split(WIDTH, -1))
        attended = F.scaled_dot_product_attention(q, k, v, is_causal=True)
        x = x + self.out(attended.transpose(1, 2).reshape(x.shape))
        return x + self.mlp(self.norm2(x))


class RmsNorm(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.weight = nn.Parameter(torch.ones(WIDTH))

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return x * torch.rsqrt(x.pow(2).mean(-1, keepdim=True) + 1e-5) * self.weight


class Llama(nn.Module):
    """A layer of Llama's: RMS norms, rotary positions, fewer keys than queries, SwiGLU."""

    def __init__(self) -> None:
        super().__init__()
        narrow = WIDTH * SHARED // HEADS
        self.norm1, self.norm2 = RmsNorm(), RmsNorm()
        self.q, self.k, self.v = (nn.Linear(WIDTH, n, bias=False) for n in (WIDTH, narrow, narrow))
        self.o = nn.Linear(WIDTH, WIDTH, bias=False)
        self.gate, self.up = nn.Linear(WIDTH, 32, bias=False), nn.Linear(WIDTH, 32, bias=False)
        self.down = nn.Linear(32, WIDTH, bias=False)
        self.register_buffer("cos", ANGLES.cos())
        self.register_buffer("sin", ANGLES.sin())

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        y = self.norm1(x)
        q, k, v = heads(self.q(y), HEADS), heads(self.k(y), SHARED), heads(self.v(y), SHARED)
        q, k = self.turned(q), self.turned(k).repeat_interleave(HEADS // SHARED, 1)
        attended = F.scaled_dot_product_attention(q, k, v.repeat_interleave(HEADS // SHARED, 1), is_causal=True)
        x = x + self.o(attended.transpose(1, 2).reshape(x.shape))
        y = self.norm2(x)
        return x + self.down(F.silu(self.gate(y)) * self.up(y))

    def turned(self, x: torch.Tensor) -> torch.Tensor:
        a, b = x.chunk(2, -1)
        return x * self.cos + torch.cat((-b, a), -1) * self.sin


class Gpt(nn.Module):
    """litgpt's kind: an embedding, layers, a norm and a head; its result is the loss."""

    def __init__(self, layers: int = 1, tied: bool = False) -> None:
        super().__init__()
        self.wte = nn.Embedding(VOCABULARY, WIDTH)
        self.h = nn.ModuleList(Llama() for _ in range(layers))
        self.norm, self.lm_head = RmsNorm(), nn.Linear(WIDTH, VOCABULARY, bias=False)
        if tied:
            self.lm_head.weight = self.wte.weight

    def forward(self, ids: torch.Tensor, targets: torch.Tensor) -> torch.Tensor:
        x = self.wte(ids)
        for layer in self.h:
            x = layer(x)
        logits = self.lm_head(self.norm(x))
        return F.cross_entropy(logits.reshape(-1, VOCABULARY), targets.reshape(-1))


def heads(x: torch.Tensor, count: int) -> torch.Tensor:
    return x.view(*x.shape[:2], count, -1).transpose(1, 2)


@dataclass(frozen=True, slots=True)
class Case:
    """A model, the plan of its weights, and whether it takes tokens, and gives a loss."""

    make: Callable[[], nn.Module]
    plan: dict[str, Any]
    tokens: bool = False

    def arguments(self, seed: int) -> tuple[torch.Tensor, ...]:
        """A batch of 4."""
        generator = torch.Generator().manual_seed(seed)
        if self.tokens:
            return tuple(torch.randint(VOCABULARY, (4, TOKENS), generator=generator) for _ in range(2))
        return (torch.randn(4, TOKENS, WIDTH, generator=generator),)

    def loss(self, result: torch.Tensor) -> torch.Tensor:
        return result if self.tokens else result.pow(2).mean()


MLP_PLAN = {"fc1": "colwise", "fc2": "rowwise"}
LLAMA_PLAN = {"q": "colwise", "k": "colwise", "v": "colwise", "o": "rowwise", "gate": "colwise", "up": "colwise",
              "down": "rowwise"}  # fmt: skip
ENDS_PLAN = {"wte": "embedding_rowwise", "lm_head": "colwise"}
GPT_PLAN = {**{f"h.*.{name}": style for name, style in LLAMA_PLAN.items()}, **ENDS_PLAN}
CASES = {
    "mlp": Case(Mlp, MLP_PLAN),
    "block": Case(Block, {"qkv": "colwise", "out": "rowwise", "mlp.fc1": "colwise", "mlp.fc2": "rowwise"}),
    "llama": Case(Llama, LLAMA_PLAN),
    "gpt": Case(Gpt, GPT_PLAN, tokens=True),
    "layers": Case(lambda: Gpt(2), GPT_PLAN, tokens=True),
    "tied": Case(lambda: Gpt(0, tied=True), ENDS_PLAN, tokens=True),
}
SGD, ADAM = (lambda p: torch.optim.SGD(p, 0.1)), (lambda p: torch.optim.AdamW(p, 0.01))


@dataclass(slots=True)
class Pair:
    """A model that Thunder runs with meshfuse's executor, and an eager one with the same weights."""

    case: Case
    jitted: Any
    eager: nn.Module

    @classmethod
    def make(cls, name: str, mesh: Any, transforms: Any = (), whole: Any = None) -> Pair:
        """`mesh` is that of tensor parallelism (None for none of it), `whole` the executor's."""
        torch.manual_seed(0)
        case = CASES[name]
        eager = case.make()
        splits = [] if mesh is None else [meshfuse.thunder.MeshSplit(mesh, case.plan)]
        executors = [meshfuse.thunder.executor(mesh=whole), *thunder.get_default_executors()]
        jitted = thunder.jit(copy.deepcopy(eager), executors=executors, transforms=[*splits, *transforms])
        return cls(case, jitted, eager)

    def steps(self, optimizer: Callable[..., Any], part: int = 0, parts: int = 1) -> Iterator[tuple[Any, Any]]:
        """(loss of Thunder's, loss of the eager model) of three steps; Thunder's has one of `parts` of the batch."""
        ours, theirs = optimizer(self.jitted.parameters()), optimizer(self.eager.parameters())
        for seed in range(3):
            arguments = self.case.arguments(seed)
            mine = tuple(x.chunk(parts)[part] for x in arguments)
            yield self.step(ours, self.jitted, mine), self.step(theirs, self.eager, arguments)

    def step(self, optimizer: Any, model: Any, arguments: Any) -> torch.Tensor:
        optimizer.zero_grad()
        loss = self.case.loss(model(*arguments))
        loss.backward()
        optimizer.step()
        return loss.detach()

    def differ_by(self) -> float:
        """The largest difference between weights; every rank of the mesh must call this."""
        found = self.jitted.original_state_dict()
        wanted = self.eager.state_dict()
        # Thunder leaves the second name of a tied weight out.
        assert len({id(p) for p in self.eager.parameters()}) <= len(found) <= len(wanted)
        return max(float((found[n] - wanted[n.removeprefix(".")]).abs().max()) for n in found)
