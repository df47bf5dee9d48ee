"""A notebook-style script: one controller shards a small model over four workers, serves it, and survives an error.

python examples/session/serve.py              # worker 0 here, three more processes
python examples/session/serve.py --threads    # four threads: nothing is started
"""

from __future__ import annotations

import argparse

import torch

import meshfuse as mf
import meshfuse.session as di

HIDDEN, INNER, WORKERS = 64, 256, 4


def make_definition() -> mf.FusionDefinition:
    """A feed-forward layer, split as Megatron does it."""
    mesh = mf.DeviceMesh((WORKERS,), ("tp",))
    with mf.FusionDefinition() as fd:
        x = fd.define_tensor([-1, HIDDEN])
        up = fd.define_tensor([INNER, HIDDEN])
        down = fd.define_tensor([HIDDEN, INNER])
        y = fd.ops.linear(fd.ops.gelu(fd.ops.linear(x, up)), down)
        fd.add_output(y)
        fd.mesh_split(up, mesh, ["tp", None])
        fd.mesh_split(down, mesh, [None, "tp"])
    return fd


def request(step: di.RemoteDefinition, x: torch.Tensor, up: di.DRef, down: di.DRef) -> torch.Tensor:
    """One request: issued without waiting, and read when it is done."""
    return step(x, up, down).full_tensor()


def fail_on(worker: int) -> None:
    """What a bug in a worker's function looks like."""
    if di.worker_id() == worker:
        raise ValueError(f"a bug on worker {worker}")


def main() -> None:
    """Run all cells."""
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--threads", action="store_true", help="workers are threads of this process")
    session = (di.ThreadedSession if parser.parse_args().threads else di.ProcessSession)(WORKERS)
    print(session)

    # 1. The weights go to the workers once, each shard to its own.
    torch.manual_seed(0)
    weights = torch.randn(INNER, HIDDEN) / 8, torch.randn(HIDDEN, INNER) / 16
    fd = make_definition()
    step = session.load_definition(fd)
    placed = [fd.recording.annotations[ref.id].sharding(f"t{ref.id}", tuple(w.shape))
              for ref, w in zip(fd.recording.inputs[1:], weights, strict=True)]  # fmt: skip
    up, down = (session.distribute_tensor(w, sharding) for w, sharding in zip(weights, placed, strict=True))
    print("worker 1 holds", tuple(up[1].shape), "of", tuple(weights[0].shape))

    # 2. Requests.
    x = torch.randn(3, HIDDEN)
    expected = torch.nn.functional.gelu(x @ weights[0].T) @ weights[1].T
    print("largest difference from one process:", f"{(request(step, x, up, down) - expected).abs().max():.0e}")

    # 3. An error on a worker arrives as what it is, and the session goes on.
    session.call(fail_on, 2)
    try:
        session.sync()
    except ValueError as error:
        print(f"worker {error.worker} raised {type(error).__name__}:", str(error).splitlines()[0])  # type: ignore[attr-defined]
    torch.testing.assert_close(request(step, x, up, down), expected)
    print("still serving")
    session.shutdown()


if __name__ == "__main__":
    main()
