"""Classes of programs with fewer experts, heads or nets than ranks, which share one; figures as in `general`."""

from __future__ import annotations

from layers import Sizes, Tensor, floats
from programs import EP8, TP8, Fd, Spec, gradients, outputs, split

from .known import Classes, by_hand

CLASSES = Classes()
known = CLASSES.known
FEW = 4


def experts(fd: Fd, s: Sizes, first: Spec, second: Spec) -> tuple[Tensor, list[Tensor]]:
    """Two products of four experts, rows split; the weights lie as said."""
    x = floats(fd, FEW, s.tokens // 2, s.width)
    w1, w2 = (floats(fd, FEW, s.width, s.width) for _ in range(2))
    y = fd.ops.matmul(fd.ops.relu(fd.ops.matmul(x, w1)), w2)
    split(fd, EP8, (x, [None, "ep", None]), (w1, first), (w2, second))
    return y, [w1, w2]


@known(29.36, 13.64)
def four_experts_on_eight_ranks(fd: Fd, s: Sizes) -> None:
    """Two ranks share an expert: rows come by an all-to-all among four, weights by another and a gather among two."""
    y, _ = experts(fd, s, [None, None, "ep"], [None, "ep", None])
    split(fd, EP8, (y, [None, "ep", None]))
    outputs(fd, y)


@known(58.72, 17.83)
def their_gradients(fd: Fd, s: Sizes) -> None:
    """Rows stay with the experts, which come once for the forward and the backward; gradients go back as they came."""
    y, weights = experts(fd, s, [None, "ep", None], [None, "ep", None])
    gradients(fd, y, weights)


@known(22.02, 17.31)
def six_experts_on_eight_ranks(fd: Fd, s: Sizes) -> None:
    """Four ranks share three experts, with a quarter of the rows each."""
    x, w = floats(fd, 6, s.tokens // 2, s.width), floats(fd, 6, s.width, s.width)
    y = fd.ops.matmul(x, w)
    split(fd, EP8, (x, [None, "ep", None]), (w, [None, None, "ep"]), (y, [None, "ep", None]))
    outputs(fd, y)


def few_heads(fd: Fd, s: Sizes, heads: int = FEW) -> list[Tensor]:
    qkv = [floats(fd, 1, heads, s.tokens, s.head) for _ in range(3)]
    split(fd, TP8, *((t, [None, None, "tp", None]) for t in qkv))
    return qkv


@known(7.34, 2.63)
def attention_by_hand_of_four_heads(fd: Fd, s: Sizes) -> None:
    """Two ranks share a head: half of the queries each, all of its keys and values."""
    y = by_hand(fd, *few_heads(fd, s))
    outputs(fd, y)
    split(fd, TP8, (y, [None, None, "tp", None]))


@known(7.34, 2.63)
def attention_of_four_heads(fd: Fd, s: Sizes) -> None:
    """The same of the op."""
    y = fd.ops.sdpfa_fwd(*few_heads(fd, s), is_causal=True)[0]
    outputs(fd, y)
    split(fd, TP8, (y, [None, None, "tp", None]))


@known(12.85, 3.22)
def attention_of_seven_heads(fd: Fd, s: Sizes) -> None:
    """One head on each of seven ranks, none on the eighth: q, k and v go there by all-to-alls, and the output back."""
    y = fd.ops.sdpfa_fwd(*few_heads(fd, s, 7), is_causal=True)[0]
    outputs(fd, y)
    split(fd, TP8, (y, [None, None, "tp", None]))


@known(25.69, 4.82)
def attention_of_seven_heads_backward(fd: Fd, s: Sizes) -> None:
    """Everything stays with the heads, and the gradients come back."""
    qkv = few_heads(fd, s, 7)
    gradients(fd, fd.ops.sdpfa_fwd(*qkv, is_causal=True)[0], qkv)


@known(25.69, 6.75)
def attention_by_hand_of_six_heads_backward(fd: Fd, s: Sizes) -> None:
    """As above, in products, with two ranks idle."""
    qkv = few_heads(fd, s, 6)
    gradients(fd, by_hand(fd, *qkv), qkv)
