"""`python -m meshfuse.session.remote HOST PORT WORKERS`: a host's part of a SocketSession.

It connects to the controller, with the token of MESHFUSE_TOKEN, starts workers here when it is told to, and ends with
the session. It may be started before the controller is.
"""

# Nothing imports this module: Python warns of one that it is to run and has imported.
from __future__ import annotations

import argparse
import sys

from ..runtime.launcher import seconds
from .host import run


def main(arguments: list[str] | None = None) -> int:
    """The command line."""
    parser = argparse.ArgumentParser(prog="python -m meshfuse.session.remote", description=__doc__)
    parser.add_argument("host", help="the controller's address")
    parser.add_argument("port", type=int, help="the controller's port")
    parser.add_argument("workers", type=int, help="number of workers on this host")
    parser.add_argument("--timeout", type=seconds, default=120.0, help="seconds to wait for the controller")
    args = parser.parse_args(arguments)
    return run(args.host, args.port, args.workers, args.timeout)


if __name__ == "__main__":
    sys.exit(main())
