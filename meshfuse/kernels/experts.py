"""Rows of tokens that go to experts, on one rank: sorted, sent, multiplied and brought back.

A rank has its rows as one tensor [1, rows, ...], by expert and then by token. How many there are is known at run time
only. A *pair* is a token and one of the experts that it goes to; `pairs` are numbered through, token by token.
"""

from __future__ import annotations

from collections.abc import Sequence
from itertools import accumulate, pairwise

import torch

from .indices import checked
from .table import kernel

# A dense tensor with the shape of a ragged one, outside of programs; its rows are this attribute (`stand_in`).
ROWS = "meshfuse_rows"


@kernel
def stand_in(rows: torch.Tensor, shape: Sequence[int]) -> torch.Tensor:
    """A tensor of this shape that takes no memory and carries the rows of a ragged one out of a program."""
    out = rows.new_zeros(()).expand(tuple(shape))
    setattr(out, ROWS, rows)
    return out


@kernel
def moe_dispatch(
    x: torch.Tensor, experts: torch.Tensor, mine: Sequence[int], count: int
) -> tuple[torch.Tensor, torch.Tensor, torch.Tensor]:
    """(rows, the place of each one's expert in `mine`, zeros) of tokens whose experts are all, or in part, here.

    x: [tokens, ...], or [tokens, slots, ...] with a row for every pair. experts: [tokens, slots]. count: of all experts.
    """
    pairs, place = _sorted_pairs(experts, mine, count)
    return _rows(x, experts, pairs)[None], place[None], torch.zeros_like(place)[None]


@kernel
def moe_collect(
    rows: torch.Tensor, experts: torch.Tensor, mine: Sequence[int], count: int
) -> torch.Tensor:
    """[tokens, slots, ...]: the rows of experts that are here back at their pairs; zeros for the other pairs."""
    return _at_pairs(rows[0], experts, mine, count)


@kernel
def moe_linear(rows: torch.Tensor, expert: torch.Tensor, weight: torch.Tensor, transposed: bool) -> torch.Tensor:
    """Each row times the matrix of its expert, [experts, in, out], or [experts, out, in] if that is transposed."""
    out = rows.new_empty((1, rows.shape[1], weight.shape[1 if transposed else 2]))
    for matrix, (a, b) in zip(weight, _spans(expert, len(weight)), strict=True):
        if a < b:
            torch.mm(rows[0, a:b], matrix.T if transposed else matrix, out=out[0, a:b])
    return out


@kernel
def moe_weight_gradient(left: torch.Tensor, right: torch.Tensor, expert: torch.Tensor, count: int) -> torch.Tensor:
    """[experts, m, n]: for each of `count` experts the product of its rows of both, [1, rows, m] and [1, rows, n]."""
    out = left.new_zeros((count, left.shape[2], right.shape[2]))
    for matrix, (a, b) in zip(out, _spans(expert, count), strict=True):
        if a < b:
            torch.mm(left[0, a:b].T, right[0, a:b], out=matrix)
    return out


# between ranks: `order` are the experts of all ranks of a group, rank by rank; `sizes` how many each of them has


@kernel
def moe_route(
    x: torch.Tensor, experts: torch.Tensor, order: Sequence[int], count: int
) -> tuple[torch.Tensor, torch.Tensor]:
    """(the rows to send, in the order of the experts; how many for each expert)."""
    pairs, place = _sorted_pairs(experts, order, count)
    return _rows(x, experts, pairs), torch.bincount(place, minlength=len(order))


@kernel
def moe_room(
    sent: torch.Tensor, counts: torch.Tensor, arriving: torch.Tensor, sizes: Sequence[int]
) -> tuple[torch.Tensor, torch.Tensor, torch.Tensor]:
    """(a tensor for the rows that arrive, elements to each rank, elements from each rank)."""
    came = arriving.view(len(sizes), -1).sum(1)
    went = torch.stack([part.sum() for part in counts.split(list(sizes))])
    return sent.new_empty((int(came.sum()), *sent.shape[1:])), *_elements(sent, went, came)


@kernel
def moe_arrive(
    rows: torch.Tensor, arriving: torch.Tensor, ranks: int
) -> tuple[torch.Tensor, torch.Tensor, torch.Tensor]:
    """(rows, expert, block): what came from each rank, by expert, now by expert alone; `block` says from which rank."""
    mine = arriving.numel() // ranks
    places = torch.arange(mine, device=rows.device).repeat(ranks)
    blocks = torch.arange(ranks, device=rows.device).repeat_interleave(mine)
    expert, block = (x.repeat_interleave(arriving) for x in (places, blocks))
    expert, by_expert = expert.sort(stable=True)
    return rows[by_expert][None], expert[None], block[by_expert][None]


@kernel
def moe_return(
    rows: torch.Tensor, block: torch.Tensor, experts: torch.Tensor, order: Sequence[int], sizes: Sequence[int],
    count: int,
) -> tuple[torch.Tensor, torch.Tensor, torch.Tensor, torch.Tensor]:  # fmt: skip
    """(the rows to send back, a tensor for those of this rank's tokens, elements to and from each rank)."""
    send = rows[0][block[0].argsort(stable=True)]
    _, place = _sorted_pairs(experts, order, count)
    counts = torch.bincount(place, minlength=len(order))
    came = torch.stack([part.sum() for part in counts.split(list(sizes))])
    went = torch.bincount(block[0], minlength=len(sizes))
    return send, send.new_empty((len(place), *send.shape[1:])), *_elements(send, went, came)


@kernel
def moe_returned(rows: torch.Tensor, experts: torch.Tensor, order: Sequence[int], count: int) -> torch.Tensor:
    """[tokens, slots, ...]: rows that came back in the order of the experts, at their pairs."""
    return _at_pairs(rows, experts, order, count)


def _elements(like: torch.Tensor, *rows: torch.Tensor) -> list[torch.Tensor]:
    """Numbers of rows as numbers of elements."""
    width = like[:0].numel() if not like.ndim else like.shape[1:].numel()
    return [n * width for n in rows]


def _sorted_pairs(experts: torch.Tensor, order: Sequence[int], count: int) -> tuple[torch.Tensor, torch.Tensor]:
    """(pairs whose expert is in `order`, by its place there and then by number; these places)."""
    places = torch.full((count + 1,), len(order), dtype=torch.int64)
    places[torch.tensor([*order], dtype=torch.int64)] = torch.arange(len(order))
    place, pairs = places.to(experts.device)[checked(experts, count).flatten()].sort(stable=True)
    if len(order) < count:
        there = int((place < len(order)).sum())
        place, pairs = place[:there], pairs[:there]
    return pairs, place


def _rows(x: torch.Tensor, experts: torch.Tensor, pairs: torch.Tensor) -> torch.Tensor:
    """The rows of these pairs."""
    return x.flatten(0, 1)[pairs] if x.ndim > 2 else x[pairs // experts.shape[1]]


def _at_pairs(rows: torch.Tensor, experts: torch.Tensor, order: Sequence[int], count: int) -> torch.Tensor:
    out = rows.new_zeros((experts.numel(), *rows.shape[1:]))
    out[_sorted_pairs(experts, order, count)[0]] = rows
    return out.view(*experts.shape, *rows.shape[1:])


def _spans(expert: torch.Tensor, count: int) -> list[tuple[int, int]]:
    """Where each expert's rows begin and end."""
    counts = torch.bincount(expert[0], minlength=count).tolist()
    return [*pairwise(accumulate(counts, initial=0))]
