"""Collectives of a session: what each worker does, over the runtime's groups.

Shards may be of different sizes: where that matters, workers first tell each other theirs.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import torch

from ..errors import ArgumentError, shown, user_error
from ..runtime.group import Group
from . import tape
from .executor import Executor, current
from .registry import register_global_func

OPS = ("sum", "prod", "min", "max", "avg")


def init_ccl(ccl: str, device_ids: Sequence[int]) -> None:
    """Connect this worker's groups, and choose its GPU for NCCL."""
    worker = current()
    if ccl == "nccl" and not torch.cuda.is_available():
        raise user_error('init_ccl: "nccl"', f"no GPU for worker {worker.worker}", "a GPU for each worker",
                         'Use "gloo".', cls=ArgumentError)  # fmt: skip
    if device_ids and torch.cuda.is_available():
        torch.cuda.set_device(device_ids[worker.worker])
    elif ccl == "nccl":
        torch.cuda.set_device(worker.world().local_rank)
    device = "cuda" if ccl == "nccl" else "cpu"
    for in_group in (True, False):
        _group(worker, in_group).all_reduce(torch.zeros(1, device=device)).wait()


def _allreduce(src: torch.Tensor, dst: torch.Tensor | None, op: str, in_group: bool) -> torch.Tensor:
    """Reduce over the workers, into `dst` on all of them."""
    group = _group(current(), in_group)
    out = _out(src, dst, src.shape, "allreduce")
    flat = src.detach().clone(memory_format=torch.contiguous_format)
    group.all_reduce(flat, "sum" if op == "avg" else op).wait()
    if op == "avg":
        flat = flat / group.size if flat.dtype.is_floating_point or flat.dtype.is_complex else flat // group.size
    return _store(out, flat.view(src.shape))


def _allgather(src: torch.Tensor, dst: torch.Tensor | None, in_group: bool) -> torch.Tensor:
    """Put the workers' tensors behind each other along dim 0, into `dst` on all of them."""
    group = _group(current(), in_group)
    sizes = _sizes(group, src)
    out = _out(src, dst, _joined(src, sizes), "allgather")
    flat = torch.empty(sum(sizes), dtype=src.dtype, device=src.device)
    mine = src.detach().contiguous().view(-1)
    if len(set(sizes)) == 1:
        group.all_gather(flat, mine).wait()
    else:
        for index, part in enumerate(flat.split(sizes)):
            if index == group.index:
                part.copy_(mine)
            group.broadcast(part, index).wait()
    return _store(out, flat)


def _broadcast(src: torch.Tensor | None, dst: torch.Tensor | None, in_group: bool) -> torch.Tensor:
    """Copy the first worker's tensor into `dst` of all, the first included."""
    group = _group(current(), in_group)
    if dst is None:
        dst = torch.empty_like(_tensor(src, "broadcast")) if group.size == 1 else _new_from_first(group, src)
    flat = dst.detach().contiguous()
    if group.index == 0:
        flat.copy_(_fitting(_tensor(src, "broadcast"), dst, "broadcast").view(dst.shape))
    group.broadcast(flat, 0).wait()
    return _store(dst, flat)


def _scatter(src: torch.Tensor | None, dst: torch.Tensor, in_group: bool) -> torch.Tensor:
    """Cut the first worker's tensor into parts of the sizes of the workers' `dst`, in order."""
    group = _group(current(), in_group)
    sizes = _sizes(group, _tensor(dst, "scatter"))
    flat = dst.detach().contiguous().view(-1)
    if group.index:
        group.recv(flat, 0).wait()
        return _store(dst, flat)
    whole = _tensor(src, "scatter").detach().contiguous().view(-1)
    if whole.numel() != sum(sizes) or whole.dtype != dst.dtype:
        raise _misfit(
            "scatter_from_worker0", whole, f"{sum(sizes)} elements of {dst.dtype}, as the workers' parts have"
        )
    parts = whole.split(sizes)
    for work in [group.send(part.contiguous(), index) for index, part in enumerate(parts) if index]:
        work.wait()
    return _store(dst, parts[0])


def _gather(src: torch.Tensor, dst: torch.Tensor | None, in_group: bool) -> torch.Tensor | None:
    """Put the workers' tensors behind each other into the first worker's `dst`."""
    group = _group(current(), in_group)
    sizes = _sizes(group, _tensor(src, "gather"))
    mine = src.detach().contiguous().view(-1)
    if group.index:
        group.send(mine, 0).wait()
        return dst
    out = _out(src, dst, _joined(src, sizes), "gather_to_worker0")
    flat = torch.empty(sum(sizes), dtype=src.dtype, device=src.device)
    parts = flat.split(sizes)
    parts[0].copy_(mine)
    for work in [group.recv(part, index) for index, part in enumerate(parts) if index]:
        work.wait()
    return _store(out, flat)


def _pass_on(src: torch.Tensor, dst: torch.Tensor, step: int) -> torch.Tensor:
    """Send `src` to the worker of the same place in the next group (or the one before), and receive its into `dst`.

    The first and the last group have one neighbour: their `dst`, or `src`, stays as it is.
    """
    worker = current()
    group = _group(worker, in_group=False)
    to, by = worker.worker + step * worker.group_size, worker.worker - step * worker.group_size
    works: list[Any] = []
    if 0 <= to < worker.size:
        works.append(group.send(_tensor(src, "send").detach().contiguous(), to))
    flat = _tensor(dst, "recv").detach().contiguous()
    if 0 <= by < worker.size:
        works.append(group.recv(flat, by))
    for work in works:
        work.wait()
    return _store(dst, flat)


def _send_between(
    src: torch.Tensor | None, dst: torch.Tensor | None, sender: int, receiver: int
) -> torch.Tensor | None:
    """Send one worker's `src` into another one's `dst`; all others do nothing."""
    worker = current()
    if worker.worker == sender == receiver:
        return _store(_tensor(dst, "recv"), _tensor(src, "send"))
    if worker.worker not in (sender, receiver):
        return dst
    # Of these two alone: a group connects when all of its members use it.
    group = worker.world().group(tuple(sorted((sender, receiver))), "of two workers")
    if worker.worker == sender:
        group.send(_tensor(src, "send").detach().contiguous(), 1 - group.index).wait()
        return dst
    flat = _tensor(dst, "recv").detach().contiguous()
    group.recv(flat, 1 - group.index).wait()
    return _store(_tensor(dst, "recv"), flat)


# The same, remembered inside of an autograd context with their adjoints.


def allreduce(src: torch.Tensor, dst: torch.Tensor | None, op: str, in_group: bool) -> torch.Tensor:
    """Reduce over the workers, into `dst` on all of them."""
    if op not in ("sum", "avg"):
        tape.refuse(src, f"allreduce of {op}")
        return _allreduce(src, dst, op, in_group)
    got = _allreduce(src, dst, op, in_group)
    return tape.record(src, got, dst, lambda grad: _allreduce(grad, None, op, in_group), "allreduce")


def allgather(src: torch.Tensor, dst: torch.Tensor | None, in_group: bool) -> torch.Tensor:
    """Put the workers' tensors behind each other along dim 0, into `dst` on all of them."""
    group = _group(current(), in_group)
    got = _allgather(src, dst, in_group)

    def adjoint(grad: torch.Tensor) -> torch.Tensor:
        sizes = _sizes(group, src)
        start = sum(sizes[: group.index])
        return _allreduce(grad, None, "sum", in_group).reshape(-1)[start : start + src.numel()]

    return tape.record(src, got, dst, adjoint, "allgather")


def broadcast(src: torch.Tensor | None, dst: torch.Tensor | None, in_group: bool) -> torch.Tensor:
    """Copy the first worker's tensor into `dst` of all, the first included."""
    got = _broadcast(src, dst, in_group)
    given = None if _group(current(), in_group).index else src
    return tape.record(given, got, dst, lambda grad: _allreduce(grad, None, "sum", in_group), "broadcast")


def scatter(src: torch.Tensor | None, dst: torch.Tensor, in_group: bool) -> torch.Tensor:
    """Cut the first worker's tensor into parts of the sizes of the workers' `dst`, in order."""
    got = _scatter(src, dst, in_group)
    return tape.record(src, got, dst, lambda grad: _gather(grad, None, in_group), "scatter_from_worker0")


def gather(src: torch.Tensor, dst: torch.Tensor | None, in_group: bool) -> torch.Tensor | None:
    """Put the workers' tensors behind each other into the first worker's `dst`."""
    is_first = not _group(current(), in_group).index
    got = _gather(src, dst, in_group)
    like = src.detach()
    tape.record(src, got if is_first else None, dst if is_first else None,
                lambda grad: _scatter(grad, torch.empty_like(like), in_group), "gather_to_worker0")  # fmt: skip
    return got


def pass_on(src: torch.Tensor, dst: torch.Tensor, step: int) -> torch.Tensor:
    """Send `src` to the worker of the same place in the next group (or the one before), and receive its into `dst`."""
    got, like = _pass_on(src, dst, step), src.detach()
    return tape.record(src, got, dst, lambda grad: _pass_on(grad, torch.zeros_like(like), -step), "send to a group")


def send_between(src: torch.Tensor | None, dst: torch.Tensor | None, sender: int, receiver: int) -> torch.Tensor | None:
    """Send one worker's `src` into another one's `dst`; all others do nothing."""
    got, me = _send_between(src, dst, sender, receiver), current().worker
    if me not in (sender, receiver):
        return got
    gives, gets = (src if me == sender else None), (got if me == receiver else None)
    like = None if gives is None else gives.detach()

    def adjoint(grad: torch.Tensor | None) -> torch.Tensor | None:
        return _send_between(grad, None if like is None else torch.zeros_like(like), receiver, sender)

    tape.record(gives, gets, dst if gets is not None else None, adjoint, "send_to_worker")
    return got


def _group(worker: Executor, in_group: bool) -> Group:
    first = worker.worker - worker.worker % worker.group_size
    ranks = range(first, first + worker.group_size) if in_group else range(worker.size)
    return worker.world().group(tuple(ranks), "of workers")


def _sizes(group: Group, tensor: torch.Tensor) -> list[int]:
    """How many elements each worker of the group has."""
    sizes = torch.empty(group.size, dtype=torch.int64)
    group.all_gather(sizes, torch.tensor([_tensor(tensor, "a collective").numel()])).wait()
    return sizes.tolist()


def _joined(src: torch.Tensor, sizes: Sequence[int]) -> tuple[int, ...]:
    """The shape of tensors like this one behind each other; flat where rows do not fit."""
    row = src[0].numel() if src.ndim and src.shape[0] else 1
    total = sum(sizes)
    return (total // row, *src.shape[1:]) if src.ndim and row and total % row == 0 else (total,)


def _new_from_first(group: Group, src: torch.Tensor | None) -> torch.Tensor:
    """A tensor like the first worker's, whose type the others do not know."""
    texts = group.world.rendezvous.exchange_among(
        group.ranks, "types", "" if group.index or src is None else f"{str(src.dtype)[6:]} {list(src.shape)}"
    )  # fmt: skip
    dtype, _, shape = texts[0].decode().partition(" ")
    sizes = [int(n) for n in shape.strip("[]").split(",") if n.strip()]
    return torch.empty(sizes, dtype=getattr(torch, dtype))


def _out(src: torch.Tensor, dst: torch.Tensor | None, shape: Sequence[int], what: str) -> torch.Tensor:
    """Where a result of this shape goes."""
    if dst is None:
        return torch.empty(tuple(shape), dtype=src.dtype, device=src.device)
    count = 1
    for n in shape:
        count *= n
    if _tensor(dst, what).numel() != count or dst.dtype != src.dtype:
        raise _misfit(what, dst, f"{count} elements of {src.dtype} for the result")
    return dst


def _fitting(src: torch.Tensor, dst: torch.Tensor, what: str) -> torch.Tensor:
    if src.numel() != dst.numel() or src.dtype != dst.dtype:
        raise _misfit(what, src, f"{dst.numel()} elements of {dst.dtype}, as the destination has")
    return src.detach()


def _misfit(what: str, found: torch.Tensor, needed: str) -> Exception:
    return user_error(what, f"{found.numel()} elements of {found.dtype}", needed, "", cls=ArgumentError)


def _tensor(value: Any, what: str) -> torch.Tensor:
    if not isinstance(value, torch.Tensor):
        raise user_error(
            f"{what} on worker {current().worker}", shown(value), "a tensor in the DRef", "", cls=ArgumentError
        )
    return value


def _store(dst: torch.Tensor, flat: torch.Tensor) -> torch.Tensor:
    if dst.data_ptr() != flat.data_ptr() or not dst.is_contiguous():
        with torch.no_grad():
            dst.copy_(flat.reshape(dst.shape))
    return dst


# Disco's names, for scripts that get them by get_global_func.
_DISCO = {
    "allreduce": lambda src, op="sum", in_group=True, dst=None: allreduce(src, dst, op, in_group),
    "allgather": lambda src, in_group=True, dst=None: allgather(src, dst, in_group),
    "broadcast_from_worker0": lambda src, in_group, dst: broadcast(src, dst, in_group),
    "scatter_from_worker0": lambda src, in_group, dst: scatter(src, dst, in_group),
    "gather_to_worker0": lambda src, in_group, dst: gather(src, dst, in_group),
}
for _name, _function in _DISCO.items():
    register_global_func(f"runtime.disco.{_name}", _function)
