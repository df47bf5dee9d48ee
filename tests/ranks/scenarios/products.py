"""Linear, matmul and grouped products, column- and row-parallel."""

from __future__ import annotations

from typing import Any

import torch
import torch.nn.functional as F

from meshfuse.nvfuser_direct import DataType, FusionDefinition, PythonProfiler
from tools import (
    STREAM,
    X,
    Y,
    coordinates,
    cut,
    expect,
    grid,
    line,
    place,
    rank,
    rows,
    same,
    size,
    split,
    whole_numbers,
)


def column_parallel_linear(bias: bool = True) -> None:
    e = 6
    with FusionDefinition() as fd:
        x, w = fd.define_tensor([-1, -1, e]), fd.define_tensor([size() * e, e])
        b = fd.define_tensor([size() * e]) if bias else None
        y = fd.ops.linear(x, w, b)
        fd.add_output(y)
        place(line(), x)
        for tv in (w, b) if b is not None else (w,):
            place(line(), tv)
            split(tv, 0)
    a, weight, offset = torch.randn(2, 5, e), torch.randn(size() * e, e), torch.randn(size() * e)
    arguments = [a, cut(weight, w), *([cut(offset, b)] if bias else [])]
    with PythonProfiler() as profiler:
        (found,) = fd.execute(arguments)
    same(found, F.linear(a, weight, offset if bias else None).chunk(size(), -1)[rank()])
    expect(profiler)
    (sharding,) = fd.fec.get_output_shardings()
    assert sharding.axis_sharded_on(X) == 2 and sharding.axis_sharded_on(Y) == -1
    assert sharding.mesh == line()


def column_parallel_linear_without_bias() -> None:
    column_parallel_linear(False)


def row_parallel_linear(bias: bool = False) -> None:
    e = 5
    with FusionDefinition() as fd:
        x, w = fd.define_tensor([-1, -1, size() * e]), fd.define_tensor([e, size() * e])
        b = fd.define_tensor([e]) if bias else None
        fd.add_output(fd.ops.linear(x, w, b))
        place(line(), x, w)
        for tv in (x, w):
            split(tv, -1)
    a, weight, offset = torch.randn(2, 3, size() * e), torch.randn(e, size() * e), torch.randn(e)
    (found,) = fd.execute([cut(a, x), cut(weight, w), *([offset] if bias else [])])
    same(found, F.linear(a, weight, offset if bias else None))


def row_parallel_linear_adds_the_bias_once() -> None:
    row_parallel_linear(True)


def linear_with_a_weight_of_three_dims() -> None:
    d, e = size(), 6
    with FusionDefinition() as fd:
        x, w, b = (fd.define_tensor(shape, contiguity=True) for shape in ([2, 5, e], [d, e, e], [d, e]))
        fd.add_output(fd.ops.linear(x, w, b))
        place(line(), x, w, b)
        for tv in (w, b):
            tv.axis(0).parallelize(X)
    a, weight, offset = torch.randn(2, 5, e), torch.randn(d, e, e), torch.randn(d, e)
    (found,) = fd.execute([a, weight[rank() : rank() + 1], offset[rank() : rank() + 1]])
    same(found, F.linear(a, weight[rank()], offset[rank()])[None])
    assert fd.fec.get_output_shardings()[0].axis_sharded_on(X) == 0


def linear_and_reduce_scatter_is_one_communication() -> None:
    """The result's reduction dim and the scattered dim are both on mesh_x."""
    d, e = size(), 7
    with FusionDefinition() as fd:
        x = fd.define_tensor([-1, d * 5, d * e], dtype=DataType.BFloat16)
        w = fd.define_tensor([-1, d * e], dtype=DataType.BFloat16)
        b = fd.define_tensor([e], dtype=DataType.BFloat16)
        y = fd.ops.linear(x, w, b)
        fd.add_output(y)
        place(line(), x, w, b, y)
        for tv in (x, w, y):
            split(tv, -1)
        split(y, 1)
    a, weight, offset = whole_numbers(3, d * 5, d * e), whole_numbers(e, d * e), whole_numbers(e)
    with PythonProfiler() as profiler:
        (found,) = fd.execute([cut(a, x), cut(weight, w), offset])
    expect(profiler, "reduce-scatter")
    assert "expr_eval" in [kernel.scheduler for kernel in profiler.profile.kernel_profiles]
    same(found, F.linear(a, weight, offset).chunk(d, 1)[rank()])


def column_parallel_matmul_annotated_on_the_output() -> None:
    d, e = size(), 6
    with FusionDefinition() as fd:
        x, w = fd.define_tensor([-1, -1, e]), fd.define_tensor([e, d * e])
        y = fd.ops.matmul(x, w)
        fd.add_output(y)
        place(line(), x, w, y)
        split(w, -1)
        y.outer_split(-2, d)
        y.axis(-3).parallelize(X)
    a, weight = torch.randn(2, 5, e), torch.randn(e, d * e)
    same(fd.execute([a, cut(weight, w)])[0], (a @ weight).chunk(d, -1)[rank()])


def row_parallel_matmul_with_a_manual_rfactor() -> None:
    d, e = size(), 8
    with FusionDefinition() as fd:
        x = fd.define_tensor([-1, d * e], contiguity=True, dtype=DataType.Half)
        w = fd.define_tensor([d * e, e], contiguity=True, dtype=DataType.Half)
        y = fd.ops.matmul(x, w)
        fd.add_output(y)
        place(line(), x, w, y)
        split(x, -1)
        split(w, 0)
        y.outer_split(-1, d)
        terms = y.rfactor(axes=[-1])
        place(line(), terms)
        terms.axis(-2).parallelize(X)
        assert len(terms.get_loop_domain()) == 4 and len(y.get_loop_domain()) == 3
    a = whole_numbers(4, d * e, dtype=torch.float16)
    weight = whole_numbers(d * e, e, dtype=torch.float16)
    same(fd.execute([cut(a, x), cut(weight, w)])[0], a @ weight)


def reduce_scatter_in_a_ring_with_a_manual_rfactor() -> None:
    """The loops of the terms and of the result are streams that begin at each rank's own block.

    The sums are rounded once, whatever cancels in them.
    """
    d = size()
    with FusionDefinition() as fd:
        x = fd.define_tensor([d * 3, d * 5], contiguity=True, dtype=DataType.BFloat16)
        w = fd.define_tensor([d * 5, 7], contiguity=True, dtype=DataType.BFloat16)
        y = fd.ops.matmul(x, w)
        fd.add_output(y)
        place(line(), x, w, y)
        for tv, axis in ((x, 1), (w, 0)):
            split(tv, axis)
            tv.set_allocation_domain(tv.get_loop_domain(), True)
        split(y, -1)
        _in_a_ring(y.rfactor(axes=[-1]))
        split(y, 0)
        y.set_allocation_domain(y.get_loop_domain(), new_contiguity=True)
        y.swizzle1d(0, X)
        y.axis(0).parallelize(STREAM)
    a, weight = torch.randn(d * 3, d * 5, dtype=torch.bfloat16), torch.randn(d * 5, 7, dtype=torch.bfloat16)
    options = {"_enable_options": ["host_ir_lowering"], "_disable_options": ["infer_contiguity"]}
    (found,) = fd.execute([cut(a, x), cut(weight, w)], **options)
    same(found, cut(a @ weight, y))
    assert found.shape == (3, 7)


def _in_a_ring(terms: Any) -> None:
    terms.outer_split(0, size())
    terms.swizzle1d(0, X)
    terms.axis(0).parallelize(STREAM)


def sequence_parallel_linear() -> None:
    with FusionDefinition() as fd:
        x, w, b = (fd.define_tensor([-1] * n, contiguity=True) for n in (3, 2, 1))
        y = fd.ops.linear(x, w, b)
        fd.add_output(y)
        place(line(), x, w, b)
        split(x, 1)
        for tv in (w, b):
            split(tv, 0)
    # Gathering the weight would cost less: the output that nothing is said of lies where nvFuser leaves it.
    a, weight, offset = torch.randn(2, 64, 12), torch.randn(8, 12), torch.randn(8)
    (found,) = fd.execute([cut(a, x), cut(weight, w), cut(offset, b)])
    same(found, F.linear(a, weight, offset).chunk(size(), -1)[rank()])


def sequence_in_and_out_weights_on_features() -> None:
    """Gather before the first linear, reduce-scatter after the second."""
    d, e = size(), 8
    with FusionDefinition() as fd:
        x, up, down = (
            fd.define_tensor([2, 2 * d, e]),
            fd.define_tensor([4 * e, e]),
            fd.define_tensor([e, 4 * e]),
        )
        y = fd.ops.linear(fd.ops.relu(fd.ops.linear(x, up)), down)
        fd.add_output(y)
        place(line(), x, up, down, y)
        for tv, axis in ((x, 1), (up, 0), (down, 1), (y, 1)):
            split(tv, axis)
    a, b, c = torch.randn(2, 2 * d, e), torch.randn(4 * e, e), torch.randn(e, 4 * e)
    with PythonProfiler() as profiler:
        (found,) = fd.execute([cut(a, x), cut(b, up), cut(c, down)])
    same(found, cut(F.linear(F.linear(a, b).relu(), c), y), rtol=1e-4, atol=1e-4)
    expect(profiler, "all-gather", "reduce-scatter")


def data_parallel_by_tensor_parallel_mlp() -> None:
    e = 4
    with FusionDefinition() as fd:
        x, up, down = fd.define_tensor([-1, e]), fd.define_tensor([4 * e, e]), fd.define_tensor([e, 4 * e])
        y = fd.ops.linear(fd.ops.relu(fd.ops.linear(x, up)), down)
        fd.add_output(y)
        place(grid(), x, up, down)
        split(x, 0, Y)
        split(up, 0, X)
        split(down, -1, X)
    a, b, c = torch.randn(3 * rows(), e), torch.randn(4 * e, e), torch.randn(e, 4 * e)
    (found,) = fd.execute([cut(a, x), cut(b, up), cut(c, down)])
    same(found, F.linear(F.linear(a, b).relu(), c).chunk(rows())[coordinates()[0]])
    (sharding,) = fd.fec.get_output_shardings()
    assert (sharding.axis_sharded_on(Y), sharding.axis_sharded_on(X)) == (0, -1)


def size_one_dims_in_front() -> None:
    d = size()
    with FusionDefinition() as fd:
        shapes = ([1, 1, d * 3], [1, 1, d * 3], [-1, d * 3])
        x, y, w = (fd.define_tensor(shape, dtype=DataType.BFloat16, contiguity=True) for shape in shapes)
        product = fd.ops.mul(fd.ops.cast(x, DataType.Float), fd.ops.cast(y, DataType.Float))
        fd.add_output(fd.ops.linear(fd.ops.cast(product, DataType.BFloat16), w))
        place(line(), x, y, w)
        for tv in (x, y, w):
            split(tv, -1)
    a, b, c = whole_numbers(1, 1, d * 3), whole_numbers(1, 1, d * 3), whole_numbers(2, d * 3)
    same(fd.execute([cut(a, x), cut(b, y), cut(c, w)])[0], F.linear(a * b, c))


def grouped_product(rows: bool = False) -> None:
    """Weights come through a permute; with `rows` the inner dim is sharded."""
    d, groups = size(), [5, 7, 9, 11]
    k, n = (4 * d, 6) if rows else (4, 6 * d)
    with FusionDefinition() as fd:
        x = fd.define_tensor([-1, k], dtype=DataType.BFloat16, contiguity=True)
        w = fd.define_tensor([4, n, k], dtype=DataType.BFloat16, contiguity=True)
        offsets = fd.define_tensor([4], dtype=DataType.Int32, contiguity=True)
        y = fd.ops.grouped_mm(x, fd.ops.permute(w, [0, 2, 1]), offsets)
        fd.add_output(y)
        place(line(), x, w, offsets)
        for tv, axis in ((x, -1), (w, -1)) if rows else ((w, 1),):
            split(tv, axis)
    a, weight = whole_numbers(32, k), whole_numbers(4, n, k)
    ends = torch.tensor(groups).cumsum(0).to(torch.int32)
    (found,) = fd.execute([cut(a, x), cut(weight, w), ends])
    wanted = torch.cat([part @ m.T for part, m in zip(a.split(groups), weight, strict=True)])
    same(found, wanted if rows else wanted.chunk(d, -1)[rank()])


def grouped_product_of_sharded_inner_dims() -> None:
    grouped_product(True)


def grouped_mlp() -> None:
    d, k, groups = size(), 4, [8, 3, 0, 5]
    n = 6 * d
    with FusionDefinition() as fd:
        x = fd.define_tensor([-1, k], dtype=DataType.Float, contiguity=True)
        gate, up = (fd.define_tensor([4, k, n], contiguity=True) for _ in range(2))
        down = fd.define_tensor([4, n, k], contiguity=True)
        offsets = fd.define_tensor([4], dtype=DataType.Int32, contiguity=True)
        gated = fd.ops.silu(fd.ops.grouped_mm(x, gate, offsets))
        hidden = fd.ops.mul(gated, fd.ops.grouped_mm(x, up, offsets))
        fd.add_output(fd.ops.grouped_mm(hidden, down, offsets))
        place(line(), x, gate, up, down, offsets)
        for tv, axis in ((gate, -1), (up, -1), (down, -2)):
            split(tv, axis)
    a, g, u, w = torch.randn(16, k), torch.randn(4, k, n), torch.randn(4, k, n), torch.randn(4, n, k)
    ends = torch.tensor(groups).cumsum(0).to(torch.int32)
    (found,) = fd.execute([a, cut(g, gate), cut(u, up), cut(w, down), ends])
    parts = [(F.silu(part @ g[i]) * (part @ u[i])) @ w[i] for i, part in enumerate(a.split(groups))]
    same(found, torch.cat(parts), rtol=1e-4, atol=1e-4)
