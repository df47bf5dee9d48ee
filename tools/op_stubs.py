#!/usr/bin/env python3
"""Writes meshfuse/definition/op_namespace.pyi, by which type checkers know `fd.ops`, from the ops' records.

Run `.venv/bin/python tools/op_stubs.py` after a change of an op's parameters; a test says when that is due.
"""

from __future__ import annotations

import inspect
import re
from collections.abc import Iterator, Sequence
from pathlib import Path

from meshfuse.kernels.scalars import FUNCTIONS
from meshfuse.ops import COMPOSITES, EXPERT_OPS, OPS
from meshfuse.ops.binding import annotation, make_call
from meshfuse.ops.opdef import OpDef
from meshfuse.ops.values import REQUIRED, ParamKind

STUB = Path(__file__).parent.parent / "meshfuse" / "definition" / "op_namespace.pyi"
_HEAD = '''\
# Written by tools/op_stubs.py from the ops' records: change those, and run `.venv/bin/python tools/op_stubs.py`.
# Types have names of their own here, as `complex`, `slice` and others are ops in the class below.
"""`fd.ops`: a definition's ops as functions."""

import inspect
from collections.abc import Callable, Sequence
from typing import Any, TypeAlias, overload

import torch

from ..dtypes import DataType
from .recording import Definition
from .tensor_view import TensorView, Val

Number: TypeAlias = bool | int | float | complex
Scalar: TypeAlias = Val | Number
Operand: TypeAlias = TensorView | Scalar

def signature_of(name: str) -> inspect.Signature: ...

class OpNamespace:
    """`fd.ops`: every op of the table and every composite, as a function.

    An op of your own (`mf.register_op`) is a function here as well, which type checkers do not know: `fd.call(op, [x])`
    is the same call.
    """

    _fd: Definition
    def __init__(self, fd: Definition) -> None: ...
    def __dir__(self) -> list[str]: ...
'''
# (name, type, default as text or "") of a parameter.
_Param = tuple[str, str, str]
_Form = tuple[Sequence[_Param], str]
_TENSORS = (ParamKind.TENSOR, ParamKind.TENSOR_OR_SCALAR)


def stub() -> str:
    """The whole stub."""
    ops = OPS | EXPERT_OPS
    blocks = [_composite(name) if name in COMPOSITES else _op(ops[name]) for name in sorted({*ops, *COMPOSITES})]
    return _HEAD + "".join(f"    {line}\n" for block in blocks for line in block)


def _op(op: OpDef) -> list[str]:
    if op.name in FUNCTIONS or op.name == "cast":
        return _functions(op.name, list(_scalar_forms(op)), op.about)
    has_alias = any(param.alias == "dim" for param in op.params)  # other aliases are nvFuser's words
    form = _params(op), _results(op)
    return _functions(op.name, _by_each_name(*form) if has_alias else [form], op.about)


def _results(op: OpDef) -> str:
    """What an op returns, by its samples."""
    counts = {len(make_call(op, sample).results) for sample in op.samples()}
    assert len(counts) == 1, op.name
    count = counts.pop()
    return "TensorView" if count == 1 else f"tuple[{', '.join(['TensorView'] * count)}]"


def _params(op: OpDef) -> list[_Param]:
    return [(p.name, annotation(p), "" if p.default is REQUIRED else _default(p.default)) for p in op.params]


def _default(value: object) -> str:
    return repr(value) if value is None or isinstance(value, (bool, int, float, str)) else "..."


def _scalar_forms(op: OpDef) -> Iterator[tuple[list[_Param], str]]:
    """The forms of an op that makes a scalar of scalars alone: one operand at least is a tensor, or a scalar is."""
    places = [place for place, p in enumerate(op.params) if p.kind in _TENSORS]
    for one, other, result in (("TensorView", "Operand", "TensorView"), ("Val", "Scalar", "Val")):
        for first in places:
            params = _params(op)
            for place in places:
                name, _, default = params[place]
                params[place] = (name, one if place == first else other, default)
            yield params, result


def _functions(name: str, forms: Sequence[_Form], about: str) -> list[str]:
    """The overloads of one function."""
    lines: list[str] = []
    for params, result in forms:
        lines += ["@overload"] if len(forms) > 1 else []
        lines += [f"def {name}(self, {', '.join(map(_param_text, params))}) -> {result}:", f'    """{about}"""']
    return lines


def _param_text(param: _Param) -> str:
    name, kind, default = param
    return f"{name}: {kind}{f' = {default}' if default else ''}" if kind else name


def _by_each_name(params: Sequence[_Param], result: str) -> list[_Form]:
    """The parameters, and again with `dim` as a keyword for `dims`."""
    place = [name for name, _, _ in params].index("dims")
    renamed = [*params[:place], ("*", "", ""), ("dim", params[place][1], ""), *params[place + 1 :]]
    return [(params, result), (renamed, result)]


# What composites, which are functions of any definition, take and return: types that stand in their signatures as Any.
_ALIASES = {
    "DimsArgument": "int | Sequence[int] | None", "Ints": "int | Sequence[int]", "Tensor": "TensorView",
    "DataType": "DataType | torch.dtype",
}  # fmt: skip
_SPECIAL = {
    ("size", "->"): "Val", ("shape", "->"): "list[Val]", ("select_scatter", "index"): "int | Val",
    ("grouped_mm", "->"): "TensorView | tuple[TensorView, TensorView | None, TensorView | None]",
    ("scaled_mm", "->"): "tuple[TensorView, TensorView | None, TensorView | None]",
    ("index", "indices"): "Sequence[TensorView | None]", ("index_put", "indices"): "Sequence[TensorView | None]",
}  # fmt: skip
_COMPUTED = {"eps": "Scalar", "p": "Scalar", "normalized_shape": "Sequence[int | Val]"}


def _composite(name: str) -> list[str]:
    function = COMPOSITES[name]
    about = (inspect.getdoc(function) or "").partition("\n")[0]
    found = inspect.signature(function)
    params = [_composite_param(name, p) for p in list(found.parameters.values())[1:]]
    if name in OPS:
        params = _params(OPS[name])
    result = _SPECIAL.get((name, "->")) or _typed(str(found.return_annotation))
    has_alias = "dims" in found.parameters
    return _functions(name, _by_each_name(params, result) if has_alias else [(params, result)], about)


def _composite_param(name: str, param: inspect.Parameter) -> _Param:
    kind = _SPECIAL.get((name, param.name)) or _COMPUTED.get(param.name) or _typed(str(param.annotation))
    default = "" if param.default is param.empty else _default(param.default)
    return param.name, f"{kind} | None" if default == "None" and "None" not in kind else kind, default


def _typed(text: str) -> str:
    for alias, meaning in _ALIASES.items():
        text = re.sub(rf"\b{alias}\b", meaning, text)
    return re.sub(r"\bAny\b", "TensorView", text)


if __name__ == "__main__":
    STUB.write_text(stub())
    print(f"wrote {STUB}: {len({*OPS, *COMPOSITES})} functions")
