"""Files that are there whole or as they were before, whatever ends their writer, and wherever."""

from __future__ import annotations

import contextlib
import os
import secrets


def write_whole(path: str | os.PathLike[str], data: bytes, *, synced: bool = False) -> None:
    """Replace a file, or make it, in one step; `synced`: once its bytes are on the disk. Raises OSError.

    Nothing half written stays, unless the process is killed: then it is a file whose name ends in `.part`.
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
