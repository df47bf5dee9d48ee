"""Tests of Lightning Thunder, run in the second environment by `make test`: the main one has no Thunder."""

from __future__ import annotations

import importlib.util
import os
import sys
from collections.abc import Iterator
from pathlib import Path

import pytest

sys.path.insert(0, str(Path(__file__).parent))
sys.path.insert(0, str(Path(__file__).parents[1] / "ranks"))

from rank_pool import RankPool

_thunder = importlib.util.find_spec("thunder")  # This folder itself is found under the name, without an origin.
collect_ignore_glob = ["test_*.py"] if _thunder is None or _thunder.origin is None else []


def pytest_collection_modifyitems(items: list[pytest.Item]) -> None:
    folder = str(Path(__file__).parent)
    for item in items:
        if str(item.path).startswith(f"{folder}{os.sep}"):  # quick: it is asked of each test of the suite
            item.add_marker(pytest.mark.thunder)


@pytest.fixture(scope="session")
def ranks2() -> Iterator[RankPool]:
    """Two ranks, started once per session."""
    pool = RankPool(2, 120)
    yield pool
    pool.close()


@pytest.fixture(scope="session")
def ranks4() -> Iterator[RankPool]:
    """Four ranks, started once per session."""
    pool = RankPool(4, 120)
    yield pool
    pool.close()
