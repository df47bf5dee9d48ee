"""What the function of a user's op returned, held against what its rule says of it."""

from __future__ import annotations

from typing import Any

import torch

from ..errors import KernelError, user_error


def as_told(name: str, made: Any, *kinds: tuple[tuple[int, ...], torch.dtype]) -> Any:
    """The results of a call. Raises KernelError where they are not the tensors of these local shapes and dtypes."""
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


def _is(result: Any, shape: tuple[int, ...], dtype: torch.dtype) -> bool:
    return isinstance(result, torch.Tensor) and tuple(result.shape) == shape and result.dtype == dtype


def _text(made: Any) -> str:
    if isinstance(made, (tuple, list)):
        return f"{type(made).__name__} of {', '.join(map(_text, made)) or 'nothing'}"
    return f"{_name(made.dtype)}{list(made.shape)}" if isinstance(made, torch.Tensor) else type(made).__name__


def _name(dtype: torch.dtype) -> str:
    return str(dtype).removeprefix("torch.")
