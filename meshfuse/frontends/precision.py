"""Types to compute in beside those that parameters are kept in."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

import torch

from ..errors import caller_line, shown, user_error


@dataclass(frozen=True, init=False)
class Precision:
    """Mixed precision: parameters stay as they are, and forward and backward compute in another type.

    param: the type that parameters are cast to before they are gathered, and floating point arguments of the forward;
        None for their own.
    reduce: the type in which gradients are summed over ranks; None for that of the gradients.

    Raises DefinitionError for what is no floating point type.
    """

    param: torch.dtype | None
    reduce: torch.dtype | None

    def __init__(self, param: torch.dtype | None = None, reduce: torch.dtype | None = None) -> None:
        for name, dtype in (("param", param), ("reduce", reduce)):
            object.__setattr__(self, name, dtype)
            if dtype is not None and not _is_float(dtype):
                raise user_error(f"Precision: {name}", shown(dtype), "a floating point torch.dtype, or None",
                                 "Pass torch.bfloat16, for example.", caller_line())  # fmt: skip


def _is_float(dtype: Any) -> bool:
    return isinstance(dtype, torch.dtype) and dtype.is_floating_point
