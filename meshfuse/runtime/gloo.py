"""Collectives of CPU tensors over gloo, and what gloo lacks: dtypes, NaN in max, reduce-scatter, speed of small calls.

gloo's all-reduce and all-gather go round a ring, one peer at a time; its all-to-all sends to all peers at once. So
small tensors are sent to every rank by an all-to-all of equal blocks. The limits in this file are the sizes at which
the ring becomes faster. Measured in microseconds on one machine of two cores, quiet and (in brackets) under load:

    ranks  bytes   all-reduce   exchange and sum   all-gather   exchange
    2      256     249 (1110)   247 (798)          260 (289)    211 (230)
    2      64 K    293 (2022)   342 (1390)         327 (1421)   278 (1032)
    2      1 M     626 (2483)   1577 (2052)        1525 (3016)  1426 (2157)
    4      256     2449 (4361)  1295 (1942)        1677 (2971)  1389 (2571)
    4      128 K   1754 (5030)  1331 (2627)        1639 (3337)  1125 (2438)
    4      512 K   2986 (5453)  4807 (7588)        4750 (8736)  4961 (7015)
"""

from __future__ import annotations

import contextlib
import functools
import os
import socket
from collections.abc import Callable, Sequence
from datetime import timedelta
from typing import Any, NoReturn

import torch
import torch.distributed as dist

from ..errors import ArgumentError, RankError, caller_line, user_error
from ..kernels import fold
from .deadlines import COLLECTIVES, is_of_torch, within
from .environment import LOOPBACK, Environment
from .job import Communicator
from .reductions import REDUCE_OPS, check_reducible, gloo_form, movable, move_scale
from .scratch import Scratch
from .work import Work

# Up to so many bytes of a rank, or of all ranks together, an exchange of everything beats a ring.
_REDUCED_BY_TWO, _REDUCED_TOGETHER, _GATHERED = 32 * 1024, 512 * 1024, 256 * 1024
_THREADS = 2  # Of a group, as in torch: two collectives at a time.
_NO_LIMIT = timedelta(days=20)
_TAG = 0  # Messages of one pair of ranks are told apart by their order alone.


class Gloo:
    """A gloo process group of exactly one Group's ranks; making it connects every rank with every other."""

    def __init__(self, group: Communicator, store: dist.Store):
        self._group = group
        # torch's stubs lack the backend's methods.
        self._pg: Any = dist.ProcessGroupGloo(store, group.index, group.size, _options(group.world))
        # `Work` looks at the clock, which stands still while a peer plans. Messages keep the limit that they have now.
        self._pg.set_timeout(_NO_LIMIT)
        self._exchanged_bytes = _REDUCED_BY_TWO if group.size == 2 else _REDUCED_TOGETHER // group.size
        self._scratch = Scratch()
        self._all_to_all_options = dist.AllToAllOptions()
        self._reduce_options = {op: _reduce_option(code) for op, code in REDUCE_OPS.items()}
        self._broadcast_options = [_broadcast_option(index) for index in range(group.size)]

    def all_reduce(self, tensor: torch.Tensor, op: str) -> Work:
        """Reduce in place.

        Small tensors, and dtypes and ops that gloo lacks, are gathered and then folded in the ranks' order.
        """
        check_reducible(tensor.dtype, op)
        native = None if tensor.nbytes <= self._exchanged_bytes else gloo_form(tensor, op)
        if native is None:
            return self._gather_and_fold(tensor, op)
        return self._issue(
            "all_reduce",
            self._pg.allreduce,
            ([native.tensor], self._reduce_options[native.op]),
            native.finish,
        )

    def _gather_and_fold(self, tensor: torch.Tensor, op: str) -> Work:
        flat = self._scratch.take(self._group.size * tensor.numel(), tensor.dtype)
        stack = flat.view(self._group.size, -1)

        def finish() -> None:
            fold(stack, op, tensor.view(-1))
            self._scratch.give(flat)

        return self._gather("all_reduce", flat, tensor, finish)

    def all_gather(self, out: torch.Tensor, tensor: torch.Tensor) -> Work:
        """Gather flat blocks into `out`, in the ranks' order."""
        return self._gather("all_gather", out, tensor)

    def _gather(
        self, name: str, out: torch.Tensor, tensor: torch.Tensor, finish: Callable[[], object] | None = None
    ) -> Work:  # fmt: skip
        mine = movable(tensor)
        if tensor.nbytes > _GATHERED:
            return self._issue(name, self._pg._allgather_base, (movable(out), mine), finish)
        copies = self._scratch.take(self._group.size * mine.numel(), mine.dtype)
        copies.view(self._group.size, -1).copy_(mine)

        def done() -> None:
            self._scratch.give(copies)
            if finish is not None:
                finish()

        return self._issue(
            name, self._pg.alltoall_base, (movable(out), copies, [], [], self._all_to_all_options), done
        )  # fmt: skip

    def reduce_scatter(self, out: torch.Tensor, tensor: torch.Tensor, op: str) -> Work:
        """Reduce by an exchange of blocks and a local fold.

        gloo's own reduce-scatter moves the bytes of an all-reduce.
        """
        check_reducible(tensor.dtype, op)
        flat = self._scratch.take(self._group.size * out.numel(), tensor.dtype)

        def finish() -> None:
            fold(flat.view(self._group.size, -1), op, out.view(-1))
            self._scratch.give(flat)

        return self._issue(
            "reduce_scatter",
            self._pg.alltoall_base,
            (movable(flat), movable(tensor), [], [], self._all_to_all_options),
            finish,
        )

    def all_to_all(
        self, out: torch.Tensor, tensor: torch.Tensor, out_sizes: Sequence[int], in_sizes: Sequence[int]
    ) -> Work:
        """Exchange flat blocks; counts are of elements, in the ranks' order."""
        scale = move_scale(tensor.dtype)
        if scale != 1:
            out_sizes, in_sizes = [n * scale for n in out_sizes], [n * scale for n in in_sizes]
        return self._issue(
            "all_to_all",
            self._pg.alltoall_base,
            (movable(out), movable(tensor), list(out_sizes), list(in_sizes), self._all_to_all_options),
        )

    def broadcast(self, tensor: torch.Tensor, src_index: int) -> Work:
        """Overwrite the tensor by that of the rank at `src_index`."""
        return self._issue("broadcast", self._pg.broadcast, ([movable(tensor)], self._broadcast_options[src_index]))

    def send(self, tensor: torch.Tensor, dst_index: int) -> Work:
        """Send to the rank at `dst_index`."""
        return self._issue("send", self._pg.send, ([movable(tensor)], dst_index, _TAG), sliced=False)

    def recv(self, tensor: torch.Tensor, src_index: int) -> Work:
        """Receive from the rank at `src_index`."""
        return self._issue("recv", self._pg.recv, ([movable(tensor)], src_index, _TAG), sliced=False)

    def abort(self) -> None:
        """Break the connections to all peers.

        They stay while work is under way, which needs them (`deadlines.left_running`).
        """
        within(1.0, lambda: setattr(self, "_pg", _BrokenConnections()), COLLECTIVES)

    def _issue(
        self,
        name: str,
        call: Callable[..., Any],
        arguments: tuple[Any, ...],
        finish: Callable[[], object] | None = None,
        sliced: bool = True,
    ) -> Work:
        work = Work(self._group, name, arguments, finish)
        try:
            work.attach(call(*arguments), sliced)
        except RuntimeError as error:
            if not is_of_torch(error):
                raise
            raise self._group.world.explain(work, error) from None
        return work


class _BrokenConnections:
    """Stands in for the connections that this rank has broken, as it ends."""

    def __getattr__(self, name: str) -> NoReturn:
        raise user_error(
            "this rank has left its job", f"{name} while it ends", "all collectives before",
            "Wait for threads that execute before the script ends.", caller_line(), RankError,
        )  # fmt: skip


def _options(world: Any) -> Any:
    options: Any = dist.ProcessGroupGloo._Options()  # pyright: ignore[reportAttributeAccessIssue]
    options._devices = [_device(world.place)]
    options._timeout = timedelta(seconds=world.limit)
    options._threads = _THREADS
    return options


def _device(place: Environment) -> Any:
    interface = os.environ.get("GLOO_SOCKET_IFNAME")
    hostname = place.own_address or (LOOPBACK if place.one_host else None)
    return _device_of(os.getpid(), interface.split(",")[0] if interface else None, hostname)


@functools.lru_cache(maxsize=8)
def _device_of(process: int, interface: str | None, hostname: str | None) -> Any:
    """One device for all groups of a process: each device is a thread that wakes a hundred times a second."""
    if interface is None:
        make = dist.ProcessGroupGloo
        return make.create_default_device() if hostname is None else make.create_device(hostname=hostname)
    try:
        return dist.ProcessGroupGloo.create_device(interface=interface)
    except RuntimeError as error:
        there = _interfaces()
        if interface in there or not there:
            raise  # Its name is not what is wrong: too many open files, say.
        raise user_error(
            "GLOO_SOCKET_IFNAME is no interface to connect by", f"{interface!r} ({error})",
            f"one of {', '.join(there)}", "Unset it, or name another one.", caller_line(), ArgumentError,
        ) from None  # fmt: skip


def _interfaces() -> list[str]:
    """The names of this machine's network interfaces; none where they cannot be listed."""
    with contextlib.suppress(OSError):  # Listing them opens a file.
        return [name for _, name in socket.if_nameindex()]
    return []


def _reduce_option(code: Any) -> Any:
    options: Any = dist.AllreduceOptions()
    options.reduceOp = code
    return options


def _broadcast_option(index: int) -> Any:
    options = dist.BroadcastOptions()
    options.rootRank, options.rootTensor = index, 0
    return options
