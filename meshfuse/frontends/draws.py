"""The seeds of a module's random numbers, drawn from torch's generator."""

from __future__ import annotations

import torch

from ..runtime.world import World

_SEEDS = 2**62


class GeneratorDraws:
    """Draws one seed for each forward from torch's default generator, so that torch.manual_seed repeats a run.

    All ranks must draw alike, which they do that were seeded alike: draws 1, 2, 4, 8, ... are compared.

    ranks: those that must; without any, all of the job.
    generator: one of torch's to draw from; None for its default one.
    """

    def __init__(self, ranks: tuple[int, ...] = (), generator: torch.Generator | None = None) -> None:
        self._count, self._ranks, self.generator = 0, ranks, generator

    def __call__(self) -> int:
        """The next seed. Raises RankError where ranks drew different ones."""
        seed = int(torch.randint(_SEEDS, (), generator=self.generator).item())
        self._count += 1
        world = World.current()
        if world.size > 1 and self._count & (self._count - 1) == 0:
            do = "Seed torch alike on every rank (torch.manual_seed(0)); its generator chooses what dropout drops."
            what = "the state of torch's random generator"
            ranks = self._ranks or world.all_ranks
            world.rendezvous.check_same(str(seed), what, ranks, lambda: f"seed {seed}", do)
        return seed
