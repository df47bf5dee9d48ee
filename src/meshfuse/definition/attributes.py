"""What scripts store as attributes of a definition, and subclasses whose `__init__` forgets meshfuse's."""

from __future__ import annotations

import functools
from collections.abc import Callable, Collection
from typing import Any

import torch

from ..errors import SourceLine, caller_line, user_error
from .tensor_view import TensorView, Val


def check_attribute(name: str, value: Any, own: Collection[str], where: Callable[[], SourceLine]) -> None:
    """Raises DefinitionError where a script stores tensors or scalars under one of the definition's own names.

    That is tensors of the definition or of numbers, such as `fd.inputs = [torch.ones(2)]`.
    """
    if name in own and _is_of_script(value):
        raise user_error(
            f"fd.{name} = ...", "a name that meshfuse's definitions keep their own state under", "any other name",
            f"Write fd.{name}_ = ..., or use a variable.", where(),
        )  # fmt: skip


def _is_of_script(value: Any) -> bool:
    listed = list(value.values()) if isinstance(value, dict) else value
    first = listed[0] if isinstance(listed, (list, tuple)) and listed else value
    return isinstance(first, (TensorView, Val, torch.Tensor))


def calling_ours(init: Callable[..., None]) -> Callable[..., None]:
    """The `__init__` of a script's class, with a check.

    Raises DefinitionError where it ends, or asks something of the definition, without having called meshfuse's
    `__init__`.
    """

    @functools.wraps(init)
    def checked(self: Any, *args: Any, **kwargs: Any) -> None:
        try:
            init(self, *args, **kwargs)
        except AttributeError as error:
            if error.obj is not self or self._state:
                raise
        if not self._state:
            raise user_error(
                f"{type(self).__name__} is no definition yet", "an __init__ that has not called FusionDefinition's",
                "that call first", "Write super().__init__() as the first line of __init__.", caller_line(),
            )  # fmt: skip

    return checked
