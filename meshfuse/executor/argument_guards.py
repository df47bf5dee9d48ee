"""Arguments that are like those of an earlier call, recognised without checking each of them anew."""

from __future__ import annotations

from typing import Any, Generic, TypeVar

import torch
from torch.autograd import forward_ad

Program = TypeVar("Program")

PLAIN = (torch.Tensor, torch.nn.Parameter)
dispatch_modes = torch._C._len_torch_dispatch_stack
# torch.compile's own check of a call's tensors: types, dtypes, devices, dispatch keys and sizes, in C++.
_Guards: Any = torch._C._dynamo.guards.TensorGuards  # pyright: ignore[reportAttributeAccessIssue]
# So many kinds of arguments have guards; others are recognised by their outlines.
_MOST_GUARDED = 4


def outline(arguments: Any) -> Any:
    """A key of all that the checks of a call's arguments look at, but strides.

    Arguments with equal keys are checked once. The key is None where the checks look at more: at numbers, DTensors and
    other subclasses of tensors, lazy views (`settled`), and torch modes that follow tensors. Whether a tensor has
    memory is part of the key: using one whose owner has freed it would end the process.
    """
    if not _is_plain_call(arguments):
        return None
    try:
        found = [
            (t.shape, t.dtype, t.device, t.layout, not t.data_ptr())
            for t in arguments
            if type(t) in PLAIN and not t.is_neg() and not t.is_conj()
        ]
    except RuntimeError:  # nested tensors have no shape, and some tensors no memory of their own
        return None
    return tuple(found) if len(found) == len(arguments) else None


def _is_plain_call(arguments: Any) -> bool:
    """Whether a call has its arguments in a list, and no torch mode follows tensors."""
    return type(arguments) in (list, tuple) and not dispatch_modes() and forward_ad._current_level < 0


Options = tuple[Any, Any, Any]


def _can_be_guarded(arguments: Any) -> bool:
    """Whether guards may look at the arguments: a nested tensor's sizes, which it does not have, end the process."""
    try:
        return not any([t.is_nested for t in arguments])
    except Exception:  # No tensors, or of a class that answers by itself.
        return False


class ArgumentGuards(Generic[Program]):
    """Programs by the arguments that they were found to fit, and by three options of the call."""

    __slots__ = ("_guarded", "_outlined")

    def __init__(self) -> None:
        # (number of arguments, torch's check of them, the options, the program)
        self._guarded: list[tuple[int, Any, Options, Program]] = []
        self._outlined: dict[Any, Program] = {}

    def learn(self, arguments: Any, options: Options, program: Program) -> None:
        """Remember arguments that fit, if they are all tensors."""
        key = outline(arguments)
        if key is not None:
            self._outlined[key, options] = program

    def find(self, arguments: Any, options: Options) -> Program | None:
        """The program for arguments like some that fitted; None where they have to be checked.

        Guards tell apart what outlines do not: whether a tensor needs a gradient, or the caller is in inference mode.
        """
        if self._guarded and _is_plain_call(arguments) and _can_be_guarded(arguments):
            count, (first, second, third) = len(arguments), options
            for number, check, known, program in self._guarded:
                if (
                    number == count and check(*arguments)
                    and known[0] is first and known[1] is second and known[2] is third
                    and all([t.data_ptr() for t in arguments])
                ):  # fmt: skip
                    return program
        return self._outlined_for(arguments, options)

    def _outlined_for(self, arguments: Any, options: Options) -> Program | None:
        try:
            program = self._outlined.get((outline(arguments), options))
        except TypeError:  # no name of a backend, or no bool
            return None
        if program is not None and len(self._guarded) < _MOST_GUARDED:
            self._guard(arguments, options, program)
        return program

    def _guard(self, arguments: Any, options: Options, program: Program) -> None:
        """From now on tell arguments like these by torch's guards, whatever their strides."""
        sizes, strides = [[*t.shape] for t in arguments], [[None] * t.ndim for t in arguments]
        guards = _Guards(*arguments, dynamic_dims_sizes=sizes, dynamic_dims_strides=strides)
        self._guarded.append((len(arguments), guards.check, options, program))
