"""Functions of a script, a notebook or another function, as values: no other process can import them.

A function travels as its code, its defaults, its closure and the globals that its code names. Both sides must run the
same version of Python.
"""

from __future__ import annotations

import importlib
import marshal
import sys
import types
from collections.abc import Iterator
from typing import Any

_LOCAL_MODULES = ("__main__", "__mp_main__")


def is_importable(function: types.FunctionType, main_is_shared: bool = False, of: Any = None) -> bool:
    """Whether another process finds the function, or the object `of` that was made of it, under its module and name.

    main_is_shared: both processes run the same script.
    """
    module = function.__module__
    if module is None or (module in _LOCAL_MODULES and not main_is_shared):
        return False
    found: Any = sys.modules.get(module)
    for part in function.__qualname__.split("."):
        found = getattr(found, part, None)
    return found is (function if of is None else of)


def reduce_function(function: types.FunctionType, main_is_shared: bool = False) -> Any:
    """How pickle writes a function by value; a function may refer to itself.

    Where both processes run the same script, a function of it uses the globals that are there.
    """
    shares = main_is_shared and function.__module__ in _LOCAL_MODULES
    code = marshal.dumps(function.__code__)
    cells = len(function.__closure__ or ())
    state = {
        "globals": {} if shares else dict(_used_globals(function)),
        "cells": [_content(cell) for cell in function.__closure__ or ()],
        "defaults": function.__defaults__,
        "kwdefaults": function.__kwdefaults__,
        "dict": function.__dict__,
    }
    made = (code, function.__name__, function.__qualname__, function.__module__, cells, shares)
    return _skeleton, made, state, None, None, _fill


def _used_globals(function: types.FunctionType) -> Iterator[tuple[str, Any]]:
    space = function.__globals__
    for name in sorted(_names(function.__code__)):
        if name in space:
            value = space[name]
            yield name, _Module(value.__name__) if isinstance(value, types.ModuleType) else value


def _names(code: types.CodeType) -> set[str]:
    """The names that code and the functions inside of it may look up."""
    found = set(code.co_names)
    for const in code.co_consts:
        if isinstance(const, types.CodeType):
            found |= _names(const)
    return found


class _Module:
    """A module in the globals of a function, by its name."""

    def __init__(self, name: str):
        self.name = name


class _Empty:
    """The content of a cell that has none yet."""


def _content(cell: types.CellType) -> Any:
    try:
        value = cell.cell_contents
    except ValueError:
        return _Empty
    return _Module(value.__name__) if isinstance(value, types.ModuleType) else value


def _skeleton(code: bytes, name: str, qualname: str, module: str, cells: int, shares: bool) -> types.FunctionType:
    own = {"__builtins__": __builtins__, "__name__": module}
    space = vars(sys.modules["__main__"]) if shares else own
    closure = tuple(types.CellType() for _ in range(cells))
    function = types.FunctionType(marshal.loads(code), space, name, None, closure or None)
    function.__qualname__, function.__module__ = qualname, module
    return function


def _fill(function: types.FunctionType, state: dict[str, Any]) -> None:
    for name, value in state["globals"].items():
        function.__globals__[name] = _loaded(value)
    for cell, value in zip(function.__closure__ or (), state["cells"], strict=True):
        if value is not _Empty:
            cell.cell_contents = _loaded(value)
    function.__defaults__, function.__kwdefaults__ = state["defaults"], state["kwdefaults"]
    function.__dict__.update(state["dict"])


def _loaded(value: Any) -> Any:
    return importlib.import_module(value.name) if isinstance(value, _Module) else value
