"""Check of `OpDef.concat_distributive`: on the parts of a dim, put together, an op gives what it gives on the whole.

`rewrites.split_concats` relies on it.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from typing import Any

import torch

from ..definition.builder import DefinitionBuilder
from ..graph import Graph, specialize
from ..ops.binding import make_call
from ..ops.opdef import OpDef, Sample
from ..ops.rules import DimFactors, FactorKind, Rule, letter
from ..ops.values import TensorType
from ..rewrites.split_concats import Parted
from .calls import operands_of, whole
from .cases import report, tolerance, wrong_results


def concat_problem(op: OpDef, sample: Sample) -> str | None:
    """Compare the op on two parts of a dim with the op on the whole, for every factor and wherever it is cut."""
    if not op.concat_distributive:
        return None
    call = make_call(op, sample)
    rule, operands = op.rule(call), operands_of(call, sample)
    wanted = whole(call, operands)
    for factor in _factors(rule):
        n = rule.factors[factor].size
        for first in range(1, n):
            graph = on_parts(op, sample, rule, factor, first)
            found = evaluated(graph, _in_two(operands, rule, factor, first))
            wrong = wrong_results(found, wanted, 10 * tolerance(call))
            if wrong is not None:
                facts = [("parts", f"{first} and {n - first} of factor {letter(factor)}"), ("wrong", wrong[2])]
                return report(
                    op, call, "it is not the same on the parts of a dim", facts, "Say concat_distributive=False."
                )
    return None


def on_parts(op: OpDef, sample: Sample, rule: Rule, factor: int, first: int) -> Graph:
    """The call as it is written for operands that are put together from two parts along a factor."""
    fd = _put_together(op, sample, rule, factor, first)
    graph = specialize(fd, {i: fd.tensors[i].type.shape for i in fd.input_tensors()}, {})
    return Parted(tuple([node.id for node in graph.nodes[:-1]]))(graph)


def _factors(rule: Rule) -> Iterator[int]:
    """The factors along which the op may be computed on parts: those that are a dim of an operand by themselves."""
    for f, factor in enumerate(rule.factors):
        sides = (*rule.operands, *rule.results)
        alone = all(factors == (f,) for dims in sides for factors in dims if f in factors)
        read = [_dim_of(dims, f) is not None for dims in rule.operands]
        kinds = {FactorKind.PASS: any(read), FactorKind.REDUCE: bool(read) and all(read), FactorKind.BLOCK: False}
        if factor.size > 1 and alone and kinds[factor.kind]:
            yield f


def _dim_of(dims: DimFactors, factor: int) -> int | None:
    return next((d for d, factors in enumerate(dims) if factors == (factor,)), None)


def _put_together(op: OpDef, sample: Sample, rule: Rule, factor: int, first: int) -> DefinitionBuilder:
    dims = iter(rule.operands)
    fd = DefinitionBuilder()

    def defined(arg: Any) -> Any:
        if isinstance(arg, list) and arg and isinstance(arg[0], TensorType):
            return [defined(entry) for entry in arg]
        if not isinstance(arg, TensorType):
            return arg
        dim = _dim_of(next(dims), factor)
        if dim is None:
            return fd.define_tensor(list(arg.shape), dtype=arg.dtype)
        sizes = ([*arg.shape[:dim], n, *arg.shape[dim + 1 :]] for n in (first, arg.shape[dim] - first))
        return fd.ops.cat([fd.define_tensor(shape, dtype=arg.dtype) for shape in sizes], dim)

    args = [defined(arg) for arg in sample.args]
    fd.add_output(fd.call(op, args, {key: defined(value) for key, value in sample.kwargs.items()}))
    return fd


def _in_two(operands: Sequence[torch.Tensor], rule: Rule, factor: int, first: int) -> list[torch.Tensor]:
    """The operands, each cut in two if it has a dim of the factor."""
    places = [(t, _dim_of(dims, factor)) for t, dims in zip(operands, rule.operands, strict=True)]
    rows = ([t] if dim is None else t.split([first, t.shape[dim] - first], dim) for t, dim in places)
    return [part for row in rows for part in row]


def evaluated(graph: Graph, inputs: Sequence[torch.Tensor]) -> list[torch.Tensor]:
    """The outputs of a graph, computed op by op on whole tensors."""
    known = dict(zip(graph.input_tensors, inputs, strict=True))
    for node in graph.nodes:
        known.update(zip(node.outputs, whole(node.call, [known[i] for i in node.inputs]), strict=True))
    return [known[i] for i in graph.outputs]
