"""A folder of small texts that may be lost: for this user only, checked when read, limited in size, never fatal.

MESHFUSE_CACHE is the folder above it, or `off`; by default it is `meshfuse` in XDG_CACHE_HOME or ~/.cache. If something
goes wrong, one warning is given, and the process does not use the cache again.
"""

from __future__ import annotations

import contextlib
import errno
import hashlib
import os
import stat
import tempfile
import warnings
from pathlib import Path

from .whole_files import write_whole

VARIABLE = "MESHFUSE_CACHE"
MOST_BYTES = 256 << 20  # The limit for all files together; those used last are kept.
TURN = ".turn"  # The end of the name of a file that says that a text is being made.
_MAGIC = "meshfuse-cache-1"
_STALE_SECONDS = 3600.0  # After which a file that is still half written, or made, is one that a killed process left.
_warned: set[str] = set()


class CacheWarning(UserWarning):
    """The cache on disk cannot be used; everything works without it."""


def folder() -> Path | None:
    """The folder for plans, made where it is missing; None where the cache is off or cannot be used.

    It must belong to this user, and no one else may write to it, as what it holds is trusted.
    """
    root = root_folder()
    if root is None or "broken" in _warned:
        return None
    path = root / "plans"
    try:
        path.mkdir(mode=0o700, parents=True, exist_ok=True)
        found = os.lstat(path)
    except (OSError, RuntimeError) as error:
        return _broken(f"{path}: {getattr(error, 'strerror', None) or error}")
    if not stat.S_ISDIR(found.st_mode) or found.st_uid != os.getuid() or found.st_mode & 0o022:
        return _broken(f"{path} is not a folder that only this user can write to")
    return path


def root_folder() -> Path | None:
    """The folder above all that is kept on disk, from MESHFUSE_CACHE or XDG_CACHE_HOME; None where the cache is off."""
    setting = os.environ.get(VARIABLE, "")
    if setting.lower() in ("off", "0"):
        return None
    try:
        return Path(setting).expanduser() if setting else _default()
    except RuntimeError as error:  # A user without an entry, as in containers, has no home where HOME is not set.
        return _broken(str(error).rstrip("."))


def writable_root() -> Path | None:
    """`root_folder`, if files can be made in it; else None."""
    place = folder()
    if place is None:
        return None
    try:
        with tempfile.TemporaryFile(dir=place):
            return place.parent
    except OSError as error:
        return _broken(f"{place}: {error.strerror}")


def _default() -> Path:
    given = os.environ.get("XDG_CACHE_HOME", "")
    return (Path(given) if os.path.isabs(given) else Path.home() / ".cache") / "meshfuse"


def read(place: Path, name: str) -> str | None:
    """A text as it was written. None where it is missing, or damaged: then it warns and removes the file."""
    path = place / name
    try:
        data = _bytes_of(path)
    except FileNotFoundError:
        return None
    except OSError as error:
        warn(f"{path} cannot be read: {error.strerror}")
        return None
    head, _, body = data.partition(b"\n")
    if head.decode(errors="replace") != _head(body):
        warn(f"{path} is damaged, and is removed")
        with contextlib.suppress(OSError):
            path.unlink()
        return None
    with contextlib.suppress(OSError):
        os.utime(path)  # Files that were used last are removed last.
    return body.decode(errors="replace")


def _bytes_of(path: Path) -> bytes:
    """A file's bytes. Raises OSError for what is no file: a pipe or a device would be read without end."""
    with open(path, "rb", opener=_open_at_once) as file:
        about = os.fstat(file.fileno())
        if not stat.S_ISREG(about.st_mode) or about.st_size > MOST_BYTES:
            raise OSError(errno.EINVAL, "no file of a plan")
        return file.read()


def _open_at_once(path: str, flags: int) -> int:
    return os.open(path, flags | os.O_NOFOLLOW | os.O_NONBLOCK)


def write(place: Path, name: str, text: str) -> None:
    """Write a text to the folder, whole or not at all. A full disk is a warning."""
    body = text.encode()
    try:
        write_whole(place / name, f"{_head(body)}\n".encode() + body)
    except OSError as error:
        warn(f"{place / name} cannot be written: {error.strerror}")
        return
    _evict(place)


def _evict(place: Path) -> None:
    """Remove texts, longest unused first, until the rest is within the limits; and what killed writers left."""
    found = []
    try:
        there = list(place.iterdir())
    except OSError:
        return  # Someone has removed the folder.
    for path in there:
        with contextlib.suppress(OSError):
            about = path.stat()
            found.append((about.st_mtime, about.st_size, path))
    newest = max((when for when, _, _ in found), default=0.0)
    total = 0
    for when, size, path in sorted(found, reverse=True):
        total += size
        if total > MOST_BYTES or (path.suffix in (".part", TURN) and newest - when > _STALE_SECONDS):
            with contextlib.suppress(OSError):
                path.unlink()


def _head(body: bytes) -> str:
    return f"{_MAGIC} {hashlib.sha256(body).hexdigest()}"


def _broken(text: str) -> None:
    warn(text)
    _warned.add("broken")


def warn(text: str) -> None:
    """Warn, once per process, that the cache cannot be used."""
    if "disk" not in _warned:
        _warned.add("disk")
        warnings.warn(
            f"meshfuse's cache of plans: {text}. Programs are planned without it; {VARIABLE} names another folder, "
            "or is 'off'.", CacheWarning, stacklevel=2,
        )  # fmt: skip
