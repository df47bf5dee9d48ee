"""Weights of a parallel module: read from safetensors by slices, or initialised module by module."""

from __future__ import annotations

import itertools
import json
import os
from collections.abc import Iterator, Mapping
from pathlib import Path
from typing import Any

import torch
from torch import nn

from ..errors import CheckpointError, SourceLine, shown, user_error
from ..executor.dtensor import is_dtensor
from ..runtime.world import World
from .patterns import nearest
from .placing import Place

_INDEX = "model.safetensors.index.json"


def load(module: nn.Module, places: Mapping[str, Place], path: Any, strict: bool, line: SourceLine) -> None:
    """Read this rank's part of every parameter and buffer from safetensors.

    path: a file, an index of several, or a folder with either.

    Raises CheckpointError where there is none, or it lacks a name or has another shape.
    """
    files = _files(path, line)
    aliases = _aliases(module)
    missing = [name for name in aliases if not any(alias in files for alias in aliases[name])]
    if missing and strict:
        near = nearest(missing[0], list(files))
        raise user_error(
            f"load: {len(missing)} names are not in {path}", f"{missing[0]}{f', near to it {near}' if near else ''}",
            "all parameters and buffers of the module", "Pass strict=False to leave them as they are.", line,
            CheckpointError,
        )  # fmt: skip
    tensors = _tensors(module)
    with torch.no_grad(), _Readers() as readers:
        for name, names in aliases.items():
            found = next((alias for alias in names if alias in files), None)
            if found is not None:
                _read(readers.of(files[found]), found, name, tensors[name], places.get(name), line)


def _files(path: Any, line: SourceLine) -> dict[str, Path]:
    """By name of a tensor the file that has it."""
    if not isinstance(path, (str, os.PathLike)):
        raise user_error("load: path", shown(path), "a path of a safetensors file, its index or their folder", "", line)
    place = Path(path)
    if place.is_dir():
        index = place / _INDEX
        place = index if index.exists() else place / "model.safetensors"
    if not place.exists():
        raise user_error(f"load: {path}", "no such file", "a safetensors file, its index or their folder",
                         "Check the path on every rank.", line, CheckpointError)  # fmt: skip
    if place.suffix == ".json":
        listed = json.loads(place.read_text())["weight_map"]
        return {name: place.parent / file for name, file in listed.items()}
    with _Readers() as readers:
        return dict.fromkeys(readers.of(place).keys(), place)


class _Readers:
    """Open files of safetensors, each opened once."""

    def __init__(self) -> None:
        self._open: dict[Path, Any] = {}

    def of(self, path: Path) -> Any:
        """The open file."""
        if path not in self._open:
            from safetensors import safe_open  # an extra

            self._open[path] = safe_open(str(path), "pt").__enter__()
        return self._open[path]

    def __enter__(self) -> _Readers:
        return self

    def __exit__(self, *_: object) -> None:
        for file in self._open.values():
            file.__exit__(None, None, None)


def _aliases(module: nn.Module) -> dict[str, list[str]]:
    """By name of a parameter or saved buffer all names that it has."""
    saved = module.state_dict(keep_vars=True)
    kept = {name: tensor for name, tensor in _tensors(module).items() if name in saved}
    return {name: [other for other, value in saved.items() if value is tensor] for name, tensor in kept.items()}


def _tensors(module: nn.Module) -> dict[str, torch.Tensor]:
    return {**dict(module.named_parameters()), **dict(module.named_buffers())}


def _read(file: Any, stored: str, name: str, target: torch.Tensor, place: Place | None, line: SourceLine) -> None:
    """Read a tensor's part into memory."""
    part = file.get_slice(stored)
    shape = tuple(part.get_shape())
    if shape != tuple(target.shape):
        raise user_error(f"load: {stored}", f"shape {list(shape)} in the file", f"{list(target.shape)} for {name}",
                         "Make the model with the config of the weights.", line, CheckpointError)  # fmt: skip
    if not is_dtensor(target) or place is None:
        target.data.copy_(file.get_tensor(stored)) if not target.is_meta else None
        return
    runs = place.sharding.runs(shape, World.current().rank)
    local: Any = target
    _fill(local._local_tensor, part, runs)


def _fill(local: torch.Tensor, part: Any, runs: Any) -> None:
    """Fill a shard, box by box; a box is a run of indices in every dim."""
    for box in itertools.product(*[_with_places(dim) for dim in runs]):
        here = local[tuple(slice(at, at + b - a) for at, (a, b) in box)]
        source = part[tuple(slice(a, b) for _, (a, b) in box)] if box else part[...]
        here.copy_(source)


def _with_places(runs: Any) -> Iterator[tuple[int, tuple[int, int]]]:
    """Each run with the place of its first index in the shard."""
    at = 0
    for a, b in runs:
        yield at, (a, b)
        at += b - a


# initialising


def init_weights(module: Any, places: Mapping[str, Place], device: torch.device, seed: int, line: SourceLine) -> None:
    """Initialise all parameters and buffers, one module after the other, with the same numbers on every mesh.

    A module is initialised whole, by the model's own `_init_weights(module)` if it has one, else by its
    `reset_parameters()`, and each rank keeps its shards: a rank holds no more than one module whole.

    Raises DefinitionError for a module with parameters that has neither.
    """
    owners = dict(module.named_modules())
    state, done = torch.get_rng_state(), set[int]()
    torch.manual_seed(seed)
    try:
        for path, part in owners.items():
            _init(module, path, part, places, device, done, line)
    finally:
        torch.set_rng_state(state)


def _init(
    root: Any, path: str, part: nn.Module, places: Mapping[str, Place], device: torch.device, done: set[int],
    line: SourceLine,
) -> None:  # fmt: skip
    """Initialise the parameters and buffers that a module has itself; tied ones at the first of their owners."""
    own = {n: p for n, p in part._parameters.items() if p is not None}
    buffers = {n: b for n, b in part._buffers.items() if b is not None}
    if not own and not buffers:
        return
    whole = {n: torch.empty(p.shape, dtype=p.dtype, device=device) for n, p in own.items()}
    for name in own:
        part._parameters[name] = nn.Parameter(whole[name], requires_grad=False)
    for name, buffer in buffers.items():
        if buffer.is_meta:
            part._buffers[name] = torch.zeros(buffer.shape, dtype=buffer.dtype, device=device)
    try:
        _call_init(root, path, part, bool(own), line)
        found = {n: part._parameters[n] for n in own}
    finally:
        part._parameters.update(own)
    for name, parameter in own.items():
        if id(parameter) not in done:
            done.add(id(parameter))
            _keep(parameter, found[name], places.get(_full_name(root, parameter)))


def _full_name(root: nn.Module, parameter: nn.Parameter) -> str:
    return next(name for name, other in root.named_parameters() if other is parameter)


def _keep(parameter: Any, whole: Any, place: Place | None) -> None:
    with torch.no_grad():
        if is_dtensor(parameter) and place is not None:
            parameter._local_tensor.copy_(place.part(whole.detach()))
        else:
            parameter.copy_(whole)


def _call_init(root: Any, path: str, part: Any, has_parameters: bool, line: SourceLine) -> None:
    with torch.no_grad():
        if hasattr(root, "_init_weights"):
            root._init_weights(part)
        elif hasattr(part, "reset_parameters"):
            part.reset_parameters()
        elif has_parameters:
            raise user_error(
                f"init_weights: {path or 'the module'} ({type(part).__name__})", "no reset_parameters()",
                "a module that says how it is initialised", "Write reset_parameters, or load its weights.", line,
            )  # fmt: skip
