"""Ops over a dim that is sharded: right on every mesh, and never a gather where a distributed form exists."""

from __future__ import annotations

import itertools
import math
from collections.abc import Callable, Sequence
from typing import Any, NamedTuple

import pytest
import torch

import meshfuse as mf
from distributed import Build, assert_close, defined, mesh_of, op_names
from meshfuse import DataType
from meshfuse.sharding.layout import Split

Reference = Callable[[torch.Tensor], Any]
X = torch.randn(12, 10, generator=torch.Generator().manual_seed(0))
X[3], X[:, 7] = X[8], X[:, 2]
# Mesh, its axes, and the axes of the two dims: in equal blocks, short, empty, on two axes, and in blocks of which each
# rank has several.
SPECS: dict[str, tuple[tuple[int, ...], Sequence[Any]]] = {
    "rows over 2": ((2,), ["x", None]),
    "columns over 2": ((2,), [None, "x"]),
    "rows over 4": ((4,), ["x", None]),
    "columns over 4, the last short": ((4,), [None, "x"]),
    "columns over 6, one empty": ((6,), [None, "x"]),
    "rows over more ranks than rows": ((14,), ["x", None]),
    "both": ((2, 3), ["x", "y"]),
    "both, the other way": ((2, 3), ["y", "x"]),
    "rows over both axes": ((2, 3), [["y", "x"], None]),
    "columns over both axes": ((2, 3), [None, ["x", "y"]]),
    "columns strided": ((2,), [None, [Split(5), Split(2, "x")]]),
    "rows strided": ((2,), [[Split(3), Split(2, "x")], None]),
    "rows strided within blocks": ((2, 3), [[Split(2, "x"), Split(2), Split(3, "y")], None]),
}


def _stable_topk(x: torch.Tensor, k: int, dim: int, largest: bool) -> tuple[torch.Tensor, ...]:
    found = torch.sort(x, dim=dim, descending=largest, stable=True)
    return found.values.narrow(dim, 0, k), found.indices.narrow(dim, 0, k)


def _welford(x: torch.Tensor, dims: list[int]) -> tuple[torch.Tensor, ...]:
    var, mean = torch.var_mean(x, dims, correction=0)
    count = math.prod(x.shape[d] for d in dims)
    return mean, var * count, torch.full(mean.shape, count)


class Case(NamedTuple):
    """An op, what it computes, and the dims that its form is for."""

    build: Build
    reference: Reference
    dims: tuple[int, ...] = ()

    def has_form(self, spec: str) -> bool:
        return any(SPECS[spec][1][d] is not None for d in self.dims)


def _topk(k: int, dim: int, largest: bool) -> Case:
    return Case(lambda fd, x: fd.ops.topk(x, k, dim, largest), lambda x: _stable_topk(x, k, dim, largest), (dim,))


def _var(name: str, dims: list[int], correction: int, keepdim: bool) -> Case:
    return Case(
        lambda fd, x: getattr(fd.ops, name)(x, dims, correction, keepdim),
        lambda x: getattr(torch, name)(x, dims, correction=correction, keepdim=keepdim),
        tuple(dims),
    )


def _scan(name: str, dim: int) -> Case:
    def reference(x: torch.Tensor) -> torch.Tensor:
        found = getattr(torch, name)(x, dim)
        return found.values if name in ("cummax", "cummin") else found

    return Case(lambda fd, x: getattr(fd.ops, name)(x, dim), reference, (dim,))


def _begun(name: str, dim: int, init: float) -> Case:
    plain = _scan(name, dim)
    begin = getattr(torch, {"cumsum": "add", "cumprod": "mul", "cummax": "maximum", "cummin": "minimum"}[name])
    return Case(
        lambda fd, x: getattr(fd.ops, name)(x, dim, init),
        lambda x: begin(plain.reference(x), torch.tensor(init, dtype=x.dtype)),
        (dim,),
    )


def _stepped(dims: tuple[int, ...], *bounds: tuple[int, int, int]) -> Case:
    starts, ends, steps = map(list, zip(*bounds, strict=True))
    cut = tuple(itertools.starmap(slice, bounds))
    return Case(lambda fd, x: fd.ops.slice(x, starts, ends, steps), lambda x: x[cut], dims)


def _selected(index: int, dim: int) -> Case:
    return Case(lambda fd, x: fd.ops.select(x, index, dim), lambda x: x.select(dim, index), (dim,))


def _sort(dim: int, descending: bool) -> Case:
    return Case(
        lambda fd, x: fd.ops.argsort(x, dim, descending),
        lambda x: torch.sort(x, dim=dim, descending=descending, stable=True).indices,
    )


def _moments(*dims: int) -> Case:
    return Case(lambda fd, x: fd.ops.welford(x, list(dims)), lambda x: _welford(x, list(dims)), dims)


CASES: dict[str, Case] = {
    "topk of rows": _topk(3, 0, True),
    "topk of columns": _topk(8, -1, True),
    "the least columns": _topk(2, 1, False),
    "rows sorted by topk": _topk(12, -2, False),
    "argsort of rows": _sort(0, False),
    "argsort of columns": _sort(-1, True),
    "var of rows": _var("var", [0], 1, False),
    "var of columns, dims kept": _var("var", [-1], 0, True),
    "var of all": _var("var", [0, 1], 1, False),
    "var_mean of columns": _var("var_mean", [1], 1, False),
    "var_mean of all, dims kept": _var("var_mean", [-2, 1], 1, True),
    "welford of rows": _moments(0),
    "welford of all": _moments(0, 1),
    **{f"{name} of dim {dim}": _scan(name, dim)
       for name in ("cumsum", "cumprod", "cummax", "cummin") for dim in (0, -1)},
    **{f"{name} of dim {dim}, begun": _begun(name, dim, 0.25)
       for name in ("cumsum", "cumprod", "cummax", "cummin") for dim in (0, 1)},
    "every third row of ten but the first": _stepped((0,), (1, 10, 3), (0, 10, 1)),
    "every third column from the fifth on": _stepped((1,), (0, 12, 1), (4, 10, 3)),
    "every fifth row of the first ten, some columns": _stepped((0, 1), (0, 10, 5), (2, 7, 1)),
    "one row by a step past the end": _stepped((0,), (7, 12, 20), (0, 10, 1)),
    "every other row and every fourth column": _stepped((1,), (1, 12, 2), (2, 9, 4)),
    "the first row": _selected(0, 0),
    "the last but one of the columns": _selected(-2, 1),
    "max": Case(lambda fd, x: fd.ops.max(x, [1]), lambda x: x.amax(1)),
    "min of all": Case(lambda fd, x: fd.ops.min(x), lambda x: x.amin()),
    "argmax": Case(lambda fd, x: fd.ops.argmax(x, 1), lambda x: x.argmax(1)),
}  # fmt: skip


# Every third pair of those that the next test has, too: it takes the form where there is one, this one what costs less.
CHEAPEST = [
    (name, spec)
    for i, (name, case) in enumerate(CASES.items()) for j, spec in enumerate(SPECS) if not case.dims or (i + j) % 3 == 0
]  # fmt: skip


@pytest.mark.sampled(2)
@pytest.mark.parametrize(("name", "spec"), CHEAPEST)
def test_an_op_over_a_sharded_dim_computes_what_torch_does(name: str, spec: str) -> None:
    build, reference, *_ = CASES[name]
    found = defined(build, X, *SPECS[spec]).simulate([X], check_replicas=True)
    assert_close(found, reference(X.double()))


@pytest.mark.sampled(2)
@pytest.mark.parametrize("spec", SPECS)
@pytest.mark.parametrize("name", [name for name, case in CASES.items() if case.dims])
@pytest.mark.usefixtures("forms_forced")
def test_every_distributed_form_computes_what_torch_does(name: str, spec: str) -> None:
    build, reference, *_ = CASES[name]
    fd = defined(build, X, *SPECS[spec])
    names = op_names(fd, X.shape)
    assert (len(names) > 1) == CASES[name].has_form(spec), names
    assert_close(fd.simulate([X], check_replicas=True), reference(X.double()))


@pytest.mark.parametrize("spec", ["columns over 4, the last short", "columns over 6, one empty"])
@pytest.mark.parametrize("largest", [True, False])
@pytest.mark.parametrize("dtype", [torch.float32, torch.float16, torch.int32, torch.int64])
@pytest.mark.usefixtures("forms_forced")
def test_topk_of_extreme_elements_takes_them_in_the_order_of_their_indices(
    dtype: torch.dtype, largest: bool, spec: str
) -> None:
    x = torch.zeros(3, 10, dtype=dtype)
    if dtype.is_floating_point:
        x[0], x[1, ::2], x[2, 1:] = -math.inf, math.nan, math.inf
    else:
        x[0], x[1, ::2], x[2, 1:] = torch.iinfo(dtype).min, 5, torch.iinfo(dtype).max
    fd = defined(lambda fd, t: fd.ops.topk(t, 9, 1, largest), x, *SPECS[spec])
    assert "block_topk" in op_names(fd, x.shape)
    values, index = fd.simulate([x], check_replicas=True)
    wanted = _stable_topk(x, 9, 1, largest)
    assert torch.equal(index, wanted[1])
    torch.testing.assert_close(values, wanted[0], rtol=0, atol=0, equal_nan=True)


@pytest.mark.parametrize("name", ["var_mean of columns", "welford of rows", "var of all"])
@pytest.mark.parametrize("spec", ["both", "columns over 6, one empty", "rows over 4"])
@pytest.mark.usefixtures("forms_forced")
def test_statistics_of_numbers_far_from_zero_keep_their_digits(name: str, spec: str) -> None:
    """In float32 the difference of sums of squares would have no digit right."""
    x = X + 1e4
    build, reference, *_ = CASES[name]
    fd = defined(build, x, *SPECS[spec])
    # Blocks' means of 10 000 deviations are rounded as every element is, before they are merged.
    limit = 4e4 * 2**-24 if "block_merge" in op_names(fd, x.shape) else 1e-4
    assert_close(fd.simulate([x], check_replicas=True), reference(x.double()), limit)


@pytest.mark.parametrize("dtype", [torch.float16, torch.int64, torch.complex64, torch.float64])
@pytest.mark.usefixtures("forms_forced")
def test_the_variance_of_other_types(dtype: torch.dtype) -> None:
    x = (X * 4).to(dtype)
    wide = x.to(torch.complex128 if x.is_complex() else torch.float64)
    (found,) = defined(lambda fd, t: fd.ops.var(t, [0]), x, *SPECS["rows over 4"]).simulate([x])
    assert_close([found], wide.var(0).to(found.dtype))


@pytest.mark.sampled(2)
@pytest.mark.parametrize("dtype", [torch.float16, torch.int64, torch.complex64, torch.float64])
@pytest.mark.parametrize("spec", ["rows over 4", "rows over more ranks than rows", "columns over 4, the last short"])
@pytest.mark.parametrize("name", ["cumsum", "cumprod", "cumsum_bwd"])
@pytest.mark.usefixtures("forms_forced")
def test_scans_of_other_types(name: str, spec: str, dtype: torch.dtype) -> None:
    x, dim = (X * 2).to(dtype), 0 if "rows" in spec else 1
    (found,) = defined(lambda fd, t: getattr(fd.ops, name)(t, dim), x, *SPECS[spec]).simulate([x])
    wide = x.to(torch.complex128) if x.is_complex() else x.double()
    wanted = wide.flip(dim).cumsum(dim).flip(dim) if name == "cumsum_bwd" else getattr(torch, name)(wide, dim)
    torch.testing.assert_close(found, wanted.to(dtype), rtol=1e-2, atol=1e-2)


# Bytes per rank on the wire.
WIDE = (256, 1024)
RESULT = 4 * WIDE[0]
BILLS: dict[str, tuple[Build, float]] = {
    # One all-to-all: an eighth of the operand, of which a rank keeps an eighth.
    "argsort": (lambda fd, x: fd.ops.argsort(x, 1), 4 * math.prod(WIDE) / 8),
    # 8 candidates per rank with their indices, moved at most once to every rank.
    "topk": (lambda fd, x: fd.ops.topk(x, 8, 1), 12 * 8 * RESULT),
    "var": (lambda fd, x: fd.ops.var(x, [1]), 4 * RESULT),
    "var_mean": (lambda fd, x: fd.ops.var_mean(x, [1]), 4 * RESULT),
    "welford": (lambda fd, x: fd.ops.welford(x, [1]), 4 * RESULT),
    "cumsum": (lambda fd, x: fd.ops.cumsum(x, 1), 8 * RESULT),
    "cumsum_bwd": (lambda fd, x: fd.ops.cumsum_bwd(x, 1), 8 * RESULT),
    "cummax": (lambda fd, x: fd.ops.cummax(x, 1), 8 * RESULT),
    # Each rank gets its part of one column.
    "select": (lambda fd, x: fd.ops.select(x, 5, 1), RESULT / 8),
    # Summed over ranks is what is made of the column: a sixteenth of it.
    "sums of a selected column": (
        lambda fd, x: fd.ops.sum(fd.ops.reshape(fd.ops.select(x, 5, 1), [16, 16]), [1]),
        2 * RESULT / 16,
    ),
    "max": (lambda fd, x: fd.ops.max(x, [1]), 2 * RESULT),
    "min": (lambda fd, x: fd.ops.min(x, [1]), 2 * RESULT),
    # The maxima, and the smallest of the indices where they are.
    "argmax": (lambda fd, x: fd.ops.argmax(x, 1), 2 * RESULT + 4 * RESULT),
    "mean": (lambda fd, x: fd.ops.mean(x, 1), 2 * RESULT),
    "logsumexp": (lambda fd, x: fd.ops.logsumexp(x, 1), 4 * RESULT),
}


@pytest.mark.parametrize("name", BILLS)
def test_only_statistics_or_candidates_travel(name: str) -> None:
    build, limit = BILLS[name]
    x = torch.empty(WIDE)
    bill = defined(build, x, (8,), [None, "x"]).bill(WIDE)
    assert 0 < bill.total <= limit, str(bill)


# Sixteen beams of four sentences: a rank has a piece of each beam's words. By name the op on [4, 16 * 8192], and the
# bytes of a piece's totals or candidates.
BEAMS = (4, 16, 8192)
MERGED: dict[str, tuple[Case, int]] = {
    "topk": (_topk(8, 1, True), 8 * 16),
    "cumsum": (_scan("cumsum", 1), 8),
    "cummin": (_scan("cummin", 1), 8),
    "cumsum_bwd": (
        Case(lambda fd, x: fd.ops.cumsum_bwd(x, 1), lambda x: x.flip(1).cumsum(1).flip(1), (1,)),
        8,
    ),
    "var": (_var("var", [1], 1, False), 8),
    "argmax": (CASES["argmax"], 16),
}


@pytest.mark.parametrize("mesh", [(8,), (2, 4)])
@pytest.mark.parametrize("name", MERGED)
def test_of_a_merged_dim_that_is_sharded_by_its_minor_part_totals_and_candidates_travel(
    name: str, mesh: tuple[int, ...]
) -> None:
    (build, reference, _), piece = MERGED[name]
    x = torch.randn(BEAMS, generator=torch.Generator().manual_seed(0), dtype=torch.float64)
    dims = [None, None, "x"] if len(mesh) == 1 else [None, "x", "y"]
    fd = defined(lambda fd, t: build(fd, fd.ops.reshape(t, [4, 16 * 8192])), x, mesh, dims)
    # To where pieces are merged, and what follows for each of them back.
    assert 0 < fd.bill(BEAMS).total <= 2 * 4 * 16 * 8 * piece
    assert_close(fd.simulate([x], check_replicas=True), reference(x.flatten(1)))


def test_the_bill_of_the_largest_logits() -> None:
    """n4 of the reference bills: 0.11 MB for the top 8 of [256, 32768] with the vocabulary over 8 ranks."""
    fd = defined(lambda fd, x: fd.ops.topk(x, 8), torch.empty(256, 32768), (8,), [None, "x"])
    assert fd.bill((256, 32768)).total <= 0.11e6


def test_a_form_is_found_behind_ops_that_could_gather_cheaper() -> None:
    """The operand is half as large before the cast; gathering it there would hide that nothing needs it."""
    x = torch.empty(256, 4096, dtype=torch.float16)
    fd = defined(lambda fd, t: fd.ops.topk(fd.ops.cast(t, mf.DataType.Float), 4), x, (4,), [None, "x"])
    assert fd.bill(x.shape).total <= 12 * 4 * 256 * 4
    values = torch.randn(256, 4096).half()
    assert_close(fd.simulate([values]), _stable_topk(values.float(), 4, 1, True))


def test_an_op_that_moves_its_operand_to_another_dim_for_less_keeps_its_plain_form() -> None:
    fd = defined(lambda fd, t: fd.ops.topk(t, 500, 1), torch.empty(64, 512), (4,), [None, "x"])
    assert op_names(fd, (64, 512)) == ["topk"]


def _rewritten() -> mf.FusionDefinition:
    with mf.FusionDefinition() as fd:
        x = fd.define_tensor([12, 10])
        doubled = fd.ops.mul(x, 2.0)
        summed = fd.ops.cumsum(doubled, 0)
        values, index = fd.ops.topk(summed, 2, 0)
        shifted = fd.ops.add(values, 1.0)
        fd.add_output(index)
        fd.add_output(shifted)
        fd.add_output(summed)
        fd.mesh_split(x, mesh_of((4,)), ["x", None])
        fd.mesh_split(values, mesh_of((4,)), [None, "x"])
    return fd


@pytest.mark.usefixtures("forms_forced")
def test_a_rewritten_graph_keeps_its_tensors_and_explains_them() -> None:
    fd = _rewritten()
    compiled = fd.compile((12, 10))
    made = [i for node in compiled.graph.nodes for i in node.outputs]
    assert len(made) == len(set(made)) and len(made) < len(compiled.graph.tensors)
    assert [tensor.id for tensor in compiled.graph.tensors] == list(range(len(compiled.graph.tensors)))
    assert len(compiled.graph.nodes) > 4
    labels = [line.split("  ")[0] for line in fd.explain().splitlines()[2:]]
    assert labels[:6] == ["x (t0)", "doubled (t1)", "summed (t2)", "t3", "t4", "shifted (t5)"]
    assert labels[6:] == [f"t{i}" for i in sorted(made) if i > 5]
    known = {0}
    for node in compiled.graph.nodes:
        assert known.issuperset(node.inputs)
        known.update(node.outputs)


@pytest.mark.usefixtures("forms_forced")
def test_an_annotation_of_a_rewritten_op_s_result_holds() -> None:
    fd = _rewritten()
    assert str(fd.output_shardings((12, 10))[1]) == "[-, x]"
    index, shifted, summed = fd.simulate([X], check_replicas=True)
    wanted = (X.double() * 2).cumsum(0)
    values, places = _stable_topk(wanted, 2, 0, True)
    assert_close([summed, shifted, index], (wanted, values + 1, places))


@pytest.mark.usefixtures("forms_forced")
def test_the_same_op_twice_and_a_result_that_nobody_reads() -> None:
    with mf.FusionDefinition() as fd:
        x = fd.define_tensor([12, 10])
        first, _ = fd.ops.topk(x, 2, 0)
        _, second = fd.ops.topk(x, 2, 0)
        fd.add_output(first)
        fd.add_output(second)
        fd.add_output(first)
        fd.mesh_split(x, mesh_of((4,)), ["x", None])
    values, index = _stable_topk(X, 2, 0, True)
    assert_close(fd.simulate([X], check_replicas=True), (values, index, values))


@pytest.mark.parametrize("name", ["topk of rows", "welford of rows", "var_mean of columns", "cumsum of dim 0"])
@pytest.mark.parametrize("ranks", [[0, 1], [1, 7]])
@pytest.mark.usefixtures("forms_forced")
def test_a_form_whose_result_is_wanted_on_another_mesh(name: str, ranks: list[int]) -> None:
    """Ranks in both meshes do more moves than the others; unreduced sums do not travel between meshes."""
    build, reference, *_ = CASES[name]
    fd = mf.FusionDefinition()
    x = fd.define_tensor(list(X.shape))
    made = build(fd, fd.ops.mul(x, 1.0))
    results = made if isinstance(made, tuple) else (made,)
    for tensor in results:
        fd.add_output(tensor)
    fd.mesh_split(x, mf.DeviceMesh((4, 2), ("x", "y")), ["x", "y"])
    fd.mesh_split(results[0], mf.DeviceMesh((2,), ("z",), ranks=ranks), ["z", *[None] * (results[0].ndim - 1)])
    assert_close(fd.simulate([X], check_replicas=True), reference(X.double()))


@pytest.mark.usefixtures("forms_forced")
def test_every_pair_of_sharded_dims_of_a_product_of_forms() -> None:
    """Statistics of a scan of a sort: each form's result is the next one's operand."""

    def build(fd: mf.FusionDefinition, x: Any) -> Any:
        values, _ = fd.ops.topk(x, 6, 0)
        return fd.ops.var_mean(fd.ops.cumsum(values, 0), [0, 1])

    values, _ = _stable_topk(X.double(), 6, 0, True)
    for dims in itertools.permutations(["x", "y", None], 2):
        found = defined(build, X, (2, 3), dims).simulate([X], check_replicas=True)
        assert_close(found, torch.var_mean(values.cumsum(0), [0, 1]))


@pytest.mark.parametrize("dtype", [DataType.Float, DataType.Half, DataType.Double])
@pytest.mark.parametrize("is_open", [False, True])
@pytest.mark.parametrize("name", ["cumsum", "cumprod", "cummax", "cummin"])
def test_a_scan_begins_with_a_number_that_its_type_does_not_hold(name: str, is_open: bool, dtype: DataType) -> None:
    """It is infinite, whether the dim is sharded or not."""
    x = torch.arange(1.0, 9.0, dtype=getattr(torch, dtype.value)).reshape(2, 4)
    for init in (1e300, -1e300, float("inf")):
        found = []
        for spec in ([None, None], [None, "x"]):
            fd = mf.FusionDefinition()
            t = fd.define_tensor([2, 4], dtype=dtype)
            fd.add_output(getattr(fd.ops, name)(t, 1, fd.define_scalar(dtype=DataType.Double) if is_open else init))
            fd.mesh_split(t, mf.DeviceMesh((2,), ("x",)), spec)
            found += fd.simulate([x, init] if is_open else [x])
        assert torch.equal(*found)
