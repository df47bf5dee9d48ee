"""Compile time per op: an unrolled transformer, forward and backward, on dp=2, tp=4, to the host program of one rank.

Writes results.json: [{ops, us_per_op, define_us_per_op, peak_mb}] and prints the curve. CPU time of one core from the
definition to the host program, and of writing the definition; medians of processes that compile nothing before it.
"""

from __future__ import annotations

import argparse
import gc
import json
import os
import statistics
import subprocess
import sys
import time
import tracemalloc
from pathlib import Path

import meshfuse as mf

HERE = Path(__file__).parent
BATCH, LENGTH, WIDTH, HIDDEN, HEADS = 8, 512, 1024, 4096, 16
# Ops of the backward for each op of the forward, about.
BACKWARD = 1.65


def layer_norm(fd: mf.FusionDefinition, x: mf.TensorView) -> mf.TensorView:
    mean = fd.ops.sum(x, [-1], keepdim=True) * (1 / WIDTH)
    centred = x - mean
    variance = fd.ops.sum(centred * centred, [-1], keepdim=True) * (1 / WIDTH)
    return centred * fd.ops.rsqrt(variance + 1e-5)


def layer(
    fd: mf.FusionDefinition, mesh: mf.DeviceMesh, x: mf.TensorView, weights: list[mf.TensorView]
) -> mf.TensorView:
    """Pre-LN attention and MLP with residuals, about 40 ops."""

    def weight(shape: list[int], spec: list[str | None]) -> mf.TensorView:
        made = fd.define_tensor(shape)
        fd.mesh_split(made, mesh, spec)
        weights.append(made)
        return made

    def heads(rows: mf.TensorView) -> mf.TensorView:
        projected = fd.ops.linear(rows, weight([WIDTH, WIDTH], ["tp", None]))
        return fd.ops.permute(fd.ops.reshape(projected, [BATCH, LENGTH, HEADS, WIDTH // HEADS]), [0, 2, 1, 3])

    normed = layer_norm(fd, x)
    mixed, *_ = fd.ops.sdpfa_fwd(heads(normed), heads(normed), heads(normed), is_causal=True)
    merged = fd.ops.reshape(fd.ops.permute(mixed, [0, 2, 1, 3]), [BATCH, LENGTH, WIDTH])
    x = x + fd.ops.linear(merged, weight([WIDTH, WIDTH], [None, "tp"]))
    hidden = fd.ops.gelu(fd.ops.linear(layer_norm(fd, x), weight([HIDDEN, WIDTH], ["tp", None])))
    return x + fd.ops.linear(hidden, weight([WIDTH, HIDDEN], [None, "tp"]))


def definition(ops: int) -> mf.FusionDefinition:
    """Layers until there are at least this many ops, the backward's among them."""
    mesh = mf.DeviceMesh((2, 4), ("dp", "tp"))
    weights: list[mf.TensorView] = []
    with mf.FusionDefinition() as fd:
        x = fd.define_tensor([BATCH, LENGTH, WIDTH])
        fd.mesh_split(x, mesh, ["dp", None, None])
        while len(fd.recording.nodes) * (1 + BACKWARD) < ops:
            x = layer(fd, mesh, x, weights)
        loss = fd.ops.sum(x * x, [0, 1, 2])
        for result in (loss, *fd.grad(loss, weights)):
            fd.add_output(result)
    return fd


def measure(ops: int) -> dict[str, float]:
    """One compilation in this process, in which nothing like it was compiled before; then one for its memory."""
    definition(1)  # loads torch
    start = time.process_time()
    fd = definition(ops)
    defined = time.process_time() - start
    gc.collect()
    start = time.process_time()
    fd.compile().host_program(0)
    compiled = time.process_time() - start
    fd = definition(ops)
    tracemalloc.start()
    fd.compile().host_program(0)
    peak = tracemalloc.get_traced_memory()[1]
    return {
        "ops": len(fd.recording.nodes),
        "us_per_op": round(compiled / len(fd.recording.nodes) * 1e6, 1),
        "define_us_per_op": round(defined / len(fd.recording.nodes) * 1e6, 1),
        "peak_mb": round(peak / 2**20, 1),
    }


def measured_apart(ops: int, repeats: int) -> dict[str, float]:
    """Medians over processes of their own, without plans kept on disk."""
    command, cold = [sys.executable, __file__, "--alone", str(ops)], os.environ | {"MESHFUSE_CACHE": "off"}
    runs = [json.loads(subprocess.run(command, env=cold, stdout=subprocess.PIPE, check=True).stdout)
            for _ in range(repeats)]  # fmt: skip
    return {name: statistics.median(run[name] for run in runs) for name in runs[0]}


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--ops", type=int, nargs="*", default=[500, 2000, 10000, 50000])
    parser.add_argument("--alone", type=int, help="measure one compilation of so many ops in this process")
    args = parser.parse_args()
    if args.alone:
        print(json.dumps(measure(args.alone)))
        return 0
    results = []
    for ops in args.ops:
        results.append(measured_apart(ops, 3 if ops <= 10000 else 1))
        line = "{ops:>7.0f} ops  {us_per_op:7.1f} us per op  (definition {define_us_per_op:5.1f})  {peak_mb:8.1f} MB"
        print(line.format(**results[-1]), flush=True)
    (HERE / "results.json").write_text(json.dumps(results, indent=1) + "\n")
    return 0


if __name__ == "__main__":
    sys.exit(main())
