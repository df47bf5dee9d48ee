"""What is known of classes of programs: XLA's bytes and a person's, and the check that holds ours to them."""

from __future__ import annotations

import dataclasses
from collections.abc import Callable
from dataclasses import dataclass

import counting
from layers import FULL, SMALL, Sizes, Tensor, floats
from programs import Fd, outputs

import meshfuse as mf
from defining import taken_over
from interpreter import has_reference, interpret
from meshfuse.costs import BYTES_ONLY, BYTES_ONLY_FLOPS
from meshfuse.plans.plan_cost import plan_cost
from meshfuse.testing import assert_same_as_unsharded

# So large that eight ranks share each head, too, as they do at full size.
RUN = dataclasses.replace(SMALL, width=128)


@dataclass(frozen=True, slots=True)
class Known:
    """A program, and its MB per rank as XLA and a person would have it.

    gflop: what a rank computes by hand, where a person repeats work on all ranks to send less. A plan may then send
        more, no more than XLA's, if its step takes less time.
    """

    build: Callable[[Fd, Sizes], None]
    xla: float
    hand: float
    gflop: float | None = None

    def defined(self, sizes: Sizes) -> mf.FusionDefinition:
        with mf.FusionDefinition() as fd:
            self.build(fd, sizes)
        return fd

    def check(self) -> mf.FusionDefinition:
        """No more than the better of the two, by a plan that gives right numbers and sends as many bytes as it says.

        The plan runs at small sizes, which take it over; a program that cannot (`Rewriting.sized`) is planned anew for
        them. Gives the definition at full size, planned.
        """
        fd = self.defined(FULL)
        found = fd.bill().total / 1e6
        # An index of 64 bits is twice that of the figures: 15 KB of 4096 of them.
        if self.gflop is None:
            assert found <= max(min(self.xla, self.hand) + 0.015, self.hand * 1.002)
        else:
            by_hand = self.hand * 1e6 / BYTES_ONLY.bandwidth + self.gflop * 1e9 / BYTES_ONLY_FLOPS
            assert found <= self.xla and plan_cost(fd.compile().planned).seconds <= by_hand
        small = self.defined(RUN)
        taken_over(small, fd)
        check_run(small)
        return fd


def check_run(fd: mf.FusionDefinition) -> None:
    """Numbers as torch's where it has all of the ops, and as many bytes sent as the bill says."""
    inputs = counting.random_inputs(fd)
    assert_same_as_unsharded(fd, inputs, interpret(fd, inputs) if has_reference(fd) else None)
    assert counting.executed_bytes(fd, inputs) == fd.bill().total


class Classes(dict[str, Known]):
    """Programs by name."""

    def known(
        self, xla: float, hand: float, gflop: float | None = None
    ) -> Callable[[Callable[[Fd, Sizes], None]], None]:
        def register(build: Callable[[Fd, Sizes], None]) -> None:
            self[build.__name__] = Known(build, xla, hand, gflop)

        return register


def by_hand(fd: Fd, q: Tensor, k: Tensor, v: Tensor) -> Tensor:
    """Causal attention of [B, H, S, K] in products and a softmax."""
    ops, length = fd.ops, q.type.shape[2]
    rows = ops.broadcast(ops.iota(length), [False, True])
    columns = ops.broadcast(ops.iota(length), [True, False])
    scores = ops.where(ops.ge(rows, columns), ops.matmul(q, ops.permute(k, [0, 1, 3, 2])) * 0.125, -1e30)
    return ops.matmul(ops.softmax(scores, -1), v)


def loss_of_a_head(fd: Fd, s: Sizes, words: int) -> tuple[Tensor, list[Tensor], list[Tensor]]:
    """Its indices; its rows and their gradient; its head, of so many words, and that one's gradient.

    Every target counts: what a count of targets costs in planning is in docs/limits.md.
    """
    x, w = floats(fd, s.batch, s.length, s.width), floats(fd, words, s.width)
    index = fd.define_tensor([s.batch, s.length], dtype=mf.DataType.Int)
    loss = fd.ops.cross_entropy(fd.ops.linear(x, w), index, ignore_index=None)
    dx, dw = fd.grad(loss, [x, w])
    outputs(fd, loss, dx, dw)
    return index, [x, dx], [w, dw]
