"""The shapes that a plan is made for: those of a call's arguments, or those that `compile` is given."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any

import torch

from ..argument_checks import as_int
from ..definition.recording import Recording, TensorDef
from ..errors import ArgumentError, DefinitionError, SizeError, SourceLine, shown, user_error
from ..ops.shape_arithmetic import UNKNOWN
from ..sharding.layout import Layout, extent
from ..sharding.value import Sharding
from .arguments import Inputs, signature


def compile_shapes(recording: Recording, shapes: Sequence[Any], line: SourceLine) -> dict[int, tuple[int, ...]]:
    """Global shapes by input tensor: as given, or without any as defined.

    Raises DefinitionError for a wrong count, for sizes left open and for those that contradict the definition.
    """
    recording.check_complete(line)
    tensors = recording.input_tensors()
    given = list(shapes) if shapes else [recording.tensors[i].type.shape for i in tensors]
    if not shapes and not all(map(_is_shape, given)):
        open_ones = ", ".join(
            f"{recording.tensors[i].label}: {recording.tensors[i].type}" for i in _open_inputs(recording)
        )
        raise user_error(
            "compile needs the size of every dim", open_ones, "a size for each '?'",
            "Pass one global shape per input tensor, or call the definition first.", line,
        )  # fmt: skip
    if len(given) != len(tensors) or not all(map(_is_shape, given)):
        raise user_error(
            "compile needs the size of every dim",
            shown([list(s) if isinstance(s, tuple) else s for s in given]),
            f"{len(tensors)} shapes without -1, for {signature(recording)}",
            "Pass one global shape per input tensor.",
            line,
        )
    found = {i: tuple(int(n) for n in shape) for i, shape in zip(tensors, given, strict=True)}
    for i, shape in found.items():
        _check_as_defined(recording.tensors[i], shape, line)
    return found


def _check_as_defined(tensor: TensorDef, shape: tuple[int, ...], line: SourceLine) -> None:
    wanted = tensor.type.shape
    if len(shape) != len(wanted) or any(n not in (-1, m) for n, m in zip(wanted, shape, strict=True)):
        raise user_error(
            f"compile: the shape of {tensor.label}", shown(list(shape)), f"{list(wanted)} as defined", "Correct it.",
            line,
        )  # fmt: skip


def _open_inputs(recording: Recording) -> list[int]:
    return [i for i in recording.input_tensors() if -1 in recording.tensors[i].type.shape]


def _is_shape(shape: Any) -> bool:
    return isinstance(shape, (list, tuple)) and all(n is not None and n >= 0 for n in map(as_int, shape))


def check_global_shapes(
    recording: Recording, inputs: Inputs, line: SourceLine | None = None
) -> dict[int, tuple[int, ...]]:
    """The shapes of global arguments. Raises ArgumentError where one differs from a size that is fixed."""
    for i, tensor in inputs.tensors.items():
        wanted = recording.tensors[i].type.shape
        if any(n not in (-1, m) for n, m in zip(wanted, tensor.shape, strict=True)):
            raise _wrong_shape(
                recording,
                i,
                f"{list(tensor.shape)}{_if_shard(recording, i, tensor)}",
                str(list(wanted)),
                "global",
                line,
            )
    return {i: tuple(t.shape) for i, t in inputs.tensors.items()}


def _if_shard(recording: Recording, i: int, tensor: torch.Tensor) -> str:
    """A remark for an error, where the tensor has the shape of some rank's shard; "" where it has not."""
    annotation, shape = recording.placed(i), recording.tensors[i].type.shape
    if annotation is None or annotation.mesh is None or -1 in shape:
        return ""
    sharding = annotation.sharding(recording.tensors[i].label, shape).placement(shape)
    rank = next((r for r in annotation.mesh.ranks if sharding.local_shape(shape, r) == tuple(tensor.shape)), None)
    return "" if rank is None else f", rank {rank}'s shard"


def _wrong_shape(
    recording: Recording, i: int, found: str, needed: str, which: str, line: SourceLine | None
) -> Exception:
    made = recording.tensors[i]
    return user_error(
        f"tensor {made.label} (defined at {made.line}) has the wrong {which} shape",
        found,
        needed,
        "Pass the rank's shard (mf.shard_tensor cuts it) to execute, the whole tensor to fd(...) and simulate.",
        line,
        ArgumentError,
    )


def global_shapes(
    recording: Recording,
    inputs: Inputs,
    rank: int,
    globals_: Mapping[int, tuple[int, ...]],
    cut: Mapping[int, tuple[Layout, ...]],
    line: SourceLine | None = None,
) -> dict[int, tuple[int, ...]]:
    """The global shapes that local arguments mean: fixed sizes as defined, open ones as even shards make them up.

    `globals_` are shapes that are known already, of DTensors, and `cut` the layouts of those that are not cut as
    annotated. Raises ArgumentError where a shard does not have its
    shape.
    """
    out: dict[int, tuple[int, ...]] = {}
    for i, tensor in inputs.tensors.items():
        annotation = recording.placed(i)
        wanted = recording.tensors[i].type.shape
        if i in globals_:
            out[i] = globals_[i]
        elif annotation is None:
            out[i] = tuple(tensor.shape)
        elif annotation.mesh is None or rank not in annotation.mesh:
            out[i] = tuple(n if n >= 0 else local for n, local in zip(wanted, tensor.shape, strict=True))
        else:
            sizes = zip(wanted, tensor.shape, annotation.named(), strict=True)
            out[i] = tuple(n if n >= 0 else local * _ways(layout) for n, local, layout in sizes)
        _check_shard(recording, i, tensor, out[i], rank, cut.get(i), line)
    return out


def _ways(layout: Layout) -> int:
    return extent(tuple(split for split in layout if split.bound))


def _check_shard(
    recording: Recording,
    i: int,
    tensor: torch.Tensor,
    shape: tuple[int, ...],
    rank: int,
    cut: tuple[Layout, ...] | None,
    line: SourceLine | None,
) -> None:
    wanted, annotation = recording.tensors[i].type.shape, recording.placed(i)
    if any(n not in (-1, m) for n, m in zip(wanted, shape, strict=True)):
        raise _wrong_shape(recording, i, str(list(tensor.shape)), str(list(wanted)), "global", line)
    if annotation is None or annotation.mesh is None or rank not in annotation.mesh:
        return
    sharding: Sharding = annotation.sharding(recording.tensors[i].label, shape).placement(shape)
    sharding = sharding if cut is None else sharding.with_dims(cut)
    local = sharding.local_shape(shape, rank)
    if tuple(tensor.shape) != local:
        whole = ", the global shape" if tuple(tensor.shape) == shape else ""
        needed = f"{list(local)}, rank {rank}'s shard of {list(shape)} in {sharding}"
        raise _wrong_shape(recording, i, f"{list(tensor.shape)}{whole}", needed, "local", line)


def with_open_sizes(
    recording: Recording, shapes: Mapping[int, tuple[int, ...]], error: DefinitionError
) -> DefinitionError:
    """The error of an op that cannot take the arguments' sizes, together with the sizes that the definition left open.

    It is the error itself where the definition leaves none open.
    """
    made = [(recording.tensors[i].label, recording.tensors[i].type.shape, shape) for i, shape in sorted(shapes.items())]
    given = [f"{label} {list(defined)} is {list(shape)}" for label, defined, shape in made if UNKNOWN in defined]
    if not given or isinstance(error, SizeError):
        return error
    return SizeError(f"{error.args[0]} Sizes that the definition leaves open: {', '.join(given)}.", error.where)
