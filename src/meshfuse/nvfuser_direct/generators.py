"""Random numbers by torch's generators: what `torch.manual_seed` means to nvFuser's scripts."""

from __future__ import annotations

import torch


class _HostDraws:
    """How often this process has drawn since the seed of torch's generator on the host was set.

    That generator counts nothing. Each draw takes one number of it, so that it tells whether it was seeded since.
    """

    def __init__(self) -> None:
        self._count = 0

    def next(self, ops: int) -> tuple[int, int]:
        generator = torch.default_generator
        seed = generator.initial_seed()
        fresh = torch.Generator().manual_seed(seed)
        if torch.equal(generator.get_state(), fresh.get_state()):
            self._count = 0
        torch.empty((), dtype=torch.int64).random_(generator=generator)
        first, self._count = self._count, self._count + ops
        return _signed(seed), first


_host = _HostDraws()


def next_draws(device: torch.device, ops: int) -> tuple[int, int]:
    """(seed, offset) by which this many ops draw on a device, their numbers going on from those drawn before.

    A CUDA generator counts words, of which nvFuser's ops take four each.
    """
    if device.type != "cuda":
        return _host.next(ops)
    place = torch.cuda.current_device() if device.index is None else device.index
    generator = torch.cuda.default_generators[place]
    first = generator.get_offset()
    generator.set_offset(first + 4 * ops)
    return _signed(generator.initial_seed()), first // 4


def _signed(seed: int) -> int:
    """The seed in 64 bits with a sign, as scalars have it: torch tells it without one."""
    return seed - 2**64 if seed >= 2**63 else seed
