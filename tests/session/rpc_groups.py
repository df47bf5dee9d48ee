"""A group of rpc for the tests of a module: this process and workers of a session."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager

import meshfuse.session as di
from meshfuse.session import rpc


@contextmanager
def rpc_group(workers: int) -> Iterator[di.ProcessSession]:
    """Workers of which this process is worker0, with `rpc` between them."""
    with di.ProcessSession(workers, timeout=30) as session:
        session.init_rpc(timeout=20)
        yield session
        session.call(rpc.shutdown)
        session.sync()
