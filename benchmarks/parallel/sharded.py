"""One rank: fully sharded steps of ours, by hand (`zero3`) and of torch's FSDP2, in turns.

`sharded.py FILE`. `run.py` starts the ranks.
"""

# pyright: reportMissingImports=false

from __future__ import annotations

import itertools
import json
import sys
from collections.abc import Callable
from pathlib import Path
from typing import Any, cast

sys.path.insert(0, str(Path(__file__).parent.parent / "runtime"))

import torch
import torch.distributed as dist
from measure import ratio, take_turns, traffic
from small_llama import Llama, batch, cross_entropy, gradient
from torch import nn
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.fsdp import fully_shard
from torch.profiler import ProfilerActivity, profile
from worker import joined
from zero3 import Zero3

import meshfuse as mf
from meshfuse.runtime import buffers

LAYERS, ROWS, ROUNDS = 4, 2, 12


class Ours:
    def __init__(self, x: torch.Tensor, y: torch.Tensor) -> None:
        mesh = mf.DeviceMesh((dist.get_world_size(),), ("dp",))
        specs = {"x": ["dp", None], "target": ["dp", None]}
        self.model: Any = mf.parallelize(Llama(LAYERS), mesh, inputs=specs, fsdp="dp", loss=cross_entropy)
        self.given = x, y

    def __call__(self) -> torch.Tensor:
        self.model.zero_grad()
        return self.model.step(*self.given)

    def kept(self) -> int:
        return sum(p.to_local().nbytes for p in self.model.parameters())


class Fsdp2:
    def __init__(self, x: torch.Tensor, y: torch.Tensor) -> None:
        self.model: nn.Module = Llama(LAYERS)
        mesh = init_device_mesh("cpu", (dist.get_world_size(),))
        for layer in self.model.layers:
            fully_shard(layer, mesh=mesh)
        fully_shard(self.model, mesh=mesh)
        self.given = x, y

    def __call__(self) -> torch.Tensor:
        self.model.zero_grad()
        loss = cross_entropy(self.model(self.given[0]), self.given[1])
        loss.backward()
        return loss

    def kept(self) -> int:
        return sum(cast(Any, p).to_local().nbytes for p in self.model.parameters())


class ByHand:
    def __init__(self, x: torch.Tensor, y: torch.Tensor) -> None:
        model = Llama(LAYERS)
        self.zero, self.given = Zero3(model, list(model.layers)), (x, y)

    def __call__(self) -> torch.Tensor:
        for unit in (self.zero.root, *self.zero.units):
            unit.sum = torch.empty(0)
        return self.zero.step(*self.given, cross_entropy)

    def kept(self) -> int:
        return sum(unit.shard.nbytes for unit in (self.zero.root, *self.zero.units))


def peak(step: Callable[[], Any]) -> int:
    """The most bytes that torch has allocated at once in a step, beside what was there before it.

    What meshfuse has kept of earlier steps' buffers is let go first, so that it counts.
    """
    buffers._POOL._keep_only(lambda slot: False)
    with profile(activities=[ProfilerActivity.CPU], profile_memory=True) as found:
        out = step()
    events: list[Any] = [e for e in found.profiler.kineto_results.events() if e.name() == "[memory]"]  # type: ignore[union-attr]
    del out
    return max(itertools.accumulate(e.nbytes() for e in sorted(events, key=lambda e: e.start_ns())))


def check(ours: Any, fsdp2: Any, hand: Any) -> None:
    """AssertionError where gradients differ."""
    theirs = {name: gradient(p) for name, p in fsdp2.model.named_parameters()}
    for name, parameter in ours.model.named_parameters():
        torch.testing.assert_close(gradient(parameter), theirs[name], rtol=1e-3, atol=1e-6)
    names = {id(p): name for name, p in hand.zero.model.named_parameters()}
    for unit in (hand.zero.root, *hand.zero.units):
        flat = torch.cat([theirs[names[id(p)]].flatten() for p in unit.parameters])
        begin = unit.rank * unit.part
        mine = flat[begin : begin + unit.part]
        torch.testing.assert_close(unit.sum[: len(mine)], mine, rtol=1e-3, atol=1e-6)


def main() -> None:
    with joined() as world:
        rows = [t.chunk(world.size)[world.rank] for t in batch(ROWS * world.size)]
        made = {"ours": Ours(*rows), "by hand": ByHand(*rows), "fsdp2": Fsdp2(*rows)}
        for _ in range(3):
            for step in made.values():
                step()
        check(*(made[name] for name in ("ours", "fsdp2", "by hand")))
        times = take_turns(made, 1, ROUNDS)
        found = {}
        for name, step in made.items():
            calls, sent = traffic(step, world.size)
            wall, cpu = (ratio([t[i] for t in times["ours"]], [t[i] for t in times[name]]) for i in (0, 1))
            seconds = sorted(t[0] for t in times[name])[ROUNDS // 2]
            found[name] = {
                "ms": 1000 * seconds, "wall": wall, "cpu": cpu, "calls": calls, "sent": sent, "peak": peak(step),
                "kept": step.kept(),
            }  # fmt: skip
        found["ours"]["sent"] = made["ours"].model.bill().total
        found["weights"] = sum(p.numel() * 4 for p in Llama(LAYERS).parameters())
        if world.rank == 0:
            Path(sys.argv[1]).write_text(json.dumps(found))


if __name__ == "__main__":
    main()
