"""Random numbers by torch's generators, so that `torch.manual_seed` has the effect that nvFuser's scripts expect."""

from __future__ import annotations

import torch


class _HostDraws:
    """How often this process has drawn since torch's host generator was seeded.

    That generator does not count. Each draw takes one number from it, so that its state shows whether it was seeded
    again.
    """

    def __init__(self) -> None:
        self._count = 0

    def next(self, ops: int) -> tuple[int, int]:
        generator = torch.default_generator
        seed = generator.initial_seed()
        fresh = torch.Generator().manual_seed(seed)
        if torch.equal(generator.get_state(), fresh.get_state()):
            self._count = 0
        torch.empty((), dtype=torch.int64, device="cpu").random_(generator=generator)
        first, self._count = self._count, self._count + ops
        return _signed(seed), first


_host = _HostDraws()


def next_draws(device: torch.device, ops: int) -> tuple[int, int]:
    """(seed, offset) for so many ops that draw on a device; their numbers follow those drawn before.

    A CUDA generator counts words, of which each of nvFuser's ops takes four.
    """
    if device.type != "cuda":
        return _host.next(ops)
    place = torch.cuda.current_device() if device.index is None else device.index
    generator = torch.cuda.default_generators[place]
    first = generator.get_offset()
    generator.set_offset(first + 4 * ops)
    return _signed(generator.initial_seed()), first // 4


def _signed(seed: int) -> int:
    """The seed as a signed 64-bit int, as scalars have it; torch gives it unsigned."""
    return seed - 2**64 if seed >= 2**63 else seed
