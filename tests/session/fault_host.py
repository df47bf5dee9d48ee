"""The other host of a session of two, for `fault_turns.py`."""

from __future__ import annotations

import sys

import fault_turns

from meshfuse.session import remote

if __name__ == "__main__":
    fault_turns.fork_the_servers()
    sys.exit(remote.main(["127.0.0.1", *sys.argv[1:]]))
