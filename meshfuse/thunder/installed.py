"""Whether Lightning Thunder is there, and the error that says what to install."""

from __future__ import annotations

import importlib.util

from ..errors import MeshfuseError, caller_line, user_error


class ThunderMissing(MeshfuseError, ImportError):
    """Lightning Thunder cannot be imported."""


def check_installed() -> None:
    """Raises ThunderMissing where there is no Thunder."""
    if importlib.util.find_spec("thunder") is None:
        raise user_error(
            "mf.thunder", "no package thunder", "Lightning Thunder 0.2.6",
            "Run `pip install lightning-thunder==0.2.6`, or install meshfuse with the extra `thunder`.",
            caller_line(), ThunderMissing,
        )  # fmt: skip
