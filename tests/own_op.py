"""A user's module with an op of its own, in full: what docs/adding-an-op.md describes, outside of the package."""

from __future__ import annotations

import importlib.util
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path

import meshfuse as mf

NAME = "weighted_rows"
MODULE = '''\
"""The rows of a matrix, each summed with weights."""

import meshfuse as mf
from meshfuse.ops.rules import FactorKind, RuleBuilder
from meshfuse.ops.values import Param, ParamKind
from meshfuse.ops.vjp import each


def infer(call):
    x, _ = call.types
    return (mf.TensorType((x.shape[0],), x.dtype),)


def rule(call):
    """a b, b -> a, summed over b."""
    builder = RuleBuilder()
    a, b = builder.dims(call.types[0].shape, [1], FactorKind.REDUCE)
    return builder.build([(a, b), (b,)], [(a,)])


def nvfuser(n):
    x, weight = n.operands
    return n.ops.sum(n.ops.mul(x, n.ops.broadcast(weight, [True, False])), [1])


def gradient(b):
    return b.ops.mul(b.ops.broadcast(b.grad, [False, True]), b["weight"])


weighted_rows = mf.register_op(mf.OpDef(
    "weighted_rows", (Param("x", ParamKind.TENSOR), Param("weight", ParamKind.TENSOR)), infer, rule,
    lambda e: f"torch.mv({e.operands[0]}, {e.operands[1]})", mf.Partial.EACH,
    samples=lambda: [mf.Sample.of_floats((4, 6), (6,))], nvfuser=nvfuser,
    vjp=each(x=gradient, weight=lambda b: b.ops.matmul(b.grad, b["x"])),
    about="the rows of a matrix, each summed with weights",
))
'''


@contextmanager
def registered(folder: Path) -> Iterator[mf.OpDef]:
    """The op, registered while the context lasts by a module that is written to this folder."""
    path = folder / f"{NAME}.py"
    path.write_text(MODULE)
    spec = importlib.util.spec_from_file_location(NAME, path)
    assert spec is not None and spec.loader is not None
    module = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(module)
    try:
        yield module.weighted_rows
    finally:
        mf.unregister_op(NAME)
