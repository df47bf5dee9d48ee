"""What docs/adding-a-rewrite.md has one do is checked where it could be forgotten."""

from __future__ import annotations

import dataclasses
import importlib
import pkgutil
import typing
from collections.abc import Iterator

import pytest

from meshfuse import rewrites
from meshfuse.plans import plan_codec

_PLAIN = (int, float, str, bool, type(None), ...)


def _rewritings() -> list[type]:
    """The classes of `meshfuse.rewrites` whose values stand in a plan, which are those that have `sized`."""
    found = set()
    for module in pkgutil.iter_modules(rewrites.__path__):
        members = vars(importlib.import_module(f"{rewrites.__name__}.{module.name}")).values()
        found |= {m for m in members if isinstance(m, type) and dataclasses.is_dataclass(m) and hasattr(m, "sized")}
    return sorted(found, key=lambda kind: kind.__name__)


def _classes_in(hint: object) -> Iterator[object]:
    """The classes that a type annotation consists of."""
    inner = typing.get_args(hint)
    if not inner:
        yield hint
    for one in inner:
        yield from _classes_in(one)


def _fields(kind: object) -> Iterator[object]:
    """The classes that the annotations of a class' fields consist of."""
    for hint in typing.get_type_hints(kind).values() if hasattr(kind, "__annotations__") else ():
        if typing.get_origin(hint) is not typing.ClassVar:
            yield from _classes_in(hint)


def _held_by(kind: object) -> set[object]:
    """A class and those that its fields hold, and theirs."""
    found: set[object] = set()
    waiting = [kind]
    while waiting:
        one = waiting.pop()
        if one not in found and one not in _PLAIN:
            found.add(one)
            waiting += _fields(one)
    return found


def test_there_are_rewritings_to_check() -> None:
    assert len(_rewritings()) >= 8


@pytest.mark.parametrize("kind", _rewritings(), ids=lambda kind: kind.__name__)
def test_plans_on_disk_can_hold_every_rewriting(kind: type) -> None:
    assert _held_by(kind) - {*plan_codec._CLASSES, *plan_codec._ENUMS} == set()
