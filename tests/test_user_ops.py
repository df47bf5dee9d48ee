"""Ops of the user's own: right on every mesh, registered and taken back, and refused where they are none."""

from __future__ import annotations

import dataclasses
import re
from collections.abc import Callable, Iterator
from typing import Any

import pytest
import torch
import torch.nn.functional as F
from hypothesis import given, settings

import meshfuse as mf
from defining import rebuilt
from meshfuse.testing import annotations, assert_same_as_unsharded, check_op, definitions, inputs_for
from user_ops import DOUBLE, USERS, scaled_product


@pytest.mark.slow
@pytest.mark.parametrize("op", USERS, ids=lambda op: op.name)
def test_ops_made_of_a_torch_function_are_right(op: mf.OpDef) -> None:
    check_op(op, max_examples=6)


@pytest.fixture
def registered() -> Iterator[None]:
    for op in USERS:
        mf.register_op(op)
    yield
    for op in USERS:
        mf.unregister_op(op)


@pytest.mark.slow
@pytest.mark.usefixtures("registered")
def test_a_registered_op_is_one_of_fd_ops() -> None:
    mesh = mf.DeviceMesh((4,), ("x",))
    with mf.FusionDefinition() as fd:
        x, weight = fd.define_tensor([2, 3, 64, 64], dtype=DOUBLE), fd.define_tensor([3, 3, 3], dtype=DOUBLE)
        y = fd.ops.depthwise_conv2d(x, weight)
        fd.add_output(y)
        for grad in fd.grad(y, [x, weight]):
            fd.add_output(grad)
        fd.mesh_split(x, mesh, [None, None, "x", None])
    tensors = [torch.randn(2, 3, 64, 64, dtype=torch.float64), torch.randn(3, 3, 3, dtype=torch.float64)]
    leaves = [t.clone().requires_grad_() for t in tensors]
    wanted = F.conv2d(leaves[0], leaves[1][:, None], padding=1, groups=3)
    expected = [wanted, *torch.autograd.grad(wanted.sum(), leaves)]
    for found, one in zip(fd.simulate(tensors, check_replicas=True), expected, strict=True):
        torch.testing.assert_close(found, one)
    assert len(fd._programs.compiled) == 1 and str(fd.output_shardings()[0]) == "[-, -, x, -]"
    assert fd.bill().total < tensors[0].nbytes / 2
    assert "OP.depthwise_conv2d" in str(fd.host_program(1)) and "test_user_ops.py" in str(fd.host_program(1))
    assert "depthwise_conv2d" in fd.explain(y) and "depthwise_conv2d" in dir(fd.ops)
    again = rebuilt(fd)
    assert repr(again) == repr(fd)
    torch.testing.assert_close(again.simulate(tensors)[0], expected[0])


@pytest.mark.usefixtures("registered")
def test_registered_ops_are_drawn_by_their_names() -> None:
    names, seen = [op.name for op in USERS], set[str]()

    @settings(max_examples=20, deadline=None, database=None)
    @given(definitions(ops=names, max_ops=3))
    def drawn(fd: mf.FusionDefinition) -> None:
        seen.update(re.findall(r"fd\.ops\.(\w+)", repr(fd)))

    drawn()
    assert seen.intersection(names)


def _split(x: torch.Tensor, _: int = 3) -> torch.Tensor:
    return x.reshape(x.shape[0] // 3, 3, x.shape[1])


EMPTY: list[tuple[str, Any, tuple[tuple[int, ...], ...], tuple[int, ...]]] = [
    ("scaled_product", lambda x, w: x @ w.T * 2.0, ((0, 4, 6), (3, 6)), ()),
    ("scaled_product", lambda x, w: x @ w.T * 2.0, ((2, 4, 0), (3, 0)), ()),
    ("scaled_product", lambda x, w: x @ w.T * 2.0, ((2, 4, 6), (0, 6)), ()),
    ("previous_product", lambda x, y: F.pad(x, (2, 0), value=1.0)[:, :-2] * x * y, ((3, 0), (3, 0)), ()),
    ("previous_product", lambda x, y: F.pad(x, (2, 0), value=1.0)[:, :-2] * x * y, ((0, 7), (0, 7)), ()),
    ("split_heads", _split, ((0, 4),), (3,)),
    ("split_heads", _split, ((6, 0),), (3,)),
]


@pytest.mark.usefixtures("registered")
@pytest.mark.parametrize("is_open", [False, True], ids=["known", "open"])
@pytest.mark.parametrize(("name", "reference", "shapes", "numbers"), EMPTY)
def test_a_users_op_of_empty_tensors_is_right(
    name: str, reference: Any, shapes: Any, numbers: Any, is_open: bool
) -> None:
    """Dims of size 0, of every part that they have in rules, whole and sharded; and the gradients."""
    values = [torch.randn(shape, dtype=torch.float64, requires_grad=True) for shape in shapes]
    wanted = reference(*values)
    for split in (None, *range(len(shapes[0]))):
        fd = mf.FusionDefinition()
        tensors = [fd.define_tensor([-1 if is_open else n for n in shape], dtype=DOUBLE) for shape in shapes]
        y = getattr(fd.ops, name)(*tensors, *numbers)
        for t in (y, *fd.grad(y, tensors)):
            fd.add_output(t)
        fd.mesh_split(
            tensors[0], mf.DeviceMesh((2,), ("x",)), ["x" if d == split else None for d in range(len(shapes[0]))]
        )
        found = fd.simulate([t.detach() for t in values], check_replicas=True)
        for one, expected in zip(
            found, (wanted, *torch.autograd.grad(wanted.sum(), values, retain_graph=True)), strict=True
        ):
            torch.testing.assert_close(one, expected.detach())


@pytest.mark.slow
@pytest.mark.usefixtures("registered")
@settings(max_examples=13)
@given(definitions(ops=USERS, families=["shapes"], max_ops=6).flatmap(annotations))
def test_random_programs_of_users_ops(fd: mf.FusionDefinition) -> None:
    assert_same_as_unsharded(fd, inputs_for(fd))


def _named(name: Any) -> mf.OpDef:
    return dataclasses.replace(scaled_product, name=name, adjoints=())


@pytest.mark.usefixtures("registered")
@pytest.mark.parametrize(
    ("op", "text"),
    [
        (print, "register_op: found <built-in function print> (builtin_function_or_method), needed an OpDef"),
        (_named("scaled_product"), "register_op: 'scaled_product' is registered already"),
        (_named("scaled_product_bwd_x"), "register_op: 'scaled_product_bwd_x' is registered already"),
        (_named("linear"), "register_op: meshfuse has an op 'linear': needed a new name"),
        (_named("softmax"), "register_op: meshfuse has an op 'softmax': needed a new name"),
        (_named("two words"), "register_op: the op's name: found 'two words', needed a Python name"),
        (_named("_private"), "register_op: the op's name: found '_private', needed a Python name"),
        (_named("lambda"), "register_op: the op's name: found 'lambda', needed a Python name"),
    ],
)
def test_what_cannot_be_registered(op: Any, text: str) -> None:
    with pytest.raises(mf.DefinitionError, match=re.escape(text)) as caught:
        mf.register_op(op)
    assert "test_user_ops.py" in str(caught.value)


def test_an_op_taken_back_is_gone() -> None:
    mf.register_op(scaled_product)
    mf.unregister_op("scaled_product")
    with pytest.raises(mf.DefinitionError, match=r"meshfuse has no op 'scaled_product'.*mf.register_op adds one"):
        mf.FusionDefinition().ops.scaled_product  # noqa: B018
    with pytest.raises(mf.DefinitionError, match="unregister_op: 'scaled_product' is not registered"):
        mf.unregister_op(scaled_product)


@pytest.mark.parametrize(
    ("rule", "text"),
    [
        ("b k", "a factor rule: found 'b k', needed 'operand, ... -> result, ...'"),
        ("b & -> b", "rule 'b & -> b': found '&', needed letters"),
        ("b t~ -> b", r"rule 'b t~ -> b': t~: found a result without it, needed it in every result"),
        ("a, b, c -> a b c", "torch_op: <lambda> has too few parameters: found 1, needed a tensor for each of the 3"),
    ],
)
def test_rules_that_cannot_be_read(rule: str, text: str) -> None:
    with pytest.raises(mf.DefinitionError, match=re.escape(text)):
        mf.torch_op(rule)(lambda x: x)


@pytest.mark.parametrize(
    ("text", "given"),
    [
        ("blocked: found 'q', needed factors of the rule, of ['a', 'b']", {"blocked": "q"}),
        ("reduce: found 'avg', needed one of sum, prod, max, min", {"reduce": "avg"}),
        ("partial: found 'x', needed an mf.Partial", {"partial": "x"}),
        ("samples: found 3, needed a list of mf.Sample", {"samples": 3}),
        ("samples: found [3], needed a list of mf.Sample", {"samples": [3]}),
        *[("needed elements before and after for 'a'", {"halo": v}) for v in (None, 3, {}, {"a": 1}, {"a": (1, -1)})],
    ],
)
def test_claims_that_no_rule_has(text: str, given: dict[str, Any]) -> None:
    rule = "a~ b -> a b" if "halo" in given else "a b -> a b"
    with pytest.raises(mf.DefinitionError, match=re.escape(text)) as caught:
        mf.torch_op(rule, **given)
    assert "(at test_user_ops.py:" in str(caught.value)


@pytest.mark.parametrize("what", [None, 3, torch.relu])
def test_what_is_no_function_and_no_op(what: Any) -> None:
    with pytest.raises(mf.DefinitionError, match="needed a Python function"):
        mf.torch_op("a -> a")(what)
    with pytest.raises(mf.DefinitionError, match=r"check_op: found .*, needed an OpDef"):
        check_op(what)


def test_calls_that_do_not_fit_the_rule() -> None:
    fd = mf.FusionDefinition()
    x, weight, row = (fd.define_tensor(list(shape), dtype=DOUBLE) for shape in ((2, 6), (3, 5), (6,)))
    with pytest.raises(mf.DefinitionError, match=r"rule 'b\* k, n k -> b\* n': sizes of 'k' differ: found 5 and 6"):
        fd.call(scaled_product, (x, weight))
    with pytest.raises(mf.DefinitionError, match="has the wrong number of dims: found 1, needed those of 'n k'"):
        fd.call(scaled_product, (x, row))


def _window_sums(width: int) -> Callable[[torch.Tensor], torch.Tensor]:
    """The sums of all windows of so many elements along the first dim."""

    def sums(x: torch.Tensor) -> torch.Tensor:
        run = torch.cat([x.new_zeros(1, *x.shape[1:]), x.cumsum(0)])
        return run[width:] - run[:-width]

    return sums


@pytest.mark.parametrize("halo", [(3, 1), (8, 0), (6, 7), (30, 2), (0, 100), (50_000, 50_000), (1_000_000, 0)], ids=str)
@pytest.mark.parametrize("n", [8, 9, 3])
@pytest.mark.timeout(60)
def test_a_halo_wider_than_its_dim_is_right(n: int, halo: tuple[int, int]) -> None:
    """Than a block, than all blocks, and by far: the numbers are right, and it takes no time by its width."""
    function = _window_sums(sum(halo) + 1)
    op = mf.register_op(mf.torch_op("a~ b -> a b", name="window_sums", halo={"a": halo}, fill=0.0)(function))
    try:
        fd = mf.FusionDefinition()
        x = fd.define_tensor([n, 2], dtype=mf.DataType.Double)
        y = fd.ops.window_sums(x)
        fd.add_output(y)
        fd.add_output(fd.grad(fd.ops.sum(fd.ops.mul(y, y)), x))
        fd.mesh_split(x, mf.DeviceMesh((4,), ("x",)), ["x", None])
        given = torch.randn(n, 2, dtype=torch.float64, generator=torch.Generator().manual_seed(n)).requires_grad_()
        found, grad = fd.simulate([given.detach()])
        assert len(fd.compile().graph.nodes) < 200
    finally:
        mf.unregister_op(op)
    wanted = function(torch.nn.functional.pad(given, [0, 0, *halo]))
    torch.testing.assert_close(found, wanted)
    torch.testing.assert_close(grad, torch.autograd.grad((wanted * wanted).sum(), given)[0])
