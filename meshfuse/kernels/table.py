"""The names by which generated programs call kernels."""

from __future__ import annotations

import sys
from collections.abc import Callable
from typing import Any, TypeVar

_F = TypeVar("_F", bound=Callable[..., Any])


def kernel(function: _F) -> _F:
    """Let generated programs call a function as K.<its name>, which no other kernel has."""
    table, name = sys.modules[__name__.rpartition(".")[0]], function.__name__
    assert not hasattr(table, name), f"there is a kernel {name} already: {getattr(table, name)}"
    setattr(table, name, function)
    return function
