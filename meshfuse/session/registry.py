"""Functions that sessions call by name."""

from __future__ import annotations

import importlib
import sys
from collections.abc import Callable
from typing import Any, TypeVar, overload

from ..errors import ArgumentError, caller_line, shown, user_error

F = TypeVar("F", bound=Callable[..., Any])
_functions: dict[str, Callable[..., Any]] = {}


@overload
def register_global_func(name: F) -> F: ...
@overload
def register_global_func(name: str, function: None = ..., override: bool = ...) -> Callable[[F], F]: ...
@overload
def register_global_func(name: str, function: F, override: bool = ...) -> F: ...
def register_global_func(name: Any, function: Any = None, override: bool = True) -> Any:
    """Register a function under a name for `Session.get_global_func`, as a decorator or at once.

    Without a name (`@register_global_func`) it is registered under its own. ArgumentError for a name that is no text,
    and for one that is taken if `override` is False.
    """
    if callable(name):
        return register_global_func(name.__name__, name)
    if not isinstance(name, str) or not name:
        raise user_error("register_global_func: name", shown(name), "a text", "", caller_line(), ArgumentError)
    if function is None:
        return lambda f: register_global_func(name, f, override)
    if not override and name in _functions:
        raise user_error(
            f"a function {name!r} is registered already", shown(_functions[name]), "a name that is free",
            "Pass override=True to replace it.", caller_line(), ArgumentError,
        )  # fmt: skip
    _functions[name] = function
    return function


def registered(name: str) -> Callable[..., Any] | None:
    """The function of that name in this process, if there is one."""
    return _functions.get(name)


def lookup(name: str, module: str | None) -> Callable[..., Any]:
    """The function of that name; the module that registers it is imported first if it is known and needed."""
    if name not in _functions and module is not None and module not in sys.modules:
        importlib.import_module(module)
    found = _functions.get(name)
    if found is None:
        names = ", ".join(sorted(name for name in _functions if not name.startswith("runtime."))) or "none"
        raise user_error(
            f"no function {name!r} is registered on this worker", names, "a registered name",
            "Call s.import_python_module with the module that registers it.", cls=ArgumentError,
        )  # fmt: skip
    return found
