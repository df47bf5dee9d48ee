"""Weights of a parallel module: read from safetensors by slices, or initialised module by module."""

from __future__ import annotations

import os
from collections.abc import Mapping
from pathlib import Path
from typing import Any

import torch
from torch import nn

from ..checkpoint.safetensors import StoredTensor, find, names_of
from ..errors import CheckpointError, SourceLine, located, shown, user_error
from ..executor.dtensor import is_dtensor
from ..long_work import saying
from .patterns import nearest
from .placing import Place

_INDEX = "model.safetensors.index.json"


def load(module: nn.Module, places: Mapping[str, Place], path: Any, strict: bool, line: SourceLine) -> None:
    """Read this rank's part of every parameter and buffer from safetensors.

    path: a file, an index of several, or a folder with either.

    Raises CheckpointError where there is none, or it lacks a name or has another shape.
    """
    file = _file(path, line)
    with located(line):
        stored, aliases = dict.fromkeys(names_of(file)), _aliases(module)
        found = {name: next((alias for alias in names if alias in stored), None) for name, names in aliases.items()}
        missing = [name for name, alias in found.items() if alias is None]
        if missing and strict:
            near = nearest(missing[0], stored)
            raise user_error(
                f"load: {len(missing)} names are not in {path}",
                f"{missing[0]}{f', near to it {near}' if near else ''}", "all parameters and buffers of the module",
                "Pass strict=False to leave them as they are.", line, CheckpointError,
            )  # fmt: skip
        tensors = _tensors(module)
        there = find(file, [alias for alias in found.values() if alias is not None])
        with torch.no_grad(), saying(f"loading weights from {path}"):
            for name, alias in found.items():
                if alias is not None:
                    _read(there[alias], alias, name, tensors[name], places.get(name), line)


def _file(path: Any, line: SourceLine) -> Path:
    """The file of tensors, or the index of several."""
    if not isinstance(path, (str, os.PathLike)):
        raise user_error("load: path", shown(path), "a path of a safetensors file, its index or their folder", "", line)
    place = Path(path)
    if place.is_dir():
        index = place / _INDEX
        place = index if index.exists() else place / "model.safetensors"
    if not place.exists():
        raise user_error(f"load: {path}", "no such file", "a safetensors file, its index or their folder",
                         "Check the path on every rank.", line, CheckpointError)  # fmt: skip
    return place


def _aliases(module: nn.Module) -> dict[str, list[str]]:
    """By name of a parameter or saved buffer all names that it has."""
    saved = module.state_dict(keep_vars=True)
    kept = {name: tensor for name, tensor in _tensors(module).items() if name in saved}
    return {name: [other for other, value in saved.items() if value is tensor] for name, tensor in kept.items()}


def _tensors(module: nn.Module) -> dict[str, torch.Tensor]:
    return {**dict(module.named_parameters()), **dict(module.named_buffers())}


def _read(
    stored: StoredTensor, alias: str, name: str, target: torch.Tensor, place: Place | None, line: SourceLine
) -> None:
    """Read a tensor's part into memory."""
    if stored.shape != tuple(target.shape):
        raise user_error(f"load: {alias}", f"shape {list(stored.shape)} in the file",
                         f"{list(target.shape)} for {name}", "Make the model with the config of the weights.", line,
                         CheckpointError)  # fmt: skip
    local: Any = target
    if is_dtensor(target) and place is not None:
        local._local_tensor.copy_(place.part(stored.mapped()))
    elif not target.is_meta:
        target.data.copy_(stored.mapped())


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
