"""aten ops that have no rule, computed whole on every rank."""

from __future__ import annotations

import functools
import hashlib
from typing import Any

import torch

from ..definition.tensor_view import TensorView
from ..dtypes import from_torch
from ..ops.opdef import Call, Emit, OpDef
from ..ops.rules import Rule, RuleBuilder
from ..ops.values import Param, ParamKind, TensorType
from .aten import Translation

_PREFIX = "whole_"


def replicated(node: torch.fx.Node) -> Any:
    """A rule by which torch computes a node's op whole on every rank; `explain` shows it as `whole_` and its name."""

    def write(t: Translation, *args: Any, **kwargs: Any) -> Any:
        tensors: list[TensorView] = []
        form = _form((args, kwargs), tensors)
        told = t.results if isinstance(t.results, (tuple, list)) else (t.results,)
        types = tuple(TensorType(tuple(t.sizes.shape(x)), from_torch(x.dtype)) for x in told if x is not None)
        made = t.fd.call(_op(node.target, form, types, len(tensors)), tensors)
        if not isinstance(t.results, (tuple, list)):
            return made
        found = iter(made if isinstance(made, tuple) else (made,))
        return tuple(None if x is None else next(found) for x in told)  # results that nobody asked for

    return write


class _Operand(int):
    """The place of a tensor among the operands."""


def _form(value: Any, tensors: list[TensorView]) -> Any:
    """Arguments with places in the order of operands in the place of tensors."""
    if isinstance(value, TensorView):
        tensors.append(value)
        return _Operand(len(tensors) - 1)
    if isinstance(value, (list, tuple)):
        return tuple(_form(entry, tensors) for entry in value)
    if isinstance(value, dict):
        return tuple((key, _form(entry, tensors)) for key, entry in value.items())
    return value


def _filled(form: Any, tensors: tuple[torch.Tensor, ...]) -> Any:
    if isinstance(form, _Operand):
        return tensors[form]
    return [_filled(entry, tensors) for entry in form] if isinstance(form, tuple) else form


@functools.lru_cache(maxsize=1024)
def _op(target: Any, form: Any, types: tuple[TensorType, ...], count: int) -> OpDef:
    """The op of one form of call: the tensors are its parameters, all else is fixed."""
    digest = hashlib.blake2b(repr((str(target), form, types)).encode(), digest_size=4).hexdigest()
    name = f"{_PREFIX}{target._schema.name.partition('::')[2].strip('_')}_{digest}"
    args, kwargs = form

    def compute(*tensors: torch.Tensor) -> Any:
        given = {key: _filled(value, tensors) for key, value in kwargs}
        made = target(*[_filled(arg, tensors) for arg in args], **given)
        found = [x for x in made if x is not None] if isinstance(made, (tuple, list)) else [made]
        return found[0].contiguous() if len(types) == 1 else tuple([x.contiguous() for x in found])

    def rule(call: Call) -> Rule:
        builder = RuleBuilder()
        operands = [tuple(builder.blocked(n) for n in t.shape) for t in call.types]
        return builder.build(operands, [tuple(builder.blocked(n) for n in t.shape) for t in types])

    def emit(e: Emit) -> str:
        return f"OP.{name}({', '.join(e.operands)})"

    params = tuple(Param(f"x{i}", ParamKind.TENSOR) for i in range(count))
    return OpDef(name, params, lambda call: types, rule, emit, compute=compute, nvfuser="an op of torch")
