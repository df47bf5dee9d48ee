"""Frozen dataclasses with a constructor of our own are what `dataclass` makes of them, but for the time it takes."""

from __future__ import annotations

import copy
import dataclasses
import inspect
import pickle

import pytest

from meshfuse.errors import SourceLine
from meshfuse.fast_dataclass import quickly_made


@dataclasses.dataclass(frozen=True, slots=True)
class Plain:
    first: int
    second: str = "b"


@quickly_made
@dataclasses.dataclass(frozen=True, slots=True)
class Quick:
    first: int
    second: str = "b"


@pytest.mark.parametrize("args, kwargs", [((1,), {}), ((1, "c"), {}), ((), {"second": "d", "first": 2})])
def test_it_is_made_of_the_same_arguments(args, kwargs):
    made, plain = Quick(*args, **kwargs), Plain(*args, **kwargs)
    assert dataclasses.astuple(made) == dataclasses.astuple(plain)
    assert inspect.signature(Quick) == inspect.signature(Plain)


@pytest.mark.parametrize("args, kwargs", [((), {}), ((1, "c", 3), {}), ((1,), {"third": 3}), ((1,), {"first": 1})])
def test_it_refuses_the_same_arguments(args, kwargs):
    with pytest.raises(TypeError) as plain:
        Plain(*args, **kwargs)
    with pytest.raises(TypeError) as quick:
        Quick(*args, **kwargs)
    assert str(quick.value) == str(plain.value).replace("Plain", "Quick")


def test_it_stays_frozen():
    with pytest.raises(dataclasses.FrozenInstanceError):
        Quick(1).first = 2  # type: ignore[misc]


@pytest.mark.parametrize("again", [copy.copy, copy.deepcopy, lambda value: pickle.loads(pickle.dumps(value)),
                                   dataclasses.replace])  # fmt: skip
def test_copies_are_equal(again):
    for value in (Quick(1, "x"), SourceLine("a.py", 3, "f")):
        found = again(value)
        assert found == value and hash(found) == hash(value)
