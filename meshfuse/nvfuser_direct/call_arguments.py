"""The arguments of a call as nvFuser's scripts pass them."""

from __future__ import annotations

from collections.abc import Iterable, Mapping, Sequence
from typing import Any

import torch

from ..definition.builder import DefinitionBuilder
from ..definition.tensor_view import TensorView
from ..errors import caller_line
from ..executor.arguments import check_list


def flattened(fd: DefinitionBuilder, inputs: Sequence[Any]) -> list[Any]:
    """The arguments, with the numbers in a list or tuple as one argument each, as define_vector takes them.

    Raises ArgumentError for a single tensor, and for what is no list.
    """
    if isinstance(inputs, (torch.Tensor, TensorView, str, bytes, Mapping)) or not isinstance(inputs, Iterable):
        check_list(fd, inputs, caller_line())
    values: list[Any] = []
    for value in inputs:
        values.extend(value if isinstance(value, (list, tuple)) else (value,))
    return values
