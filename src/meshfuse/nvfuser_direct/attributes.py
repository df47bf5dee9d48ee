"""What scripts keep as attributes of a definition."""

from __future__ import annotations

from collections.abc import Callable, Collection
from typing import Any

from ..definition.tensor_view import TensorView, Val
from ..errors import SourceLine, user_error


def check_attribute(name: str, value: Any, own: Collection[str], where: Callable[[], SourceLine]) -> None:
    """Raises DefinitionError for a tensor or scalar of a script, or some of them, under one of the definition's own
    names.
    """
    if name in own and _is_of_script(value):
        raise user_error(
            f"fd.{name} = ...", "a name that meshfuse's definitions keep their own state under", "any other name",
            f"Write fd.{name}_ = ..., or use a variable.", where(),
        )  # fmt: skip


def _is_of_script(value: Any) -> bool:
    first = value[0] if isinstance(value, (list, tuple)) and value else value
    return isinstance(first, (TensorView, Val))
