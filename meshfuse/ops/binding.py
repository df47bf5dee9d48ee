"""From what a user passes to an op to its argument tuple: names, defaults, kinds and overloads; keys of arguments."""

from __future__ import annotations

import inspect
from collections.abc import Callable, Mapping, Sequence
from typing import Any

from ..argument_checks import as_int
from ..dtypes import DataType, from_torch
from ..errors import MeshfuseError, shown, user_error
from .opdef import Call, OpDef, Sample, count_tensors
from .values import REQUIRED, Param, ParamKind, ScalarRef, TensorRef, TensorType

K = ParamKind
Resolve = Callable[[Any], Any]
_NUMBERS = (bool, int, float, complex)


def bind(op: OpDef, args: Sequence[Any], kwargs: Mapping[str, Any], resolve: Resolve) -> tuple[Any, ...]:
    """The arguments in the order of `op.params`. `resolve` turns a TensorView or Val into its reference, and the
    sizes of a TensorView into a list of Vals.

    Raises DefinitionError for missing, unknown or repeated arguments and for values of the wrong kind.
    """
    given = _by_name(op, args, kwargs)
    return tuple([_checked(op, param, given.get(param.name, param.default), resolve) for param in op.params])


def make_call(op: OpDef, sample: Sample) -> Call:
    """A sample as a call with its tensors' types."""
    types: list[TensorType] = []

    def resolve(value: Any) -> Any:
        if not isinstance(value, TensorType):
            return value
        types.append(value)
        return TensorRef(len(types) - 1)

    args = bind(op, sample.args, sample.kwargs, resolve)
    results = op.infer(Call(op, args, tuple(types)))
    return Call(op, args, tuple(types), results)


def _by_name(op: OpDef, args: Sequence[Any], kwargs: Mapping[str, Any]) -> dict[str, Any]:
    if len(args) > len(op.params):
        raise user_error(f"{op.name}: too many arguments", str(len(args)), f"at most {len(op.params)}", signature(op))
    given = {
        param.name: arg for param, arg in zip(op.params, _shift_dtype(op, args), strict=False) if arg is not REQUIRED
    }
    if not kwargs:
        return given
    names = {alias: param.name for param in op.params for alias in (param.name, param.alias) if alias}
    for key, value in kwargs.items():
        if key not in names or names[key] in given:
            what = "is not a parameter" if key not in names else "is given twice"
            raise user_error(
                f"{op.name}: {key!r} {what}", f"keywords {shown(sorted(kwargs))}", signature(op), "Fix the call."
            )
        given[names[key]] = value
    return given


def _shift_dtype(op: OpDef, args: Sequence[Any]) -> Sequence[Any]:
    """nvFuser overloads `sum(t, dtype)` beside `sum(t, dims, keepdim, dtype)`: move a type to its parameter."""
    if DataType not in map(type, args):
        return args
    out = list(args)
    for place, arg in enumerate(args):
        if isinstance(arg, DataType) and op.params[place].kind is not K.DTYPE:
            wanted = next((i for i, p in enumerate(op.params) if p.kind is K.DTYPE), place)
            out += [REQUIRED] * (wanted + 1 - len(out))
            out[place], out[wanted] = REQUIRED, arg
    return out


def signature(op: OpDef) -> str:
    """`sum(arg, dims=None, ...)`, for error texts and help."""
    parts = [p.name if p.default is REQUIRED else f"{p.name}={p.default!r}" for p in op.params]
    return f"{op.name}({', '.join(parts)})"


# What a kind of parameter takes, as text of a type of Python's; tensors are TensorViews, scalars numbers or Vals.
ANNOTATIONS: dict[ParamKind, str] = {
    K.TENSOR: "TensorView", K.OPTIONAL_TENSOR: "TensorView | None", K.TENSORS: "Sequence[TensorView]",
    K.TENSOR_OR_SCALAR: "Operand", K.SCALAR: "Scalar", K.OPTIONAL_SCALAR: "Scalar | None",
    K.INT: "int", K.DIM: "int", K.DIMS: "int | Sequence[int]", K.OPTIONAL_DIMS: "int | Sequence[int] | None",
    K.INTS: "Sequence[int]", K.SIZE: "int | Val", K.SHAPE: "Sequence[int | Val]",
    K.BOOL: "bool", K.BOOLS: "Sequence[bool]", K.DTYPE: "DataType | torch.dtype",
}  # fmt: skip


def annotation(param: Param) -> str:
    """The type of a parameter's arguments."""
    found = ANNOTATIONS[param.kind]
    return f"{found} | None" if param.default is None and not found.endswith("None") else found


def python_signature(op: OpDef) -> inspect.Signature:
    """How an op is called, for `inspect.signature` and what completes names."""
    kind, empty = inspect.Parameter.POSITIONAL_OR_KEYWORD, inspect.Parameter.empty
    return inspect.Signature([
        inspect.Parameter(p.name, kind, default=empty if p.default is REQUIRED else p.default, annotation=annotation(p))
        for p in op.params
    ])  # fmt: skip


def _checked(op: OpDef, param: Param, value: Any, resolve: Resolve) -> Any:
    if value is REQUIRED:
        raise user_error(f"{op.name}: argument {param.name!r} is missing", "", "", f"Call it as {signature(op)}.")
    found = None if value is None and param.default is None else of_kind(param.kind, value, resolve)
    if found is REQUIRED:
        raise wrong_kind(op.name, param.name, param.kind, value, signature(op))
    return found


def of_kind(kind: ParamKind, value: Any, resolve: Resolve) -> Any:
    """The value in the form that ops take for such a parameter; REQUIRED where it is no value of that kind."""
    if value is None:
        return None if kind in _OPTIONAL else REQUIRED
    return _CHECKS[kind](resolve, value)


def wrong_kind(op: str, param: str, kind: ParamKind, value: Any, call_as: str) -> MeshfuseError:
    """The error of an argument that is not of its parameter's kind."""
    do = f"Call it as {call_as}.{NUMBERS_COME_IN if _is_array(value) else _ONE_NUMBER if _is_one(value) else ''}"
    return user_error(f"{op}: argument {param!r} is of the wrong kind", described(value), kind.value, do)


NUMBERS_COME_IN = " Tensors of numbers come in by define_tensor, as arguments of the definition."
_ONE_NUMBER = " A tensor of one number comes in by define_tensor([]), a number that stays as it is by its item()."


def described(value: Any) -> str:
    """A wrong argument in an error text: its value and type; of a tensor or array only the shape."""
    kind = type(value).__name__
    return f"a {kind} of shape {list(value.shape)}" if _is_array(value) else f"{shown(value)} ({kind})"


def _is_array(value: Any) -> bool:
    """Whether it is a torch tensor, numpy array or the like that is more than a single number."""
    return _holds_numbers(value) and bool(getattr(value, "shape", ()))


def _is_one(value: Any) -> bool:
    """Whether it is a torch tensor or other array without dims."""
    return _holds_numbers(value) and hasattr(value, "item")


def _holds_numbers(value: Any) -> bool:
    """Whether it is an array; the classes of arrays and of numpy's numbers have the same attributes."""
    return hasattr(value, "__array__") and not isinstance(value, type)


def _int(value: Any) -> Any:
    found = as_int(value)
    return REQUIRED if found is None else found


def _check_tensor(resolve: Resolve, value: Any) -> Any:
    found = resolve(value)
    return found if isinstance(found, TensorRef) else REQUIRED


def _check_tensors(resolve: Resolve, value: Any) -> Any:
    if not isinstance(value, (list, tuple)) or not value:
        return REQUIRED
    found = tuple(resolve(v) for v in value)
    return found if all(isinstance(f, TensorRef) for f in found) else REQUIRED


def _check_scalar(resolve: Resolve, value: Any) -> Any:
    found = resolve(value)
    return found if isinstance(found, (ScalarRef, *_NUMBERS)) else REQUIRED


def _check_operand(resolve: Resolve, value: Any) -> Any:
    found = resolve(value)
    return found if isinstance(found, (TensorRef, ScalarRef, *_NUMBERS)) else REQUIRED


def _check_ints(_: Resolve, value: Any) -> Any:
    if not isinstance(value, (list, tuple)):
        return REQUIRED
    found = tuple(_int(v) for v in value)
    return REQUIRED if REQUIRED in found else found


def _check_dims(resolve: Resolve, value: Any) -> Any:
    found = _int(value)
    return found if found is not REQUIRED else _check_ints(resolve, value)


def _check_size(resolve: Resolve, value: Any) -> Any:
    found = resolve(value)
    return found if isinstance(found, ScalarRef) else _int(found)


def _check_shape(resolve: Resolve, value: Any) -> Any:
    sizes = resolve(value)
    if not isinstance(sizes, (list, tuple)):
        return REQUIRED
    found = tuple(_check_size(resolve, v) for v in sizes)
    return REQUIRED if REQUIRED in found else found


def _check_bool(_: Resolve, value: Any) -> Any:
    """A bool. 0 and 1 count as well, as C++'s bool takes them: traces of programs write them."""
    return bool(value) if isinstance(value, bool) or _int(value) in (0, 1) else REQUIRED


def _check_bools(_: Resolve, value: Any) -> Any:
    is_list = isinstance(value, (list, tuple)) and all(isinstance(v, bool) for v in value)
    return tuple(value) if is_list else REQUIRED


def _check_dtype(_: Resolve, value: Any) -> Any:
    try:
        return from_torch(value)
    except ValueError:
        return REQUIRED


_OPTIONAL = (K.OPTIONAL_TENSOR, K.OPTIONAL_SCALAR, K.OPTIONAL_DIMS)
_CHECKS: dict[ParamKind, Callable[[Resolve, Any], Any]] = {
    K.TENSOR: _check_tensor,
    K.OPTIONAL_TENSOR: _check_tensor,
    K.TENSORS: _check_tensors,
    K.TENSOR_OR_SCALAR: _check_operand,
    K.SCALAR: _check_scalar,
    K.OPTIONAL_SCALAR: _check_scalar,
    K.INT: lambda _, value: _int(value),
    K.DIM: lambda _, value: _int(value),
    K.DIMS: _check_dims,
    K.OPTIONAL_DIMS: _check_dims,
    K.INTS: _check_ints,
    K.SIZE: _check_size,
    K.SHAPE: _check_shape,
    K.BOOL: _check_bool,
    K.BOOLS: _check_bools,
    K.DTYPE: _check_dtype,
}


# What is equal for arguments that mean the same: (type, text where 1 == 1.0 would mislead, argument).
_Key = tuple[type, str, Any]
Keys = tuple[_Key, ...]
_ANY = TensorRef(-1)
_TENSOR = (TensorRef, repr(_ANY), _ANY)


def keys_of(args: Sequence[Any]) -> Keys:
    """A key for every argument. 1, 1.0 and True differ, and so do 0.0 and -0.0, also in a list."""
    return tuple([_TENSOR if type(arg) is TensorRef else _key_of(arg) for arg in args])


def _key_of(arg: Any) -> _Key:
    if count_tensors(arg):
        arg = (_ANY,) * len(arg)
    return (type(arg), repr(arg) if isinstance(arg, (float, complex, tuple)) else "", arg)
