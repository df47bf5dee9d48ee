"""Classes of programs whose best plan is several changes away from what ops ask for; figures as in bill_classes."""

from __future__ import annotations

from layers import Sizes, Tensor, floats, mlp, one_hot
from programs import Fd, gradients, outputs, split

import meshfuse as mf
from bill_known import Classes

CLASSES = Classes()
known = CLASSES.known
D2_S2_T2 = mf.DeviceMesh((2, 2, 2), ("dp", "sp", "tp"))
DP2_EP4 = mf.DeviceMesh((2, 4), ("dp", "ep"))


@known(23.07, 9.44)
def a_product_of_operands_split_crosswise(fd: Fd, s: Sizes) -> None:
    """Rows stay on two axes and columns go to the third: 1 AG of half of x, and w moves by a permute."""
    x, w = floats(fd, s.tokens, s.width), floats(fd, s.width, s.hidden)
    outputs(fd, fd.ops.matmul(x, w))
    split(fd, D2_S2_T2, (x, [("sp", "dp"), "tp"]), (w, [("tp", "dp"), "sp"]))  # type: ignore[list-item]


@known(23.07, 9.44)
def a_product_summed_over_the_axis_of_both_columns_and_rows(fd: Fd, s: Sizes) -> None:
    x, w = floats(fd, s.tokens, s.width), floats(fd, s.width, s.hidden)
    outputs(fd, fd.ops.matmul(x, w))
    split(fd, D2_S2_T2, (x, [("dp", "sp"), "tp"]), (w, ["tp", ("dp", "sp")]))  # type: ignore[list-item]


def two_experts_each(fd: Fd, s: Sizes, x: Tensor, router: Tensor, w1: Tensor, w2: Tensor) -> Tensor:
    """Tokens go to their two likeliest experts, as in GShard (2020); capacity of all."""
    ops, places = fd.ops, 2 * s.capacity
    groups, length, width = x.type.shape
    likely = ops.softmax(ops.matmul(x, router), -1)
    first = one_hot(fd, ops.argmax(likely, -1), s.experts)
    second = one_hot(fd, ops.argmax(likely * (1.0 - first), -1), s.experts)
    combine, taken = None, ops.sum(first, [1], keepdim=True)
    for chosen, before in ((first, 0.0), (second, taken)):
        place = ops.sum((ops.cumsum(chosen, 1) + before) * chosen, [-1]) - 1.0
        slots = one_hot(fd, ops.cast(place, mf.DataType.Int), places)
        gate = chosen * ops.sum(likely * chosen, [-1], keepdim=True)
        part = ops.broadcast(gate, [False, False, False, True]) * ops.broadcast(slots, [False, False, True, False])
        combine = part if combine is None else combine + part
    assert combine is not None
    combine = ops.reshape(combine, [groups, length, s.experts * places])
    sent = ops.matmul(ops.permute(ops.cast(ops.gt(combine, 0.0), mf.DataType.Float), [0, 2, 1]), x)
    by_expert = ops.permute(ops.reshape(sent, [groups, s.experts, places, width]), [1, 0, 2, 3])
    made = mlp(fd, ops.reshape(by_expert, [s.experts, groups * places, width]), w1, w2)
    by_group = ops.permute(ops.reshape(made, [s.experts, groups, places, width]), [1, 0, 2, 3])
    return ops.matmul(combine, ops.reshape(by_group, [groups, s.experts * places, width]))


@known(235.0, 38.92)
def gradients_of_two_experts_for_each_token(fd: Fd, s: Sizes) -> None:
    """3 permutes of experts' rows, and 2 AG over dp of gradients, which no rank needs to reduce: those of dp share each
    expert's hidden dim, not its rows (4 all-to-alls and 2 AR would send 58.7).
    """
    x, router = floats(fd, s.batch, s.length, s.width), floats(fd, s.width, s.experts)
    w1, w2 = floats(fd, s.experts, s.width, s.expert_hidden), floats(fd, s.experts, s.expert_hidden, s.width)
    made = gradients(fd, two_experts_each(fd, s, x, router, w1, w2), [router, w1, w2])
    split(fd, DP2_EP4, (x, [("dp", "ep"), None, None]))  # type: ignore[list-item]
    for w in (w1, w2, *made[1:]):
        split(fd, DP2_EP4, (w, ["ep", None, None]))
    split(fd, DP2_EP4, (made[0], [None, None]))


test_no_more_than_xla_and_a_plan_by_hand, test_the_plan_is_right_and_sends_what_it_says = CLASSES.tests()
