"""The derivatives of ops made of torch functions: torch's autograd on each rank, as an op for every operand."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from typing import Any

import torch

from .notation import Dims, Notation
from .opdef import Call, OpDef, Partial
from .torch_function import Halos, TorchOp, Widths
from .values import Param, ParamKind
from .vjp import Backward
from .vjp import sizes as shape_of

K = ParamKind


def derivative(op: TorchOp) -> dict[str, Any]:
    """The OpDef fields of the derivative: `vjp`, and `adjoints` with one op per operand. Empty without operands."""
    tensors = op.params[: len(op.notation.operands)]
    adjoints = {param.name: _adjoint(op, place) for place, param in enumerate(tensors)}
    return {"vjp": _vjp(tensors, adjoints), "adjoints": tuple(adjoints.values())} if tensors else {}


def _adjoint(op: TorchOp, operand: int) -> OpDef:
    """An op that gives the gradient by one operand, by torch's autograd on each rank.

    It sums over the factors that the operand lacks. Along a dim of which the function sees `a` elements before and `z`
    after its own, an element's gradient needs the results' gradients from `z` before to `a` after.
    """
    notation, count, own_def = op.notation, len(op.notation.results), op.opdef()

    def primal(call: Call) -> Call:
        return Call(own_def, call.args[count:], call.types[count:])

    def halos(call: Call) -> Halos:
        own = op.halos(primal(call))
        reach = own[operand]
        grads = [{f: (z, a) for f, (a, z) in reach.items()} for _ in range(count)]
        expanded = notation.expanded(primal(call).types)
        return (*grads, *(_widened(dims, h, reach) for dims, h in zip(expanded.operands, own, strict=True)))

    marked = tuple(tuple(dim._replace(halo=True) for dim in dims) for dims in notation.results)
    rule = Notation(notation.text, (*marked, *notation.operands), (notation.operands[operand],))
    names = tuple(f"grad{i}" if count > 1 else "grad" for i in range(count))
    made = TorchOp(
        f"{op.name}_bwd_{op.params[operand].name}", rule, _backward_of(op.function, count, operand),
        (*(Param(name, K.TENSOR) for name in names), *op.params), op.blocked, "sum", halos, ((0,) * count + op.fills),
        lambda call: op.sizes(primal(call)), lambda call: (call.types[count + operand].dtype,),
        (operand, lambda call: op.halos(primal(call))),
    )  # fmt: skip
    return made.opdef(partial=Partial.FIRST if count == 1 else Partial.NONE)


def _backward_of(function: Callable[..., Any], count: int, operand: int) -> Callable[..., torch.Tensor]:
    """A function's gradient by operand number `operand`, called on its `count` results' gradients and its operands."""

    def backward(*args: Any) -> torch.Tensor:
        grads, rest = args[:count], list(args[count:])
        with torch.enable_grad():
            rest[operand] = leaf = rest[operand].detach().requires_grad_()
            made = function(*rest)
            pairs = zip(made if isinstance(made, (tuple, list)) else (made,), grads, strict=True)
            used = [(result, grad) for result, grad in pairs if result.requires_grad]
            results, given = [r for r, _ in used], [g for _, g in used]
            found = torch.autograd.grad(results, [leaf], given, allow_unused=True) if used else [None]
        return torch.zeros_like(leaf) if found[0] is None else found[0]

    return backward


def _widened(dims: Dims, halo: Widths, reach: Widths) -> dict[str, tuple[int, int]]:
    """The widths that a gradient needs of an operand: the function's own, plus those of the results that it reads."""
    names = [dim.factors[0] for dim in dims if len(dim.factors) == 1]
    found = {f: (halo.get(f, (0, 0)), reach.get(f, (0, 0))) for f in names if f in halo or f in reach}
    return {f: (a + after, z + before) for f, ((a, z), (before, after)) in found.items()}


def _vjp(tensors: Sequence[Param], adjoints: Mapping[str, OpDef]) -> Callable[[Backward], Mapping[str, Any]]:
    def vjp(b: Backward) -> Mapping[str, Any]:
        pairs = zip(b.results, b.grads, strict=True)
        grads = [b.ops.full(shape_of(r), 0.0, r.dtype) if grad is None else grad for r, grad in pairs]
        arguments = list(b.arguments.values())
        return {p.name: b.ops.apply(adjoints[p.name], *grads, *arguments) for p in tensors if b.needs(p.name)}

    return vjp
