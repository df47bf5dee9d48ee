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


def write(folder: Path, shards: Mapping[str, Shard], rank: int, together: Together) -> dict[str, tuple[int, int]]:
    """Write each box once, whichever ranks hold it.

    Returns all files, which are on the disk then, with (bytes, CRC-32).
    """
    planner = _SavePlanner(flatten_state_dict=False, flatten_sharded_tensors=False)
    writer: Any = None
    metadata: Any = None

    # All that may fail does so within `together`: the other ranks wait for this one.
    def plan() -> Any:
        nonlocal writer
        writer = dcp.FileSystemWriter(folder, sync_files=True)
        planner.set_up_planner(dict(shards), writer.storage_meta(), is_coordinator=rank == 0)
        writer.set_up_storage_writer(rank == 0)
        return writer.prepare_local_plan(planner.create_local_plan())

    planned = together("planning", plan)

    def store() -> Any:
        nonlocal metadata
        plans, metadata = planner.create_global_plan(planned)
        mine = planner.finish_plan(writer.prepare_global_plan(plans)[rank])
        found = writer.write_data(mine, planner).wait()
        names = sorted({result.storage_data.relative_path for result in found})
        return found, {name: sum_of(folder / name) for name in names}

    def finish() -> dict[str, tuple[int, int]]:
        if rank:
            return {}
        writer.finish(metadata, [found for found, _ in done])
        sync_file(folder / _METADATA)
        return {_METADATA: sum_of(folder / _METADATA)}

    done = together("writing", store)
    last = together("writing the index of files", finish)
    return {name: entry for own in (*(own for _, own in done), *last) for name, entry in own.items()}


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
