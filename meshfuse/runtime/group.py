"""The collectives of some ranks: issued at once, and waited for at most MESHFUSE_TIMEOUT seconds."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Protocol

import torch

from .gloo import Gloo
from .host_staging import Staged, device_name, is_shared
from .job import Job
from .nccl import Nccl
from .rendezvous import Rendezvous
from .work import DONE, Done, Work


class ConnectedJob(Job, Protocol):
    """A job whose ranks can meet."""

    rendezvous: Rendezvous


class Group:
    """`ranks` that communicate with each other; this process is `ranks[index]`.

    All ranks of the group issue the same collectives in the same order, on contiguous tensors of any dtype. In a group
    of one rank, or on tensors without elements, they do nothing. Errors are RankError (a peer failed) and RankTimeout
    (a peer did not arrive), raised by `wait()` and sometimes at once.
    """

    def __init__(self, world: ConnectedJob, ranks: tuple[int, ...], label: str):
        self.world, self.ranks, self.label = world, ranks, label
        self.size, self.index = len(ranks), ranks.index(world.rank)
        self.issued = 0
        self._gloo: Gloo | None = None
        self._device: Nccl | Staged | None = None

    def __str__(self) -> str:
        return f"group {self.label} (ranks {', '.join(map(str, self.ranks))})"

    def all_reduce(self, tensor: torch.Tensor, op: str = "sum") -> Work | Done:
        """Reduce over the ranks, in place. op: sum, prod, max, min (of bools: or, and, or, and).

        All ranks get the same bits. Large float16 and bfloat16 sums are rounded at each step, as NCCL does.
        """
        if self.size == 1 or not tensor.numel():
            return DONE
        return self._transport(tensor).all_reduce(tensor, op)

    def all_gather(self, out: torch.Tensor, tensor: torch.Tensor) -> Work | Done:
        """Put the equal blocks of all ranks behind each other into `out`, in the group's order."""
        if self.size == 1:
            out.view(-1).copy_(tensor.view(-1))
            return DONE
        return self._transport(tensor).all_gather(out, tensor) if tensor.numel() else DONE

    def reduce_scatter(self, out: torch.Tensor, tensor: torch.Tensor, op: str = "sum") -> Work | Done:
        """Reduce over the ranks, and put this rank's block of the result into `out`.

        `tensor` is one block per rank, all of one size.
        """
        if self.size == 1:
            out.view(-1).copy_(tensor.view(-1))
            return DONE
        return self._transport(tensor).reduce_scatter(out, tensor, op) if tensor.numel() else DONE

    def all_to_all(
        self, out: torch.Tensor, tensor: torch.Tensor, out_sizes: Sequence[int], in_sizes: Sequence[int]
    ) -> Work | Done:
        """Send `in_sizes[r]` elements of `tensor` to each rank r, get `out_sizes[r]` from it; 0 is fine."""
        if self.size == 1:
            out.view(-1).copy_(tensor.view(-1))
            return DONE
        return self._transport(tensor).all_to_all(out, tensor, out_sizes, in_sizes)

    def broadcast(self, tensor: torch.Tensor, src_index: int) -> Work | Done:
        """Overwrite `tensor` by that of the group's rank number `src_index`."""
        if self.size == 1 or not tensor.numel():
            return DONE
        return self._transport(tensor).broadcast(tensor, src_index)

    def send(self, tensor: torch.Tensor, dst_index: int) -> Work | Done:
        """Send to the group's rank number `dst_index`. The tensor must stay unchanged until `wait()`."""
        return self._transport(tensor).send(tensor, dst_index) if tensor.numel() else DONE

    def recv(self, tensor: torch.Tensor, src_index: int) -> Work | Done:
        """Overwrite `tensor` by what the group's rank number `src_index` sends; messages keep their order."""
        return self._transport(tensor).recv(tensor, src_index) if tensor.numel() else DONE

    def _transport(self, tensor: torch.Tensor) -> Gloo | Nccl | Staged:
        self.issued += 1
        if _is_of_host(tensor):
            return self._gloo or self._connect_gloo()
        return self._device or self._connect_device(tensor.device)

    @property
    def is_staged(self) -> bool:
        """Whether collectives of device tensors go through the host; known after the first one."""
        return isinstance(self._device, Staged)

    def trouble(self) -> str:
        """What NCCL has found to be wrong with the connections, "" for nothing."""
        return self._device.trouble() if isinstance(self._device, Nccl) else ""

    def _connect_gloo(self) -> Gloo:
        self._gloo = self.world.rendezvous.connect(self, "gloo", lambda store: Gloo(self, store))
        return self._gloo

    def _connect_device(self, device: torch.device) -> Nccl | Staged:
        """Use NCCL where every rank has a device of its own, and the host where some ranks share one."""
        if is_shared(self.world.rendezvous.exchange_among(self.ranks, "devices", device_name(device))):
            self._device = Staged(self._gloo or self._connect_gloo())
        else:
            self._device = self.world.rendezvous.connect(self, "nccl", lambda store: Nccl(self, store, device))
        return self._device

    def leave(self) -> None:
        """Break the connections once the device has done the communication that it was given."""
        if isinstance(self._device, Nccl):
            self._device.settle()
        self.abort()

    def abort(self) -> None:
        """Break the connections, so that peers that wait for this rank notice at once."""
        for transport in (self._gloo, self._device):
            if transport is not None:
                transport.abort()


def _is_of_host(tensor: torch.Tensor) -> bool:
    return tensor.is_cpu
