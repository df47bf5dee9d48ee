"""`torch_op`: an op from a torch function and a factor rule as text, the short way to an `OpDef` of one's own.

Everything else follows: types from the rule, the derivative from autograd and, for dims along which the function sees
neighbours, a distributed form in which ranks exchange the edges of their blocks.
"""

from __future__ import annotations

import functools
import inspect
import keyword
from collections.abc import Callable, Mapping, Sequence
from typing import Any

from ..dtypes import DataType, promote
from ..errors import caller_line, located, shown, user_error
from .notation import Notation
from .opdef import Call, OpDef, Partial, Sample
from .torch_derivatives import derivative
from .torch_function import Function, Halos, TorchOp, Widths
from .user_op_checks import (
    checked_notation,
    is_function,
    returned_dtypes,
    returned_flops,
    returned_halo,
    returned_sizes,
)
from .values import REQUIRED, Param, ParamKind

K = ParamKind
_KINDS = {"bool": K.BOOL, "int": K.INT, "float": K.SCALAR, "complex": K.SCALAR, "tuple": K.INTS, "list": K.INTS}


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
    """Make an op of the decorated torch function, ready for `mf.register_op` and `meshfuse.testing.check_op`::

        @mf.torch_op("b* m k, k n -> b* m n", partial=mf.Partial.EACH)
        def product(a, b):
            return a @ b

    Every rank calls the function with its own parts of the tensors, then the numbers. Tensor parameters come first, as
    many as `rule` has operands, and must not be changed in place. Other parameters are numbers, by their annotation
    (bool, int, float, complex, tuple, list) or default.

    rule: the factors of every dim of operands and results (`ops/notation.py`).
    name: the op's name in `fd.ops`; the function's own by default.
    blocked: the factors, separated by spaces, that must be whole.
    reduce: how factors that only operands have are combined over ranks: "sum", "prod", "max" or "min".
    halo: by factor how many elements (before, after) its own a rank sees along the dims marked `~`, or a function of
        the call that gives them. The function is given that many more elements and returns the results of its own.
    fill: what stands beyond the ends of such dims.
    sizes: a function of the call that gives the sizes of factors which no operand has.
    dtype: the dtype of the results, one for each, or a function of the call; by default torch's promotion of the
        operands.
    partial: which unreduced operands may pass: in what the op is linear.
    flops: a function of the call: operations on the global tensors; by default one per element.
    samples: calls for tests.
    domain: the open interval that tests draw real operands from.
    differentiable: whether gradients are torch's autograd through the function, on each rank's part.

    Functions of the call are asked once for equal calls. Raises DefinitionError for a rule that cannot be read or does
    not fit the function.
    """
    with located(caller_line()):
        notation = checked_notation(
            rule, blocked=blocked, reduce=reduce, halo=halo, fill=fill, sizes=sizes, dtype=dtype, partial=partial,
            flops=flops, samples=samples, domain=domain, differentiable=differentiable,
        )  # fmt: skip
    facts: dict[str, Any] = {"partial": partial, "samples": lambda: samples, "domain": domain}
    facts |= {} if flops is None else {"flops": functools.partial(returned_flops, notation, flops)}

    def make(function: Function) -> OpDef:
        with located(caller_line()):
            params, called = _params(rule, notation, function), _name(name, function)
        op = TorchOp(
            called, notation, function, params, tuple(blocked.split()), reduce, _halos(notation, halo),
            (fill,) * len(notation.operands), functools.partial(returned_sizes, notation, sizes),
            _dtypes(notation, dtype),
        )  # fmt: skip
        about = (inspect.getdoc(function) or "").partition("\n")[0].rstrip(".")
        return op.opdef(about=about, **facts, **(derivative(op) if differentiable and reduce == "sum" else {}))

    return make


def _halos(notation: Notation, halo: Callable[[Call], Widths] | Widths | None) -> Callable[[Call], Halos]:
    """By operand the widths of each factor in a call, from the `halo` option."""

    def halos(call: Call) -> Halos:
        found: Any = returned_halo(notation, halo(call)) if is_function(halo) else halo or {}
        return tuple(
            {dim.factors[0]: found[dim.factors[0]] for dim in dims if dim.halo and any(found[dim.factors[0]])}
            for dims in notation.operands
        )

    return halos


def _name(given: Any, function: Any) -> str:
    name = given or getattr(function, "__name__", "")
    if not isinstance(name, str) or not name.isidentifier() or keyword.iskeyword(name):
        raise user_error("torch_op: the op's name", shown(name), "a Python name", "Give the function, or name=, one.")
    return name


def _dtypes(notation: Notation, given: Any) -> Callable[[Call], Sequence[DataType]]:
    def dtypes(call: Call) -> Sequence[DataType]:
        found: Any = given(call) if is_function(given) else given
        if found is None:
            found = functools.reduce(promote, (t.dtype for t in call.types))
        return returned_dtypes(notation, found, len(notation.results))

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
    """The kind of a number's parameter, from its annotation or default."""
    given = p.annotation if p.annotation is not p.empty else type(p.default)
    text = given if isinstance(given, str) else getattr(given, "__name__", str(given))
    kind = _KINDS.get(text.split("[")[0].split("|")[0].strip())
    if kind is None:
        raise user_error(f"torch_op: parameter {p.name!r}", text, "one of bool, int, float or tuple",
                         "Annotate it.")  # fmt: skip
    return kind
