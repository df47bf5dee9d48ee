"""The arguments of a call: as nvFuser's scripts pass them, and outputs that are written into them.

`fd.add_output(tensor, alias_input=argument)` has an output written.
"""

from __future__ import annotations

from collections.abc import Iterable, Mapping, Sequence
from typing import Any

import torch

from ..definition.recording import Recording
from ..definition.tensor_view import TensorView
from ..errors import ArgumentError, SourceLine, caller_line, shown, user_error
from ..executor.arguments import check_list
from ..ops.values import TensorRef

Aliases = Mapping[int, int]  # The place of an output -> the number of the input tensor that it is written into.


def flattened(recording: Recording, inputs: Sequence[Any]) -> list[Any]:
    """The arguments, with the numbers in a list or tuple as one argument each, as define_vector takes them.

    Raises ArgumentError for a single tensor, and for what is no list.
    """
    if isinstance(inputs, (torch.Tensor, TensorView, str, bytes, Mapping)) or not isinstance(inputs, Iterable):
        check_list(recording, inputs, caller_line())
    values: list[Any] = []
    for value in inputs:
        values.extend(value if isinstance(value, (list, tuple)) else (value,))
    return values


def check_alias(aliases: Aliases, tensor: TensorView, alias: Any, line: SourceLine) -> None:
    """Raises DefinitionError unless `alias` is an input of the tensor's dtype and number of dims, not written yet."""
    inputs = tensor.fd.recording.input_tensors()
    fits = isinstance(alias, TensorView) and alias.fd is tensor.fd and alias.id in inputs
    if not fits or (alias.dtype, alias.ndim) != (tensor.dtype, tensor.ndim):
        raise user_error(
            f"add_output of {tensor.label}: alias_input", shown(alias), f"an input tensor like {tensor.type}",
            "Pass what define_tensor returned.", line,
        )  # fmt: skip
    if alias.id in aliases.values():
        raise user_error(
            f"add_output of {tensor.label}: alias_input", f"{alias.label}, which another output is written into",
            "an output of its own for each argument", "Write the one that is to stay.", line,
        )  # fmt: skip


def write_aliases(
    recording: Recording, aliases: Aliases, outputs: Sequence[Any], arguments: Sequence[Any], line: SourceLine
) -> list[Any]:
    """Write outputs into their arguments, each rank its own shards; returns the outputs that are left.

    An output that is such an argument, or is written into one, comes back as the argument itself. Raises ArgumentError
    where the sizes differ.
    """
    places = {ref.id: i for i, ref in enumerate(recording.inputs) if isinstance(ref, TensorRef)}
    written = {tensor: arguments[places[tensor]] for tensor in aliases.values()}
    kept = [_apart(out, written.values()) for out in outputs]
    for write in (_check_shape, _write):  # all are checked before any is written
        for place, tensor in aliases.items():
            if kept[place] is not None:  # of which the rank has a part
                write(recording, tensor, kept[place], written[tensor], line)
    same = written | {recording.outputs[place]: written[tensor] for place, tensor in aliases.items()}
    pairs = enumerate(zip(recording.outputs, kept, strict=True))
    return [same.get(tensor, out) for place, (tensor, out) in pairs if place not in aliases]


def _check_shape(recording: Recording, tensor: int, out: Any, argument: Any, line: SourceLine) -> None:
    if out.shape != argument.shape:
        raise user_error(
            f"the output written into argument {recording.tensors[tensor].label}", f"shape {list(out.shape)}",
            f"{list(argument.shape)}, the argument's", "Annotate both alike.", line, ArgumentError,
        )  # fmt: skip


def _write(recording: Recording, tensor: int, out: Any, argument: Any, line: SourceLine) -> None:
    try:
        with torch.no_grad():
            _local(argument).copy_(_local(out))
    except RuntimeError as error:  # an expanded tensor, one of inference mode
        raise user_error(
            f"argument {recording.tensors[tensor].label}, which an output is written into, cannot be written",
            str(error).partition("\n")[0], "a tensor with memory of its own for each element", "Pass t.clone().", line,
            ArgumentError,
        ) from error  # fmt: skip


def _apart(out: Any, written: Any) -> Any:
    """The output, copied to memory of its own if it is a view of an argument that will be written."""
    if not isinstance(out, torch.Tensor):
        return out
    memory = {_local(argument).untyped_storage().data_ptr() for argument in written}
    return out.clone() if _local(out).untyped_storage().data_ptr() in memory else out


def _local(tensor: Any) -> torch.Tensor:
    return getattr(tensor, "to_local", lambda: tensor)()
