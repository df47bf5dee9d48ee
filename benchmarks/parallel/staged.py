"""One rank: steps of a pipeline, ours and by torch.distributed.pipelining, in turns; stages that sleep; held bytes.

`staged.py FILE`. `run.py` starts the ranks, one for each stage.
"""

# pyright: reportMissingImports=false

from __future__ import annotations

import json
import sys
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

sys.path.insert(0, str(Path(__file__).parent.parent / "runtime"))

import torch
import torch.distributed as dist
from measure import ratio, take_turns
from sharded import peak
from small_llama import Llama, batch, cross_entropy, gradient, part_of
from torch import nn
from torch.distributed.pipelining import PipelineStage, Schedule1F1B, ScheduleGPipe
from worker import joined

import meshfuse as mf
from meshfuse.frontends.pipeline.program import StageProgram

LAYERS, ROWS, ROUNDS, SLEEPS = 8, 8, 5, 3
THEIRS = {"gpipe": ScheduleGPipe, "1f1b": Schedule1F1B}
SLEPT = {"gpipe": 1, "1f1b": 1, "interleaved": 2, "interleaved-zero-bubble": 2, "zbv": 1, "dualpipe-v": 1}
UNIT = 0.02  # Seconds of a forward, and of each part of a backward, by all stages of a rank together.


class Ours:
    def __init__(self, schedule: str, microbatches: int, rows: int = ROWS) -> None:
        ranks = dist.get_world_size()
        cut = [f"layers.{LAYERS // ranks * stage}" for stage in range(1, ranks)]
        pipeline = mf.Pipeline("pp", schedule, microbatches, cut=cut)
        mesh = mf.DeviceMesh((ranks,), ("pp",))
        self.model: Any = mf.parallelize(Llama(LAYERS), mesh, loss=cross_entropy, pipeline=pipeline)
        self.given = batch(rows)

    def __call__(self) -> torch.Tensor:
        self.model.zero_grad()
        return self.model.step(*self.given)


class Theirs:
    def __init__(self, schedule: str, microbatches: int) -> None:
        self.rank, self.ranks = dist.get_rank(), dist.get_world_size()
        self.model = part_of(Llama(LAYERS), self.rank, self.ranks)
        stage = PipelineStage(self.model, self.rank, self.ranks, torch.device("cpu"))
        self.schedule: Any = THEIRS[schedule](stage, n_microbatches=microbatches, loss_fn=cross_entropy)
        self.x, self.y = batch(ROWS)

    def __call__(self) -> torch.Tensor | None:
        self.model.zero_grad()
        losses: list[torch.Tensor] = []
        is_last = self.rank == self.ranks - 1
        given = (self.x,) if self.rank == 0 else ()
        self.schedule.step(*given, target=self.y if is_last else None, losses=losses if is_last else None)
        return torch.stack(losses).mean() if losses else None


def check(ours: Ours, theirs: Theirs) -> None:
    """AssertionError where gradients differ."""
    each = LAYERS // theirs.ranks
    mine = {name: p for name, p in ours.model.named_parameters() if p is not None}
    for name, parameter in theirs.model.named_parameters():
        part, _, rest = name.partition(".")
        number, _, inner = rest.partition(".")
        name = f"layers.{int(number) + theirs.rank * each}.{inner}" if part == "layers" else name
        torch.testing.assert_close(gradient(mine[name]), parameter.grad, rtol=1e-3, atol=1e-6)


def beside(schedule: str, microbatches: int) -> dict[str, Any]:
    made: dict[str, Any] = {"ours": Ours(schedule, microbatches), "theirs": Theirs(schedule, microbatches)}
    for _ in range(2):
        for step in made.values():
            step()
    check(made["ours"], made["theirs"])
    times = take_turns(made, 1, ROUNDS)
    found: dict[str, Any] = {"schedule": schedule, "microbatches": microbatches}
    for name, rows in times.items():
        found[name] = 1000 * sorted(t[0] for t in rows)[ROUNDS // 2]
    found["wall"], found["cpu"] = (
        ratio([t[i] for t in times["ours"]], [t[i] for t in times["theirs"]]) for i in (0, 1)
    )  # fmt: skip
    return found


class Tiny(nn.Module):
    def __init__(self, layers: int) -> None:
        super().__init__()
        self.layers = nn.ModuleList([nn.Linear(8, 8) for _ in range(layers)])

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        for layer in self.layers:
            x = torch.tanh(layer(x))
        return x


def mean_square(result: torch.Tensor, target: torch.Tensor) -> torch.Tensor:
    return (result - target).square().mean()


@contextmanager
def sleeping(seconds: Callable[[StageProgram, Any], float]) -> Iterator[None]:
    """In this context each program of a stage takes so many seconds more."""
    run = StageProgram.run

    def slept(self: StageProgram, half: Any, *args: Any) -> Any:
        time.sleep(seconds(self, half))
        return run(self, half, *args)

    StageProgram.run = slept  # pyright: ignore[reportAttributeAccessIssue]
    try:
        yield
    finally:
        StageProgram.run = run


def slept(schedule: str, microbatches: int) -> dict[str, Any]:
    """A step of stages that sleep, beside the schedule's makespan."""
    ranks = dist.get_world_size()
    pipeline = mf.Pipeline("pp", schedule, microbatches, virtual=SLEPT[schedule])
    stages = pipeline.stages(ranks)
    model: Any = mf.parallelize(Tiny(stages), mf.DeviceMesh((ranks,), ("pp",)), loss=mean_square, pipeline=pipeline)
    x = torch.randn(microbatches, 8)
    unit = UNIT * ranks / stages

    def seconds(program: StageProgram, half: Any) -> float:
        step = program.step
        if half is step.backward:
            return unit if step.rest is not None or model.schedule().is_split else 2 * unit
        return unit if half in (step.forward, step.rest) else 0.0

    def step() -> None:
        model.zero_grad()
        model.step(x, x)

    for _ in range(2):
        step()
    with sleeping(seconds):
        times = take_turns({"ours": step}, 1, SLEEPS)["ours"]
    span = model.schedule().makespan({"F": unit, "B": 2 * unit, "I": unit, "W": unit})
    found = sorted(t[0] for t in times)[SLEEPS // 2]
    return {"schedule": schedule, "microbatches": microbatches, "ms": 1000 * found, "span": 1000 * span}


def held(microbatches: int) -> int:
    """The most bytes at once in a step of 1F1B with micro-batches of a row."""
    ours = Ours("1f1b", microbatches, microbatches)
    ours()
    return peak(ours)


def main() -> None:
    with joined() as world:
        cases = [(name, count) for count in (4, 8) for name in THEIRS]
        found: dict[str, Any] = {"beside": [beside(*case) for case in cases]}
        found["slept"] = [slept(name, count) for count in (4, 8) for name in SLEPT]
        found["held"] = [held(count) for count in (8, 16)]
        if world.rank == 0:
            Path(sys.argv[1]).write_text(json.dumps(found))


if __name__ == "__main__":
    main()
