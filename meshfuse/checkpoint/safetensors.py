"""Tensors in safetensors files, read in part: the file is mapped, and only the pages of a shard are read.

The format: 8 bytes (little endian) with the length of a JSON header, the header with dtype, shape and offsets of each
tensor, and the tensors' bytes (github.com/huggingface/safetensors). An index file says which file has which tensor.
"""

from __future__ import annotations

import json
import math
import mmap
import os
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any

import torch

from ..errors import CheckpointError, MeshfuseError, user_error

_DTYPES = {
    "F64": torch.float64, "F32": torch.float32, "F16": torch.float16, "BF16": torch.bfloat16, "I64": torch.int64,
    "I32": torch.int32, "I16": torch.int16, "I8": torch.int8, "U8": torch.uint8, "BOOL": torch.bool,
    "F8_E4M3": torch.float8_e4m3fn, "F8_E5M2": torch.float8_e5m2, "U16": torch.uint16, "U32": torch.uint32,
    "U64": torch.uint64, "C64": torch.complex64,
}  # fmt: skip
_MOST_HEADER = 100_000_000  # bytes, as the format's own library has it


@dataclass(frozen=True, slots=True)
class StoredTensor:
    """Where a tensor is: its file, dtype, shape, and first byte in the file."""

    file: str
    dtype: torch.dtype
    shape: tuple[int, ...]
    start: int

    def mapped(self) -> torch.Tensor:
        """The tensor in the file's own pages: to be read, not to be changed."""
        size = math.prod(self.shape) * self.dtype.itemsize
        if not size:
            return torch.empty(self.shape, dtype=self.dtype)
        with open(self.file, "rb") as file:
            # A private mapping: torch wants memory that can be written.
            pages = mmap.mmap(file.fileno(), 0, flags=mmap.MAP_PRIVATE, prot=mmap.PROT_READ | mmap.PROT_WRITE)
        raw = torch.frombuffer(pages, dtype=torch.uint8, count=size, offset=self.start)
        # A dtype's memory must be aligned, which files of other writers need not be.
        raw = raw if self.start % self.dtype.itemsize == 0 else raw.clone()
        return raw.view(self.dtype).view(self.shape)


def names_of(path: str | os.PathLike[str]) -> list[str]:
    """The names of all tensors in a safetensors file, or in those of an index. Raises CheckpointError as `find`."""
    path = os.fspath(path)
    return [name for name in (_index(path) if _is_index(path) else _header(path)[0]) if name != "__metadata__"]


def find(path: str | os.PathLike[str], names: Sequence[str]) -> dict[str, StoredTensor]:
    """Where these tensors are, in a safetensors file or in those of an index.

    Raises CheckpointError for files that are not as the format says, and for names that they do not have.
    """
    path = os.fspath(path)
    files = _files(path, names)
    headers = {file: _header(file) for file in sorted(set(files.values()))}
    return {name: _entry(file, name, *headers[file]) for name, file in files.items()}


def _files(path: str, names: Sequence[str]) -> dict[str, str]:
    if not _is_index(path):
        return dict.fromkeys(names, path)
    index = _index(path)
    missing = [name for name in names if name not in index]
    if missing:
        raise _wrong(path, f"no tensor {missing[0]!r}", f"one of its {len(index)} names")
    folder = os.path.dirname(path)
    return {name: os.path.join(folder, os.path.basename(index[name])) for name in names}


def _is_index(path: str) -> bool:
    return path.endswith(".json")


def _index(path: str) -> Mapping[str, str]:
    """By name of a tensor the file that has it."""
    try:
        with open(path, encoding="utf-8") as file:
            return json.load(file)["weight_map"]
    except (OSError, ValueError, KeyError, TypeError) as error:
        raise _wrong(path, f"no index ({error})", 'a JSON file with a "weight_map"') from None


def _header(path: str) -> tuple[Mapping[str, Any], int]:
    try:
        size = os.path.getsize(path)
        with open(path, "rb") as file:
            length = int.from_bytes(file.read(8), "little")
            if not 2 <= length <= min(_MOST_HEADER, size - 8):
                raise ValueError(f"a header of {length} bytes")
            return json.loads(file.read(length)), 8 + length
    except (OSError, ValueError) as error:
        raise _wrong(path, f"no safetensors file ({error})", "a file in that format") from None


def _entry(path: str, name: str, header: Mapping[str, Any], data: int) -> StoredTensor:
    if name not in header:
        raise _wrong(path, f"no tensor {name!r}", f"one of its {len(header)} names")
    try:
        entry = header[name]
        dtype, shape = _DTYPES[entry["dtype"]], tuple(map(int, entry["shape"]))
        start, end = map(int, entry["data_offsets"])
        fits = end - start == math.prod(shape) * dtype.itemsize and 0 <= start <= end
        if not fits or data + end > os.path.getsize(path):
            raise ValueError(f"bytes {start} to {end} for shape {list(shape)} of {dtype}")
    except (KeyError, TypeError, ValueError) as error:
        raise _wrong(path, f"a wrong entry of {name!r} ({error})", "dtype, shape and offsets that fit") from None
    return StoredTensor(path, dtype, shape, data + start)


def _wrong(path: str, found: str, needed: str) -> MeshfuseError:
    return user_error(f"{path} cannot be read", found, needed, cls=CheckpointError)
