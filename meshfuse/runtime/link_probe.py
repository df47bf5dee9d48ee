"""`meshfuse doctor --links`: how fast the axes of a mesh are on real ranks, as a text to pass as `links=`.

Of ranks that are all on this host the figures are kept on disk, too: meshes without links then have them.

All groups of an axis gather at the same time, tensors of several sizes. The time of an all-gather of b bytes by n ranks
is taken to be latency * ceil(log2 n) + (n - 1) / n * b / bandwidth, as in `costs.all_gather`; a least squares fit of
relative errors gives both figures. On CPUs the probe also measures up to which size a gather and a local sum beat the
ring of gloo's all-reduce.
"""

from __future__ import annotations

import argparse
import sys
import time
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch

from .. import default_machine
from ..costs import Link, Machine, plain, slowest
from ..errors import ArgumentError, DefinitionError, shown, user_error
from ..mesh import DeviceMesh, mesh_of_text
from ..number_text import figures, micro
from .group import Group
from .world import World

# Bytes of the gathered tensor, in the order of measuring: the smallest and the largest size come first.
SIZES = (1 << 12, 1 << 22, 1 << 16, 1 << 24, 1 << 19, 1 << 26)
CROSSOVER_SIZES = tuple(1 << k for k in range(12, 23))
REPEATS = 7


@dataclass(frozen=True, slots=True)
class Measured:
    """An axis, the link that was fitted to it, and the largest relative error of that fit."""

    axis: str
    ranks: int
    link: Link
    error: float


def fit(n: int, times: Sequence[tuple[float, float]]) -> tuple[Link, float]:
    """The link that fits (bytes, seconds) of all-gathers by n ranks best, and its largest relative error.

    Least squares of relative errors, with neither figure negative. From one size it gives a bandwidth, and no latency.
    """
    steps, share = (n - 1).bit_length(), (n - 1) / n
    rows = [(steps / t, share * b / t) for b, t in times]  # relative errors: each row times (latency, 1/bandwidth) is 1
    aa, ab, bb = (sum(r[i] * r[j] for r in rows) for i, j in ((0, 0), (0, 1), (1, 1)))
    a, b = sum(r[0] for r in rows), sum(r[1] for r in rows)
    determinant = aa * bb - ab * ab
    solved = len(times) > 1 and determinant > 1e-12 * aa * bb
    latency, per_byte = ((a * bb - b * ab) / determinant, (b * aa - a * ab) / determinant) if solved else (0.0, b / bb)
    if latency < 0:
        latency, per_byte = 0.0, b / bb
    if per_byte <= 0:  # latency alone: take the bandwidth at which the largest size takes 1 % longer
        latency = a / aa
        per_byte = 0.01 * latency * steps / (share * max(times)[0])
    link = Link(_rounded(1 / per_byte), _rounded(latency))
    return link, max(abs(link.seconds(steps, share * b) / t - 1) for b, t in times)


def _rounded(value: float) -> float:
    """To three figures, as measurements deserve."""
    return float(f"{value:.3g}")


class Probe:
    """Measures on this rank, together with the others of a mesh, which all take the same decisions.

    `limit` is in seconds: late measurements are left out.
    """

    def __init__(self, world: World, mesh: DeviceMesh, limit: float):
        self.world, self.mesh = world, mesh
        self.everyone = world.group(world.all_ranks, "of the probe")
        self.until = time.monotonic() + limit
        own = torch.cuda.is_available() and torch.cuda.device_count() >= world.local_size
        self.device = torch.device("cuda", world.local_rank) if own else torch.device("cpu")

    def axes(self) -> list[Measured]:
        """All axes of more than one rank, in order."""
        return [self._axis(name) for name, size in zip(self.mesh.names, self.mesh.shape, strict=True) if size > 1]

    def _axis(self, name: str) -> Measured:
        size = self.mesh.axis_size(name)
        group = self.world.group(self.mesh.group(self.world.rank, ((name, 1, size),)), f"along {name}")
        times: list[tuple[float, float]] = []
        for nbytes in SIZES:
            if len(times) >= 2 and self._is_late():
                break
            count = max(1, nbytes // size)
            mine, out = self._bytes(count), self._bytes(count * size)
            times.append((count * size, self._seconds(lambda m=mine, o=out: group.all_gather(o, m).wait())))
        link, error = fit(size, times)
        return Measured(name, size, link, error)

    def _bytes(self, count: int) -> torch.Tensor:
        return torch.zeros(count, dtype=torch.uint8, device=self.device)

    def _seconds(self, work: Callable[[], object]) -> float:
        """The seconds of the fastest of some runs, on the slowest rank; a first run, which connects, does not count."""
        work()
        return self._greatest(min(self._once(work) for _ in range(REPEATS)))

    def _once(self, work: Callable[[], object]) -> float:
        self._settle()
        start = time.perf_counter()
        work()
        self._settle()
        return time.perf_counter() - start

    def _settle(self) -> None:
        if self.device.type == "cuda":
            torch.cuda.synchronize(self.device)

    def _greatest(self, value: float) -> float:
        """The greatest of all ranks' values, the same on every rank."""
        held = torch.tensor([value], dtype=torch.float64, device="cpu")
        self.everyone.all_reduce(held, "max").wait()
        return float(held[0])

    def _is_late(self) -> bool:
        return self._greatest(float(time.monotonic() > self.until)) > 0

    def crossover(self) -> int | None:
        """The largest size in bytes up to which a gather and a sum takes no longer than gloo's ring; None on GPUs."""
        if self.device.type != "cpu" or self.world.size < 3:
            return None
        largest = 0
        for nbytes in CROSSOVER_SIZES:
            tensor = torch.zeros(nbytes // 4, device="cpu")
            stack = torch.zeros(self.world.size, nbytes // 4, device="cpu")
            gathered = self._seconds(lambda t=tensor, s=stack: _gather_and_sum(self.everyone, s, t))
            ring = self._seconds(lambda t=tensor: self._ring(t).wait())
            if gathered > ring or self._is_late():
                break
            largest = nbytes
        return largest

    def rates(self) -> tuple[float, float]:
        """The operations per second of a product, and the bytes per second of a copy, while all ranks do the same."""
        size, dtype = (8192, torch.bfloat16) if self.device.type == "cuda" else (768, torch.float32)
        a, b = (torch.zeros(size, size, dtype=dtype, device=self.device) for _ in range(2))
        held = torch.zeros(1 << 24, device=self.device)
        copied = torch.empty_like(held)
        product, copy = self._seconds(lambda: torch.mm(a, b)), self._seconds(lambda: copied.copy_(held))
        return _rounded(2 * size**3 / product), _rounded(2 * held.nbytes / copy)

    def machine(self, measured: Sequence[Measured]) -> Machine | None:
        """This host as it was measured, at the slowest of its axes; None where ranks are on several."""
        if self.world.local_size < self.world.size or not measured:
            return None
        link, (flops, memory) = slowest([m.link for m in measured]), self.rates()
        return Machine(link, link, self.world.size, flops, memory)

    def _ring(self, tensor: torch.Tensor) -> Any:
        """gloo's own all-reduce, whatever the size: `Group.all_reduce` takes it for large tensors only."""
        gloo: Any = self.everyone._transport(tensor)
        return gloo._issue("all_reduce", gloo._pg.allreduce, ([tensor], gloo._reduce_options["sum"]))

    @property
    def switches_at(self) -> int:
        """Bytes of the largest tensor that meshfuse reduces by an exchange over gloo."""
        gloo: Any = self.everyone._transport(torch.zeros(1, device="cpu"))
        return gloo._exchanged_bytes


def _gather_and_sum(group: Group, stack: torch.Tensor, tensor: torch.Tensor) -> torch.Tensor:
    group.all_gather(stack, tensor).wait()
    return stack.sum(0)


# what is printed ------------------------------------------------------------------------------------------------


def report(
    measured: Sequence[Measured], device: str, machine: Machine | None, kept: Path | None,
    crossover: tuple[int, int] | None,
) -> str:  # fmt: skip
    """A table of the axes, the `links=` to use, a rank's rates, and the crossover of all-reduces.

    That is (measured, meshfuse's own) in bytes.
    """
    cells = [("axis", "ranks", "latency", "bandwidth", "fits within")]
    cells += [(m.axis, str(m.ranks), _latency(m.link), _bandwidth(m.link), f"{m.error:.0%}") for m in measured]
    widths = [max(map(len, column)) for column in zip(*cells, strict=True)]
    lines = ["  ".join(f"{c:<{w}}" for c, w in zip(row, widths, strict=True)).rstrip() for row in cells]
    links = ", ".join(f"{m.axis!r}: mf.{m.link}" for m in measured)
    rates = f", flops={plain(machine.flops)}, memory={plain(machine.memory)}" if machine is not None else ""
    lines += [f"measured on {device}", "", f"links={{{links}}}{rates}"]
    if kept is not None:
        lines.append(f"kept in {kept}: meshes without links have these from now on; remove the file to undo that")
    if crossover is not None:
        size = f"up to {crossover[0] >> 10} KiB" if crossover[0] else "at no size"
        lines.append(
            f"\na gather and a sum beats gloo's all-reduce {size}; meshfuse uses it up to {crossover[1] >> 10} KiB"
        )
    return "\n".join(lines)


def _latency(link: Link) -> str:
    return f"{micro(link.latency)} us"


def _bandwidth(link: Link) -> str:
    return f"{figures(link.bandwidth / 1e9)} GB/s"


# the command ----------------------------------------------------------------------------------------------------


def mesh_of(text: str | None, ranks: int) -> DeviceMesh:
    """The mesh that "dp=2,tp=4" means on so many ranks; one axis of all of them without a text."""
    if text is None:
        return DeviceMesh((ranks,), ("x",))
    try:
        mesh = mesh_of_text(text)
    except (ArgumentError, DefinitionError):
        mesh = None
    if mesh is None or mesh.size != ranks:
        raise user_error("--mesh", shown(text), f"axes of {ranks} ranks in all, as in dp=2,tp={max(1, ranks // 2)}",
                         "Give it as many ranks as there are.", cls=ArgumentError)  # fmt: skip
    return mesh


def main(argv: Sequence[str] | None = None) -> int:
    """Measure on the ranks of this job; rank 0 prints."""
    parser = argparse.ArgumentParser(prog="python -m meshfuse.runtime.link_probe", description=__doc__)
    parser.add_argument("--mesh")
    parser.add_argument("--limit", type=float, default=20.0)
    args = parser.parse_args(argv)
    world = World.current()
    try:
        mesh = mesh_of(args.mesh, world.size)
    except ArgumentError as error:
        if world.rank == 0:
            print(f"meshfuse: {error}", file=sys.stderr)
        return 1
    probe = Probe(world, mesh, args.limit)
    measured, largest = probe.axes(), probe.crossover()
    machine = probe.machine(measured)
    crossover = None if largest is None else (largest, probe.switches_at)
    if world.rank == 0:
        kept = None if machine is None else default_machine.keep(machine)
        print(report(measured, probe.device.type, machine, kept, crossover))
    return 0


if __name__ == "__main__":
    sys.exit(main())
