"""Collectives of CUDA tensors over NCCL. A wait orders the current stream; it does not block."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from datetime import timedelta
from typing import Any

import torch
import torch.distributed as dist

from ..kernels import fold
from .deadlines import COLLECTIVES, is_of_torch, within
from .device_watchdog import Pending, is_watched
from .job import Communicator
from .reductions import REDUCE_OPS, check_reducible, movable, move_scale
from .work import Work

_NATIVE = (
    torch.uint8, torch.int8, torch.int32, torch.int64,
    torch.float16, torch.bfloat16, torch.float32, torch.float64,
)  # fmt: skip


# Seconds that torch's watchdog of NCCL waits longer than `DeviceWatchdog`, whose error says more, and which knows
# when a peer plans.
_LATER = 3600


class Nccl:
    """An NCCL process group of exactly one Group's ranks, on this rank's device.

    The process ends by torch's watchdog where NCCL loses a connection, and by the world's `DeviceWatchdog` where a peer
    does not arrive within the world's time limit, or fails while a graph is replayed, which torch's does not see.
    """

    def __init__(self, group: Communicator, store: dist.Store, device: torch.device):
        torch.cuda.set_device(device)
        options = dist.ProcessGroupNCCL.Options()
        options._timeout = timedelta(seconds=group.world.limit + _LATER)
        self._group, self._device, self._waited = group, device, torch.cuda.Event()
        # torch's stubs lack the backend's methods.
        self._pg: Any = dist.ProcessGroupNCCL(store, group.index, group.size, options)

    def all_reduce(self, tensor: torch.Tensor, op: str) -> Work:
        """Reduce in place. Dtypes that NCCL cannot reduce are gathered and then folded."""
        check_reducible(tensor.dtype, op)
        if tensor.dtype not in _NATIVE:
            stack = tensor.new_empty((self._group.size, tensor.numel()))
            return self._issue(
                "all_reduce",
                lambda: self._pg._allgather_base(movable(stack), movable(tensor)),
                lambda: fold(stack, op, tensor.view(-1)),
            )
        options: Any = dist.AllreduceOptions()
        options.reduceOp = REDUCE_OPS[op]
        return self._issue("all_reduce", lambda: self._pg.allreduce([tensor], options))

    def all_gather(self, out: torch.Tensor, tensor: torch.Tensor) -> Work:
        """Gather flat blocks into `out`, in the ranks' order."""
        return self._issue("all_gather", lambda: self._pg._allgather_base(movable(out), movable(tensor)))

    def reduce_scatter(self, out: torch.Tensor, tensor: torch.Tensor, op: str) -> Work:
        """Reduce by NCCL's own reduce-scatter where it takes the dtype, else by an exchange and a local fold."""
        check_reducible(tensor.dtype, op)
        if tensor.dtype not in _NATIVE:
            stack = tensor.new_empty((self._group.size, out.numel()))
            return self._issue(
                "reduce_scatter",
                lambda: self._pg.alltoall_base(movable(stack), movable(tensor), [], [], dist.AllToAllOptions()),
                lambda: fold(stack, op, out.view(-1)),
            )
        options: Any = dist.ReduceScatterOptions()
        options.reduceOp = REDUCE_OPS[op]
        return self._issue(
            "reduce_scatter", lambda: self._pg._reduce_scatter_base(out.view(-1), tensor.view(-1), options)
        )

    def all_to_all(
        self, out: torch.Tensor, tensor: torch.Tensor, out_sizes: Sequence[int], in_sizes: Sequence[int]
    ) -> Work:
        """Exchange flat blocks; counts are of elements, in the ranks' order."""
        scale = move_scale(tensor.dtype)
        outs, ins = [n * scale for n in out_sizes], [n * scale for n in in_sizes]
        return self._issue(
            "all_to_all",
            lambda: self._pg.alltoall_base(movable(out), movable(tensor), outs, ins, dist.AllToAllOptions()),
        )

    def broadcast(self, tensor: torch.Tensor, src_index: int) -> Work:
        """Overwrite the tensor by that of the rank at `src_index`."""
        options = dist.BroadcastOptions()
        options.rootRank, options.rootTensor = src_index, 0
        return self._issue("broadcast", lambda: self._pg.broadcast([movable(tensor)], options))

    def send(self, tensor: torch.Tensor, dst_index: int) -> Work:
        """Send to the rank at `dst_index`."""
        return self._issue("send", lambda: self._pg.send([movable(tensor)], dst_index, 0))

    def recv(self, tensor: torch.Tensor, src_index: int) -> Work:
        """Receive from the rank at `src_index`."""
        return self._issue("recv", lambda: self._pg.recv([movable(tensor)], src_index, 0))

    def settle(self) -> None:
        """Wait until the device has done what was issued: breaking the connections would cut it short."""
        within(self._group.world.limit, lambda: torch.cuda.synchronize(self._device), COLLECTIVES)

    def abort(self) -> None:
        """Break the connections to all peers."""
        within(1.0, self._pg.abort, COLLECTIVES)

    def _issue(self, name: str, call: Callable[[], Any], finish: Callable[[], object] | None = None) -> Work:
        work = Work(self._group, name, call, finish).then(lambda: self._watch(work))
        try:
            work.attach(call())
        except RuntimeError as error:
            if not is_of_torch(error):
                raise
            raise self._group.world.explain(work, error) from None
        return work

    def _watch(self, work: Work) -> None:
        """Have the device watched, which has to do this collective before it goes on.

        The backend's own word for a collective that has failed is that it is done; an event says what the device does.
        """
        if is_watched():
            self._waited.record()
            pending = Pending(work, self._group.ranks, self._waited.query, self.trouble)
            self._group.world.watchdog.put(pending)

    def trouble(self) -> str:
        """What NCCL has found to be wrong with the connections, "" for nothing."""
        found = str(self._pg.get_error())
        return "" if found.endswith("SUCCESS") else found
