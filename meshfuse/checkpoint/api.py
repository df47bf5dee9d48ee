"""`save` and `load`: all ranks call them alike, or one process without ranks."""

from __future__ import annotations

import contextlib
import json
import os
import pickle
from collections.abc import Callable, Iterator, Mapping
from dataclasses import replace
from pathlib import Path
from typing import Any

import torch

from ..argument_checks import is_text
from ..errors import ArgumentError, CheckpointError, MeshfuseError, caller_line, error_text, located, shown, user_error
from ..executor.modes import on_cpu
from ..executor.spmd import sum_of_bits
from ..kernels.user_functions import settled
from ..long_work import saying
from ..runtime.diagnosis import SAME_PROGRAM, disagreement
from ..runtime.environment import LONGEST_TIMEOUT
from ..runtime.world import World
from . import folder as files
from .entries import CheckpointEntry, as_python, check_local, global_shape, is_plain, to_load, to_save, wrong
from .held_apart import Saved, owners, saved_by, with_missing
from .hyperslabs import Shard, boxes
from .transfer import read, write

# Disks are slower than networks: a checkpoint may take so many times MESHFUSE_TIMEOUT.
_PATIENCE = 10
# So often a load begins again where a save of another job's has replaced the checkpoint that it was reading.
_OVERTAKEN = 10


def save(path: str | os.PathLike[str], state: Mapping[str, Any], *, timeout: float | None = None) -> None:
    """Save tensors and plain values under their names, as one checkpoint in the folder `path`. All ranks call it alike.

    A value of `state` is one of:

    - a tensor that every rank holds whole (compared, and stored once), or a DTensor;
    - `(shard, sharding)`, with a Sharding or an annotated TensorView; the shard is None on ranks outside the mesh.
        `(shard, sharding, global shape)` saves the ranks from telling each other their shapes, and ranks outside the
        mesh may leave the name out, as they may that of a DTensor: a pipeline's stages each save what they have;
    - a number, text or None.

    The checkpoint that was in the folder stays until this one is whole on the disk, and remains if this save fails or
    is killed. `timeout` is the limit of each wait for the other ranks, in seconds: ten times MESHFUSE_TIMEOUT by
    default.

    Raises ArgumentError for values that cannot be saved, CheckpointError (on every rank) where the disk refuses, and
    RankError where ranks fail or pass different things.
    """
    team = _Team(World.current(), timeout, "save")
    with located(caller_line()), team.lock, on_cpu():
        folder = _folder(path)
        with saying(f"saving {folder}"):
            entries, values = team.each("reading what to save", lambda: _read_state(state))
            entries = _of_all_ranks(team, entries, values)
            shards = _compared(team, entries)
            dtypes = _dtypes(team, entries)
            _save(team, folder, shards, dtypes, values)


def load(
    path: str | os.PathLike[str], wanted: Mapping[str, Any] | None = None, *, timeout: float | None = None
) -> dict[str, Any]:
    """Load a checkpoint from the folder `path`; returns its values by name. All ranks call it alike.

    How many ranks saved it, and in which shardings, makes no difference: one process without ranks may load it, too.
    Without `wanted` everything is loaded, whole. With it only these names are, each as its value says:

    - None: the whole tensor, or the plain value;
    - a Sharding or an annotated TensorView: this rank's shard in it, None outside its mesh;
    - a tensor, a DTensor or `(shard, sharding)`: loaded into that memory.

    Every file is compared with its checksum first, each by one of the ranks. The files' index is a pickle, as torch
    writes it: load only what you trust. `timeout` is as for `save`.

    Raises CheckpointError where there is no checkpoint or it is damaged, ArgumentError where it lacks a name or has
    another dtype or shape, or two names have other values in the same memory, and RankError where ranks fail.
    """
    team = _Team(World.current(), timeout, "load")
    with located(caller_line()), team.lock, on_cpu():
        home = _folder(path)
        if not isinstance(wanted, (Mapping, type(None))):
            raise user_error("load: what is wanted", shown(wanted), "a dict by name, or None for all",
                             'Pass {"w": None} for the whole tensor "w".', cls=ArgumentError)  # fmt: skip
        with saying(f"loading {home}"):
            for last in (*[False] * _OVERTAKEN, True):
                found = _load(team, home, wanted, last)
                if found is not None:
                    return found
    raise AssertionError("the last attempt raises")


def _folder(path: Any) -> Path:
    if isinstance(path, (str, os.PathLike)) and str(path) and "\0" not in str(path) and is_text(str(path)):
        return Path(path)
    raise user_error("checkpoint: the folder", shown(path), "a path", "Name a folder.", cls=ArgumentError)


class _Team:
    """The ranks that save or load together: an error on one of them is raised on all."""

    def __init__(self, world: World, timeout: float | None, what: str):
        self.world, self.what = world, what
        number = not isinstance(timeout, bool) and isinstance(timeout, (int, float))
        if timeout is not None and not (number and 0 < timeout <= LONGEST_TIMEOUT):
            raise user_error(f"{what}: timeout", shown(timeout), f"seconds above 0, at most {LONGEST_TIMEOUT:g}",
                             f"Leave it out for {_PATIENCE} times MESHFUSE_TIMEOUT.", caller_line(),
                             ArgumentError)  # fmt: skip
        self.lock = world.checkpoint_lock
        self.limit = min(world.limit * _PATIENCE, LONGEST_TIMEOUT) if timeout is None else timeout

    def all(self, doing: str, action: Callable[[], Any]) -> list[Any]:
        """The action's result from every rank. Raises the error of the first rank on which it fails."""
        own: Exception | None = None
        try:
            worked, value = True, action()
        except Exception as error:  # Any error: the other ranks wait for this one.
            own, worked, value = error, False, error_text(error)
        text = f"meshfuse.{self.what}, {doing}"
        mine = pickle.dumps((text, worked, value))
        replies = [pickle.loads(data) for data in self.world.rendezvous.exchange(mine, text, self.limit)]
        self.compare("what comes next", [text for text, _, _ in replies])
        failed = {rank: value for rank, (_, worked, value) in enumerate(replies) if not worked}
        if isinstance(own, MeshfuseError):
            raise own
        if failed:
            raise _failure(self.what, doing, failed) from own
        return [value for *_, value in replies]

    def each(self, doing: str, action: Callable[[], Any]) -> Any:
        """The action's result on this rank, once it has worked on every rank."""
        kept: list[Any] = []
        self.all(doing, lambda: kept.append(action()))
        return kept[0]

    def same(self, value: Callable[[], str], what: str, do: str) -> None:
        """Raises RankError where the ranks' values differ."""
        self.compare(what, self.all(f"comparing {what}", value), do)

    def compare(self, what: str, texts: list[str], do: str = SAME_PROGRAM) -> None:
        """Raises RankError where the texts of the ranks differ."""
        if len(set(texts)) > 1:
            raise disagreement(what, texts, self.world.all_ranks, do)


def _failure(what: str, doing: str, failed: Mapping[int, str]) -> MeshfuseError:
    found = "; ".join(f"on rank {rank} {text.rstrip('.')}" for rank, text in failed.items())
    needed = "room and permission to write on every rank" if what == "save" else "the checkpoint on every rank"
    kept = "The checkpoint of before, if there was one, is untouched." if what == "save" else ""
    return user_error(f"meshfuse.{what} failed while {doing}", found, needed, kept, cls=CheckpointError)


def _read_state(state: Mapping[str, Any]) -> tuple[dict[str, CheckpointEntry], dict[str, Any]]:
    if not isinstance(state, Mapping):
        raise user_error("save: what to save", shown(state), "a dict of values by name",
                         'Pass {"w": tensor, "step": 7}.', cls=ArgumentError)  # fmt: skip
    for name in state:
        if not isinstance(name, str) or not is_text(name):
            raise wrong(repr(name), type(name).__name__, "a text as the name, of whole letters")
    state = {name: as_python(value) for name, value in state.items()}
    values = {name: value for name, value in state.items() if is_plain(value)}
    given = {name: to_save(name, value) for name, value in state.items() if name not in values}
    # Memory is compared and stored, and the memory of torch's lazy views has other numbers.
    return {name: replace(entry, local=settled(entry.local)) for name, entry in given.items()}, values


def _of_all_ranks(
    team: _Team, entries: Mapping[str, CheckpointEntry], values: Mapping[str, Any]
) -> dict[str, CheckpointEntry]:  # fmt: skip
    """The entries of all ranks, once these are known to save the same, but for shards on meshes without a rank."""

    def key() -> tuple[str, Saved]:
        plain = [f"{name}: {value!r}" for name, value in sorted(values.items())]
        kinds = {name: f"{name}: {_kind(entry, team.world)}" for name, entry in sorted(entries.items())}
        whole = [kind for name, kind in kinds.items() if entries[name].sharding is None]
        return "\n".join([*plain, *kinds.values()]), saved_by(entries, [*plain, *whole])

    what = "what they save"
    replies = team.all(f"comparing {what}", key)
    texts = [text for text, _ in replies]
    if len(set(texts)) == 1:
        return dict(entries)
    found = owners([saved for _, saved in replies])
    if found is None:
        do = "Make every rank save the same, and what is another part on each with its sharding: (shard, sharding)."
        team.compare(what, texts, do)
        raise AssertionError("texts differ")
    return with_missing(entries, found, team.world.rank)


def _compared(team: _Team, entries: Mapping[str, CheckpointEntry]) -> dict[str, Shard]:
    """The shards to save. Raises ArgumentError for a shard of a wrong shape."""
    open_ = [name for name, entry in entries.items() if entry.shape is None]
    own = {name: _held(entries[name]) for name in open_}
    everyone = team.all("comparing shards", lambda: own) if open_ else []
    dtypes = {name: {e[name][0] for e in everyone if e[name] is not None} for name in open_}

    def shape_of(name: str, entry: CheckpointEntry) -> tuple[int, ...]:
        if entry.shape is not None:
            shape = entry.shape
        else:
            if len(dtypes[name]) > 1:
                raise wrong(name, f"shards of dtypes {', '.join(map(str, sorted(dtypes[name], key=str)))}", "one dtype")
            shape = global_shape(entry, {rank: e[name] and e[name][1] for rank, e in enumerate(everyone)})
        check_local(entry, shape, team.world.rank)
        return shape

    def shards() -> dict[str, Shard]:
        return _shards(team, entries, {name: shape_of(name, entry) for name, entry in entries.items()})

    return team.each("comparing shards", shards)


def _kind(entry: CheckpointEntry, world: World) -> str:
    """A text of all that must be equal on every rank.

    Of a whole tensor that includes its numbers: one rank stores them.

    A rank without a shard does not know the dtype.
    """
    if entry.sharding is not None or entry.local is None:
        return f"{'whole' if entry.sharding is None else entry.sharding} {entry.shape}"
    bits = f", a sum of bits of {sum_of_bits(entry.local)}" if world.size > 1 else ""
    return f"whole {entry.shape} {entry.local.dtype}{bits}"


def _held(entry: CheckpointEntry) -> tuple[torch.dtype, tuple[int, ...]] | None:
    return None if entry.local is None else (entry.local.dtype, tuple(entry.local.shape))


def _shards(
    team: _Team, entries: Mapping[str, CheckpointEntry], shapes: Mapping[str, tuple[int, ...]]
) -> dict[str, Shard]:
    rank = team.world.rank

    def shard(entry: CheckpointEntry, shape: tuple[int, ...]) -> Shard:
        sharding = entry.placed(shape)
        if entry.local is None:
            return Shard(torch.empty(0), shape, ())
        if 0 in shape:  # torch finds a tensor by its boxes alone: one box, which each rank that holds it has.
            return Shard(entry.local.new_empty(shape), shape, boxes(None, shape, rank))
        return Shard(entry.local, shape, boxes(sharding, shape, rank))

    return {name: shard(entry, shapes[name]) for name, entry in entries.items()}


def _dtypes(team: _Team, entries: Mapping[str, CheckpointEntry]) -> dict[str, str]:
    """Every tensor's dtype, from the first rank that holds a shard of it, which may be an empty one."""
    own = {name: str(e.local.dtype).removeprefix("torch.") for name, e in entries.items() if e.local is not None}
    everyone = team.all("comparing dtypes", lambda: own)
    return {name: dtype for held in reversed(everyone) for name, dtype in held.items()}


def _save(
    team: _Team, path: Path, shards: Mapping[str, Shard], dtypes: Mapping[str, str], values: Mapping[str, Any]
) -> None:
    rank = team.world.rank
    with contextlib.ExitStack() as held:

        def begin() -> str:
            if rank:
                return ""
            path.mkdir(parents=True, exist_ok=True)
            held.enter_context(files.locked(path))
            return files.new_name(path)

        data = team.all("making the folder", begin)[0]
        try:
            stored = write(path / data, shards, rank, team.all)

            def complete() -> None:
                tensors = {name: (dtypes[name], tuple(s.shape)) for name, s in shards.items()}
                if rank == 0:
                    files.check_shared(path / data, stored)
                    files.commit(path, files.Index(data, tensors, dict(values), stored))

            team.each("completing", complete)
        except BaseException:
            if rank == 0:
                files.abandon(path, data)
            raise


def _load(team: _Team, home: Path, wanted: Mapping[str, Any] | None, last: bool) -> dict[str, Any] | None:
    """The values that are wanted; None where the checkpoint was replaced meanwhile and this is not the last attempt."""
    index = team.each("reading the index", lambda: files.read_index(home))
    read_by = team.all("comparing the checkpoint that they load", lambda: index.data)
    if not last and len(set(read_by)) > 1:
        return None
    team.compare("the checkpoint that they load", read_by)
    names = {name: None for name in (*index.tensors, *index.values)} if wanted is None else dict(wanted)

    def wished() -> tuple[dict[str, CheckpointEntry], dict[str, Shard]]:
        entries = _targets(index, names, team.world.rank)
        return entries, _shards(team, entries, {name: index.tensors[name][1] for name in entries})

    entries, shards = team.each("comparing what is wanted", wished)
    folder = home / index.data

    def untouched(action: Callable[[], object]) -> bool:
        try:
            action()
        except OSError:
            if last or files.read_index(home).data == index.data:
                raise
            return False
        return True

    held = {name: s for name, s in shards.items() if s.numel and s.parts}
    if not all(team.all("checking files", lambda: untouched(lambda: _check_files(folder, index, team.world)))):
        return None
    if not all(team.all("reading", lambda: untouched(lambda: read_apart(folder, held)))):
        return None
    return {name: _loaded(names[name], entries[name]) if name in entries else index.values[name] for name in names}


def _targets(index: files.Index, names: Mapping[str, Any], rank: int) -> dict[str, CheckpointEntry]:
    missing = [name for name in names if name not in index.tensors and name not in index.values]
    if missing:
        there = sorted([*index.tensors, *index.values])
        raise user_error(
            f"the checkpoint lacks {', '.join(map(repr, missing))}", f"{', '.join(there) or 'nothing'}",
            "all names that are asked for", "Ask for what is there, or leave these out.", cls=ArgumentError,
        )  # fmt: skip
    for name in names:
        if name in index.values and not is_plain(as_python(names[name])):
            raise wrong(name, f"the plain value {json.dumps(index.values[name])}", "a tensor, as is asked for")
    tensors = {name: entry for name, entry in index.tensors.items() if name in names}
    entries = {
        name: to_load(name, names[name], getattr(torch, dtype), shape, rank) for name, (dtype, shape) in tensors.items()
    }
    for name, entry in entries.items():
        check_local(entry, index.tensors[name][1], rank)
    return entries


def _check_files(folder: Path, index: files.Index, world: World) -> None:
    for name in sorted(index.files)[world.rank :: world.size]:
        files.check_file(folder, name, index.files[name])


def _loaded(wanted: Any, entry: CheckpointEntry) -> Any:
    """The object that the user passed to be filled; else the tensor that was made."""
    return wanted if isinstance(wanted, torch.Tensor) else entry.local


def read_apart(folder: Path, shards: Mapping[str, Shard]) -> None:
    """As `read`. Raises ArgumentError for a name whose memory has another one's values in the end."""
    shared = dict.fromkeys(_in_one_memory(shards))
    made = {name: _like(shard) if name in shared else shard for name, shard in shards.items()}
    read(folder, made)
    for name in shared:
        shards[name].local.copy_(made[name].local)
    for name in shared:
        if not torch.equal(_bits(shards[name].local), _bits(made[name].local)):
            others = ", ".join(repr(other) for other in shared if other != name)
            raise wrong(
                name, f"memory that other values are loaded to, too, of {others}",
                "memory of its own, or the same values", "Pass another tensor, such as t.clone().",
            )  # fmt: skip


def _in_one_memory(shards: Mapping[str, Shard]) -> Iterator[str]:
    """The names whose tensors, from their first element to their last, lie where another one's do."""
    rows = sorted((*_ends(shard.local), name) for name, shard in shards.items() if shard.local.numel())
    reached, last = -1, ""
    for start, end, name in rows:
        if start < reached:
            yield from (last, name)
        if end > reached:
            reached, last = end, name


def _ends(tensor: torch.Tensor) -> tuple[int, int]:
    steps = sum((n - 1) * stride for n, stride in zip(tensor.shape, tensor.stride(), strict=True))
    return tensor.data_ptr(), tensor.data_ptr() + (steps + 1) * tensor.itemsize


def _like(shard: Shard) -> Shard:
    return Shard(torch.empty_like(shard.local), shard.shape, shard.parts)


def _bits(tensor: torch.Tensor) -> torch.Tensor:
    return tensor.contiguous().flatten().view(torch.uint8)
