"""Checks of what the function of a user's op did, against what its rule says."""

from __future__ import annotations

import functools
from collections.abc import Callable
from types import CodeType, FrameType
from typing import Any

import torch

from ..errors import KernelError, user_error


def checked_results(name: str, made: Any, *kinds: tuple[tuple[int, ...], torch.dtype]) -> Any:
    """The results of a user's function. Raises KernelError unless they are tensors of these local shapes and dtypes."""
    results = made if len(kinds) > 1 else (made,)
    listed = isinstance(results, (tuple, list)) and len(results) == len(kinds)
    if listed and all(_is(result, *kind) for result, kind in zip(results, kinds, strict=True)):
        return made
    wanted = ", ".join(f"{_name(dtype)}{list(shape)}" for shape, dtype in kinds)
    raise user_error(
        f"{name}: its function returned something else than its rule says", _text(made), f"{wanted} on this rank",
        "Correct the function, or its rule, halo, sizes and dtype: meshfuse.testing.check_op tries each.",
        cls=KernelError,
    )  # fmt: skip


def watched(name: str, function: Callable[..., Any]) -> Callable[..., Any]:
    """A user's function with its results settled, and checked.

    It raises KernelError where the function changes an argument in place, which other ops and the user may read, and
    where it returns a tensor on another device than its arguments'.
    """

    @functools.wraps(function)
    def call(*args: Any) -> Any:
        tensors = [a for a in args if isinstance(a, torch.Tensor)]
        before = [_version(tensor) for tensor in tensors]
        made = function(*args)
        changed = [place for place, tensor in enumerate(tensors) if _version(tensor) != before[place]]
        if changed:
            raise user_error(
                f"{name}: its function changed its argument {changed[0]} in place", _text(tensors[changed[0]]),
                "arguments left as they are", "Let it begin with a clone, or use the op without the underscore.",
                cls=KernelError,
            )  # fmt: skip
        for result in made if isinstance(made, (tuple, list)) else (made,):
            if tensors and isinstance(result, torch.Tensor) and result.device != tensors[0].device:
                raise user_error(
                    f"{name}: its function returned a tensor of another device", str(result.device),
                    f"{tensors[0].device}, as its arguments are on", "Let it make tensors there.", cls=KernelError,
                )  # fmt: skip
        return tuple(map(settled, made)) if isinstance(made, (tuple, list)) else settled(made)

    return call


_CALL = watched("", repr).__code__  # of the calls of all functions that are watched


def comes_from_a_function(frame: FrameType | None, outer: CodeType) -> bool:
    """Whether a watched function, called since `outer` was, has led to this frame.

    If not, whatever runs here has interrupted `outer`: a signal's handler, or the end of an object.
    """
    while frame is not None and frame.f_code is not outer:
        if frame.f_code is _CALL:
            return True
        frame = frame.f_back
    return False


def settled(value: Any) -> Any:
    """A tensor whose memory holds its numbers; anything else as it is.

    torch's lazy views hold the negatives or conjugates of their numbers. What is sent, and what compiled code reads, is
    memory.
    """
    if not isinstance(value, torch.Tensor) or not (value.is_neg() or value.is_conj()):
        return value
    with torch.no_grad():
        return value.resolve_conj().resolve_neg()


def _version(tensor: torch.Tensor) -> int:
    """How often a tensor was written to; 0 for one of inference mode, which does not count."""
    return 0 if tensor.is_inference() else tensor._version


def _is(result: Any, shape: tuple[int, ...], dtype: torch.dtype) -> bool:
    is_dense = isinstance(result, torch.Tensor) and result.layout == torch.strided
    return is_dense and tuple(result.shape) == shape and result.dtype == dtype


def _text(made: Any) -> str:
    if isinstance(made, (tuple, list)):
        return f"{type(made).__name__} of {', '.join(map(_text, made)) or 'nothing'}"
    if not isinstance(made, torch.Tensor):
        return type(made).__name__
    return f"{'' if made.layout == torch.strided else f'{_name(made.layout)} '}{_name(made.dtype)}{list(made.shape)}"


def _name(kind: torch.dtype | torch.layout) -> str:
    return str(kind).removeprefix("torch.")
