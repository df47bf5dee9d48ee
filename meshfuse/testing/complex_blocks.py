"""Blocks of random programs: complex numbers."""

from __future__ import annotations

import math

from hypothesis import strategies as st

from .writer import DefinitionWriter, Var, joint


def _complex(w: DefinitionWriter, ndim: int = 0, limit: float = 1e3) -> Var:
    """A complex tensor of at least so many dims and with numbers up to the limit, or a new input."""
    found = w.pick(lambda v: v.kind == "complex" and v.ndim >= ndim and v.bound <= limit)
    return found or w.input([w.size() for _ in range(max(ndim, 2))], "complex", 6.0)


def complex_of(w: DefinitionWriter) -> None:
    x = w.float(lambda v: v.tv.dtype.itemsize > 2)
    w.like(x, "complex", x.tv, kind="complex", bound=2 * x.bound)


def complex_pointwise(w: DefinitionWriter) -> None:
    x = _complex(w)
    name = w.choose(("add", "sub", "mul", "neg", "truediv", "abs"))
    if name in ("neg", "abs"):
        w.like(x, name, kind="float" if name == "abs" else "complex", bound=2 * x.bound, exact=False)
        return
    if name == "truediv":
        w.like(x, name, w.choose((2.0, 1.0 + 2.0j)), exact=False)
        return
    same = w.pick(lambda v: v.kind == "complex" and v.shape == x.shape and v.bound <= 1e3)
    other = same or w.input(x.shape, "complex", 6.0)
    bound = 2 * x.bound * other.bound if name == "mul" else x.bound + other.bound
    exact = x.exact and other.exact and bound < 1e6
    w.like(x, name, other.tv, shape=joint(x.shape, other.shape), bound=bound, exact=exact)


def complex_product(w: DefinitionWriter) -> None:
    x = _complex(w, 2, 50.0)
    n = w.size()
    if x.ndim < 4 and math.prod(x.shape[:-1]) * n <= w.max_numel:
        other = w.input((x.shape[-1], n), "complex", 6.0, dtype=x.tv.dtype)
        w.like(x, "matmul", other.tv, shape=(*x.shape[:-1], n), bound=2 * x.bound * 6 * x.shape[-1])


def complex_reduction(w: DefinitionWriter) -> None:
    x = _complex(w, 1)
    dim, keep = w.dim(x), w.flag()
    shape = [1 if d == dim else n for d, n in enumerate(x.shape) if keep or d != dim]
    if w.flag():
        w.like(x, "sum", [dim], keep, shape=shape, bound=x.bound * x.shape[dim])
    else:
        w.like(x, "cumsum", dim, bound=x.bound * x.shape[dim])


def complex_shape(w: DefinitionWriter) -> None:
    x = _complex(w, 1)
    how = w.choose(("permute", "reshape", "slice"))
    if how == "permute":
        order = list(w.draw(st.permutations(range(x.ndim))))
        w.like(x, how, order, shape=[x.shape[d] for d in order])
    elif how == "reshape":
        shape = [math.prod(x.shape)]
        w.like(x, how, shape, shape=shape)
    else:
        w.like(x, how, [0] * x.ndim, [max(1, n - 1) for n in x.shape], shape=[max(1, n - 1) for n in x.shape])


def parts_of(w: DefinitionWriter) -> None:
    w.like(_complex(w), w.choose(("real", "imag")), kind="float")
