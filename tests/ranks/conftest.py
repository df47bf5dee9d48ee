"""Fixtures of real ranks: `ranks2` and `ranks4` are pools, `job` runs scripts as whole jobs."""

from __future__ import annotations

import subprocess
import sys
import textwrap
from collections.abc import Callable, Iterator
from pathlib import Path

import pytest

sys.path.insert(0, str(Path(__file__).parent))

import forked
from rank_pool import RankPool, base_environment

_GUARD = 140


@pytest.fixture(scope="session")
def ranks2() -> Iterator[RankPool]:
    """Two ranks, started once per session."""
    pool = RankPool(2)
    yield pool
    pool.close()


@pytest.fixture(scope="session")
def ranks4() -> Iterator[RankPool]:
    """Four ranks, started once per session."""
    pool = RankPool(4)
    yield pool
    pool.close()


@pytest.fixture
def job(tmp_path: Path) -> Callable[..., subprocess.CompletedProcess[str]]:
    """`job(script, *launcher_words, args=..., **variables)`: a finished run of a script.

    Its processes are forked off one that has imported torch, as that is what starts cost; `real` ones begin with
    nothing.
    """

    def run(script: str, *launcher: str, args: tuple[str, ...] = (), real: bool = False, **variables: str):
        path = tmp_path / "script.py"
        path.write_text(textwrap.dedent(script))
        # torchrun leaves its folder for logs behind.
        own = {"TMPDIR": str(tmp_path)} if "torch.distributed.run" in launcher else {}
        words, environment = [*launcher, str(path), *args], base_environment(**own, **variables)
        if not real and (not launcher or launcher[1] in forked.LAUNCHERS):
            return forked.finished(words, environment, tmp_path, _GUARD)
        return subprocess.run(
            [sys.executable, *words], env=environment, capture_output=True, text=True, timeout=_GUARD
        )  # fmt: skip

    return run
