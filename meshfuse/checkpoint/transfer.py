"""Boxes to files and back, with the planners, readers and writers of torch.distributed.checkpoint.

torch's own `save` communicates over its default process group, which a script may not have. So its steps are taken here
one by one, with meshfuse's own exchange between them. Files and metadata are torch's, unchanged.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping
from pathlib import Path
from typing import Any

import torch.distributed.checkpoint as dcp
from torch.distributed.checkpoint.default_planner import DefaultLoadPlanner, DefaultSavePlanner
from torch.distributed.checkpoint.metadata import MetadataIndex
from torch.distributed.checkpoint.planner import LoadPlan
from torch.distributed.checkpoint.planner_helpers import create_read_items_for_chunk_list

from .folder import sum_of, sync_file
from .hyperslabs import Shard

_METADATA = ".metadata"
# (a description, an action) -> every rank's result of the action.
Together = Callable[[str, Callable[[], Any]], list[Any]]


class _SavePlanner(DefaultSavePlanner):
    """torch's planner, for shards that are no tensors."""

    def lookup_object(self, index: MetadataIndex) -> Any:
        return self.state_dict[index.fqn].__get_tensor_shard__(index)


class _LoadPlanner(DefaultLoadPlanner):
    """torch's planner, for shards that are no tensors."""

    def set_up_planner(self, state_dict: Any, metadata: Any = None, is_coordinator: bool = False) -> None:
        self.state_dict = self.original_state_dict = state_dict
        self.metadata, self.is_coordinator = metadata, is_coordinator

    def create_local_plan(self) -> LoadPlan:
        assert self.metadata is not None
        stored: Any = self.metadata.state_dict_metadata
        return LoadPlan(
            [
                item
                for name, shard in self.state_dict.items()
                for item in create_read_items_for_chunk_list(name, stored[name], shard.__create_chunk_list__())
            ]
        )

    def lookup_tensor(self, index: MetadataIndex) -> Any:
        return self.state_dict[index.fqn].__get_tensor_shard__(index)


# By the name of a file its (bytes, CRC-32).
Sums = dict[str, tuple[int, int]]


def write(folder: Path, shards: Mapping[str, Shard], rank: int, together: Together) -> Sums:
    """Write each box once, whichever ranks hold it; returns all files, which are on the disk then."""
    save = _Save(folder, rank)
    # All that may fail does so within `together`: the other ranks wait for this one.
    plans = together("planning", lambda: save.plan(shards))
    written = together("writing", lambda: save.write(plans))
    index = together("writing the index of files", lambda: save.write_index([results for results, _ in written]))
    return {name: entry for sums in (*(own for _, own in written), *index) for name, entry in sums.items()}


class _Save:
    """The steps of torch's on one rank; each takes what all ranks have made in the one before."""

    def __init__(self, folder: Path, rank: int):
        self.folder, self.rank = folder, rank
        self.planner = _SavePlanner(flatten_state_dict=False, flatten_sharded_tensors=False)
        self.writer: Any = None
        self.metadata: Any = None

    def plan(self, shards: Mapping[str, Shard]) -> Any:
        """What this rank has to write."""
        self.writer = dcp.FileSystemWriter(self.folder, sync_files=True)
        self.planner.set_up_planner(dict(shards), self.writer.storage_meta(), is_coordinator=self.rank == 0)
        self.writer.set_up_storage_writer(self.rank == 0)
        return self.writer.prepare_local_plan(self.planner.create_local_plan())

    def write(self, plans: list[Any]) -> tuple[Any, Sums]:
        """Write this rank's share: torch's results, and the files."""
        agreed, self.metadata = self.planner.create_global_plan(plans)
        mine = self.planner.finish_plan(self.writer.prepare_global_plan(agreed)[self.rank])
        results = self.writer.write_data(mine, self.planner).wait()
        names = sorted({result.storage_data.relative_path for result in results})
        return results, {name: sum_of(self.folder / name) for name in names}

    def write_index(self, results: list[Any]) -> Sums:
        """The file that says what is in the others, which rank 0 writes."""
        if self.rank:
            return {}
        self.writer.finish(self.metadata, results)
        sync_file(self.folder / _METADATA)
        return {_METADATA: sum_of(self.folder / _METADATA)}


def read(folder: Path, shards: Mapping[str, Shard]) -> None:
    """Fill the shards from the files; each rank does so by itself."""
    if not shards:
        return
    reader = dcp.FileSystemReader(folder)
    planner = _LoadPlanner(flatten_state_dict=False, flatten_sharded_tensors=False)
    metadata = reader.read_metadata()
    planner.set_up_planner(dict(shards), metadata, is_coordinator=True)
    reader.set_up_storage_reader(metadata, is_coordinator=True)
    (plan,) = planner.create_global_plan([reader.prepare_local_plan(planner.create_local_plan())])
    (plan,) = reader.prepare_global_plan([plan])
    reader.read_data(planner.finish_plan(plan), planner).wait()
