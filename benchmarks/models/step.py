"""One rank of a pair: our step and torch's, in turns. `step.py CASE RIVAL FILE` under `meshfuse run`."""

from __future__ import annotations

import json
import sys
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist
from torch.distributed.device_mesh import DeviceMesh, init_device_mesh
from torch.distributed.fsdp import fully_shard
from torch.distributed.tensor import Replicate, Shard
from torch.distributed.tensor.parallel import (
    ColwiseParallel,
    PrepareModuleInput,
    RowwiseParallel,
    SequenceParallel,
    parallelize_module,
)
from transformers import LlamaConfig, LlamaForCausalLM

import meshfuse as mf

ROWS, LENGTH, ROUNDS = 4, 256, 12
CONFIG = LlamaConfig(
    vocab_size=1024, hidden_size=256, intermediate_size=688, num_hidden_layers=4, num_attention_heads=8,
    num_key_value_heads=8, max_position_embeddings=LENGTH, use_cache=False,
)  # fmt: skip
SHAPES = {"tp": (1, 2), "sp": (1, 2), "fsdp": (2, 1), "fsdp_tp": (2, 2)}


def llama() -> Any:
    torch.manual_seed(0)
    return LlamaForCausalLM(CONFIG)


def ours(case: str) -> Any:
    """The model over meshfuse's programs."""
    mesh = mf.DeviceMesh(SHAPES[case], ("dp", "tp"))
    plan: Any = "hf" if SHAPES[case][1] > 1 else None
    model = llama()
    if case == "sp":
        plan = {**model.tp_plan, **{f"layers.*.{n}": SequenceParallel() for n in
                                    ("input_layernorm", "post_attention_layernorm")}}  # fmt: skip
    specs = {"input_ids": ["dp", None], "labels": ["dp", None]}
    return mf.parallelize(model, mesh, plan, inputs=specs, fsdp="dp" if "fsdp" in case else None)


def theirs(case: str, rival: str) -> Any:
    """The model as torch parallelizes it."""
    model, mesh = llama(), init_device_mesh("cpu", SHAPES[case], mesh_dim_names=("dp", "tp"))
    if SHAPES[case][1] > 1:
        _tensor_parallel(model, mesh["tp"], case == "sp")
    if "fsdp" in case:
        for layer in model.model.layers:
            fully_shard(layer, mesh=mesh["dp"])
        fully_shard(model, mesh=mesh["dp"])
    return torch.compile(model) if rival == "compiled" else model


def _tensor_parallel(model: Any, mesh: DeviceMesh, sequence: bool) -> None:
    columns = {f"self_attn.{n}": ColwiseParallel() for n in ("q_proj", "k_proj", "v_proj")}
    columns |= {f"mlp.{n}": ColwiseParallel() for n in ("gate_proj", "up_proj")}
    end = Shard(1) if sequence else Replicate()
    rows = {n: RowwiseParallel(output_layouts=end) for n in ("self_attn.o_proj", "mlp.down_proj")}
    plan: dict[str, Any] = {**columns, **rows}
    if sequence:
        plan |= {"input_layernorm": SequenceParallel(), "post_attention_layernorm": SequenceParallel()}
        gathered: dict[str, Any] = dict(input_layouts=(Shard(1),), desired_input_layouts=(Replicate(),))
        plan["mlp"] = PrepareModuleInput(**gathered)
        plan["self_attn"] = PrepareModuleInput(
            input_kwarg_layouts={"hidden_states": Shard(1)}, desired_input_kwarg_layouts={"hidden_states": Replicate()}
        )
    for layer in model.model.layers:
        parallelize_module(layer, mesh, plan)
    first = RowwiseParallel(input_layouts=Replicate(), output_layouts=end)
    head: dict[str, Any] = {"model.embed_tokens": first, "lm_head": ColwiseParallel(output_layouts=Replicate())}
    if sequence:
        head |= {
            "model.norm": SequenceParallel(),
            "lm_head": ColwiseParallel(input_layouts=Shard(1), output_layouts=Replicate()),
        }
    parallelize_module(model, mesh, head)


def loss_of(model: Any, rows: torch.Tensor) -> Any:
    """The loss. The positions are said: where torch's model has a part of the sequence it would count that alone."""
    return model(input_ids=rows, labels=rows, position_ids=torch.arange(LENGTH)[None]).loss


def stepping(model: Any, rows: torch.Tensor) -> Callable[[], float]:
    optimizer = torch.optim.AdamW(
        model.parameters(), lr=1e-3, foreach=False
    )  # not timed; plain norms beside DTensors cannot be

    def step() -> float:
        dist.barrier()
        start = time.perf_counter()
        loss_of(model, rows).backward()
        taken = time.perf_counter() - start
        optimizer.step()
        optimizer.zero_grad()
        return 1000 * taken

    return step


def main() -> None:
    case, rival, out = sys.argv[1:]
    torch.set_num_threads(1)
    world, ids = mf.World.current(), torch.randint(1024, (ROWS, LENGTH), generator=torch.Generator().manual_seed(1))
    shape = SHAPES[case]
    rows = ids.chunk(shape[0])[world.rank // shape[1]]
    model = ours(case)
    mine = stepping(model, rows)
    start = time.perf_counter()
    mine()
    first = time.perf_counter() - start
    other = stepping(theirs(case, rival), rows)
    other()
    times = [(mine(), other()) for _ in range(ROUNDS)]
    host = host_time(model, rows)
    if world.rank == 0:
        found = {"ours": min(a for a, _ in times), "theirs": min(b for _, b in times), "first": first, "host": host}
        Path(out).write_text(json.dumps(found))


def host_time(model: Any, rows: torch.Tensor) -> float:
    """Milliseconds of a step outside of its two programs: the least of some steps."""
    from meshfuse.frontends.autograd import Runner

    inside, run = [0.0], Runner._run

    def timed(*args: Any) -> Any:
        start = time.perf_counter()
        try:
            return run(*args)
        finally:
            inside[0] += time.perf_counter() - start

    Runner._run = timed  # pyright: ignore[reportAttributeAccessIssue]
    found = []
    for _ in range(ROUNDS):
        model.zero_grad()  # Else torch adds up gradients in the backward.
        dist.barrier()
        inside[0], start = 0.0, time.perf_counter()
        loss_of(model, rows).backward()
        found.append(time.perf_counter() - start - inside[0])
    Runner._run = run
    return 1000 * min(found)


if __name__ == "__main__":
    main()
