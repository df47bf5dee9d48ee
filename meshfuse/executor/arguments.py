"""Checking a call's arguments against a definition."""

from __future__ import annotations

import contextlib
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any

import torch
from torch.autograd import forward_ad

from ..definition.checks import number_fits, plain_number
from ..definition.recording import Recording, TensorDef
from ..errors import ArgumentError, DefinitionError, SourceLine, shown, user_error
from ..kernels import settled
from ..ops.values import ScalarRef, TensorRef
from ..scalars import python_cast
from ..sharding.layout import Layout
from .argument_guards import PLAIN, dispatch_modes


@dataclass(frozen=True, slots=True)
class Inputs:
    """A call's arguments split into tensors and scalars, by their numbers in the definition.

    dtensors: None where no argument is a DTensor. Else outputs are to become DTensors, and these are the inputs that
        torch has cut otherwise than they are annotated, by number, with the layouts of their dims.
    """

    tensors: Mapping[int, torch.Tensor]
    scalars: Mapping[int, Any]
    device: torch.device
    dtensors: tuple[tuple[int, tuple[Layout, ...]], ...] | None = None

    def in_order(self, inputs: Sequence[TensorRef | ScalarRef]) -> list[Any]:
        """The values of a definition's inputs: plain tensors and Python's numbers."""
        return [self.tensors[i.id] if isinstance(i, TensorRef) else self.scalars[i.id] for i in inputs]


# Torch modes in which ops make no numbers, or record another program.
_FOLLOWING = tuple(torch._C._TorchDispatchModeKey.__members__.values())


def split_arguments(recording: Recording, arguments: Sequence[Any], line: SourceLine | None = None) -> Inputs:
    """A call's arguments by their numbers in the definition.

    Raises ArgumentError for a wrong count, kind (DTensors included), dtype, number of dims or stride order, and for
    mixed devices; DefinitionError for a definition without outputs.
    """
    check_count(recording, arguments, line)
    tensors: dict[int, torch.Tensor] = {}
    scalars: dict[int, Any] = {}
    for place, (ref, value) in enumerate(zip(recording.inputs, arguments, strict=True)):
        if isinstance(ref, TensorRef):
            tensors[ref.id] = _checked_tensor(place, recording.tensors[ref.id], value, line)
        else:
            scalars[ref.id] = _checked_scalar(recording, place, ref.id, value, line)
    return Inputs(tensors, scalars, _device(recording, tensors, line))


def check_count(recording: Recording, arguments: Any, line: SourceLine | None) -> None:
    """Raises ArgumentError unless there is one argument per input, DefinitionError without outputs."""
    recording.check_complete(line)
    check_list(recording, arguments, line)
    if len(arguments) != len(recording.inputs):
        raise user_error(
            "wrong number of arguments", str(len(arguments)), f"{len(recording.inputs)}: {signature(recording)}",
            "Pass one argument per define_tensor and define_scalar, in their order"
            f"{': fd(*tensors) of a list' if _is_list_of_all(recording, arguments) else ''}.", line, ArgumentError,
        )  # fmt: skip


def _is_list_of_all(recording: Recording, arguments: Sequence[Any]) -> bool:
    """Whether a single argument was passed, a list of as many values as there are inputs."""
    first = arguments[0] if len(arguments) == 1 else None
    return isinstance(first, (list, tuple)) and len(first) == len(recording.inputs)


def check_list(recording: Recording, arguments: Any, line: SourceLine | None) -> None:
    """Raises ArgumentError unless the arguments are a list."""
    if not isinstance(arguments, (list, tuple)):
        raise user_error(
            "the arguments", f"{type(arguments).__name__}",
            f"a list of {len(recording.inputs)}: {signature(recording)}", "Pass one list with all of them.", line,
            ArgumentError,
        )  # fmt: skip


def signature(recording: Recording) -> str:
    names = [recording.tensors[r.id].label if isinstance(r, TensorRef) else f"s{r.id}" for r in recording.inputs]
    return f"[{', '.join(names)}]"


def _checked_tensor(place: int, made: TensorDef, value: Any, line: SourceLine | None) -> torch.Tensor:
    name = f"argument {place}, {made.label} (defined at {made.line})"
    value = _without_class(value)
    problem = _kind_problem(made, value) or _type_problem(made, value) or _stride_problem(made, value)
    if problem is not None:
        wrong, found, needed, do = problem
        raise user_error(f"{name}{wrong}", found, needed, do, line, ArgumentError)
    return settled(value)


def _without_class(value: Any) -> Any:
    """The plain tensor of a subclass that only adds attributes and functions, which no program calls.

    A collective of torch that still runs (AsyncCollectiveTensor) is waited for. Anything else is returned as it is.
    """
    if not isinstance(value, torch.Tensor) or type(value) in PLAIN:
        return value
    if type(value).__name__ == "AsyncCollectiveTensor":
        return value.wait()  # type: ignore[attr-defined]
    if _computes(value):
        return value
    with torch._C.DisableTorchFunctionSubclass():
        return value.as_subclass(torch.Tensor)


def _computes(value: torch.Tensor) -> bool:
    """Whether the tensor's class has ops of its own, as DTensor and FakeTensor do."""
    name = "__torch_dispatch__"
    return getattr(type(value), name) is not getattr(torch.Tensor, name)


def _follower(value: torch.Tensor) -> str:
    """What of torch must see every op on the tensor, such as autograd's forward mode; "" for nothing."""
    of_torch = torch._C._functorch  # pyright: ignore[reportAttributeAccessIssue]
    if of_torch.is_batchedtensor(value) or of_torch.is_gradtrackingtensor(value) or torch._is_functional_tensor(value):
        return "a tensor of torch.func (vmap, grad, jvp, functionalize)"
    if forward_ad._current_level >= 0 and forward_ad.unpack_dual(value).tangent is not None:
        return "a dual tensor of torch.autograd.forward_ad"
    modes = map(torch._C._get_dispatch_mode, _FOLLOWING if dispatch_modes() else ())
    return next((f"a call in torch's {type(mode).__name__}" for mode in modes if mode is not None), "")


# What is wrong (to follow the argument's name), found, needed, and what to do.
_Problem = tuple[str, str, str, str]


def unreadable(value: torch.Tensor, kind: Any, gradients: str) -> _Problem | None:
    """What is wrong with a tensor of another kind than dense ones that hold numbers; None for such.

    kind: the type that is needed, for an error. gradients: where gradients come from, as an error says it.
    """
    if follower := _follower(value):
        return (
            " cannot be looked into",
            follower,
            f"a plain torch tensor, {kind}",
            f"Call it outside of these; {gradients}.",
        )
    if value.is_nested or value.layout != torch.strided:
        found = "a nested tensor" if value.is_nested else str(value.layout)
        how = "t.to_padded_tensor(0.0)" if value.is_nested else "t.to_dense()"
        return " is not dense", found, "torch.strided", f"Convert it: {how}."
    return None


def _kind_problem(made: TensorDef, value: Any) -> _Problem | None:
    if not isinstance(value, torch.Tensor):
        return (
            " is no tensor",
            f"{type(value).__name__}",
            f"a torch tensor, {made.type}",
            "Convert it: torch.as_tensor(t).",
        )
    if _computes(value):
        return _class_problem(made, value)
    if problem := unreadable(value, made.type, "gradients come from fd.grad"):
        return problem
    if value.numel() and not value.untyped_storage().nbytes():
        return (
            " has no memory",
            "a storage of 0 bytes, freed by its owner",
            str(made.type),
            "Pass it while it is there.",
        )
    return None


def _class_problem(made: TensorDef, value: Any) -> _Problem:
    if hasattr(value, "placements"):
        return (
            " is a DTensor",
            "DTensor",
            "a plain global tensor",
            "Call fd.execute for DTensors, or pass t.full_tensor().",
        )
    needed = f"a plain torch tensor, {made.type}: its memory is what is sent"
    return " is of a class with ops of its own", type(value).__name__, needed, "Pass the tensor that it stands for."


def _type_problem(made: TensorDef, value: torch.Tensor) -> _Problem | None:
    wanted = f"torch.{made.type.dtype.value}"
    if str(value.dtype) != wanted:
        return " has the wrong dtype", str(value.dtype), wanted, f"Convert it: t.to({wanted})."
    if value.dim() != made.type.ndim:
        do = "Reshape the argument or define the tensor with its dims."
        return (
            " has the wrong number of dims",
            f"shape {list(value.shape)}",
            f"{made.type.ndim} dims, {made.type}",
            do,
        )
    return None


def _stride_problem(made: TensorDef, value: torch.Tensor) -> _Problem | None:
    """What is wrong with the strides of an argument whose definition gives a stride order; expanded dims have none."""
    if made.stride_order is None or value.numel() == 0:
        return None
    placed = [d for d in range(value.dim()) if value.shape[d] > 1 and value.stride(d)]
    sizes_strides = [(made.stride_order[d], value.stride(d)) for d in placed]
    strides = [stride for _, stride in sorted(sizes_strides)]
    if strides == sorted(strides):
        return None
    return (
        " has the wrong stride order", f"strides {list(value.stride())}",
        f"stride order {list(made.stride_order)} (0 is the fastest dim)",
        "Pass a tensor laid out so, or define it without stride_order.",
    )  # fmt: skip


def _checked_scalar(recording: Recording, place: int, number: int, value: Any, line: SourceLine | None) -> Any:
    if isinstance(value, torch.Tensor) and value.dim() == 0:
        with contextlib.suppress(RuntimeError):  # a tensor on the meta device has no number
            value = value.item()
    dtype, fits = recording.scalars[number].dtype, True
    try:
        value = plain_number(value)
    except DefinitionError:  # an int of more than 64 bits
        fits = False
    if not fits or not isinstance(value, (bool, int, float, complex)) or not number_fits(value, dtype):
        found = shown(value) if isinstance(value, (bool, int, float, complex)) else f"a {type(value).__name__}"
        needed = f"a number that {dtype.name} holds" if fits else "an int of 64 bits, or a float"
        what = f"argument {place}, scalar s{number}"
        raise user_error(what, found, needed, "Pass a Python number.", line, ArgumentError)
    return python_cast(value, dtype)


def _device(recording: Recording, tensors: Mapping[int, torch.Tensor], line: SourceLine | None) -> torch.device:
    first: dict[str, int] = {}
    for i, tensor in tensors.items():
        first.setdefault(str(tensor.device), i)
    if len(first) > 1:
        raise user_error(
            "arguments on different devices",
            ", ".join(f"{recording.tensors[i].label} on {name}" for name, i in first.items()),
            "one device",
            "Move them to one device.",
            line,
            ArgumentError,
        )
    return next((t.device for t in tensors.values()), torch.device("cpu"))


def check_numbers(recording: Recording, given: Inputs, what: str, line: SourceLine) -> None:
    """Raises ArgumentError for tensors on the meta device, which hold no numbers, where `what` needs these."""
    if given.device.type == "meta":
        raise user_error(
            f"{what}: arguments without numbers",
            ", ".join(f"{recording.tensors[i].label} on meta" for i in given.tensors),
            "tensors with memory, on a CPU or a GPU",
            "Make them with torch.zeros_like(t, device='cpu'); fd.simulate takes meta tensors, for shapes alone.",
            line,
            ArgumentError,
        )


def scalar_values(recording: Recording, scalars: Mapping[Any, Any] | None, line: SourceLine) -> dict[int, Any]:
    """The values of scalar inputs by number, from a mapping by `Val` or number.

    Raises DefinitionError for anything but a mapping, and for values of what is no scalar input.
    """
    numbers = {ref.id for ref in recording.inputs if isinstance(ref, ScalarRef)}
    given = {} if scalars is None else scalars
    is_mapping = isinstance(given, Mapping)
    found = {getattr(getattr(key, "ref", None), "id", key): value for key, value in given.items()} if is_mapping else {}
    if not is_mapping or not set(found) <= numbers:
        raise user_error(
            "compile: scalars",
            shown(scalars),
            f"values of the scalar inputs {sorted(f's{n}' for n in numbers)}",
            "Pass {val: number}.",
            line,
        )
    return found
