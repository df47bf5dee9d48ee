"""The rivals' versions of the programs of the table, by name: on which mesh, and what builds them."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

PROGRAMS: dict[str, tuple[str, Callable[[Any], Any]]] = {}


def program(name: str, mesh: str) -> Callable[[Any], Any]:
    """Register what builds a program of the table, and its mesh."""

    def register(build: Any) -> Any:
        PROGRAMS[name] = (mesh, build)
        return build

    return register
