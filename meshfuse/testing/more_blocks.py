"""Blocks of random programs: random numbers, attention, grouped and scaled products, and composites."""

from __future__ import annotations

import math

from hypothesis import strategies as st

from ..dtypes import Category, DataType
from .examples import Example
from .writer import DefinitionWriter, Var

REAL = (DataType.Double, DataType.Double, DataType.Float)


# random numbers ---------------------------------------------------------------------------------------------


def uniform(w: DefinitionWriter) -> None:
    x = w.float()
    name, dtype = w.choose(("uniform", "normal")), w.choose((*REAL, DataType.Half))
    own = {"rng_seed": 7, "rng_offset": 3} if w.flag() else {}
    numbers = (-1.0, 2.0) if name == "uniform" else (0.5, 1.5)
    made = w.fd.call(name, (*map(w.number, numbers), w.sizes_of(x.shape)), {**own, "dtype": dtype})
    drawn = w.add(made, x.shape, "float", 16.0, False)
    w.like(x, "mul", drawn.tv, bound=16 * x.bound, exact=False)


def random_like(w: DefinitionWriter) -> None:
    x, name = w.float(), w.choose(("rand_like", "randn_like"))
    w.like(x, name, bound=8.0, exact=False)


def dropout(w: DefinitionWriter) -> None:
    x = w.float()
    w.add(w.fd.ops.dropout(x.tv, w.choose((0.0, 0.25, 0.5))), x.shape, "float", 2 * x.bound, False)


# products ---------------------------------------------------------------------------------------------------


def attention(w: DefinitionWriter, dropout_p: float = 0.0) -> None:
    """Attention, half of the time with its gradients."""
    heads, groups, length = w.choose((1, 2, 4)), w.choose((1, 2)), w.choose((2, 3, 5))
    dtype = w.choose([d for d in w.dtypes if d.category is Category.FLOAT] or [DataType.Double])
    shape = (w.choose((1, 2, 3)), heads * groups, length, 2)
    q, k, v = (w.input(s, dtype=dtype) for s in (shape, *((shape[0], heads, length, 2),) * 2))
    is_causal = w.flag()
    made = w.fd.call("sdpfa_fwd", (q.tv, k.tv, v.tv), {"is_causal": is_causal, "dropout_p": dropout_p})
    w.add(made[0], shape, "float", 2 * v.bound, False)
    if w.flag():
        grad = w.input(shape, dtype=dtype)
        args = (grad.tv, q.tv, k.tv, v.tv, *made[:2], dropout_p, is_causal, *made[2:])
        for one, like in zip(w.fd.call("sdpfa_bwd", args), (q, k, v), strict=True):
            w.add(one, like.shape, "float", 100.0, False)


def attention_with_dropout(w: DefinitionWriter) -> None:
    attention(w, w.choose((0.25, 0.5)))


def ring_attention(w: DefinitionWriter) -> None:
    """Attention in a ring of any size, half of the time with its gradients."""
    ring, heads, groups, is_causal = w.choose((1, 2, 3, 4)), w.choose((1, 2)), w.choose((1, 2)), w.flag()
    options = (ring, is_causal, None, w.flag())
    dtype = w.choose([d for d in w.dtypes if d.category is Category.FLOAT] or [DataType.Double])
    shape = (w.choose((1, 2)), heads * groups, 2 * ring, 2)
    columns = 2 * ring if is_causal else 2 * ring * w.choose((1, 2))
    q, k, v = (w.input(s, dtype=dtype) for s in (shape, *((shape[0], heads, columns, 2),) * 2))
    out, lse = w.fd.call("ring_attention", (q.tv, k.tv, v.tv, *options))
    w.add(out, shape, "float", 2 * v.bound, False)
    w.add(lse, shape[:-1], "float", 100.0, False)
    if w.flag():
        args = (w.input(shape, dtype=dtype).tv, q.tv, k.tv, v.tv, out, lse, *options)
        for one, like in zip(w.fd.call("ring_attention_bwd", args), (q, k, v), strict=True):
            w.add(one, like.shape, "float", 100.0, False)


def grouped(w: DefinitionWriter) -> None:
    """A product in groups of one size: of rows, columns or inner indices."""
    groups, size, m, n = w.choose((1, 2, 3)), w.choose((1, 2, 3)), w.size(), w.size()
    ends = w.add(w.fd.ops.iota(groups, size, size, DataType.Int32), (groups,), "int", 16.0, True)
    total, kind = groups * size, w.choose(("rows", "columns", "inner"))
    shapes = {
        "rows": ((total, m), (groups, m, n), (total, n)),
        "columns": ((groups, m, n), (n, total), (m, total)),
        "inner": ((m, total), (total, n), (groups, m, n)),
    }[kind]
    dtype = w.choose([d for d in w.dtypes if d.category is Category.FLOAT] or [DataType.Double])
    a, b = (w.input(shape, dtype=dtype) for shape in shapes[:2])
    made = w.fd.call("grouped_mm", (a.tv, b.tv, ends.tv))
    w.add(made, shapes[2], "float", 16.0 * max(m, n, total), True)


def scaled(w: DefinitionWriter) -> None:
    m, k, n = w.size(), 2 * w.choose((1, 2, 3)), w.size()
    scales = w.choose((((m, 1), (1, n)), ((), ()), ((m, 2), (2, n))))
    a, b, *factors = (w.input(s, dtype=DataType.Float) for s in ((m, k), (k, n), *scales))
    more = {"bias": w.input((n,), dtype=DataType.Float).tv} if w.flag() else {}
    made = w.fd.call("scaled_mm", (a.tv, b.tv, *(f.tv for f in factors)), {**more, "dtype": DataType.Float})
    w.add(made, (m, n), "float", 256.0 * k + 4, False)


# composites -------------------------------------------------------------------------------------------------


def _normalized(w: DefinitionWriter, x: Var, name: str) -> None:
    shape = (x.shape[-1],)
    weight = w.input(shape, dtype=x.tv.dtype).tv if w.flag() else None
    w.add(getattr(w.fd.ops, name)(x.tv, list(shape), weight), x.shape, "float", 16.0, False)


def composite(w: DefinitionWriter) -> None:
    x = w.tamed(w.float(lambda v: v.ndim > 0 and math.prod(v.shape) > 0), 100.0)
    name, dim, ops = w.choose(_COMPOSITES), w.dim(x), w.fd.ops
    without = (*x.shape[:dim], *x.shape[dim + 1 :])
    if name in ("layer_norm", "rms_norm"):
        _normalized(w, x, name)
    elif name == "logsumexp":
        w.add(ops.logsumexp(x.tv, [dim]), without, "float", x.bound + 10, False)
    elif name == "mean":
        w.add(ops.mean(x.tv, [dim], True), (*x.shape[:dim], 1, *x.shape[dim + 1 :]), "float", x.bound, False)
    elif name == "argmax":
        x = x if x.exact else w.input(x.shape)
        w.add(ops.argmax(x.tv, dim), without, "int", 16.0, True)
    elif name == "gelu":
        w.add(ops.gelu(x.tv, w.choose(("none", "tanh"))), x.shape, "float", x.bound, False)
    elif name == "cross_entropy":
        _cross_entropy(w)
    else:
        w.add(getattr(ops, name)(x.tv, dim), x.shape, "float", x.bound, False)


def _cross_entropy(w: DefinitionWriter) -> None:
    rows, classes = w.size(), w.size()
    logits = w.input((rows, classes))
    values = tuple(w.draw(st.integers(0, classes - 1)) for _ in range(3))
    targets = w.input((rows,), "int", example=Example((rows,), values))
    loss = w.fd.ops.cross_entropy(logits.tv, targets.tv, w.choose(("mean", "sum")))
    w.add(loss, (), "float", 100.0, False)


_COMPOSITES = (
    "softmax", "log_softmax", "logsumexp", "mean", "layer_norm", "rms_norm", "argmax", "gelu", "cross_entropy",
)  # fmt: skip
