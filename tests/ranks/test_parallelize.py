"""Modules over real ranks: DTensor parameters, torch's optimisers, clipping, state dicts and checkpoints."""

from __future__ import annotations

import sys
from pathlib import Path
from typing import Any

import pytest
import torch

import meshfuse as mf

sys.path.insert(0, str(Path(__file__).parent.parent))
from frontend_models import (
    GPT_PLAN,
    VOCABULARY,
    Gpt,
    difference,
    gradients_differ_by,
    pair,
    parameters_differ_by,
    train,
    whole,
    worse_than_eager_by,
)

pytestmark = pytest.mark.ranks

INPUTS = {"ids": ["dp", None], "targets": ["dp", None]}


def ids(seed: int = 1) -> torch.Tensor:
    return torch.randint(VOCABULARY, (4, 8), generator=torch.Generator().manual_seed(seed))


def mine(tensor: torch.Tensor, ranks: int) -> torch.Tensor:
    """This rank's rows on a mesh of (ranks, 4 / ranks)."""
    return tensor.chunk(ranks)[mf.World.current().rank * ranks // 4]


def fast() -> None:
    import os

    os.environ["MESHFUSE_SEARCH"] = "fast"


def on_rank_training(folder: str) -> dict[str, Any]:
    """Train over 2 by 2 ranks, save in three ways, and load on a mesh of one axis."""
    import torch.distributed.checkpoint as dcp
    from torch.distributed.checkpoint.state_dict import StateDictOptions, get_model_state_dict, set_model_state_dict

    fast()
    found: dict[str, Any] = {}
    model, eager = pair(Gpt, 1)
    mesh = mf.DeviceMesh((2, 2), ("dp", "tp"))
    mf.parallelize(model, mesh, GPT_PLAN, inputs=INPUTS, fsdp="dp")
    weights = dict(model.named_parameters())
    found["placements"] = {
        n: str(weights[n].placements) for n in ("layers.0.qkv.weight", "norm.weight", "layers.0.up.bias")
    }
    local = train(model, {"ids": mine(ids(), 2), "targets": mine(ids(2), 2)})
    whole = train(eager, {"ids": ids(), "targets": ids(2)})
    found["steps"] = max(abs(a - b) / b for a, b in zip(local, whole, strict=True))
    exact = pair(Gpt, 1)[1].double()
    train(exact, {"ids": ids(), "targets": ids(2)})
    found["parameters"] = worse_than_eager_by(model, eager, exact)
    model(mine(ids(), 2), mine(ids(2), 2))[0].backward()
    found["grad"] = {type(p.grad).__name__ for p in model.parameters() if p.grad is not None}
    found["like"] = all(p.grad is None or p.grad.placements == p.placements for p in model.parameters())
    found["idle"] = model.idle.grad is None
    full = get_model_state_dict(model, options=StateDictOptions(full_state_dict=True))
    found["full"] = sorted(full) == sorted(eager.state_dict()) if mf.World.current().rank == 0 else True
    # torch's checkpoints write no packed weights.
    unpacked, _ = pair(Gpt, 1)
    mf.parallelize(unpacked, mesh, {k: v for k, v in GPT_PLAN.items() if "qkv" not in k}, fsdp="dp")
    dcp.save({"model": get_model_state_dict(unpacked)}, checkpoint_id=f"{folder}/dcp")
    mf.save(f"{folder}/own", model.state_dict())
    with torch.device("meta"):
        other = Gpt(1)
    mf.parallelize(other, mf.DeviceMesh((4,), ("tp",)), {**GPT_PLAN, "layers.*.qkv": "rowwise"})
    other.init_weights(3)
    state = {"model": get_model_state_dict(other)}
    dcp.load(state, checkpoint_id=f"{folder}/dcp")
    set_model_state_dict(other, state["model"])
    found["dcp"] = parameters_differ_by(other, unpacked)
    other.init_weights(4)
    mf.load(f"{folder}/own", other.state_dict())
    found["own"] = parameters_differ_by(other, model)
    with torch.no_grad():
        found["logits"] = difference(other(ids()), eager(ids()))
    return found


def test_training_saving_and_loading(ranks4: Any, tmp_path: Path) -> None:
    for found in ranks4.run(on_rank_training, str(tmp_path), timeout=140):
        assert found["steps"] < 1e-5 and found["parameters"] < 1e-5
        assert found["grad"] == {"DTensor"} and found["like"] and found["idle"] and found["full"]
        assert found["dcp"] == 0 and found["own"] == 0 and found["logits"] < 1e-5
        assert "_StridedShard" in found["placements"]["layers.0.qkv.weight"]


def on_rank_results() -> dict[str, Any]:
    from torch.distributed.tensor import DTensor, Replicate, Shard

    fast()
    found: dict[str, Any] = {}
    model, eager = pair(Gpt, 1)
    mf.parallelize(model, mf.DeviceMesh((2, 2), ("dp", "tp")), GPT_PLAN, inputs=INPUTS)
    loss, logits = model(mine(ids(), 2), mine(ids(2), 2))
    found["types"] = type(loss).__name__, type(logits).__name__
    wanted, scores = eager(ids(), ids(2))
    found["logits"] = difference(logits, scores)
    (loss + logits.square().mean().full_tensor()).backward()  # a gradient that no plan expects
    (wanted + scores.square().mean()).backward()
    found["gradients"] = gradients_differ_by(model, eager)
    mesh = model.norm.weight.device_mesh
    given = DTensor.from_local(mine(ids(), 2), mesh, [Shard(0), Replicate()])
    with torch.no_grad():
        plain, placed = model(mine(ids(), 2)), model(given)
        found["plain"] = type(plain).__name__, difference(plain, mine(eager(ids()), 2)), difference(placed, plain)
    torch.manual_seed(mf.World.current().rank)
    try:
        mf.parallelize(Gpt(1), mf.DeviceMesh((4,), ("tp",)), GPT_PLAN)
    except mf.RankError as error:
        found["error"] = str(error)
    return found


def test_results_and_what_ranks_must_agree_on(ranks4: Any) -> None:
    for found in ranks4.run(on_rank_results, timeout=140):
        assert found["types"] == ("Tensor", "DTensor")
        assert found["logits"] < 1e-5 and found["gradients"] < 1e-5
        assert found["plain"][0] == "Tensor" and max(found["plain"][1:]) < 1e-5
        assert "ranks disagree on the parameters of the module" in found["error"]
        assert "torch.manual_seed" in found["error"]


def on_rank_gradients() -> dict[str, Any]:
    """All ways in which torch's autograd hands out gradients, beside those of the eager model."""
    fast()
    found: dict[str, Any] = {}
    model, eager = pair(Gpt, 1)
    mf.parallelize(model, mf.DeviceMesh((1, 2), ("dp", "tp")), GPT_PLAN, inputs=INPUTS)

    def both(run: Any) -> tuple[Any, Any]:
        for each in (model, eager):
            each.zero_grad()
        return run(model), run(eager)

    def loss(each: Any) -> torch.Tensor:
        return each(ids(), ids(2))[0]

    def differ(pairs: Any) -> float:
        return max(difference(a, b) for a, b in zip(*pairs, strict=True))

    found["grad"] = differ(
        both(lambda each: torch.autograd.grad(loss(each), [each.norm.weight, each.layers[0].up.bias]))
    )
    found["untouched"] = all(p.grad is None for p in model.parameters())
    both(lambda each: loss(each).backward(inputs=[each.norm.weight]))
    found["inputs"] = gradients_differ_by(model, eager)
    both(lambda each: [loss(each).backward() for _ in range(2)])
    found["added"] = gradients_differ_by(model, eager)
    both(lambda each: (loss(each) + 3 * loss(each) + whole(each.norm.weight).square().sum()).backward())
    found["beside"] = gradients_differ_by(model, eager)

    def hooked(each: Any) -> list[Any]:
        seen, weight, bias = [], each.norm.weight, each.layers[0].up.bias
        made = [
            weight.register_hook(lambda grad: (seen.append(grad.detach()), grad * 2)[1]),
            bias.register_post_accumulate_grad_hook(lambda p: (seen.append(p.grad), setattr(p, "grad", None))[0]),
        ]
        loss(each).backward()
        for hook in made:
            hook.remove()
        return sorted(seen, key=lambda grad: grad.shape[0])

    pairs = both(hooked)
    found["hooked"] = differ(pairs), len(pairs[0])
    found["after hooks"] = gradients_differ_by(model, eager)
    return found


def test_gradients_go_wherever_torch_is_asked_to_bring_them(ranks2: Any) -> None:
    for found in ranks2.run(on_rank_gradients, timeout=140):
        assert found["untouched"] and found["hooked"][1] == 2
        for what in ("grad", "inputs", "added", "beside", "after hooks"):
            assert found[what] < 1e-5, what
        assert found["hooked"][0] < 1e-5
