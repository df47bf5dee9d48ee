"""What a user may be told, whatever is passed: for tests that pass everything."""

from __future__ import annotations

import contextlib
import re
from collections.abc import Iterator
from pathlib import Path

from meshfuse.errors import MeshfuseError


@contextlib.contextmanager
def refused_in(file: str) -> Iterator[None]:
    """Lets pass what a user may be told: a ValueError of ours with a line of this file."""
    try:
        yield
    except MeshfuseError as error:
        assert isinstance(error, ValueError), repr(error)
        assert re.search(rf"\(at {re.escape(Path(file).name)}:\d+\)", str(error)), str(error)
