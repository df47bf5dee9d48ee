"""Collectives of device tensors through the host and gloo, for ranks that share a device: NCCL refuses that.

Every tensor is first copied to host memory; at the wait the result is copied back to the device. Both copies are in the
order of the current stream, which the host waits for.
"""

from __future__ import annotations

import functools
import os
from collections.abc import Sequence

import torch

from . import processes
from .gloo import Gloo
from .scratch import Scratch
from .work import Work


def device_name(device: torch.device) -> str:
    """A name for a device that no other device of any machine has.

    NCCL_HOSTID tells NCCL's machines apart, and so it does here: of ranks with other ones NCCL refuses no device.
    """
    found = torch.cuda.get_device_properties(device)
    return f"{processes.machine()} {os.environ.get('NCCL_HOSTID', '')} {getattr(found, 'uuid', device)}"


def is_shared(names: Sequence[bytes]) -> bool:
    """Whether two ranks have the same device, by the names of all ranks' devices."""
    return len(set(names)) < len(names)


class Staged:
    """The transport of a `Group` for tensors of any device, over the gloo process group of the same ranks."""

    def __init__(self, gloo: Gloo):
        self._gloo = gloo
        self._scratch = Scratch(pinned=torch.cuda.is_available())

    def all_reduce(self, tensor: torch.Tensor, op: str) -> Work:
        """Reduce in place."""
        host = self._copied(tensor)
        return self._gloo.all_reduce(host, op).then(functools.partial(self._back, tensor, host))

    def all_gather(self, out: torch.Tensor, tensor: torch.Tensor) -> Work:
        """Gather flat blocks into `out`, in the ranks' order."""
        mine, host = self._copied(tensor), self._like(out)
        return self._gloo.all_gather(host, mine).then(functools.partial(self._back, out, host, mine))

    def reduce_scatter(self, out: torch.Tensor, tensor: torch.Tensor, op: str) -> Work:
        """Reduce, and put this rank's block of the result into `out`."""
        mine, host = self._copied(tensor), self._like(out)
        return self._gloo.reduce_scatter(host, mine, op).then(functools.partial(self._back, out, host, mine))

    def all_to_all(
        self, out: torch.Tensor, tensor: torch.Tensor, out_sizes: Sequence[int], in_sizes: Sequence[int]
    ) -> Work:
        """Exchange flat blocks; counts are of elements, in the ranks' order."""
        mine, host = self._copied(tensor), self._like(out)
        work = self._gloo.all_to_all(host, mine, out_sizes, in_sizes)
        return work.then(functools.partial(self._back, out, host, mine))

    def broadcast(self, tensor: torch.Tensor, src_index: int) -> Work:
        """Overwrite the tensor by that of the rank at `src_index`."""
        host = self._copied(tensor)
        return self._gloo.broadcast(host, src_index).then(functools.partial(self._back, tensor, host))

    def send(self, tensor: torch.Tensor, dst_index: int) -> Work:
        """Send to the rank at `dst_index`; the tensor may be changed at once."""
        host = self._copied(tensor)
        return self._gloo.send(host, dst_index).then(functools.partial(self._scratch.give, host))

    def recv(self, tensor: torch.Tensor, src_index: int) -> Work:
        """Receive from the rank at `src_index`."""
        host = self._like(tensor)
        return self._gloo.recv(host, src_index).then(functools.partial(self._back, tensor, host))

    def abort(self) -> None:
        """Does nothing: the group breaks gloo's connections itself."""

    def _copied(self, tensor: torch.Tensor) -> torch.Tensor:
        """The tensor's elements in a flat host buffer."""
        return self._like(tensor).copy_(tensor.reshape(-1))

    def _back(self, tensor: torch.Tensor, host: torch.Tensor, *others: torch.Tensor) -> None:
        tensor.view(-1).copy_(host)
        self._scratch.give(host, *others)

    def _like(self, tensor: torch.Tensor) -> torch.Tensor:
        """A flat host buffer for as many elements as the tensor has."""
        return self._scratch.take(tensor.numel(), tensor.dtype)
