"""What is checked on a GPU: single ops, a GPT block on simulated and on real ranks, and the GPT example."""

from __future__ import annotations

import functools
import json
import re
import subprocess
import sys
from collections.abc import Callable, Sequence
from dataclasses import replace
from pathlib import Path
from typing import Any

import torch
from gpu_works import BLOCKS, Block
from pieces import Lines, Piece, described

import meshfuse as mf
from meshfuse.dtypes import DataType
from meshfuse.ops import OPS
from meshfuse.ops.binding import make_call
from meshfuse.ops.opdef import Call, Sample
from meshfuse.testing.calls import define_call, operands_of, retyped, whole

HERE = Path(__file__).parent
EXAMPLE = HERE.parents[1] / "examples" / "gpt"


def ops(device: str = "cuda") -> list[Piece]:
    """Every sample of every op in a definition of its own, the first one in BFloat16 too, against torch on the CPU."""
    places = [(name, place) for name, op in OPS.items() for place in range(len(op.samples()))]
    chosen = [*((name, 0, True) for name in OPS if OPS[name].samples()), *((*place, False) for place in places)]
    labels = [f"{name} {place}{' BFloat16' if half else ''}" for name, place, half in chosen]
    return [(label, functools.partial(_op, *one, device)) for label, one in zip(labels, chosen, strict=True)]


def _op(name: str, place: int, half: bool, device: str) -> Lines:
    op, sample = OPS[name], OPS[name].samples()[place]
    found: dict[str, Any] = {"op": name, "sample": place, "dtype": "BFloat16" if half else ""}
    if isinstance(op.nvfuser, str) or dict(sample.kwargs).get("dropout_p"):
        return [found | {"state": "random or torch's own"}]
    if half:
        given, sample = sample, retyped(sample, DataType.BFloat16)
        if sample == given:
            return []
    try:
        call = make_call(op, sample)
    except mf.DefinitionError:
        return []  # Not for this type.
    return [found | _compared(call, sample, device)]


def _compared(call: Call, sample: Sample, device: str) -> dict[str, Any]:
    try:
        operands = operands_of(call, sample)
        expected = whole(call, operands)
    except (NotImplementedError, RuntimeError) as error:
        return {"state": "no reference on a CPU", "why": described(error)}
    with mf.FusionDefinition() as fd:
        for output in define_call(fd, call.op, sample)[1]:
            fd.add_output(output)
    outputs = fd.simulate([t.to(device) for t in operands])
    halves = any(t.dtype.is_reduced_float for t in (*call.types, *call.results))
    try:
        for a, b in zip(outputs, expected, strict=True):
            limit = 2e-2 if halves else 2e-4
            if a.dtype is not torch.uint64:  # attention's random state
                torch.testing.assert_close(a.cpu(), b, rtol=limit, atol=limit, equal_nan=True)
    except AssertionError as error:
        return {"state": "wrong", "why": described(error), "by": reasons(fd)}
    return {"state": "right", "by": reasons(fd)}


def reasons(fd: mf.FusionDefinition) -> list[str]:
    """What ran the segments of a simulated definition, and why."""
    (made,) = fd._execution.simulated.values()
    return sorted({f"{c.backend}: {c.why}" for ss in made.simulation.segments for c in ss.chosen.values()})


# a GPT block ------------------------------------------------------------------------------------------------------


def block(device: str = "cuda") -> list[Piece]:
    """Its forward and backward on simulated ranks of one GPU, with attention as one op and as many."""
    forms = [("", Block()), (", composed", Block(fused=False))]
    works = [(f"{n} simulated{form}", block, n) for form, block in forms for n in (1, 2, 4)]
    large = ("1 simulated, large and composed", replace(BLOCKS["large"], fused=False), 1)
    return [
        (label, lambda block=block, n=n: [check_simulated(block, n, device)]) for label, block, n in [large, *works]
    ]


def check_simulated(block: Block, ranks: int, device: str) -> dict[str, Any]:
    fd = block.definition(ranks)
    found = check_block(block, ranks, device, fd.simulate)
    how = f"simulated{'' if block.fused else ', composed'}, of {block.batch} x {block.length} x {block.width}"
    return {"ranks": ranks, "how": how, **found, "by": reasons(fd)}


def check_block(block: Block, ranks: int, device: str, call: Callable[[Sequence[Any]], Any]) -> dict[str, Any]:
    """Results against float64, beside torch's own error in bfloat16; `call` gives the global ones."""
    inputs = block.inputs(device)
    expected = block.by_hand(*(t.double() for t in inputs))
    errors = {
        "meshfuse": [error_of(a, b) for a, b in zip(call(inputs), expected, strict=True)],
        "torch": [error_of(a, b) for a, b in zip(block.by_hand(*inputs), expected, strict=True)],
    }
    right = all(a <= 2 * b + 1e-2 for a, b in zip(errors["meshfuse"], errors["torch"], strict=True))
    return {"state": "right" if right else "wrong", "errors": errors}


def error_of(found: torch.Tensor, expected: torch.Tensor) -> float:
    """The largest difference relative to the largest value; not a number where something is not one."""
    return float((found.double() - expected).abs().max() / expected.abs().max())


def ranks(device: str = "cuda", sizes: tuple[int, ...] = ()) -> list[Piece]:
    """The same block on real ranks that share the GPU, over gloo by way of the host."""
    return [(f"{n} real", lambda n=n: [_on_real_ranks(n, device, sizes)]) for n in (2, 4)]


def _on_real_ranks(count: int, device: str, sizes: tuple[int, ...]) -> dict[str, Any]:
    job = [sys.executable, "-m", "meshfuse", "run", "--ranks", str(count)]
    command = [*job, str(HERE / "rank_block.py"), device, *map(str, sizes)]
    done = subprocess.run(command, capture_output=True, text=True)
    made = re.search(r"^found (\{.*\})$", done.stdout, re.MULTILINE)
    if done.returncode or made is None:
        raise RuntimeError(f"status {done.returncode}: {(done.stderr or done.stdout).strip()[-300:]}")
    return {"ranks": count, "how": "real", **json.loads(made[1])}


# the example ------------------------------------------------------------------------------------------------------


def example(device: str = "cuda") -> list[Piece]:
    """Two steps of the GPT example's reading, against the unsharded torch model on the CPU."""
    return [(mesh, lambda mesh=mesh: [{"mesh": mesh, **_read(mesh, device)}]) for mesh in ("tp=1", "dp=2,tp=2", "sp=2")]


def _read(mesh: str, device: str) -> dict[str, Any]:
    if str(EXAMPLE) not in sys.path:
        sys.path.append(str(EXAMPLE))
    from data import eval_windows  # pyright: ignore[reportMissingImports]
    from fused import annotate, define  # pyright: ignore[reportMissingImports]
    from model import GPT, load_params, loss  # pyright: ignore[reportMissingImports]

    axes = dict(part.split("=") for part in mesh.split(","))
    gpt, params = define(), load_params(EXAMPLE / "weights.safetensors")
    annotate(gpt, mf.DeviceMesh(tuple(map(int, axes.values())), tuple(axes)))
    weights = [params[name].to(device) for name in gpt.weights]
    tokens, targets = eval_windows(GPT.block)
    worst = 0.0
    for part in (slice(0, 8), slice(8, 16)):
        ours = gpt.fd.simulate([tokens[part].to(device), targets[part].to(device), *weights])[0].item()
        with torch.no_grad():
            theirs = loss(params, tokens[part], targets[part]).item()
        worst = max(worst, abs(ours - theirs) / abs(theirs))
    return {"state": "right" if worst < 1e-4 else "wrong", "error": worst, "by": reasons(gpt.fd)}
