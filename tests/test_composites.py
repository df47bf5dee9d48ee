"""Composites against torch, on one rank and with the dim that they reduce over sharded."""

from __future__ import annotations

import contextlib
from collections.abc import Callable
from typing import Any

import pytest
import torch
import torch.nn.functional as F

import meshfuse as mf
from meshfuse.ops.binding import of_kind
from meshfuse.ops.values import REQUIRED, ParamKind

Build = Callable[..., Any]
X = torch.randn(4, 6, 10, generator=torch.Generator().manual_seed(1))
TARGETS = torch.tensor([[9, 0, 4, 3, 3, 7]] * 4)
CASES: dict[str, tuple[Build, Callable[[torch.Tensor], torch.Tensor]]] = {
    "gelu": (lambda fd, x: fd.ops.gelu(x), F.gelu),
    "gelu by tanh": (
        lambda fd, x: fd.ops.gelu(x, "tanh"),
        lambda x: F.gelu(x, approximate="tanh"),
    ),
    "softmax": (lambda fd, x: fd.ops.softmax(x, -1), lambda x: x.softmax(-1)),
    "softmax of dim 1": (lambda fd, x: fd.ops.softmax(x, 1), lambda x: x.softmax(1)),
    "log_softmax": (lambda fd, x: fd.ops.log_softmax(x), lambda x: x.log_softmax(-1)),
    "logsumexp": (lambda fd, x: fd.ops.logsumexp(x, -1), lambda x: x.logsumexp(-1)),
    "logsumexp of two dims": (
        lambda fd, x: fd.ops.logsumexp(x, [0, 2], True),
        lambda x: x.logsumexp((0, 2), True),
    ),
    "logsumexp of all": (lambda fd, x: fd.ops.logsumexp(x, None), lambda x: x.logsumexp((0, 1, 2))),
    "mean": (lambda fd, x: fd.ops.mean(x), lambda x: x.mean()),
    "mean of a dim": (lambda fd, x: fd.ops.mean(x, -1, True), lambda x: x.mean(-1, keepdim=True)),
    "layer_norm": (lambda fd, x: fd.ops.layer_norm(x, [10]), lambda x: F.layer_norm(x, [10])),
    "rms_norm": (
        lambda fd, x: fd.ops.rms_norm(x, [6, 10], eps=1e-6),
        lambda x: F.rms_norm(x, [6, 10], eps=1e-6),
    ),
    "argmax": (lambda fd, x: fd.ops.argmax(x, -1), lambda x: x.argmax(-1)),
    "argmax of all": (lambda fd, x: fd.ops.argmax(x), lambda x: x.argmax()),
    "argmax of all in their place": (lambda fd, x: fd.ops.argmax(x, None, True), lambda x: x.argmax(None, True)),
}
SPECS = {
    "one rank": ((1,), ("x",), [None, None, None]),
    "last dim": ((2,), ("x",), [None, None, "x"]),
    "last dim uneven": ((3,), ("x",), [None, None, "x"]),
    "two dims": ((2, 3), ("x", "y"), ["x", None, "y"]),
    "more ranks than elements": ((12,), ("x",), [None, None, "x"]),
    "two axes": ((2, 2), ("x", "y"), [None, None, ["y", "x"]]),
}


def _run(build: Build, spec: str, inputs: list[torch.Tensor]) -> torch.Tensor:
    (out,) = _run_all(lambda fd, *given: [build(fd, *given)], spec, inputs)
    return out


def _run_all(build: Callable[..., list[Any]], spec: str, inputs: list[torch.Tensor]) -> list[torch.Tensor]:
    shape, names, dims = SPECS[spec]
    fd = mf.FusionDefinition(seed=1)
    x, *rest = (fd.define_tensor(list(t.shape), dtype=mf.DataType[_name(t)]) for t in inputs)
    for out in build(fd, x, *rest):
        fd.add_output(out)
    fd.mesh_split(x, mf.DeviceMesh(shape, names), dims[-x.ndim :])
    return list(fd.simulate(inputs))


def _name(t: torch.Tensor) -> str:
    return next(d.name for d in mf.DataType if d.value == str(t.dtype).removeprefix("torch."))


@pytest.mark.sampled(2)
@pytest.mark.slow
@pytest.mark.parametrize("spec", SPECS)
@pytest.mark.parametrize("name", CASES)
def test_a_composite_computes_what_torch_does(name: str, spec: str) -> None:
    build, reference = CASES[name]
    found, wanted = _run(build, spec, [X]), reference(X.double())
    assert found.shape == wanted.shape
    torch.testing.assert_close(found, wanted.to(found.dtype), rtol=2e-5, atol=2e-6)


@pytest.mark.parametrize("name", [name for name in CASES if "argmax" not in name])
def test_half_precision_comes_back_as_half(name: str) -> None:
    build, reference = CASES[name]
    found = _run(build, "last dim", [X.half()])
    assert found.dtype == torch.float16
    torch.testing.assert_close(found, reference(X.half().double()).half(), rtol=2e-3, atol=1e-3)


# Which targets are the one that is ignored: some, those of whole rows, all, none.
IGNORED: dict[str, Any] = {
    "some": (0, slice(3)), "rows": slice(1, 4), "all": slice(None), "none": slice(0),
}  # fmt: skip
# Every spec with every choice of targets, and all pairs of two parameters.
LOSSES = [
    (spec, which, ("mean", "sum", "none")[(i + j) % 3], (None, 3)[(i // 3 + j) % 2])
    for i, spec in enumerate(SPECS) for j, which in enumerate(IGNORED)
]  # fmt: skip


@pytest.mark.slow
@pytest.mark.parametrize(("spec", "which", "reduction", "ignore"), LOSSES)
def test_cross_entropy_leaves_ignored_targets_out(spec: str, which: str, reduction: str, ignore: int | None) -> None:
    """-100 unless another is named, which may be a class. As in torch the mean of no rows is NaN, with gradient 0."""
    given: dict[str, Any] = {} if ignore is None else {"ignore_index": ignore}
    targets = TARGETS.clone()
    targets[IGNORED[which]] = given.get("ignore_index", -100)
    seed = torch.randn(() if reduction != "none" else (4, 6), generator=torch.Generator().manual_seed(2)).double()

    def build(fd: Any, x: Any, t: Any, dy: Any) -> list[Any]:
        loss = fd.ops.cross_entropy(x, t, reduction, **given)
        return [loss, fd.grad(loss, x, dy)]

    found = _run_all(build, spec, [X.double(), targets, seed])
    x = X.double().requires_grad_()
    wanted = F.cross_entropy(x.movedim(-1, 1), targets, reduction=reduction, **given)
    (by_x,) = torch.autograd.grad(wanted, [x], seed)
    torch.testing.assert_close(found, [wanted.detach(), by_x], rtol=1e-12, atol=1e-12, equal_nan=True)


@pytest.mark.parametrize("target", [2, -100])
@pytest.mark.parametrize("reduction", ["mean", "sum", "none"])
def test_cross_entropy_of_one_row_without_a_batch(target: int, reduction: str) -> None:
    fd = mf.FusionDefinition()
    x, t = fd.define_tensor([10]), fd.define_tensor([], dtype=mf.DataType.Int)
    fd.add_output(fd.ops.cross_entropy(x, t, reduction))
    fd.mesh_split(x, mf.DeviceMesh((2,), ("x",)), ["x"])
    (found,) = fd.simulate([X[0, 0], torch.tensor(target)])
    wanted = F.cross_entropy(X[0, 0], torch.tensor(target), reduction=reduction)
    torch.testing.assert_close(found, wanted, equal_nan=True)


@pytest.mark.parametrize("dtype", [torch.uint8, torch.int8, torch.int16, torch.int32])
def test_a_target_is_not_ignored_for_the_bits_of_the_ignored_one(dtype: torch.dtype) -> None:
    """-100 as an unsigned byte would be 156, which may be a class."""
    x, targets = X.reshape(1, 240), torch.tensor([156 if dtype == torch.uint8 else 100]).to(dtype)
    found = _run_all(lambda fd, x, t: [fd.ops.cross_entropy(x, t)], "last dim", [x, targets])
    torch.testing.assert_close(found[0], F.cross_entropy(x, targets.long()), rtol=2e-5, atol=2e-6)


@pytest.mark.parametrize("ignore", [-100, 3, None])
@pytest.mark.parametrize("wrong", [10, -1, -100])
def test_other_targets_that_are_no_class_are_errors(ignore: int | None, wrong: int) -> None:
    targets = TARGETS.clone()
    targets[2, 1] = wrong
    with contextlib.nullcontext() if wrong == ignore else pytest.raises(mf.KernelError, match=f"found {wrong} in "):
        _run(lambda fd, x, t: fd.grad(fd.ops.cross_entropy(x, t, "mean", ignore), x), "last dim", [X, targets])


@pytest.mark.parametrize("name", ["mean", "logsumexp"])
def test_dim_is_another_name_of_dims(name: str) -> None:
    """As for the reductions of the table."""
    (found, wanted) = (_run(lambda fd, x, k=k: getattr(fd.ops, name)(x, **k), "last dim", [X])
                       for k in ({"dim": -1}, {"dims": [-1]}))  # fmt: skip
    assert torch.equal(found, wanted)
    with pytest.raises(mf.DefinitionError, match=f"{name}: .*'dims'"):
        _run(lambda fd, x: getattr(fd.ops, name)(x, 0, dim=-1), "last dim", [X])


def test_layer_norm_takes_weight_and_bias() -> None:
    weight, bias = torch.randn(10), torch.randn(10)
    found = _run(lambda fd, x, w, b: fd.ops.layer_norm(x, [10], w, b), "last dim", [X, weight, bias])
    wanted = F.layer_norm(X.double(), [10], weight.double(), bias.double())
    torch.testing.assert_close(found, wanted.float(), rtol=2e-5, atol=2e-6)


# gelu of infinity and layer_norm of the largest floats are left out: torch's own are NaN, or 0, by how it rounds.
SPECIAL: dict[str, tuple[Build, Callable[[torch.Tensor], torch.Tensor]]] = {
    **{name: CASES[name] for name in CASES if not name.startswith(("gelu", "layer_norm"))},
    "cross_entropy": (
        lambda fd, x: fd.ops.cross_entropy(x, fd.ops.full([4, 6], 3, mf.DataType.Int), "none"),
        lambda x: F.cross_entropy(x.movedim(-1, 1), torch.full((4, 6), 3), reduction="none"),
    ),
}


@pytest.mark.sampled(2)
@pytest.mark.parametrize("spec", ["one rank", "last dim uneven", "two axes"])
@pytest.mark.parametrize("name", SPECIAL)
@pytest.mark.parametrize("value", [float("inf"), float("-inf"), float("nan")])
def test_what_is_no_number_is_as_in_torch(name: str, value: float, spec: str) -> None:
    """One in a row, some, all but one, all, in one column, and beside its opposite."""
    build, reference = SPECIAL[name]
    x = X.clone()
    x[0, 0, 3], x[0, 1, [2, 7]], x[1, 2, 1:], x[1, 3], x[2, :, 4] = (value,) * 5
    x[3, 1, 2], x[3, 1, 7] = value, -value
    wanted = reference(x.double())
    torch.testing.assert_close(_run(build, spec, [x]).double(), wanted.double(), rtol=2e-5, atol=2e-6, equal_nan=True)


def test_dropout_drops_the_same_on_every_mesh_and_keeps_the_mean() -> None:
    ones = torch.ones(40, 60, 10)
    found = [_run(lambda fd, x: fd.ops.dropout(x, 0.25), spec, [ones]) for spec in SPECS]
    assert all(torch.equal(found[0], other) for other in found[1:])
    assert found[0].unique().tolist() == pytest.approx([0.0, 4 / 3])
    assert abs(float(found[0].mean()) - 1.0) < 0.02


def test_dropout_outside_training_changes_nothing() -> None:
    assert torch.equal(_run(lambda fd, x: fd.ops.dropout(x, 0.5, False), "last dim", [X]), X)


def test_argmax_takes_the_first_of_equal_elements() -> None:
    x = torch.tensor([[[1.0, 3.0, 3.0, 2.0]]])
    assert int(_run(lambda fd, t: fd.ops.argmax(t, -1), "last dim", [x])) == 1


@pytest.mark.parametrize(
    ("build", "text"),
    [
        (
            lambda fd, x: fd.ops.gelu(x, "sigmoid"),
            "gelu: approximate: found 'sigmoid', needed 'none' or 'tanh'",
        ),
        (lambda fd, x: fd.ops.dropout(x, 1.5), "dropout: p: found 1.5, needed 0 to 1. Pass the share"),
        (lambda fd, x: fd.ops.layer_norm(fd.ops.sum(x), [1]), "a norm over the last dims: found Float.*Reshape it"),
        (lambda fd, x: fd.ops.argmax(fd.ops.full([0, 3], 1.0, x.dtype), 0), "has no largest element.*Leave it out"),
        (lambda fd, x: fd.ops.cross_entropy(x, x, "max"), "cross_entropy: reduction: found 'max'"),
        (lambda fd, x: fd.ops.layer_norm(x, []), r"normalized_shape: found \[\], needed 1 to 3 sizes"),
    ],
)
def test_a_wrong_argument_is_an_error(build: Build, text: str) -> None:
    fd = mf.FusionDefinition()
    with pytest.raises(mf.DefinitionError, match=text):
        build(fd, fd.define_tensor([4, 6, 10]))


@pytest.mark.parametrize("kind", ParamKind)
def test_none_is_accepted_where_documented(kind: ParamKind) -> None:
    taken = of_kind(kind, None, lambda value: value)
    assert taken is (None if kind.value.endswith("or None") else REQUIRED)


@pytest.mark.parametrize("n", [1, 5])
@pytest.mark.parametrize("what", ["weight", "bias"])
def test_open_parameters_of_norms_are_not_repeated(what: str, n: int) -> None:
    fd = mf.FusionDefinition()
    x, given = fd.define_tensor([-1, -1]), fd.define_tensor([-1])
    fd.add_output(fd.ops.layer_norm(x, [10], **{what: given}))
    with pytest.raises(
        mf.DefinitionError, match=rf"found Float\[{n}\], needed \[10\].* of a norm's parameters its norm"
    ):
        fd.simulate([X[0], torch.ones(n)])
    (out,) = fd.simulate([X[0], torch.ones(10)])
    plain = F.layer_norm(X[0], [10])
    torch.testing.assert_close(out, plain if what == "weight" else plain + 1)
    assert "sized" not in fd.latest().graph.nodes[-1].name


@pytest.mark.parametrize("dim", [None, 0, 1])
def test_argmax_of_open_sizes_takes_no_empty_dim(dim: int | None) -> None:
    fd = mf.FusionDefinition()
    x = fd.define_tensor([-1, -1])
    fd.add_output(fd.ops.argmax(x, dim))
    for shape in ((0, 3), (3, 0)):
        empty = torch.zeros(shape)
        if dim is not None and shape[dim]:
            assert torch.equal(fd.simulate([empty])[0], empty.argmax(dim))
        else:
            with pytest.raises(mf.DefinitionError, match=r"found Float\[.*0.*argmax takes no empty dim"):
                fd.simulate([empty])
    assert torch.equal(fd.simulate([X[0]])[0], X[0].argmax(dim))
