"""Writing files so that each is whole, or as it was before, whenever its writer ends."""

from __future__ import annotations

import contextlib
import os
import secrets


def write_whole(path: str | os.PathLike[str], data: bytes, *, synced: bool = False) -> None:
    """Replace or make a file in one step; `synced`: only once its bytes are on the disk. Raises OSError.

    Nothing half written stays, unless the process is killed: then it is in a file whose name ends in `.part`.
    """
    part = f"{os.fspath(path)}.{secrets.token_hex(4)}.part"
    try:
        with open(part, "xb") as file:
            file.write(data)
            if synced:
                file.flush()
                os.fsync(file.fileno())
        os.replace(part, path)
    except BaseException:  # Ctrl-C, too.
        with contextlib.suppress(OSError):
            os.remove(part)
        raise
