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
    import torch
    import torch.distributed as dist
    from torch.distributed.device_mesh import init_device_mesh

    import meshfuse as mf
    from meshfuse.frontends.placing import join_default_group

    if not dist.is_initialized():  # Left after each test.
        join_default_group(mf.World.current(), torch.device("cpu"))
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


@pytest.mark.parametrize("name", ["block", "gpt"])
def test_two_tensor_ranks(ranks2: Any, name: str) -> None:
    for losses, weights, regions in ranks2.run(on_rank_train, name, 1, 2, "none"):
        assert losses < 1e-5 and weights < 1e-5
        assert regions == [1, 1]


# Of each kind one model at least; a weight of two names with both ways to keep it. "gpt" has a layer of "llama".
BOTH = [("mlp", "ddp"), ("tied", "ddp"), ("tied", "zero2"), ("gpt", "zero3")]


@pytest.mark.parametrize(("name", "kind"), BOTH)
def test_two_by_two_ranks(ranks4: Any, name: str, kind: str) -> None:
    for losses, weights, regions in ranks4.run(on_rank_train, name, 2, 2, kind):
        assert losses < 1e-5 and weights < 1e-5
        assert regions[0] == 1


def on_rank_micro_batches(kind: str) -> float:
    """The largest difference of gradients that two micro-batches add up to, the first without synchronisation."""
    from thunder_models import Pair

    mesh = on_rank_mesh(2, 2)
    pair = Pair.make("mlp", mesh["tp"], transforms_of(kind, mesh))
    part = mesh.get_local_rank("dp")
    batches = [pair.case.arguments(seed)[0] for seed in (1, 2)]
    with pair.jitted.no_sync():
        pair.case.loss(pair.jitted(batches[0].chunk(2)[part])).backward()
    pair.case.loss(pair.jitted(batches[1].chunk(2)[part])).backward()
    for batch in batches:
        pair.case.loss(pair.eager(batch)).backward()
    grads = {name: p.grad for name, p in pair.eager.named_parameters()}
    layouts = pair.jitted._lc_transforms[0].layouts
    return max(
        float((p.grad - shard_of(grads[n], layouts.get(n))).abs().max()) for n, p in pair.jitted.named_parameters()
    )


def shard_of(whole: Any, layout: Any) -> Any:
    """This rank's shard of a weight that is cut."""
    import meshfuse as mf
    from meshfuse.sharding.data import shard

    return whole if layout is None else shard(whole, layout.sharding, mf.World.current().rank)


def test_no_sync_adds_gradients_up(ranks4: Any) -> None:
    assert max(ranks4.run(on_rank_micro_batches, "ddp")) < 1e-5


def on_rank_errors() -> list[str]:
    """What a mesh of other ranks and weights that differ are told."""
    import copy

    import torch
    from thunder_models import MLP_PLAN, Mlp

    import meshfuse as mf
    import thunder

    mesh, found = on_rank_mesh(2, 2), []
    rank = mf.World.current().rank

    def told(call: Any) -> None:
        try:
            call()
        except mf.MeshfuseError as error:
            found.append(str(error))

    other = mf.DeviceMesh((2,), ("tp",), ranks=[(rank + 2) % 4, (rank + 3) % 4])
    told(lambda: mf.thunder.MeshSplit(other, MLP_PLAN))
    torch.manual_seed(rank)
    model, executors = Mlp(), [mf.thunder.executor()]
    split = mf.thunder.MeshSplit(mesh["tp"], MLP_PLAN)
    told(lambda: thunder.jit(copy.deepcopy(model), executors=executors, transforms=[split]))
    return found


def test_errors_of_ranks(ranks4: Any) -> None:
    for found in ranks4.run(on_rank_errors):
        first, second = found
        assert first.startswith("MeshSplit: a mesh that this rank is not on: found rank ")
        assert 'needed a mesh with this rank. Pass the sub-mesh of this rank: mesh["tp"] of init_device_mesh.' in first
        assert second.startswith("ranks disagree on the parameters of the module")
        assert "Call torch.manual_seed with the same number on these ranks before the model is made" in second
