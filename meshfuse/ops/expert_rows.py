"""Rows of tokens that go to experts, on one rank: sorted, sent, multiplied and brought back.

A rank has its rows as one tensor [1, rows, ...], by expert and then by token. How many there are is known at run time
only. A *pair* is a token and one of the experts that it goes to; `pairs` are numbered through, token by token.
"""

from __future__ import annotations

from collections.abc import Sequence
from itertools import accumulate, pairwise

import torch
import torch.nn.functional as F

from ..kernels.indices import Runs, checked
from ..kernels.table import kernel


@kernel
def moe_dispatch(
    x: torch.Tensor, experts: torch.Tensor, mine: Sequence[int], count: int
) -> tuple[torch.Tensor, torch.Tensor]:
    """(rows, the place of each one's expert in `mine`) of tokens that are all here, as their experts are, or some.

    x: [tokens, width], or [tokens, slots, width] with a row for every pair. experts: [tokens, slots]. count: of all
    experts.
    """
    pairs, place = _sorted_pairs(experts, mine, count)
    return _rows(x, experts.shape[1], pairs)[None], place[None]


@kernel
def moe_collect(rows: torch.Tensor, experts: torch.Tensor, mine: Sequence[int], count: int) -> torch.Tensor:
    """[tokens, slots, width]: the rows of experts that are here back at their pairs; zeros for the other pairs."""
    out = rows.new_zeros((*experts.shape, rows.shape[-1]))
    out.view(-1, rows.shape[-1])[_sorted_pairs(experts, mine, count)[0]] = rows[0]
    return out


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


@kernel
def moe_swiglu(rows: torch.Tensor) -> torch.Tensor:
    """silu(gate) * up, for rows of gate and up one behind the other."""
    gate, up = rows.chunk(2, -1)
    return F.silu(gate).mul_(up)


@kernel
def moe_swiglu_bwd(grad: torch.Tensor, rows: torch.Tensor) -> torch.Tensor:
    """The gradient of `moe_swiglu` by its rows."""
    gate, up = rows.chunk(2, -1)
    out = torch.empty_like(rows)
    by_gate, by_up = out.chunk(2, -1)
    by_gate.copy_(torch.ops.aten.silu_backward(grad * up, gate))
    torch.mul(grad, F.silu(gate), out=by_up)
    return out


# between ranks. All of a group know where all pairs of its tokens go, so how many rows each rank gets from each is
# known before they travel. They arrive by the rank of their token, and lie by expert and token as if all had been here.


@kernel
def moe_send(
    x: torch.Tensor, experts: torch.Tensor, tokens: Sequence[Runs], members: Sequence[Sequence[int]], me: int,
    count: int,
) -> tuple[torch.Tensor, ...]:  # fmt: skip
    """(rows to send, a tensor for those that arrive, elements to and from each rank, the order of those that arrive,
    the places of their experts).

    x: of this rank's tokens. experts: [tokens of the group, slots]. tokens: by rank of the group the runs of its tokens
    among those. members: by rank its experts.
    """
    pairs, place, owner = _arriving(experts, tokens, members[me], count)
    leaving, home = _leaving(experts, tokens[me], members, count)
    sent = _rows(x, experts.shape[1], leaving)
    room = sent.new_empty((len(pairs), *sent.shape[1:]))
    sizes = [torch.bincount(at, minlength=len(members)) * x.shape[-1] for at in (home, owner)]
    return sent, room, *sizes, owner.argsort(stable=True), place


@kernel
def moe_arrive(rows: torch.Tensor, order: torch.Tensor, place: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
    """(rows by expert and token, the places of their experts) of rows as they arrive."""
    out = torch.empty_like(rows)
    out[order] = rows
    return out[None], place[None]


@kernel
def moe_return(
    rows: torch.Tensor, experts: torch.Tensor, tokens: Sequence[Runs], members: Sequence[Sequence[int]], me: int,
    count: int,
) -> tuple[torch.Tensor, ...]:  # fmt: skip
    """(rows to send back to the ranks of their tokens, a tensor for those of this rank's tokens, elements to and from
    each rank, the pairs of these)."""
    _, _, owner = _arriving(experts, tokens, members[me], count)
    leaving, home = _leaving(experts, tokens[me], members, count)
    sent = rows[0][owner.argsort(stable=True)]
    room = sent.new_empty((len(leaving), *sent.shape[1:]))
    sizes = [torch.bincount(at, minlength=len(members)) * rows.shape[-1] for at in (owner, home)]
    return sent, room, *sizes, leaving


@kernel
def moe_returned(rows: torch.Tensor, pairs: torch.Tensor, tokens: int, slots: int) -> torch.Tensor:
    """[tokens, slots, width]: rows that came back, at their pairs."""
    out = rows.new_zeros((tokens * slots, *rows.shape[1:]))
    out[pairs] = rows
    return out.view(tokens, slots, *rows.shape[1:])


def _arriving(
    experts: torch.Tensor, tokens: Sequence[Runs], mine: Sequence[int], count: int
) -> tuple[torch.Tensor, torch.Tensor, torch.Tensor]:
    """(pairs of this rank's experts by expert and token, the places of these, the ranks of their tokens)."""
    pairs, place = _sorted_pairs(experts, mine, count)
    owners = torch.empty(experts.shape[0], dtype=torch.int64)
    for rank, runs in enumerate(tokens):
        for a, b in runs:
            owners[a:b] = rank
    return pairs, place, owners.to(experts.device)[pairs // experts.shape[1]]


def _leaving(
    experts: torch.Tensor, tokens: Runs, members: Sequence[Sequence[int]], count: int
) -> tuple[torch.Tensor, torch.Tensor]:
    """(pairs of this rank's tokens by rank, expert and token, counted from its first token; the ranks they go to)."""
    order = [expert for mine in members for expert in mine]
    pairs, place = _sorted_pairs(torch.cat([experts[a:b] for a, b in tokens] or [experts[:0]]), order, count)
    homes = torch.tensor([rank for rank, mine in enumerate(members) for _ in mine], dtype=torch.int64)
    return pairs, homes.to(experts.device)[place]


def _sorted_pairs(experts: torch.Tensor, order: Sequence[int], count: int) -> tuple[torch.Tensor, torch.Tensor]:
    """(pairs whose expert is in `order`, by its place there and then by number; these places)."""
    places = torch.full((count,), len(order), dtype=torch.int64)
    places[torch.tensor([*order], dtype=torch.int64)] = torch.arange(len(order))
    place, pairs = places.to(experts.device)[checked(experts, count).flatten()].sort(stable=True)
    if len(order) < count:
        there = int((place < len(order)).sum())
        place, pairs = place[:there], pairs[:there]
    return pairs, place


def _rows(x: torch.Tensor, slots: int, pairs: torch.Tensor) -> torch.Tensor:
    """The rows of these pairs."""
    return x.flatten(0, 1)[pairs] if x.ndim > 2 else x[pairs // slots]


def _spans(expert: torch.Tensor, count: int) -> list[tuple[int, int]]:
    """Where each expert's rows begin and end."""
    counts = torch.bincount(expert[0], minlength=count).tolist()
    return [*pairwise(accumulate(counts, initial=0))]
