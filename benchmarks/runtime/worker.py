"""One rank of the benchmark: all variants of every work in this process, in turns. `run.py` starts the ranks."""

from __future__ import annotations

import argparse
import contextlib
import json
import math
import os
import sys
import warnings
from collections.abc import Callable, Iterator, Sequence
from pathlib import Path
from typing import Any

import handwritten
import torch
import torch.distributed as dist
from definitions import definition
from dtensors import distributed, step_of
from measure import ratio, repeats, take_turns, traffic
from torch.distributed.device_mesh import DeviceMesh, init_device_mesh
from works import WORKS, Work, local_part

from meshfuse.runtime.world import World

# What torch.compile keeps is read again by rank number: ranks must not share it.
CACHE = Path("~/.cache/meshfuse/bench-runtime").expanduser()
VARIANTS = ("hand", "hand_compiled", "dtensor", "dtensor_compiled", "meshfuse_eager", "meshfuse")
WARM_UP = 30
Step = Callable[[], Sequence[torch.Tensor]]


def compiled(forward: Callable[..., Any]) -> Callable[..., Any]:
    return torch.compile(forward, fullgraph=True, dynamic=False)


def plain(forward: Callable[..., Any]) -> Callable[..., Any]:
    return forward


class Bench:
    """One work on these ranks: its local inputs, expected local outputs and variants."""

    def __init__(self, work: Work):
        self.work, self.size = work, dist.get_world_size()
        self.mesh: DeviceMesh = init_device_mesh("cpu", work.mesh_shape(self.size), mesh_dim_names=work.axes)
        coordinate = self.mesh.get_coordinate()
        assert coordinate is not None
        self.place = {a: (i, n) for a, i, n in zip(work.axes, coordinate, self.mesh.shape, strict=True)}
        self.expected = [
            local_part(t, spec, self.place) for t, spec in zip(work.expected(), work.results, strict=True)
        ]  # fmt: skip

    def locals(self) -> dict[str, torch.Tensor]:
        return {n: local_part(t, self.work.specs[n], self.place) for n, t in self.work.inputs().items()}

    def _comms(self, kind: type[handwritten.Eager]) -> dict[str, handwritten.Eager]:
        return {a: kind(self.mesh.get_group(a), n, i) for a, (i, n) in self.place.items()}

    def steps(self, chosen: Sequence[str] = VARIANTS) -> dict[str, Step]:
        hand = getattr(handwritten, self.work.name)
        made: dict[str, Callable[[], Step]] = {
            "hand": lambda: hand(self._comms(handwritten.Eager), self.locals(), plain),
            "hand_compiled": lambda: hand(self._comms(handwritten.Traceable), self.locals(), compiled),
            "dtensor": lambda: self._dtensor(plain),
            "dtensor_compiled": lambda: self._dtensor(compiled),
            "meshfuse_eager": lambda: self._meshfuse("eager"),
            "meshfuse": lambda: self._meshfuse("inductor"),
        }
        return {name: make() for name, make in made.items() if name in chosen}

    def _dtensor(self, wrap: Any) -> Step:
        return step_of(self.work, distributed(self.work, self.mesh, self.locals()), wrap)

    def _meshfuse(self, backend: str) -> Step:
        fd, arguments = definition(self.work, self.size), list(self.locals().values())
        return lambda: fd.execute(arguments, backend=backend)

    def check(self, name: str, found: Sequence[torch.Tensor]) -> None:
        """AssertionError where an output is not unsharded torch's."""
        for place, (mine, expected) in enumerate(zip(found, self.expected, strict=True)):
            error = (mine.detach().double() - expected).abs().max().item()
            limit = 1e-4 * max(1.0, expected.abs().max().item())
            assert error < limit, f"{self.work.name}, {name}: output {place} is off by {error}"


def measure(work: Work, rounds: int, chosen: Sequence[str]) -> list[dict[str, Any]]:
    """The lines of results.json of one work on these ranks."""
    bench = Bench(work)
    steps = bench.steps(chosen)
    for name, step in steps.items():
        for _ in range(WARM_UP):
            found = step()
        bench.check(name, found)
    times = take_turns(steps, repeats(steps["hand"]), rounds)
    group = dist.get_world_size() if len(work.axes) == 1 else math.isqrt(dist.get_world_size())
    lines = []
    for name, step in steps.items():
        collectives, sent = traffic(step, group)
        if name.startswith("meshfuse"):
            sent = definition(work, bench.size).bill().total  # What the simulator's transport counts, see bench-bills.
        wall, cpu = (ratio([t[i] for t in times[name]], [t[i] for t in times["hand"]]) for i in (0, 1))
        lines.append({
            "work": work.name, "ranks": dist.get_world_size(), "variant": name, "wall_ratio": round(wall, 3),
            "cpu_ratio": round(cpu, 3), "collectives": collectives, "bytes": round(sent),
        })  # fmt: skip
    return lines


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--out", type=Path, required=True)
    parser.add_argument("--rounds", type=int, default=40)
    parser.add_argument("--works", nargs="*", default=[])
    parser.add_argument("--variants", nargs="*", default=VARIANTS)
    args = parser.parse_args()
    lines: list[dict[str, Any]] = []
    with joined() as world:
        for work in WORKS:
            if (not args.works or work.name in args.works) and not (len(work.axes) == 2 and world.size < 4):
                lines += measure(work, args.rounds, args.variants)
                if world.rank == 0:
                    args.out.write_text(json.dumps(lines))
    return 0


@contextlib.contextmanager
def joined() -> Iterator[World]:
    """This rank, on one thread, with a default process group as hand-written programs have it."""
    warnings.filterwarnings("ignore", category=FutureWarning)
    torch.set_num_threads(1)
    world = World.current()
    os.environ["TORCHINDUCTOR_CACHE_DIR"] = str(CACHE / f"rank_{world.rank}_of_{world.size}")
    dist.init_process_group(
        "gloo", store=dist.PrefixStore("bench", world.store), rank=world.rank, world_size=world.size
    )
    yield world
    dist.destroy_process_group()


if __name__ == "__main__":
    sys.exit(main())
