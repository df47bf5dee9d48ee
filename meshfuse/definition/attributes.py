"""What scripts store as attributes of a definition, and subclasses whose `__init__` forgets meshfuse's."""

from __future__ import annotations

import functools
import sys
from collections.abc import Callable, Collection
from typing import Any

from ..errors import SourceLine, caller_line, user_error

_OURS = __name__.partition(".")[0]


# What a script may set of a definition that is there: bounds, to numbers or None, and what nvFuser's has.
_BOUNDS, _NVFUSERS = {"max_memory", "max_wire"}, {"fec", "ke"}


def check_attribute(kind: type, own: Collection[str], name: str, value: Any, where: Callable[[], SourceLine]) -> None:
    """Raises DefinitionError where a script stores something under a name of the definition's state or properties.

    `kind` is the definition's class, `own` the names of its state. What nothing but a script calls, such as `grad`, it
    may have for itself.
    """
    if not (name in own or isinstance(getattr(kind, name, None), property)) or _is_settable(name, value):
        return
    setter = sys._getframe(2).f_globals.get("__name__", "")
    if setter.partition(".")[0] != _OURS and not _is_declared(kind, name):
        raise user_error(
            f"fd.{name} = ...", "a name that meshfuse's definitions keep their own state under",
            "any other name", f"Write fd.{name}_ = ..., or use a variable.", where(),
        )  # fmt: skip


def _is_settable(name: str, value: Any) -> bool:
    return name in _NVFUSERS or (name in _BOUNDS and (value is None or isinstance(value, int | float)))


def _is_declared(kind: type, name: str) -> bool:
    """Whether a script's class has the name, as a default or a property of its own."""
    holder = next((above for above in kind.__mro__ if name in vars(above)), None)
    return holder is not None and holder.__module__.partition(".")[0] != _OURS


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
