"""Ops made of a torch function and a factor rule as text: the short way to an `OpDef` of one's own.

Everything else follows: types from the rule, the derivative from autograd, and for dims of which the function sees
neighbours the distributed form, in which ranks exchange the edges of their blocks.
"""

from __future__ import annotations

import functools
import inspect
import math
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, replace
from typing import Any

from ..dtypes import DataType, promote
from ..errors import caller_line, located, shown, user_error
from ..gradients.context import Backward
from ..gradients.context import sizes as shape_of
from ..kernels.adjoints import backward_of
from .base import (
    REQUIRED,
    Call,
    Emit,
    OpDef,
    Param,
    ParamKind,
    Partial,
    Rule,
    Sample,
    TensorRef,
    TensorType,
    Writing,
)
from .blocks import block_size
from .claims import (
    check_claims,
    check_halos,
    check_options,
    check_results,
    check_told,
    check_widths,
    is_function,
    told_dtypes,
    told_flops,
    told_halo,
    told_sizes,
)
from .halo import in_blocks, whole_again
from .local import plain_text
from .notation import Dim, Dims, Notation, parse

K = ParamKind
Function = Callable[..., Any]
# By factor, how many elements before and after its own the function sees; and so for every operand.
Widths = Mapping[str, tuple[int, int]]
Halos = tuple[Widths, ...]
_KINDS = {"bool": K.BOOL, "int": K.INT, "float": K.SCALAR, "complex": K.SCALAR, "tuple": K.INTS, "list": K.INTS}
_BLOCK = "blocks~"


@dataclass(frozen=True, slots=True, eq=False)
class TorchOp:
    """What `torch_op` is told, and the parts of an OpDef that follow from it."""

    name: str
    notation: Notation
    function: Function
    params: tuple[Param, ...]
    blocked: tuple[str, ...]
    reduce: str
    halos: Callable[[Call], Halos]
    fills: tuple[Any, ...]
    sizes: Callable[[Call], Mapping[str, int]]
    dtypes: Callable[[Call], Sequence[DataType]]
    crop: tuple[int, Callable[[Call], Halos]] | None = None
    block: str = ""

    def expanded(self, call: Call) -> Notation:
        return self.notation.expanded(call.types)

    def infer(self, call: Call) -> tuple[TensorType, ...]:
        notation = self.expanded(call)
        shapes = notation.shapes(notation.sizes(call.types, self.sizes(call)))
        return tuple(map(TensorType, shapes, self.dtypes(call)))

    def rule(self, call: Call) -> Rule:
        notation = self.expanded(call)
        seen = [f for halo in self.halos(call) for f in halo]
        return notation.rule(notation.sizes(call.types, self.sizes(call)), (*self.blocked, *seen), self.reduce)

    def emit(self, e: Emit) -> str | tuple[str, ...]:
        """The call of the function; of nothing, where the rank has nothing to compute it from, its identity."""
        pairs = zip(e.operand_shapes, e.call.types, strict=True)
        if all(map(_is_empty, e.result_shapes)) or any(_is_empty(shape) and t.numel for shape, t in pairs):
            shapes = zip(e.result_shapes, e.call.results, strict=True)
            return tuple(f"K.neutral({shape}, {self.reduce!r}, torch.{t.dtype.value}, device)" for shape, t in shapes)
        kinds = [(s, t.dtype.value) for s, t in zip(e.result_shapes, e.call.results, strict=True)]
        wanted = "".join(f", ({shape}, torch.{dtype})" for shape, dtype in kinds)
        return f"K.as_told({self.name!r}, {self._cropped(e, self._called(e))}{wanted})"

    def _called(self, e: Emit) -> str:
        notation, halos = self.expanded(e.call), self.halos(e.call)
        operands = [
            _padded(name, dims, halo, fill)
            for name, dims, halo, fill in zip(e.operands, notation.operands, halos, self.fills, strict=True)
        ]
        numbers = [self._number(e, p) for p in self.params[len(operands) :]]
        if not self.block:
            return f"OP.{self.name}({', '.join([*operands, *numbers])})"
        places = [_place(dims, _BLOCK) for dims in notation.operands]
        made = [_place(dims, _BLOCK) for dims in notation.results]
        listed = f"[{', '.join(operands)}]"
        return f"K.over_blocks(OP.{self.name}, {', '.join([str(places), str(made), listed, *numbers])})"

    def _number(self, e: Emit, param: Param) -> str:
        is_scalar = param.kind in (K.SCALAR, K.OPTIONAL_SCALAR)
        return e.scalar(param.name) if is_scalar and e.call[param.name] is not None else repr(e.call[param.name])

    def _cropped(self, e: Emit, text: str) -> str:
        """Of a gradient the part that is the rank's own."""
        if self.crop is None:
            return text
        for f, (before, after) in self.crop[1](e.call)[self.crop[0]].items():
            place = _place(self.expanded(e.call).results[0], f)
            text += f".narrow({place}, {before + after}, {e.result_shapes[0][place or 0]})"
        return text

    def distributed(
        self, r: Writing, call: Call, operands: tuple[TensorRef, ...], dim: int, blocks: int
    ) -> Sequence[TensorRef] | None:
        """Blocks of the dim with their neighbours' edges, the function on each, and the dim put together."""
        notation, halos = self.expanded(call), self.halos(call)
        names = notation.operands[r.operand][dim].factors
        if not blocks or len(names) != 1 or not any(names[0] in halo for halo in halos):
            return None
        f, n = names[0], call.types[r.operand].shape[dim]
        size = block_size(n, blocks)
        made = _block_op(self, f, size, tuple(tuple(sorted(h.items())) for h in halos), notation)
        cut = [
            in_blocks(r, x, place, blocks, size, halo.get(f, (0, 0)), fill) if place is not None else x
            for x, dims, halo, fill in zip(operands, notation.operands, halos, self.fills, strict=True)
            for place in [_place(dims, f)]
        ]
        found = r.call(made, *cut, *call.args[len(operands) :])
        results = (found,) if isinstance(found, TensorRef) else found
        places = [_place(dims, f) for dims in notation.results]
        return [x if p is None else whole_again(r, x, p, n) for x, p in zip(results, places, strict=True)]

    def opdef(self, **more: Any) -> OpDef:
        has_halo = self.block == "" and any(d.halo for dims in self.notation.operands for d in dims)
        return OpDef(
            self.name, self.params, self.infer, self.rule, self.emit, compute=self.function,
            distributed=self.distributed if has_halo else None, nvfuser="a function of torch", **more,
        )  # fmt: skip


def _is_empty(shape: Sequence[int]) -> bool:
    return math.prod(shape) == 0


def _place(dims: Dims, factor: str) -> int | None:
    """The dim that is this factor."""
    return next((d for d, dim in enumerate(dims) if dim.factors == (factor,)), None)


def _padded(name: str, dims: Dims, halo: Widths, fill: Any) -> str:
    """Python text of an operand with what lies beyond the tensor's ends."""
    widths = [halo.get(dim.factors[0], (0, 0)) if len(dim.factors) == 1 else (0, 0) for dim in reversed(dims)]
    while widths and widths[-1] == (0, 0):
        widths.pop()
    flat = [w for pair in widths for w in pair]
    return f"F.pad({name}, {flat}, value={plain_text(fill)})" if flat else name


@functools.lru_cache(maxsize=4096)
def _block_op(op: TorchOp, factor: str, size: int, halos: Any, notation: Notation) -> OpDef:
    """The op on blocks of a factor: the dim before it says which block, and what the function sees is all there."""
    found, lengths = [dict(halo) for halo in halos], {factor: size}
    sides: list[list[Dims]] = [[], []]
    for i, (dims, halo) in enumerate(zip(notation.operands, found, strict=True)):
        inner = f"{factor}~{i}" if factor in halo else factor
        lengths[inner] = size + sum(halo.pop(factor, (0, 0)))
        sides[0].append(_in_blocks(dims, factor, inner))
    sides[1] = [_in_blocks(dims, factor, factor) for dims in notation.results]
    made = replace(
        op, name=f"{op.name}_in_blocks", notation=Notation(op.notation.text, tuple(sides[0]), tuple(sides[1])),
        blocked=(*op.blocked, *lengths), halos=lambda _: tuple(found), block=factor,
        sizes=lambda call: {**op.sizes(call), **lengths},
    )  # fmt: skip
    return made.opdef()


def _in_blocks(dims: Dims, factor: str, inner: str) -> Dims:
    out: list[Dim] = []
    for dim in dims:
        out += [Dim((_BLOCK,)), Dim((inner,))] if dim.factors == (factor,) else [dim]
    return tuple(out)


# derivatives ------------------------------------------------------------------------------------------------


def _adjoint(op: TorchOp, operand: int) -> OpDef:
    """The gradient by one operand, by torch's autograd on each rank.

    What the operand lacks is summed over. Along a dim of which the function sees `a` elements before and `z` after, the
    gradient of an element needs those of the results from `z` before it to `a` after.
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
        f"{op.name}_bwd_{op.params[operand].name}", rule, backward_of(op.function, count, operand),
        (*(Param(name, K.TENSOR) for name in names), *op.params), op.blocked, "sum", halos, ((0,) * count + op.fills),
        lambda call: op.sizes(primal(call)), lambda call: (call.types[count + operand].dtype,),
        (operand, lambda call: op.halos(primal(call))),
    )  # fmt: skip
    return made.opdef(partial=Partial.FIRST if count == 1 else Partial.NONE)


def _widened(dims: Dims, halo: Widths, reach: Widths) -> dict[str, tuple[int, int]]:
    """The widths for a gradient: those of the function, and on each side what the operand reaches on the other."""
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


# the decorator ----------------------------------------------------------------------------------------------


def torch_op(
    rule: str,
    *,
    name: str = "",
    blocked: str = "",
    reduce: str = "sum",
    halo: Callable[[Call], Widths] | Widths | None = None,
    fill: Any = 0,
    sizes: Callable[[Call], Mapping[str, int]] | None = None,
    dtype: DataType | Callable[[Call], DataType | Sequence[DataType]] | None = None,
    partial: Partial = Partial.NONE,
    flops: Callable[[Call], float] | None = None,
    samples: Sequence[Sample] = (),
    domain: tuple[float, float] | None = None,
    differentiable: bool = True,
) -> Callable[[Function], OpDef]:
    """Make an op of the decorated torch function. It is ready for `mf.register_op` and `meshfuse.testing.check_op`.

    The function is called on every rank with the rank's parts of the tensors, then the numbers; its tensor parameters
    come first, as many as `rule` (see `ops/notation.py`) has operands, and may not be changed in place. Other
    parameters are numbers by their annotation (bool, int, float, tuple) or default. `blocked` names the factors that
    must be whole; factors that only operands have are combined over ranks by `reduce` (sum, prod, max, min).

    `halo` tells how many elements before and after a rank's own the function sees along the dims marked `~`, from the
    call's types: the function is given that many more, `fill` beyond the tensor's ends, and returns the rank's own.
    `sizes` are those of factors that no operand tells, `dtype` the results' types where torch's promotion of the
    operands is not theirs. `partial` says in what the op is linear, and `domain` the numbers that tests draw. Unless
    `differentiable` is False, gradients are torch's own, on each rank's part.

    Raises DefinitionError for a rule that cannot be read or does not fit the function.
    """
    with located(caller_line()):
        notation = parse(rule)
        marks = {dim.factors for dims in notation.operands for dim in dims if dim.halo}
        check_halos(notation, marks)
        check_results(notation, blocked)
        check_claims(notation, blocked, reduce, partial, samples)
        check_told(notation, marks, halo, sizes)
        check_options(notation, fill, dtype, flops, domain, differentiable)
        if marks and not is_function(halo):
            check_widths(notation, marks, halo)
    facts: dict[str, Any] = {"partial": partial, "samples": lambda: samples, "domain": domain}
    facts |= {} if flops is None else {"flops": functools.partial(told_flops, notation, flops)}

    def make(function: Function) -> OpDef:
        with located(caller_line()):
            params, called = _params(rule, notation, function), _name(name, function)
        op = TorchOp(
            called, notation, function, params, tuple(blocked.split()), reduce, _halos(notation, halo),
            (fill,) * len(notation.operands), functools.partial(told_sizes, notation, sizes), _dtypes(notation, dtype),
        )  # fmt: skip
        about = (inspect.getdoc(function) or "").partition("\n")[0].rstrip(".")
        return op.opdef(about=about, **facts, **(_derivative(op) if differentiable and reduce == "sum" else {}))

    return make


def _derivative(op: TorchOp) -> dict[str, Any]:
    """Of an OpDef the derivative, and the ops that it is written in: one for each operand, if there are any."""
    tensors = op.params[: len(op.notation.operands)]
    adjoints = {param.name: _adjoint(op, place) for place, param in enumerate(tensors)}
    return {"vjp": _vjp(tensors, adjoints), "adjoints": tuple(adjoints.values())} if tensors else {}


def _halos(notation: Notation, halo: Callable[[Call], Widths] | Widths | None) -> Callable[[Call], Halos]:
    """The widths of a call's operands, from those that the user tells by factor."""

    def halos(call: Call) -> Halos:
        found: Any = told_halo(notation, halo(call)) if is_function(halo) else halo or {}
        return tuple(
            {dim.factors[0]: found[dim.factors[0]] for dim in dims if dim.halo and any(found[dim.factors[0]])}
            for dims in notation.operands
        )

    return halos


def _name(given: Any, function: Any) -> str:
    name = given or getattr(function, "__name__", "")
    if not isinstance(name, str) or not name.isidentifier():
        raise user_error("torch_op: the op's name", shown(name), "a Python name", "Give the function, or name=, one.")
    return name


def _dtypes(notation: Notation, given: Any) -> Callable[[Call], Sequence[DataType]]:
    def dtypes(call: Call) -> Sequence[DataType]:
        found: Any = given(call) if is_function(given) else given
        if found is None:
            found = functools.reduce(promote, (t.dtype for t in call.types))
        return told_dtypes(notation, found, len(notation.results))

    return dtypes


def _params(rule: str, notation: Notation, function: Function) -> tuple[Param, ...]:
    if not hasattr(function, "__code__"):
        raise user_error("torch_op", f"{shown(function)} ({type(function).__name__})", "a Python function",
                         "Define it with def.")  # fmt: skip
    found = list(inspect.signature(function).parameters.values())
    count = len(notation.operands)
    if len(found) < count:
        raise user_error(f"torch_op: {function.__name__} has too few parameters", str(len(found)),
                         f"a tensor for each of the {count} operands of {rule!r}", "")  # fmt: skip
    tensors = tuple(Param(p.name, K.TENSOR) for p in found[:count])
    return (*tensors, *(Param(p.name, _kind(p), _default(p)) for p in found[count:]))


def _default(p: inspect.Parameter) -> Any:
    return REQUIRED if p.default is p.empty else p.default


def _kind(p: inspect.Parameter) -> ParamKind:
    """What a number's parameter takes, from its annotation or its default."""
    given = p.annotation if p.annotation is not p.empty else type(p.default)
    text = given if isinstance(given, str) else getattr(given, "__name__", str(given))
    kind = _KINDS.get(text.split("[")[0].split("|")[0].strip())
    if kind is None:
        raise user_error(f"torch_op: parameter {p.name!r}", text, "one of bool, int, float or tuple",
                         "Annotate it.")  # fmt: skip
    return kind
