"""A step of a program in steady state allocates its outputs, and nothing where an earlier step's were given back."""

from __future__ import annotations

import sys
from collections import Counter
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
from torch.profiler import ProfilerActivity, profile

import meshfuse as mf

pytestmark = pytest.mark.ranks
BENCH = Path(__file__).resolve().parents[2] / "benchmarks" / "runtime"


def allocations(step: Any) -> tuple[list[int], Any]:
    """Bytes of each allocation of torch's CPU memory in a step, and what it gives."""
    with profile(activities=[ProfilerActivity.CPU], profile_memory=True) as found:
        out = step()
    events = found.profiler.kineto_results.events()  # type: ignore[union-attr]
    return [e.nbytes() for e in events if e.name() == "[memory]" and e.nbytes() > 0], out


def fewest_allocations(step: Callable[[], Any]) -> tuple[list[int], Any]:
    """As `allocations`, of that of some steps which allocates least; outputs are dropped. At times gloo's threads
    still hold what the step before has sent.
    """
    fewest, out = allocations(step)
    for _ in range(4):  # As often on every rank.
        out = None
        found, out = allocations(step)
        fewest = min(fewest, found, key=len)
    return fewest, out


def on_rank(name: str, backend: str) -> tuple[list[int], list[list[int]], list[int]]:
    """Allocations of a step whose outputs are dropped, of some whose outputs are kept, and the outputs' bytes."""
    sys.path.insert(0, str(BENCH))
    from definitions import definition
    from works import WORKS, local_part

    world = mf.World.current()
    work = next(w for w in WORKS if w.name == name)
    shape = work.mesh_shape(world.size)
    place = {axis: (world.rank // shape[1] if i == 0 and len(shape) > 1 else world.rank % shape[-1], n)
             for i, (axis, n) in enumerate(zip(work.axes, shape, strict=True))}  # fmt: skip
    given = [local_part(t, work.specs[n], place) for n, t in work.inputs().items()]
    fd = definition(work, world.size)

    def step() -> list[torch.Tensor]:
        return fd.execute(given, backend=backend)

    for _ in range(4):
        step()
    dropped, out = fewest_allocations(step)
    kept: list[Any] = [out, *(step() for _ in range(3))]
    taken = []
    for _ in range(4):
        found, out = allocations(step)
        taken.append(found)
        kept.append(out)
    wrong = [place for place, o in enumerate(out) for other in kept[:-1] if other[place].data_ptr() == o.data_ptr()]
    assert not wrong, f"outputs {wrong} share memory with those of an earlier step"
    return dropped, taken, [o.nbytes for o in out]


@pytest.mark.parametrize("name", ["mlp", "layer_norm", "cross_entropy"])
def test_compiled_programs_allocate_their_outputs_only(ranks2, name):
    for dropped, taken, outputs in ranks2.run(on_rank, name, "inductor", timeout=150):
        assert dropped == []
        # Less where an earlier test has given back buffers of this size; in some steps more (`fewest_allocations`).
        assert any(not Counter(found) - Counter(outputs) for found in taken)


def test_the_count_sees_what_torch_allocates(ranks2):
    """Op by op every op makes its result."""
    for dropped, *_ in ranks2.run(on_rank, "layer_norm", "eager"):
        assert sum(dropped) > 4 * 256 * 512 * 2


def test_gradients_over_two_axes_allocate_their_outputs_only(ranks4):
    for dropped, taken, outputs in ranks4.run(on_rank, "dp_tp_mlp", "inductor", timeout=150):
        assert dropped == []
        # Gradients of one axis are parts of one buffer.
        assert min(map(sum, taken)) <= sum(outputs)


def moved(backend: str) -> list[int]:
    """Allocations of a step that only communicates, in every way that there is; outputs dropped."""
    mesh = mf.DeviceMesh((2, 2), ("a", "b"))
    layouts: list[list[Any]] = [
        [None, None], ["a", None], [None, "b"], ["b", "a"], [["a", "b"], None], [None, ["b", "a"]],
    ]  # fmt: skip
    with mf.FusionDefinition() as fd:
        x = fd.define_tensor([12, 20])
        fd.mesh_split(x, mesh, ["a", "b"])
        for layout in layouts:
            y = fd.ops.set(x)
            fd.add_output(y)
            fd.mesh_split(y, mesh, layout)
    local = torch.ones(6, 10)
    for _ in range(4):
        fd.execute([local], backend=backend)
    return fewest_allocations(lambda: fd.execute([local], backend=backend))[0]


def test_moves_allocate_nothing(ranks4):
    """Gathers, exchanges and slices of a text that is not compiled."""
    for found in ranks4.run(moved, "eager"):
        assert found == []
