"""Functions of `fd.ops` that take less in nvFuser than in the table, or take arguments in another order."""

from __future__ import annotations

import functools
from collections.abc import Callable, Mapping, Sequence
from typing import Any

from ..argument_checks import as_int
from ..definition.op_namespace import OpNamespace
from ..definition.tensor_view import TensorView, Val
from ..errors import SourceLine, caller_line, user_error
from .communications import BY_MESH, COMMUNICATIONS, names_mesh


class Ops(OpNamespace):
    """`fd.ops` with communication by hand, nvFuser's limits on slices, and sdpfa_fwd's arguments from before it had a
    bias and a mask.
    """

    __slots__ = ()

    def __getattr__(self, name: str) -> Callable[..., Any]:
        if name in COMMUNICATIONS:
            return functools.partial(COMMUNICATIONS[name], self._fd)
        ops: Any = super()  # The stub of its class has no __getattr__, so that typos are errors.
        return ops.__getattr__(name)

    def __dir__(self) -> list[str]:
        return sorted([*super().__dir__(), *COMMUNICATIONS])

    def scatter(self, *args: Any, **named: Any) -> Any:
        """With a mesh behind the tensor, the communication; else the write by index."""
        return self._by_mesh("scatter", args, named)

    def gather(self, *args: Any, **named: Any) -> Any:
        """With a mesh behind the tensor, the communication; else the look-up by index."""
        return self._by_mesh("gather", args, named)

    def _by_mesh(self, name: str, args: Sequence[Any], named: Mapping[str, Any]) -> Any:
        if names_mesh(args, named):
            return BY_MESH[name](self._fd, *args, **named)
        return self._fd.call(name, args, named)

    def sdpfa_fwd(self, query: Any, key: Any, value: Any, *options: Any, **named: Any) -> Any:
        """Attention. The options are bias, mask, dropout_p, is_causal, scale; or only the last three of these."""
        if options and not isinstance(options[0], (TensorView, type(None))):
            options = (None, None, *options)
        return self._fd.call("sdpfa_fwd", (query, key, value, *options), named)

    def slice(
        self, arg: Any, start_indices: Any, end_indices: Any, strides: Any = None, *options: Any, **named: Any
    ) -> Any:
        """The elements of every dim from a start to an end; neither may be below 0."""
        lists = (start_indices, end_indices) if strides is None else (start_indices, end_indices, strides)
        if isinstance(arg, TensorView) and all(isinstance(part, (list, tuple)) for part in lists):
            _check_slice(arg, start_indices, end_indices, strides, caller_line())
        return self._fd.call("slice", (arg, start_indices, end_indices, strides, *options), named)


def _check_slice(
    tensor: TensorView, starts: Sequence[Any], ends: Sequence[Any], strides: Sequence[Any] | None, line: SourceLine
) -> None:
    """Raises DefinitionError for lists of other lengths, for starts below 0, and for ends before their starts.

    nvFuser does not count from the end of a dim. Scalars of a call are not checked.
    """
    wrong = _unequal(tensor, starts, ends, strides)
    if wrong is not None:
        found = ", ".join(f"{len(part)} {name}" for name, part in _named(starts, ends, strides))
        needed = f"{tensor.ndim} of each, one per dim of {tensor.label}"
        raise user_error("slice", found, needed, f"{wrong} Give full lists.", line)
    for dim, (start, end) in enumerate(zip(map(_known, starts), map(_known, ends), strict=True)):
        _check_bounds(dim, start, end, line)


def _named(starts: Any, ends: Any, strides: Any) -> list[tuple[str, Sequence[Any]]]:
    return [("starts", starts), ("ends", ends), *([] if strides is None else [("strides", strides)])]


def _check_bounds(dim: int, start: int | None, end: int | None, line: SourceLine) -> None:
    if start is not None and start < 0:
        do = "Slice operation start_indices must be greater than or equal to 0. Count from the dim's begin."
        raise user_error(f"slice: the start of dim {dim}", str(start), "at least 0", do, line)
    if start is not None and end is not None and end < start:
        do = "Slice operation end_indices must be greater than or equal to start_indices."
        raise user_error(f"slice: the end of dim {dim}", str(end), f"at least {start}, the start", do, line)


def _unequal(
    tensor: TensorView, starts: Sequence[Any], ends: Sequence[Any], strides: Sequence[Any] | None
) -> str | None:
    if strides is not None and len(strides) != len(starts):
        return "Slice start_indices and strides don't match!"
    if len(starts) != len(ends):
        return "Slice indexing attribute dimensions don't match!"
    return None if len(starts) == tensor.ndim else "Number of tensor dimensions does not match slice dimensions!"


def _known(index: Any) -> int | None:
    """The index, if it is a number or a constant of the definition; else None."""
    if isinstance(index, Val):
        made = index.fd.recording.scalars[index.ref.id]
        return as_int(made.operands[0]) if made.op == "const" else None
    return as_int(index)
