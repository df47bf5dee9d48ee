"""Thunder's own collectives, taken into regions: training as eager does, by one region forward and one backward."""

from __future__ import annotations

import sys
from pathlib import Path
from typing import Any

import pytest

sys.path.insert(0, str(Path(__file__).parent))

pytestmark = pytest.mark.ranks


def on_rank_train(name: str, tensor: int, kind: str, taken: bool = True) -> tuple[float, float, list[list[str]]]:
    """(largest difference of losses, of weights, what runs and communicates forward and backward) of three steps."""
    import torch
    from test_ranks import on_rank_mesh, transforms_of
    from thunder_models import SGD, Pair

    import thunder

    mesh = on_rank_mesh(2, tensor)
    pair = Pair.make(name, mesh["tp"] if tensor > 1 else None, transforms_of(kind, mesh), mesh if taken else None)
    losses = []
    for mine, whole in pair.steps(SGD, mesh.get_local_rank("dp"), 2):
        torch.distributed.all_reduce(mine, group=mesh["dp"].get_group())
        losses.append(float((mine / 2 - whole).abs()))
    traces = (thunder.last_traces(pair.jitted)[-1], thunder.last_backward_traces(pair.jitted)[-1])
    words = ("meshfuse", "torch_all", "torch_reduce", "torch_wait")
    found = [[b.sym.name for b in trace.bound_symbols if b.sym.name.startswith(words)] for trace in traces]
    return max(losses), pair.differ_by(), found


ONE = [["meshfuse0"], ["meshfuse1"]]


@pytest.mark.parametrize(("name", "kind"), [("block", "ddp"), ("llama", "zero2"), ("mlp", "zero3")])
def test_data_parallel_alone_is_one_region(ranks2: Any, name: str, kind: str) -> None:
    for losses, weights, found in ranks2.run(on_rank_train, name, 1, kind):
        assert losses < 1e-5 and weights < 1e-5
        assert found == ONE


@pytest.mark.parametrize(("name", "kind"), [("mlp", "ddp"), ("block", "zero2"), ("mlp", "zero3")])
def test_with_tensor_parallel_ranks_as_well(ranks4: Any, name: str, kind: str) -> None:
    for losses, weights, found in ranks4.run(on_rank_train, name, 2, kind):
        assert losses < 1e-5 and weights < 1e-5
        assert found == ONE


def test_without_a_mesh_they_stay_thunders(ranks2: Any) -> None:
    for losses, weights, (forward, backward) in ranks2.run(on_rank_train, "mlp", 1, "zero2", False):
        assert losses < 1e-5 and weights < 1e-5
        gathers, waits = forward.count("torch_all_gather_prim_impl"), forward.count("torch_wait_prim_impl")
        assert (gathers, waits, forward.count("meshfuse0")) == (4, 4, 1)
        assert backward.count("torch_reduce_scatter_prim_impl") == 4
