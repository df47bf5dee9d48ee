"""The blocks that random programs are made of: each appends an op, or a few, to a definition.

Ops whose value jumps (floor, comparisons, argsort) take only exact operands: numbers that are the same in whatever
order they were summed, so that a sharded program can be compared with an unsharded one.
"""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence

from hypothesis import strategies as st

from ..dtypes import DataType
from .complex_blocks import complex_of, complex_pointwise, complex_product, complex_reduction, complex_shape, parts_of
from .more_blocks import (
    attention,
    attention_with_dropout,
    composite,
    dropout,
    grouped,
    random_like,
    ring_attention,
    scaled,
    uniform,
)
from .op_blocks import any_op, any_pointwise
from .shape_blocks import (
    broadcast,
    broadcast_in_dim,
    cat,
    merge,
    pad,
    permute,
    reorder,
    reshape,
    slice_,
    split,
    squeeze,
    triu,
)
from .writer import Block, DefinitionWriter, Var, joint

SMOOTH = ("tanh", "sigmoid", "sin", "cos", "erf", "erfc", "atan", "asinh", "silu")
KEEPING = ("relu", "abs", "neg", "set", "segment_set", "real")
STEPS = ("floor", "ceil", "round", "trunc", "sign", "frac")
TESTS = ("isfinite", "isnan", "isinf", "isreal", "signbit", "isneginf", "isposinf", "logical_not")
WITHIN_ONE = ("exp", "expm1", "exp2", "sinh", "cosh", "tan")
POSITIVE = ("log", "log2", "log10", "log1p", "sqrt", "rsqrt", "reciprocal", "lgamma")
FRACTION = ("asin", "acos", "atanh", "erfinv")
COMPARISONS = ("eq", "ne", "lt", "le", "gt", "ge")
BITWISE = ("bitwise_and", "bitwise_or", "bitwise_xor")


def _exact(x: Var) -> bool:
    return x.kind == "float" and x.exact


# pointwise --------------------------------------------------------------------------------------------------


def unary(w: DefinitionWriter) -> None:
    x, name = w.float(), w.choose((*SMOOTH, *KEEPING, *KEEPING))
    keeps = name in KEEPING
    bound = x.bound if keeps or name in ("silu", "asinh") else 2.0
    w.like(x, name, bound=bound, exact=x.exact and keeps)


def unary_in_domain(w: DefinitionWriter) -> None:
    name = w.choose((*WITHIN_ONE, *POSITIVE, *FRACTION))
    if name in POSITIVE:
        inside = w.like(w.float(), "sigmoid", bound=1.0, exact=False)
        inside = w.like(inside, "add", 0.5, bound=2.0)
    else:
        inside = w.tamed(w.float(), 1.0)
    if name in FRACTION:
        inside = w.like(inside, "mul", 0.75, exact=False)
    w.like(inside, name, bound=4.0, exact=False)


def step(w: DefinitionWriter) -> None:
    w.like(w.float(_exact), w.choose(STEPS))


def test_of(w: DefinitionWriter) -> None:
    w.like(w.float(_exact), w.choose(TESTS), kind="bool", bound=1.0)


def binary(w: DefinitionWriter) -> None:
    a = w.float()
    b = w.broadcastable(a)
    name = w.choose(("add", "sub", "mul", "maximum", "minimum"))
    pair = (a, b) if w.flag() else (b, a)
    bound = a.bound * b.bound if name == "mul" else a.bound + b.bound
    exact = a.exact and b.exact and bound < 1e6
    w.like(pair[0], name, pair[1].tv, shape=joint(a.shape, b.shape), bound=bound, exact=exact)


def with_number(w: DefinitionWriter) -> None:
    x, name = w.float(), w.choose(("add", "sub", "mul", "div", "rsub", "maximum", "clamp", "pow"))
    if name == "rsub":
        w.add(w.fd.ops.sub(2.0, x.tv), x.shape, x.kind, x.bound + 2, x.exact)
    elif name == "clamp":
        w.like(x, "clamp", -1.0, 2.5, bound=4.0)
    elif name == "pow":
        w.like(x, "pow", w.number(2.0), bound=x.bound**2)
    else:
        w.like(x, name, w.number(2.0), bound=2 * x.bound + 2)


def with_scalar_input(w: DefinitionWriter) -> None:
    x, scalar = w.float(), w.fd.define_scalar(dtype=DataType.Double)
    w.like(x, w.choose(("mul", "add")), scalar, bound=4 * x.bound, exact=False)


def quotient(w: DefinitionWriter) -> None:
    a = w.float()
    b = w.broadcastable(a)
    below = w.like(w.like(b, "mul", b.tv, bound=b.bound**2, exact=False), "add", 1.0)
    name = w.choose(("div", "truediv"))
    w.like(a, name, below.tv, shape=joint(a.shape, b.shape), exact=False)


def comparison(w: DefinitionWriter) -> None:
    a = w.float(_exact)
    b = w.broadcastable(a)
    b = b if b.exact else w.input(b.shape)
    shape = joint(a.shape, b.shape)
    w.like(a, w.choose(COMPARISONS), b.tv, shape=shape, kind="bool", bound=1.0, exact=True)


def where(w: DefinitionWriter) -> None:
    condition = w.pick(lambda v: v.kind == "bool") or w.input([w.size(), w.size()], "bool")
    a = w.broadcastable(condition)
    wide = joint(condition.shape, a.shape)
    b = w.pick(lambda v: v.kind == "float" and joint_or_none(v.shape, wide) == wide)
    other = b.tv if b is not None else 0.5
    bound, exact = (max(a.bound, b.bound), a.exact and b.exact) if b is not None else (a.bound, a.exact)
    w.add(w.fd.ops.where(condition.tv, a.tv, other), wide, "float", bound, exact)


def joint_or_none(a: Sequence[int], b: Sequence[int]) -> tuple[int, ...] | None:
    """The shape to which both broadcast; None where they do not."""
    fit = all(m == n or 1 in (m, n) for m, n in zip(reversed(a), reversed(b), strict=False))
    return joint(a, b) if fit else None


def ternary(w: DefinitionWriter) -> None:
    a = w.float()
    b = w.broadcastable(a)
    b = w.tamed(b, 10.0)
    shape = joint(a.shape, b.shape)
    if w.flag():
        w.like(a, "lerp", b.tv, 0.25, shape=shape, bound=a.bound + b.bound, exact=False)
    else:
        bound = a.bound + 2 * a.bound * b.bound
        w.like(a, "addcmul", b.tv, a.tv, 2.0, shape=shape, bound=bound, exact=False)


def integers(w: DefinitionWriter) -> None:
    a = w.pick(lambda v: v.kind == "int") or w.input([w.size(), w.size()], "int")
    b = w.broadcastable(a, "int")
    w.like(a, w.choose((*BITWISE, "add", "maximum", "gcd")), b.tv, shape=joint(a.shape, b.shape), bound=64.0)


def logic(w: DefinitionWriter) -> None:
    a = w.pick(lambda v: v.kind == "bool") or w.input([w.size(), w.size()], "bool")
    b = w.broadcastable(a, "bool")
    w.like(a, w.choose(("logical_and", "logical_or", "bitwise_xor")), b.tv, shape=joint(a.shape, b.shape))


def cast(w: DefinitionWriter) -> None:
    x = w.pick(lambda v: v.exact and v.bound < 1e5) or w.input([w.size(), w.size()])
    kind = w.choose(("float", "int", "float32"))
    types = {"float": DataType.Double, "int": DataType.Int, "float32": DataType.Float}
    w.like(x, "cast", types[kind], kind="int" if kind == "int" else "float", exact=x.exact and kind != "float32")


# reductions and scans ---------------------------------------------------------------------------------------


def _dims(w: DefinitionWriter, x: Var) -> list[int]:
    flags = [w.flag() for _ in x.shape]
    return [d for d, flag in enumerate(flags) if flag] or [w.dim(x)]


def _reduced(x: Var, dims: Sequence[int], keep: bool) -> list[int]:
    return [1 if d in dims else n for d, n in enumerate(x.shape) if keep or d not in dims]


def reduction(w: DefinitionWriter) -> None:
    x = w.float(lambda v: v.ndim > 0)
    name, dims, keep = w.choose(("sum", "sum", "sum", "max", "min", "prod")), _dims(w, x), w.flag()
    count = math.prod(x.shape[d] for d in dims)
    x = w.tamed(x, 1.0) if name == "prod" else x
    bound = x.bound * count if name == "sum" else x.bound
    exact = x.exact and name != "prod"
    w.like(x, name, dims, keep, shape=_reduced(x, dims, keep), bound=bound, exact=exact)


def count_of(w: DefinitionWriter) -> None:
    x = w.pick(lambda v: v.kind in ("int", "bool") and v.ndim > 0) or w.input([w.size(), w.size()], "int")
    dims, keep = _dims(w, x), w.flag()
    shape, name = _reduced(x, dims, keep), w.choose(("sum", "max", "min")) if x.kind == "int" else "sum"
    w.like(x, name, dims, keep, shape=shape, kind="int", bound=x.bound * math.prod(x.shape))


def statistics(w: DefinitionWriter) -> None:
    x = w.tamed(w.float(lambda v: v.ndim > 0), 100.0)
    dims, keep = _dims(w, x), w.flag()
    shape = _reduced(x, dims, keep)
    if x.tv.dtype.is_reduced_float or w.flag():  # var_mean takes no half precision
        w.like(x, "var", dims, 0, keep, shape=shape, bound=x.bound**2, exact=False)
        return
    var, mean = w.fd.call("var_mean", (x.tv, dims, 0, keep))
    w.add(var, shape, "float", x.bound**2, False)
    w.add(mean, shape, "float", x.bound, False)


def scan(w: DefinitionWriter) -> None:
    x, name = w.float(lambda v: v.ndim > 0), w.choose(("cumsum", "cummax", "cummin", "cumprod"))
    x = w.tamed(x, 1.0) if name == "cumprod" else x
    dim, init = w.dim(x), [0.5] if w.draw(st.integers(0, 3)) == 3 else []
    bound = x.bound * x.shape[dim] + 1 if name == "cumsum" else x.bound
    w.like(x, name, dim, *init, bound=bound, exact=x.exact and name != "cumprod")


def softmax(w: DefinitionWriter) -> None:
    x = w.float(lambda v: v.ndim > 0)
    dim = w.dim(x)
    peak = w.like(x, "max", [dim], True, shape=_reduced(x, [dim], True))
    powers = w.like(w.like(x, "sub", peak.tv), "exp", bound=1.0, exact=False)
    total = w.like(powers, "sum", [dim], True, shape=peak.shape, bound=float(x.shape[dim]))
    w.like(powers, "div", total.tv)


# products ---------------------------------------------------------------------------------------------------


def matmul(w: DefinitionWriter) -> None:
    a = w.tamed(w.float(lambda v: 1 < v.ndim < 4), 50.0)
    *batch, _, k = a.shape
    b = w.pick(
        lambda v: (
            v.kind == "float"
            and v.ndim == 2
            and v.shape[0] == k
            and v is not a
            and v.tv.dtype is a.tv.dtype
            and v.bound <= 50.0
        )
    )
    if b is None or w.flag():
        lead = batch if w.flag() else []
        b = w.input([*lead, k, w.size()], dtype=a.tv.dtype)
    shape = (*batch, a.shape[-2], b.shape[-1])
    if math.prod(shape) <= w.max_numel:
        w.like(a, "matmul", b.tv, shape=shape, bound=a.bound * b.bound * k)


def linear(w: DefinitionWriter) -> None:
    x = w.tamed(w.float(lambda v: 0 < v.ndim < 4), 50.0)
    n = w.size()
    weight = w.input([n, x.shape[-1]], dtype=x.tv.dtype)
    more = [w.input([n], dtype=x.tv.dtype).tv] if w.flag() else []
    shape, bound = (*x.shape[:-1], n), x.bound * 4 * x.shape[-1] + 4
    if math.prod(shape) <= w.max_numel:
        w.like(x, "linear", weight.tv, *more, shape=shape, bound=bound)


def gram(w: DefinitionWriter) -> None:
    x = w.tamed(w.float(lambda v: v.ndim == 2), 50.0)
    m, k = x.shape
    other = w.like(x, "permute", [1, 0], shape=(k, m))
    w.like(x, "matmul", other.tv, shape=(m, m), bound=x.bound**2 * k)


# lookups ----------------------------------------------------------------------------------------------------


def _index(w: DefinitionWriter, shape: Sequence[int]) -> Var:
    return w.input(shape, "int", 1.0)


def index_select(w: DefinitionWriter) -> None:
    x = w.float(lambda v: v.ndim > 0)
    dim, n = w.dim(x), w.size()
    shape = (*x.shape[:dim], n, *x.shape[dim + 1 :])
    if math.prod(shape) <= w.max_numel:
        w.like(x, "index_select", _index(w, [n]).tv, dim, shape=shape)


def take_along(w: DefinitionWriter) -> None:
    x = w.float(lambda v: v.ndim > 0)
    dim, n = w.dim(x), w.choose((1, 2, 3, 5))
    shape = (*x.shape[:dim], n, *x.shape[dim + 1 :])
    if math.prod(shape) <= w.max_numel:
        w.like(x, w.choose(("take_along_axis", "gather")), _index(w, shape).tv, dim, shape=shape)


def embedding(w: DefinitionWriter) -> None:
    table, index = w.float(lambda v: v.ndim == 2), _index(w, [w.choose((1, 2, 3, 4)), w.choose((1, 2, 5))])
    shape = (*index.shape, table.shape[1])
    if table.ndim == 2 and math.prod(shape) <= w.max_numel:
        w.add(w.fd.ops.embedding_fwd(index.tv, table.tv), shape, "float", table.bound, table.exact)


def select(w: DefinitionWriter) -> None:
    x = w.float(lambda v: v.ndim > 1)
    dim = w.dim(x)
    place = w.draw(st.integers(0, x.shape[dim] - 1))
    w.like(x, "select", place, dim, shape=(*x.shape[:dim], *x.shape[dim + 1 :]))


def scatter(w: DefinitionWriter) -> None:
    x = w.float(lambda v: v.ndim > 0)
    dim = w.dim(x)
    shape = [min(n, 2) for n in x.shape]
    w.like(x, "scatter", _index(w, shape).tv, 3.0, dim, bound=x.bound + 3)


def order(w: DefinitionWriter) -> None:
    x = w.float(lambda v: v.ndim > 0 and v.exact)
    dim = w.dim(x)
    if w.flag():
        w.like(x, "argsort", dim, w.flag(), True, kind="int", bound=16.0)
        return
    k = w.draw(st.integers(1, x.shape[dim]))
    values, _ = w.fd.call("topk", (x.tv, k, dim, w.flag(), True))
    w.add(values, (*x.shape[:dim], k, *x.shape[dim + 1 :]), "float", x.bound, x.exact)


# factories --------------------------------------------------------------------------------------------------


def factory(w: DefinitionWriter) -> None:
    x = w.float(lambda v: v.ndim > 0)
    if w.flag():
        line = w.add(w.fd.ops.iota(x.shape[-1], 1, 2, DataType.Int), (x.shape[-1],), "int", 32.0, True)
        values = w.like(line, "cast", DataType.Double, kind="float")
    else:
        shape = [x.shape[-1]] if w.flag() else list(x.shape)
        values = w.add(w.fd.ops.full(w.sizes_of(shape), w.number(1.5), DataType.Double), shape, "float", 2.0, True)
    w.like(x, "add", values.tv, bound=x.bound + values.bound)


FAMILIES: Mapping[str, tuple[Block, ...]] = {
    "pointwise": (unary, unary_in_domain, step, test_of, binary, with_number, with_scalar_input, quotient,
                  comparison, where, ternary, integers, logic, cast, factory),
    "reductions": (reduction, reduction, count_of, statistics, scan, softmax, squeeze),
    "products": (matmul, linear, linear, gram, attention, ring_attention, grouped, scaled),
    "shapes": (merge, split, reshape, permute, slice_, pad, reorder, cat, broadcast, broadcast_in_dim, squeeze, triu),
    "lookups": (index_select, take_along, embedding, select, scatter, order),
    "random": (uniform, random_like, dropout, attention_with_dropout),
    "complex": (complex_of, complex_pointwise, complex_product, complex_reduction, complex_shape, parts_of),
    "ops": (any_op, any_op, any_pointwise, composite),
}  # fmt: skip
