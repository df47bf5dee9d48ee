"""Compile time per op: an unrolled transformer, forward and backward, on dp=2, tp=4, to the host program of one rank.

Writes results.json: [{ops, us_per_op, peak_mb}] and prints the curve. CPU time of one core, medians of repeated runs.
"""

from __future__ import annotations

import argparse
import gc
import json
import statistics
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
        while len(fd.nodes) * (1 + BACKWARD) < ops:
            x = layer(fd, mesh, x, weights)
        loss = fd.ops.sum(x * x, [0, 1, 2])
        for result in (loss, *fd.grad(loss, weights)):
            fd.add_output(result)
    return fd


def measure(ops: int, repeats: int) -> dict[str, float]:
    times = []
    for _ in range(repeats):
        fd = definition(ops)
        gc.collect()
        start = time.process_time()
        fd.compile().host_program(0)
        times.append(time.process_time() - start)
    tracemalloc.start()
    fd = definition(ops)
    fd.compile().host_program(0)
    peak = tracemalloc.get_traced_memory()[1]
    tracemalloc.stop()
    count = len(fd.nodes)
    return {
        "ops": count,
        "us_per_op": round(statistics.median(times) / count * 1e6, 1),
        "peak_mb": round(peak / 2**20, 1),
    }


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--ops", type=int, nargs="*", default=[500, 2000, 10000, 50000])
    args = parser.parse_args()
    measure(100, 1)
    results = []
    for ops in args.ops:
        results.append(measure(ops, 3 if ops <= 2000 else 1))
        print("{ops:>7.0f} ops  {us_per_op:7.1f} us per op  {peak_mb:8.1f} MB".format(**results[-1]), flush=True)
    (HERE / "results.json").write_text(json.dumps(results, indent=1) + "\n")
    return 0


if __name__ == "__main__":
    sys.exit(main())
