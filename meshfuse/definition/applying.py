"""Applying ops and composites to the values of a definition: what `fd.call` and the functions of `fd.ops` do."""

from __future__ import annotations

import difflib
import functools
import inspect
from collections.abc import Callable, Mapping, Sequence
from typing import Any

from ..dtypes import DataType, scalar_dtype
from ..errors import DefinitionError, DtypeError, MeshfuseError, SourceLine, caller_line, located, shown, user_error
from ..kernels.scalars import FUNCTIONS
from ..ops import COMPOSITES, OPS
from ..ops.binding import Resolve, bind, described, of_kind, signature, wrong_kind
from ..ops.composite import MAY_BE_NONE, PARAMETER_KINDS
from ..ops.opdef import Call, OpDef, tensor_refs
from ..ops.promotion import widened_from
from ..ops.registry import find, names
from ..ops.torch_names import INSTEAD
from ..ops.values import REQUIRED, ParamKind, ScalarRef, TensorRef
from ..scalars import ScalarDef, result_dtype
from .checks import checked_dtype, plain_number
from .dtype_origins import add_origins
from .recording import Definition, Recording
from .tensor_view import Sizes, TensorView, Val

# Kinds of parameters that a composite gets in plain form, as ops do.
_PLAIN = frozenset({ParamKind.INT, ParamKind.OPTIONAL_DIMS, ParamKind.BOOL, ParamKind.DTYPE})
_NUMBERS = (Val, bool, int, float, complex, DataType)


class UnknownOpError(DefinitionError, AttributeError):
    """`fd.ops` has no such op."""


def find_op(name: str | OpDef) -> OpDef:
    """The op of this name; an OpDef as it is. Raises UnknownOpError, which suggests similar names."""
    op = find(name)
    if op is None:
        instead = INSTEAD.get(name) if isinstance(name, str) else None
        near = difflib.get_close_matches(name, [*names(), *COMPOSITES]) if isinstance(name, str) and not instead else []
        raise user_error(
            f"meshfuse has no op {shown(name)}", f"near to it {near}" if near else "", "",
            f"{f'Write {instead}. ' if instead else ''}dir(fd.ops) lists all; mf.register_op adds one.",
            caller_line(), UnknownOpError,
        )  # fmt: skip
    return op


def call_at(
    fd: Definition, line: SourceLine, name: str | OpDef, args: Sequence[Any], kwargs: Mapping[str, Any] | None = None
) -> Any:
    """Apply an op at this line of the script: a TensorView, a tuple of them, or (on scalars alone) a Val."""
    with located(line):
        fd.recording.check_open()
        if not isinstance(args, (list, tuple)):
            needed = "a list of all arguments"
            raise user_error(
                f"call of {shown(name)}: arguments", shown(args), needed, "Pass one list with all of them."
            )
        if not isinstance(kwargs, (dict, type(None), Mapping)):
            needed = "a dict of arguments by name, or None"
            raise user_error(f"call of {shown(name)}: keywords", shown(kwargs), needed, "Pass {'dim': 0}, for example.")
        return fd._apply(find_op(name), args, kwargs or {}, line)


def call_with_keywords(fd: Definition, name: str, *args: Any, **kwargs: Any) -> Any:
    """`fd.call` with keyword arguments."""
    return fd.call(name, args, kwargs)


def apply(fd: Definition, op: OpDef, args: Sequence[Any], kwargs: Mapping[str, Any], line: SourceLine) -> Any:
    """Apply an op to arguments as a user passes them."""
    if _is_scalar_call(op, args, kwargs):
        return Val(fd, _scalar_op(fd, op, args, kwargs))
    made = append(fd.recording, op, bind(op, args, kwargs, functools.partial(resolve, fd)), line)
    return TensorView(fd, made[0]) if len(made) == 1 else tuple([TensorView(fd, ref) for ref in made])


def rounded(fd: Definition, made: Any) -> Any:
    """The result of an op in torch's type, where nvFuser's rule makes it Float of half precision."""
    node = fd.recording.producer(made.id) if isinstance(made, TensorView) else None
    if node is None or OPS.get(node.op.name) is not node.op:
        return made
    wanted = widened_from(Call(node.op, node.args, node.form.types, (made.type,)))
    return made if wanted is None else fd._apply(OPS["cast"], (made, wanted), {}, node.line)


def append(recording: Recording, op: OpDef, bound: tuple[Any, ...], line: SourceLine) -> tuple[TensorRef, ...]:
    """Append an op to a recording; an error about dtypes says where its operands have them from."""
    try:
        return recording.append(op, bound, line)
    except DtypeError as error:
        add_origins(recording, error, [ref.id for ref in tensor_refs(bound)])
        raise


def resolve(fd: Definition, value: Any) -> Any:
    """What an op gets for an argument: a reference for a value of the definition, else a plain number."""
    if isinstance(value, (TensorView, Val)):
        if value.fd is not fd:
            raise user_error(
                "op argument", f"{value!r} of another definition", "a value of this definition",
                "Pass what this FusionDefinition's own calls returned.",
            )  # fmt: skip
        return value.ref
    return value() if isinstance(value, Sizes) else plain_number(value)


# scalars


def _scalar_op(fd: Definition, op: OpDef, args: Sequence[Any], kwargs: Mapping[str, Any]) -> ScalarRef:
    recording = fd.recording
    refs = tuple([resolve(fd, arg) for arg in _scalar_arguments(op, args, kwargs)])
    if op.name == "cast":
        return recording.new_scalar(ScalarDef("cast", refs[:1], checked_dtype("cast", refs[1], None)))
    found = [recording.scalars[r.id].dtype if isinstance(r, ScalarRef) else scalar_dtype(r) for r in refs]
    return recording.new_scalar(ScalarDef(op.name, refs, result_dtype(op.name, found)))


def _is_scalar_call(op: OpDef, args: Sequence[Any], kwargs: Mapping[str, Any]) -> bool:
    """Whether all arguments are numbers and scalars, with at least one scalar; the op then makes a scalar."""
    if TensorView in map(type, args):
        return False
    given = [*args, *kwargs.values()]
    scalars_only = bool(given) and all(isinstance(plain_number(a), _NUMBERS) for a in given)
    return scalars_only and (op.name in FUNCTIONS or op.name == "cast") and any(isinstance(a, Val) for a in given)


def _scalar_arguments(op: OpDef, args: Sequence[Any], kwargs: Mapping[str, Any]) -> list[Any]:
    """The arguments in the order of `op.params`. Raises DefinitionError for missing, unknown or repeated ones."""
    names = [param.name for param in op.params]
    given = {**dict(zip(names, args, strict=False)), **kwargs}
    required = [param.name for param in op.params if param.default is REQUIRED]
    repeated = len(given) < len(args) + len(kwargs)
    if len(args) > len(names) or not set(required) <= set(given) <= set(names) or repeated:
        found = f"{len(args)} arguments {sorted(kwargs)}"
        raise user_error(f"{op.name} of scalars", found, signature(op), "Fix the call.")
    return [given.get(param.name, param.default) for param in op.params]


# composites


def call_composite(fd: Definition, name: str, *args: Any, **kwargs: Any) -> Any:
    """Call a composite: a function of `fd.ops` that is written in ops of the table."""
    with located(caller_line()):
        fd.recording.check_open()
        return _composite_call(fd, name, COMPOSITES[name], args, kwargs)


def _composite_call(
    fd: Definition, name: str, function: Callable[..., Any], args: Sequence[Any], kwargs: Mapping[str, Any]
) -> Any:
    """Call a composite. Raises DefinitionError for arguments that it does not take or cannot work with."""
    called, call_as = inspect.signature(function), usage(name, function)
    if "dim" in kwargs and "dims" in called.parameters and "dims" not in kwargs:  # as the ops of the table take it
        kwargs = {"dims" if key == "dim" else key: value for key, value in kwargs.items()}
    try:
        bound = called.bind(fd, *args, **kwargs)
    except TypeError as error:
        raise user_error(f"{name}: {error}", "", "", f"Call it as {call_as}.") from None
    first = bound.args[1] if len(bound.args) > 1 else None
    if not isinstance(first, TensorView):
        raise user_error(
            f"{name}: the first argument",
            described(first),
            "a tensor of this definition",
            f"Call it as {call_as}.",
        )
    _check_kinds(name, bound, call_as, functools.partial(resolve, fd))
    rounds, fd.recording.rounds = fd.recording.rounds, False  # composites choose the types that they compute in
    try:
        return function(*bound.args, **bound.kwargs)
    except MeshfuseError as error:
        if not str(error.args[0]).startswith(name):
            error.args = (f"{name}: {error.args[0]}",)
        raise
    except (TypeError, AttributeError) as error:
        wrong = f"{name}: an argument is of the wrong kind"
        raise user_error(wrong, str(error), "", f"Call it as {call_as}.") from error
    finally:
        fd.recording.rounds = rounds


def _check_kinds(name: str, bound: inspect.BoundArguments, call_as: str, resolve: Resolve) -> None:
    """Raises DefinitionError for an argument of another kind than its parameter's; puts the others in plain form."""
    for param, value in bound.arguments.items():
        kind, default = PARAMETER_KINDS.get(param), bound.signature.parameters[param].default
        if kind is None or value is default or (value is None and param in MAY_BE_NONE):
            continue
        found = of_kind(kind, value, resolve)
        if found is REQUIRED:
            raise wrong_kind(name, param, kind, value, call_as)
        bound.arguments[param] = found if kind in _PLAIN else value


@functools.cache
def usage(name: str, function: Callable[..., Any]) -> str:
    """How a composite is called, as text: `softmax(x, dim=-1, dtype=None)`."""
    params = list(inspect.signature(function).parameters.values())[1:]
    parts = [p.name if p.default is p.empty else f"{p.name}={p.default!r}" for p in params]
    return f"{name}({', '.join(parts)})"
