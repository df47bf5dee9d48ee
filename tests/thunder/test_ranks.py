"""Thunder over real ranks: tensor parallel by meshfuse alone, and with Thunder's own DDP and FSDP beside it."""

from __future__ import annotations

import sys
from pathlib import Path
from typing import Any

import pytest

sys.path.insert(0, str(Path(__file__).parent))

pytestmark = pytest.mark.ranks


def on_rank_mesh(data: int, tensor: int) -> Any:
    """torch's mesh of (data, tensor) ranks, on the store that the ranks have."""
    import os

    import torch.distributed as dist
    from torch.distributed.device_mesh import init_device_mesh

    import meshfuse as mf

    world = mf.World.current()
    if not dist.is_initialized():
        os.environ.setdefault("GLOO_SOCKET_IFNAME", "lo")
        store = dist.PrefixStore("tests.thunder", world.store)
        dist.init_process_group("gloo", store=store, rank=world.rank, world_size=world.size)
    return init_device_mesh("cpu", (data, tensor), mesh_dim_names=("dp", "tp"))


def transforms_of(kind: str, mesh: Any) -> list[Any]:
    import torch
    from thunder.distributed import FSDPType
    from thunder.distributed.transforms.ddp_v2 import DDPTransform
    from thunder.distributed.transforms.fsdp_v2 import FSDPTransform

    group = mesh["dp"].get_group()
    if kind == "ddp":
        return [DDPTransform(group, 25.0, None)]
    if kind in ("zero2", "zero3"):
        strategy = {"zero2": FSDPType.ZERO2, "zero3": FSDPType.ZERO3}[kind]
        return [FSDPTransform(torch.device("cpu"), sharding_strategy=strategy, process_group=group)]
    return []


def on_rank_train(name: str, data: int, tensor: int, kind: str) -> tuple[float, float, list[int]]:
    """(largest difference of losses, of weights, numbers of regions forward and backward) of three steps."""
    import torch
    from thunder_models import ADAM, SGD, Pair

    import thunder

    mesh = on_rank_mesh(data, tensor)
    pair = Pair.make(name, mesh["tp"], transforms_of(kind, mesh))
    losses = []
    for mine, whole in pair.steps(ADAM if name == "gpt" else SGD, mesh.get_local_rank("dp"), data):
        torch.distributed.all_reduce(mine, group=mesh["dp"].get_group())
        losses.append(float((mine / data - whole).abs()))
    traces = (thunder.last_traces(pair.jitted)[-1], thunder.last_backward_traces(pair.jitted)[-1])
    regions = [sum(b.sym.name.startswith("meshfuse") for b in trace.bound_symbols) for trace in traces]
    return max(losses), pair.differ_by(), regions


@pytest.mark.parametrize("name", ["mlp", "block", "llama", "gpt", "tied"])
def test_two_tensor_ranks(ranks2: Any, name: str) -> None:
    for losses, weights, regions in ranks2.run(on_rank_train, name, 1, 2, "none"):
        assert losses < 1e-5 and weights < 1e-5
        assert regions == [1, 1]


@pytest.mark.parametrize("kind", ["ddp", "zero2", "zero3"])
@pytest.mark.parametrize("name", ["mlp", "llama", "gpt", "tied"])
def test_two_by_two_ranks(ranks4: Any, name: str, kind: str) -> None:
    for losses, weights, regions in ranks4.run(on_rank_train, name, 2, 2, kind):
        assert losses < 1e-5 and weights < 1e-5
        assert regions[0] == 1
