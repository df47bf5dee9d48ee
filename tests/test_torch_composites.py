"""Composites named as torch's functions, against these: values and gradients, sharded and of open sizes."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any, NamedTuple

import pytest
import torch
import torch.nn.functional as F

import meshfuse as mf

LINE = mf.DeviceMesh((2,), ("x",))


class Case(NamedTuple):
    """shapes: of the real operands. build: from the definition and its tensors. torch: the same in torch."""

    shapes: Sequence[tuple[int, ...]]
    build: Callable[..., Any]
    torch: Callable[..., Any]
    more: Sequence[torch.Tensor] = ()
    may_be_open: bool = True


def ints(*values: int, shape: tuple[int, ...] | None = None) -> torch.Tensor:
    return torch.tensor(values).reshape(shape or (len(values),))


def batch_norm(x: torch.Tensor, w: torch.Tensor, b: torch.Tensor, mean: torch.Tensor, var: torch.Tensor) -> Any:
    mean, var = mean.detach().clone(), var.detach().clone()
    return [F.batch_norm(x, mean, var, w, b, True, 0.2, 1e-3), mean, var]


def index_put(x: torch.Tensor, values: torch.Tensor, i: torch.Tensor, j: torch.Tensor, add: bool) -> torch.Tensor:
    return x.index_put((i, j), values, add)


MASK = torch.tensor([[True, False, True, False], [False, False, True, True], [True, True, False, False]])
PAIRS = (ints(0, -1, 2, shape=(3, 1)), ints(3, 0))
CASES: dict[str, Case] = {
    "conv1d": Case([(2, 4, 9), (6, 2, 3), (6,)],
                   lambda fd, x, w, b: fd.ops.convolution(x, w, b, [1], [1], groups=2),
                   lambda x, w, b: F.conv1d(x, w, b, padding=1, groups=2)),
    "conv2d": Case([(2, 3, 8, 6), (4, 3, 3, 3), (4,)],
                   lambda fd, x, w, b: fd.ops.convolution(x, w, b, [2, 1], [1, 1]),
                   lambda x, w, b: F.conv2d(x, w, b, (2, 1), 1)),
    "conv3d": Case([(1, 2, 4, 4, 6), (2, 2, 3, 1, 2)],
                   lambda fd, x, w: fd.ops.convolution(x, w, None, [1, 2, 2], [1, 0, 0]),
                   lambda x, w: F.conv3d(x, w, None, (1, 2, 2), (1, 0, 0))),
    "a patch embedding": Case([(2, 3, 8, 4), (5, 3, 4, 2), (5,)],
                              lambda fd, x, w, b: fd.ops.convolution(x, w, b, [4, 2]),
                              lambda x, w, b: F.conv2d(x, w, b, (4, 2))),
    "conv_transpose2d": Case([(2, 4, 4, 3), (4, 3, 3, 2), (3,)],
                             lambda fd, x, w, b: fd.ops.convolution(x, w, b, [2], [1, 0], [1], True, [1, 0]),
                             lambda x, w, b: F.conv_transpose2d(x, w, b, 2, (1, 0), (1, 0))),
    "max_pool2d": Case([(2, 3, 8, 7)], lambda fd, x: fd.ops.max_pool(x, 3, 2, 1),
                       lambda x: list(F.max_pool2d(x, 3, 2, 1, return_indices=True))),
    "max_pool1d, ceil": Case([(2, 3, 10)], lambda fd, x: fd.ops.max_pool(x, 3, 2, 0, 2, True),
                             lambda x: list(F.max_pool1d(x, 3, 2, 0, 2, True, return_indices=True)), may_be_open=False),
    "avg_pool2d": Case([(2, 3, 8, 6)], lambda fd, x: fd.ops.avg_pool(x, [2, 3]), lambda x: F.avg_pool2d(x, (2, 3))),
    "avg_pool2d, ceil": Case([(2, 2, 7, 6)], lambda fd, x: fd.ops.avg_pool(x, 3, 2, 1, True, False),
                             lambda x: F.avg_pool2d(x, 3, 2, 1, True, False), may_be_open=False),
    "avg_pool1d, padded": Case([(2, 2, 7)], lambda fd, x: fd.ops.avg_pool(x, 3, 2, 1, True),
                               lambda x: F.avg_pool1d(x, 3, 2, 1, True), may_be_open=False),
    "avg_pool3d, divisor": Case([(1, 2, 4, 4, 2)], lambda fd, x: fd.ops.avg_pool(x, 2, divisor=3),
                                lambda x: F.avg_pool3d(x, 2, divisor_override=3)),
    "adaptive_avg_pool2d": Case([(2, 3, 7, 6)], lambda fd, x: fd.ops.adaptive_avg_pool(x, [4, 3]),
                                lambda x: F.adaptive_avg_pool2d(x, (4, 3))),
    "adaptive_avg_pool2d to 1": Case([(2, 3, 4, 6)], lambda fd, x: fd.ops.adaptive_avg_pool(x, [1, None]),
                                     lambda x: F.adaptive_avg_pool2d(x, (1, 6))),
    "nearest": Case([(2, 3, 4, 5)], lambda fd, x: fd.ops.upsample_nearest(x, [8, 7]),
                    lambda x: F.interpolate(x, (8, 7), mode="nearest")),
    "bilinear": Case([(2, 3, 4, 5)], lambda fd, x: fd.ops.upsample_linear(x, [12, 7]),
                     lambda x: F.interpolate(x, (12, 7), mode="bilinear")),
    "linear, smaller": Case([(2, 3, 8)], lambda fd, x: fd.ops.upsample_linear(x, [3]),
                            lambda x: F.interpolate(x, 3, mode="linear")),
    "bilinear, corners": Case([(2, 2, 4, 3)], lambda fd, x: fd.ops.upsample_linear(x, [8, 5], True),
                              lambda x: F.interpolate(x, (8, 5), mode="bilinear", align_corners=True)),
    "batch_norm": Case([(4, 3, 6), (3,), (3,), (3,), (3,)],
                       lambda fd, x, *a: [(r := fd.ops.batch_norm(x, *a, True, 0.2, 1e-3))[0], *r[3:]], batch_norm),
    "batch_norm, evaluated": Case([(4, 3, 6), (3,), (3,), (3, 1)],
                                  lambda fd, x, w, b, m: fd.ops.batch_norm(
                                      x, w, b, *(fd.ops.squeeze(t, [1]) for t in (m, m * m + 1.0)), False)[0],
                                  lambda x, w, b, m: (x - m) * (m * m + 1.00001).rsqrt() * w[:, None] + b[:, None]),
    "group_norm": Case([(2, 4, 3, 2), (4,), (4,)], lambda fd, x, w, b: fd.ops.group_norm(x, 2, w, b),
                       lambda x, w, b: F.group_norm(x, 2, w, b)),
    "native_group_norm": Case([(2, 4, 6)], lambda fd, x: list(fd.ops.native_group_norm(x, 2)),
                              lambda x: list(torch.native_group_norm(x, None, None, 2, 4, 6, 2, 1e-5))),
    "instance_norm": Case([(2, 4, 3, 2), (4,)], lambda fd, x, w: fd.ops.instance_norm(x, w),
                          lambda x, w: F.instance_norm(x, weight=w)),
    "native_layer_norm": Case([(3, 4, 6), (4, 6), (4, 6)],
                              lambda fd, x, w, b: list(fd.ops.native_layer_norm(x, [4, 6], w, b)),
                              lambda x, w, b: list(torch.native_layer_norm(x, (4, 6), w, b, 1e-5))),
    "flip": Case([(4, 6)], lambda fd, x: fd.ops.flip(x, [0, 1]), lambda x: x.flip(0, 1)),
    "roll": Case([(4, 6)], lambda fd, x: fd.ops.roll(x, [1, -2], [0, 1]), lambda x: x.roll((1, -2), (0, 1))),
    "roll of all": Case([(4, 6)], lambda fd, x: fd.ops.roll(x, 5), lambda x: x.roll(5)),
    "sort": Case([(4, 6)], lambda fd, x: list(fd.ops.sort(x, 1, True)), lambda x: list(x.sort(1, True))),
    "index": Case([(4, 6, 4)], lambda fd, x, i, j: fd.ops.index(x, [None, i, j]), lambda x, i, j: x[:, i, j], PAIRS),
    "index, apart": Case([(4, 6, 4)], lambda fd, x, i, j: fd.ops.index(x, [i, None, j]),
                         lambda x, i, j: x[i, :, j], PAIRS),
    "index of one dim": Case([(4, 6)], lambda fd, x, i: fd.ops.index(x, [None, i]), lambda x, i: x[:, i],
                             [ints(5, 0, -2, 2, shape=(2, 2))]),
    "index_put": Case([(4, 6), (3, 2)], lambda fd, x, v, i, j: fd.ops.index_put(x, [i, j], v),
                      lambda x, v, i, j: index_put(x, v, i, j, False), PAIRS),
    "index_put, added": Case([(4, 6), (2,)], lambda fd, x, v, i, j: fd.ops.index_put(x, [i, j], v, True),
                             lambda x, v, i, j: index_put(x, v, i, j, True), [ints(0, 0, 2, shape=(3, 1)), ints(3, 3)]),
    "index_put of a mask": Case([(3, 4, 2), (2,)], lambda fd, x, v, m: fd.ops.index_put(x, [m], v),
                                lambda x, v, m: torch.where(m[..., None], v, x), [MASK]),
    "index_add": Case([(4, 6), (3, 6)], lambda fd, x, s, i: fd.ops.index_add(x, 0, i, s, 2.0),
                      lambda x, s, i: x.index_add(0, i, s, alpha=2.0), [ints(3, 0, 3)]),
    "scatter_add": Case([(4, 6), (3, 4)], lambda fd, x, s, i: fd.ops.scatter_add(x, 1, i, s),
                        lambda x, s, i: x.scatter_add(1, i, s), [ints(*[5, 0, 5, 2] * 3, shape=(3, 4))]),
    **{f"scatter_reduce by {how}{'' if own else ' alone'}": Case(
        [(4, 6), (4, 6)], lambda fd, x, s, i, how=how, own=own: fd.ops.scatter_reduce(x, 0, i, s, how, own),
        lambda x, s, i, how=how, own=own: x.scatter_reduce(0, i, s, how, include_self=own),
        [ints(*[3, 0, 3, 2, 0, 1] * 4, shape=(4, 6))])
       for how, own in (("mean", True), ("mean", False), ("amax", True), ("amin", False))},
    "unfold": Case([(2, 8, 3)], lambda fd, x: fd.ops.unfold(x, 1, 3, 2), lambda x: x.unfold(1, 3, 2)),
    "unfold of long windows": Case([(70, 2)], lambda fd, x: fd.ops.unfold(x, 0, 40, 15),
                                   lambda x: x.unfold(0, 40, 15)),
    "slice_scatter": Case([(4, 8), (4, 3)], lambda fd, x, s: fd.ops.slice_scatter(x, s, 1, 2, 5),
                          lambda x, s: torch.slice_scatter(x, s, 1, 2, 5)),
    "slice_scatter, stepped": Case([(8, 4), (3, 4)], lambda fd, x, s: fd.ops.slice_scatter(x, s, 0, -7, None, 3),
                                   lambda x, s: torch.slice_scatter(x, s, 0, -7, None, 3)),
    "select_scatter": Case([(4, 6), (4,)], lambda fd, x, s: fd.ops.select_scatter(x, s, 1, -2),
                           lambda x, s: torch.select_scatter(x, s, 1, -2)),
    "bincount": Case([(6,)], lambda fd, w, i: fd.ops.bincount(i, 5, w),
                     lambda w, i: torch.zeros(5).double().index_add(0, i, w), [ints(4, 0, 0, 2, 4, 1)]),
    "a complex RoPE": Case([(2, 4, 6), (4, 3)], lambda fd, x, a: fd.ops.reshape(fd.ops.view_as_real(fd.ops.mul(
        fd.ops.view_as_complex(fd.ops.reshape(x, [2, 4, 3, 2])), fd.ops.conj(
            fd.ops.complex(fd.ops.cos(a), fd.ops.sin(a))))), [2, 4, 6]),
        lambda x, a: torch.view_as_real(torch.view_as_complex(x.reshape(2, 4, 3, 2)) * torch.polar(
            torch.ones_like(a), a).conj()).flatten(2)),
}  # fmt: skip


def _inputs(case: Case) -> list[torch.Tensor]:
    generator = torch.Generator().manual_seed(3)
    return [*(torch.randn(s, generator=generator, dtype=torch.float64) for s in case.shapes), *case.more]


def _found(
    case: Case, inputs: Sequence[torch.Tensor], dim: int | None = None, is_open: bool = False
) -> list[torch.Tensor]:
    """The results, and the gradients of the first by all real operands that it depends on.

    dim: that of the first operand which is sharded, if any. is_open: whether its sizes are open.
    """
    fd = mf.FusionDefinition()
    kinds = {torch.float64: mf.DataType.Double, torch.int64: mf.DataType.Int, torch.bool: mf.DataType.Bool}
    shapes = [[-1] * t.ndim if is_open and not place else list(t.shape) for place, t in enumerate(inputs)]
    tensors = [fd.define_tensor(shape, dtype=kinds[t.dtype]) for shape, t in zip(shapes, inputs, strict=True)]
    made = case.build(fd, *tensors)
    results = list(made) if isinstance(made, (list, tuple)) else [made]
    for tensor in (*results, *fd.grad(fd.ops.sum(fd.ops.sin(results[0])), tensors[: len(case.shapes)])):
        fd.add_output(tensor)
    if dim is not None:
        fd.mesh_split(tensors[0], LINE, ["x" if d == dim else None for d in range(tensors[0].ndim)])
    return list(fd.simulate(inputs, check_replicas=True))


def _wanted(case: Case, inputs: Sequence[torch.Tensor]) -> list[torch.Tensor]:
    leaves = [t.clone().requires_grad_(t.is_floating_point()) for t in inputs]
    made = case.torch(*leaves)
    results = list(made) if isinstance(made, (list, tuple)) else [made]
    real = leaves[: len(case.shapes)]
    grads = torch.autograd.grad(results[0].sin().sum(), real, allow_unused=True)
    pairs = zip(real, grads, strict=True)
    return [t.detach() for t in (*results, *(torch.zeros_like(x) if g is None else g for x, g in pairs))]


@pytest.mark.parametrize("name", CASES)
def test_a_composite_and_its_gradients_are_torch_s_wherever_it_is_sharded(name: str) -> None:
    case = CASES[name]
    inputs = _inputs(case)
    wanted = _wanted(case, inputs)
    last = len(case.shapes[0]) - 1
    for dim in sorted({min(1, last), last}):  # The channels, and a spatial dim.
        for found, value in zip(_found(case, inputs, dim), wanted, strict=True):
            told = f"with dim {dim} sharded: {{}}".format
            torch.testing.assert_close(found, value, rtol=1e-9, atol=1e-9, msg=told)


@pytest.mark.parametrize("name", [name for name, case in CASES.items() if case.may_be_open])
def test_so_they_are_where_sizes_are_open(name: str) -> None:
    case = CASES[name]
    inputs = _inputs(case)
    for found, value in zip(_found(case, inputs, is_open=True), _wanted(case, inputs), strict=True):
        torch.testing.assert_close(found, value, rtol=1e-9, atol=1e-9)


NORMS = ("batch_norm", "group_norm", "instance_norm", "avg_pool2d", "bilinear", "adaptive_avg_pool2d")


@pytest.mark.parametrize("name", NORMS)
def test_half_precision_is_computed_in_float32_and_comes_back(name: str) -> None:
    case = CASES[name]
    inputs = [t.bfloat16().float() for t in _inputs(case)]
    fd = mf.FusionDefinition()
    made = case.build(fd, *(fd.define_tensor(list(t.shape), dtype=mf.DataType.BFloat16) for t in inputs))
    fd.add_output(made[0] if isinstance(made, (list, tuple)) else made)
    (found,) = fd.simulate([t.bfloat16() for t in inputs])
    assert found.dtype == torch.bfloat16
    torch.testing.assert_close(found.float(), _wanted(case, inputs)[0], rtol=5e-3, atol=5e-3)


@pytest.mark.parametrize("dtype", [mf.DataType.Float, mf.DataType.Int])
@pytest.mark.parametrize("limits", [(0, 8), (0, 0), (-2, 3)])
def test_histc_counts_as_torch_does(dtype: mf.DataType, limits: tuple[int, int]) -> None:
    """Also the tokens of each expert, which are whole numbers."""
    x = torch.randint(-3, 9, (4, 10), generator=torch.Generator().manual_seed(0)).to(getattr(torch, dtype.value))
    fd = mf.FusionDefinition()
    t = fd.define_tensor([4, 10], dtype=dtype)
    fd.add_output(fd.ops.histc(t, 5, *limits))
    fd.mesh_split(t, LINE, ["x", None])
    (found,) = fd.simulate([x])
    assert found.dtype == x.dtype
    torch.testing.assert_close(found.double(), torch.histc(x.double(), 5, *limits))


@pytest.mark.parametrize(("message", "build"), [
    (r"index: an index of bools: found Bool\[4, 6\], needed integers", lambda fd, x, m: fd.ops.index(x, [m])),
    (r"index_put: values for a mask: found .*, needed one value",
     lambda fd, x, m: fd.ops.index_put(x, [m], fd.ops.full([3], 1.0, mf.DataType.Float))),
    (r"scatter_reduce: reduce: found 'max', needed 'sum', 'mean'",
     lambda fd, x, m: fd.ops.scatter_reduce(x, 0, x, x, "max")),
    (r"roll: shifts and dims: found 1 and 2, needed as many", lambda fd, x, m: fd.ops.roll(x, 1, [0, 1])),
    (r"unfold: size and step: found 9 and 1", lambda fd, x, m: fd.ops.unfold(x, 1, 9, 1)),
    (r"max_pool: the operand: found Float\[4, 6\], needed \[n, channels, ..\]", lambda fd, x, m: fd.ops.max_pool(x, 2)),
    (r"batch_norm: running statistics: found None", lambda fd, x, m: fd.ops.batch_norm(x, training=False)),
    (r"group_norm: groups: found 4 of 6 channels", lambda fd, x, m: fd.ops.group_norm(x, 4)),
    (r"convolution: the channels of input and weight differ: found 6 and 5",
     lambda fd, x, m: fd.ops.convolution(fd.ops.reshape(x, [1, 6, 4]), fd.ops.full([2, 5, 1], 1.0, mf.DataType.Float))),
    (r"convolution: the kernel does not fit into the input",
     lambda fd, x, m: fd.ops.convolution(fd.ops.reshape(x, [1, 6, 4]), fd.ops.full([2, 6, 5], 1.0, mf.DataType.Float))),
    (r"window_sum: kernel: found 0, needed 1 or more",
     lambda fd, x, m: fd.ops.window_sum(fd.ops.reshape(x, [1, 6, 4]), [0], [1])),
])  # fmt: skip
def test_what_a_composite_cannot_take_is_told(message: str, build: Callable[..., Any]) -> None:
    fd = mf.FusionDefinition()
    x, mask = fd.define_tensor([4, 6]), fd.define_tensor([4, 6], dtype=mf.DataType.Bool)
    with pytest.raises(mf.DefinitionError, match=message):
        build(fd, x, mask)


# what is moved ----------------------------------------------------------------------------------------------------


def _moved(build: Callable[..., Any], mesh: mf.DeviceMesh, spec: list[Any]) -> float:
    """Bytes on the wire for an operand [1, 8, 64, 16] and its result in this sharding, and the operand's gradient."""
    fd = mf.FusionDefinition()
    x = fd.define_tensor([1, 8, 64, 16])
    made = build(fd, x)
    fd.add_output(made)
    fd.add_output(fd.grad(fd.ops.sum(fd.ops.sin(made)), x))
    for tensor in (x, made):
        fd.mesh_split(tensor, mesh, spec)
    return fd.bill().total


def _convolved(fd: mf.FusionDefinition, x: Any, transposed: bool = False) -> Any:
    weight = fd.ops.sin(fd.ops.reshape(fd.ops.iota(8 * 8 * 9, dtype=mf.DataType.Float), [8, 8, 3, 3]))
    return fd.ops.convolution(x, weight, None, [2], [1], [1], transposed, [1] if transposed else [0])


WINDOWS: dict[str, Callable[..., Any]] = {
    "convolution": _convolved, "transposed": lambda fd, x: _convolved(fd, x, True),
    "max_pool": lambda fd, x: fd.ops.max_pool(x, 3, 2, 1)[0], "avg_pool": lambda fd, x: fd.ops.avg_pool(x, 3, 2, 1),
    "bilinear": lambda fd, x: fd.ops.upsample_linear(x, [128, 32]),
}  # fmt: skip


@pytest.mark.parametrize("name", WINDOWS)
def test_over_a_sharded_spatial_dim_only_edges_move(name: str) -> None:
    """A row is 8 x 16 numbers, or twice as many where the result is larger; four ranks have three borders."""
    moved = _moved(WINDOWS[name], mf.DeviceMesh((4,), ("x",)), [None, None, "x", None])
    assert 0 < moved <= 8 * 3 * 8 * 32 * 4


@pytest.mark.parametrize("name", ["max_pool", "nearest", "patches", "batch of images"])
def test_windows_side_by_side_move_nothing(name: str) -> None:
    build, spec = {
        "max_pool": (lambda fd, x: fd.ops.max_pool(x, 2)[0], [None, None, "x", None]),
        "nearest": (lambda fd, x: fd.ops.upsample_nearest(x, [128, 32]), [None, None, "x", None]),
        "patches": (lambda fd, x: fd.ops.avg_pool(x, [4, 2]), [None, None, "x", None]),
        "batch of images": (lambda fd, x: fd.ops.max_pool(x, 3, 2, 1)[0], [None, "x", None, None]),
    }[name]
    assert _moved(build, mf.DeviceMesh((4,), ("x",)), spec) == 0


def test_a_small_residual_network_on_batch_and_rows() -> None:
    """Batch norms over both, a strided convolution beside a pool, and a head: loss, buffers and gradients."""
    case = Case(
        [(4, 3, 8, 8), (6, 3, 3, 3), (6,), (6,), (6, 3, 1, 1), (5, 6)],
        lambda fd, x, w, g, b, s, h: fd.ops.linear(fd.ops.squeeze(fd.ops.adaptive_avg_pool(fd.ops.relu(fd.ops.add(
            fd.ops.batch_norm(fd.ops.convolution(x, w, None, [2], [1]), g, b)[0],
            fd.ops.convolution(fd.ops.avg_pool(x, 2), s))), 1), [2, 3]), h),
        lambda x, w, g, b, s, h: F.adaptive_avg_pool2d(F.relu(
            F.batch_norm(F.conv2d(x, w, None, 2, 1), None, None, g, b, True) + F.conv2d(F.avg_pool2d(x, 2), s)
        ), 1).flatten(1) @ h.T,
    )  # fmt: skip
    inputs, fd = _inputs(case), mf.FusionDefinition()
    tensors = [fd.define_tensor(list(t.shape), dtype=mf.DataType.Double) for t in inputs]
    made = case.build(fd, *tensors)
    for tensor in (made, *fd.grad(fd.ops.sum(fd.ops.sin(made)), tensors)):
        fd.add_output(tensor)
    fd.mesh_split(tensors[0], mf.DeviceMesh((2, 2), ("dp", "sp")), ["dp", None, "sp", None])
    for found, value in zip(fd.simulate(inputs, check_replicas=True), _wanted(case, inputs), strict=True):
        torch.testing.assert_close(found, value, rtol=1e-9, atol=1e-9)
