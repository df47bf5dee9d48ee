"""What only some ranks save: shards on meshes of their own, as the stages of a pipeline have them."""

from __future__ import annotations

from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass

from ..definition.tensor_view import TensorView
from ..sharding.value import Sharding
from .entries import CheckpointEntry


@dataclass(frozen=True, slots=True)
class Saved:
    """What a rank saves.

    whole: a text of all that each rank must have, with plain values.
    shards: by name the sharding and the global shape of a tensor that lies on a mesh; None where they are not known.
    """

    whole: str
    shards: Mapping[str, tuple[Sharding | None, tuple[int, ...] | None]]


def saved_by(entries: Mapping[str, CheckpointEntry], whole: Iterable[str]) -> Saved:
    """What this rank saves; `whole` are texts of what is no shard."""
    shards = {name: _placed(entry) for name, entry in entries.items() if entry.sharding is not None}
    return Saved("\n".join(whole), shards)


def _placed(entry: CheckpointEntry) -> tuple[Sharding | None, tuple[int, ...] | None]:
    if isinstance(entry.sharding, TensorView):
        return (entry.placed(entry.shape) if entry.shape is not None else None), entry.shape
    return entry.sharding, entry.shape


def owners(everyone: Sequence[Saved]) -> dict[str, tuple[Sharding, tuple[int, ...]]] | None:
    """By name of all shards where it lies, and its shape; None where ranks do not save the same.

    A name may be missing on ranks outside its mesh. Where it is on several meshes that have no rank in common, as a
    tied weight of several stages, the first one's is saved.
    """
    if len({saved.whole for saved in everyone}) > 1:
        return None
    found: dict[str, tuple[Sharding, tuple[int, ...]]] = {}
    for name in sorted({name for saved in everyone for name in saved.shards}):
        held = {rank: saved.shards[name] for rank, saved in enumerate(everyone) if name in saved.shards}
        kinds = list(dict.fromkeys(held.values()))
        first, shape = kinds[0]
        meshes = [sharding.mesh.ranks for sharding, _ in kinds if sharding is not None]
        apart = len({rank for ranks in meshes for rank in ranks}) == sum(map(len, meshes))
        if first is None or shape is None or len(meshes) < len(kinds) or not apart or {s for _, s in kinds} != {shape}:
            return None
        if any(held.get(rank) != kind for kind in kinds if kind[0] is not None for rank in kind[0].mesh.ranks):
            return None
        found[name] = first, shape
    return found


def with_missing(
    entries: Mapping[str, CheckpointEntry], found: Mapping[str, tuple[Sharding, tuple[int, ...]]], rank: int
) -> dict[str, CheckpointEntry]:
    """The entries with those of all ranks, of which this one holds nothing unless it is in their mesh."""
    made = dict(entries)
    for name, (sharding, shape) in found.items():
        if name not in entries or rank not in sharding.mesh.ranks:
            made[name] = CheckpointEntry(name, None, sharding, shape)
    return made
