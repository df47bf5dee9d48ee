"""Dataclasses for what there is one of per op, or several: nodes, values, placements, instructions."""

from __future__ import annotations

from dataclasses import dataclass, field
from typing import TYPE_CHECKING, Any, TypeVar

_T = TypeVar("_T")

if TYPE_CHECKING:
    from typing_extensions import dataclass_transform

    @dataclass_transform(frozen_default=True, field_specifiers=(field,))
    def frozen(cls: type[_T]) -> type[_T]:
        """A frozen dataclass with slots."""
        ...

else:

    def frozen(cls: Any) -> Any:
        """A dataclass with slots that is frozen to the type checker, which `make lint` runs. With `frozen=True` Python
        would refuse to set fields at run time, too, and takes four times as long to make one: a tenth of a compilation.
        """
        return dataclass(slots=True, unsafe_hash=True)(cls)
