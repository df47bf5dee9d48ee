"""A checkpoint's folder: `checkpoint.json` names the data that are complete, and is replaced in one step.

    path/checkpoint.json            which data, their files with sizes and checksums, tensors, values
    path/data-000003-5f1c/          torch.distributed.checkpoint's files of the third save

A save writes new data beside the old. Only when all of them are on the disk is `checkpoint.json` replaced by one that
names them; then the old data are removed. If a save ends before that, for whatever reason, the old checkpoint is
untouched.
"""

from __future__ import annotations

import contextlib
import errno
import hashlib
import json
import os
import re
import secrets
import shutil
import warnings
import zlib
from collections.abc import Iterable, Iterator, Mapping
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any

import torch

from ..errors import CheckpointError, caller_line, user_error
from ..file_locks import exclusive
from ..whole_files import write_whole

# The version of the folder's format; it changes when an older meshfuse could not read a checkpoint.
FORMAT = 1
_INDEX = "checkpoint.json"
_PREFIX = "data-"
_BLOCK = 1 << 22  # Bytes read at once for a checksum.


@dataclass(frozen=True, slots=True)
class Index:
    """The content of `checkpoint.json`. tensors: name -> (dtype, shape); files: name -> (bytes, CRC-32)."""

    data: str
    tensors: dict[str, tuple[str, tuple[int, ...]]]
    values: dict[str, Any]
    files: dict[str, tuple[int, int]]
    format: int = FORMAT


@contextlib.contextmanager
def locked(path: Path) -> Iterator[None]:
    """Lock the folder for one save, of whichever job.

    When another save ended, it would remove what this one has written. Raises CheckpointError where another save has
    the lock. Some file systems, such as NFS, cannot lock: there `commit` looks again.
    """
    with exclusive(os.open(path, os.O_RDONLY)) as is_ours:
        if not is_ours:
            raise user_error(
                f"another save into {path} is under way", "a process that has locked the folder", "one at a time",
                "Wait for its end, or save into another folder.", cls=CheckpointError,
            )  # fmt: skip
        yield


def new_name(path: Path) -> str:
    """A name for the data of the next save."""
    numbers = [int(p.name.split("-")[1]) for p in path.glob(f"{_PREFIX}*-*") if p.name.split("-")[1].isdigit()]
    return f"{_PREFIX}{max(numbers, default=0) + 1:06d}-{secrets.token_hex(4)}"


def read_index(path: Path) -> Index:
    """The checkpoint in a folder.

    Raises CheckpointError where there is none, or none that is complete and in this format.
    """
    try:
        _check_kind(path / _INDEX)
        text = (path / _INDEX).read_text(errors="replace")
    except OSError as error:
        raise user_error(
            "no checkpoint to load", f"{path}: {error.strerror}", f"a folder with a {_INDEX}",
            "Pass the folder that meshfuse.save was given; a save that did not finish leaves none.",
            cls=CheckpointError,
        ) from None  # fmt: skip
    found = _parsed(path / _INDEX, text)
    if found.format != FORMAT:
        raise user_error(
            f"{path / _INDEX} is of another format", str(found.format), str(FORMAT),
            "Load it with the meshfuse that saved it, and save it with this one.", cls=CheckpointError,
        )  # fmt: skip
    return found


def _parsed(file: Path, text: str) -> Index:
    try:
        digest, _, body = text.partition("\n")
        if digest != _digest(body):
            raise ValueError("its checksum differs")
        found = json.loads(body)
        if found["format"] == FORMAT:
            _check_form(found)
        tensors = {name: (dtype, tuple(shape)) for name, (dtype, shape) in found["tensors"].items()}
        files = {name: (size, code) for name, (size, code) in found["files"].items()}
        return Index(found["data"], tensors, found["values"], files, found["format"])
    except (ValueError, KeyError, TypeError, AttributeError, RecursionError) as error:
        raise user_error(
            f"{file} is damaged", str(error), "the text that meshfuse.save wrote", "Load another checkpoint.",
            cls=CheckpointError,
        ) from None  # fmt: skip


def _check_form(found: Mapping[str, Any]) -> None:
    """Raises ValueError for content that no save writes, such as data outside of the folder."""
    data, values, files = found["data"], found["values"], found["files"]
    if not isinstance(data, str) or not re.fullmatch(rf"{_PREFIX}[0-9a-f-]+", data):
        raise ValueError(f"{data!r} as the name of its data")
    if not isinstance(values, dict):
        raise ValueError(f"{values!r} as its values")
    for name, (dtype, shape) in found["tensors"].items():
        if not isinstance(getattr(torch, str(dtype), None), torch.dtype) or not _are_counts(shape):
            raise ValueError(f"{dtype!r} of shape {shape!r} as tensor {name!r}")
    for name, facts in files.items():
        if "/" in name or not _are_counts(facts):
            raise ValueError(f"{facts!r} as the facts of its file {name!r}")


def _are_counts(found: Any) -> bool:
    return isinstance(found, list) and all(type(n) is int and n >= 0 for n in found)


def _check_kind(file: Path) -> None:
    """Raises OSError for what exists and is no file: reading a pipe without a writer would never end."""
    if file.exists() and not file.is_file():
        raise OSError(errno.EINVAL, f"{file.name} is no file")


def commit(path: Path, index: Index) -> None:
    """Make these data, which are all on the disk, the checkpoint; then remove the data that it replaces.

    Raises OSError where they did not become the checkpoint. Once they did, nothing fails any more.
    """
    os.stat(path / index.data)  # Another save, where none can be kept out, may have removed them.
    write_index(path, index)
    try:
        _sync_folder(path)
    except OSError as error:  # After a loss of power the old checkpoint may be back, so its data stay.
        line = caller_line()
        warnings.warn_explicit(
            f"meshfuse.save: {path} holds the new checkpoint, but may hold the one before again after a loss of power: "
            f"found {error.strerror} when its folder was to be brought to the disk. The next save tries again.",
            UserWarning, line.file, line.line,
        )  # fmt: skip
    else:
        _clear(path, index.data)


def write_index(path: Path, index: Index) -> None:
    """Replace `checkpoint.json`, in one step."""
    body = json.dumps(asdict(index))
    write_whole(path / _INDEX, f"{_digest(body)}\n{body}".encode(), synced=True)


def _clear(path: Path, data: str) -> None:
    """Remove all other data, and what killed saves left. Where that fails, the next save does it."""
    with contextlib.suppress(Exception):
        for old in path.glob(f"{_PREFIX}*"):
            if old.name != data:
                shutil.rmtree(old, ignore_errors=True)
        for old in path.glob(f"{_INDEX}.*.part"):
            old.unlink(missing_ok=True)


def abandon(path: Path, data: str) -> None:
    """Remove the data of a save that failed.

    They stay if they have become the checkpoint: a save can fail after that, as where another rank ends before it is
    told.
    """
    if not _may_name(path, data):
        with contextlib.suppress(OSError):  # `ignore_errors` leaves some.
            shutil.rmtree(path / data, ignore_errors=True)


def _may_name(path: Path, data: str) -> bool:
    try:
        return data in (path / _INDEX).read_text(errors="replace")
    except FileNotFoundError:
        return False
    except OSError:
        return True


def sum_of(file: Path) -> tuple[int, int]:
    """(bytes, CRC-32) of a file."""
    code = size = 0
    with open(file, "rb") as stream:
        while block := stream.read(_BLOCK):
            code, size = zlib.crc32(block, code), size + len(block)
    return size, code


def check_file(folder: Path, name: str, expected: tuple[int, int]) -> None:
    """Raises CheckpointError where a file is not as it was written."""
    try:
        _check_kind(folder / name)
        size, code = sum_of(folder / name)
    except OSError as error:
        found = error.strerror or "no file"
    else:
        if (size, code) == expected:
            return
        found = f"{size} bytes" if size != expected[0] else f"other bytes (CRC-32 {code:08x})"
    raise user_error(
        f"the checkpoint's file {folder / name} is damaged", found, f"{expected[0]} bytes, CRC-32 {expected[1]:08x}",
        "Load another checkpoint.", cls=CheckpointError,
    )  # fmt: skip


def check_shared(folder: Path, written: Iterable[str]) -> None:
    """Raises CheckpointError unless the files of all ranks are there, as they are if all ranks have the same folder."""
    for name in written:
        if not (folder / name).exists():
            raise user_error(
                "the ranks save to different folders", f"no file {name} in {folder}, which is rank 0's",
                "the files of all ranks in one folder",
                "Pass the same path on every rank, without the time or the rank in it, on a disk that all hosts share.",
                cls=CheckpointError,
            )  # fmt: skip


def sync_file(file: Path) -> None:
    """Have the system write a file's data to the disk."""
    with open(file, "rb") as stream:
        os.fsync(stream.fileno())


def _sync_folder(path: Path) -> None:
    handle = os.open(path, os.O_RDONLY)
    try:
        os.fsync(handle)
    except OSError as error:
        if error.errno not in (errno.EINVAL, errno.ENOTSUP):  # This file system has no such thing.
            raise
    finally:
        os.close(handle)


def _digest(body: str) -> str:
    return hashlib.sha256(body.encode()).hexdigest()
