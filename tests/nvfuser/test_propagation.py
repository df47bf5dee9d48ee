"""Shardings that meshfuse chooses, against the plan that nvFuser dumps for the same program."""

from __future__ import annotations

import functools
import json
import math
import os
import re
import subprocess
import sys
from pathlib import Path
from typing import Any

import plans
import pytest

import meshfuse as mf
import meshfuse.nvfuser_direct as nvfuser

pytestmark = pytest.mark.nvfuser

# Nobody places the result of a sharded contraction: nvFuser reduces it on every rank, meshfuse leaves it in parts.
IN_PARTS = ["row_linear", "reduction"]
_AFTER = re.compile(r"Fusion after pass: PropagateShardingsPass\n(.*?)\n=====", re.DOTALL)
_LEAF = re.compile(r"([irb])(?:(deviceIdx)\.x|S|rf)?\d*\{")
# (is split over the ranks, per dim; is a partial sum)
Plan = tuple[tuple[bool, ...], bool]


def parsed(loop: str) -> Plan:
    """The plan of a tensor from its loop domain; the leaf after a device's is the rest of the same dim."""
    dims, partial, rest = [], False, False
    for letter, device in _LEAF.findall(loop):
        if rest:
            rest = False
        elif letter == "r":
            partial, rest = partial or bool(device), bool(device)
        else:
            dims.append(bool(device))
            rest = bool(device)
    return tuple(dims), partial


@functools.cache
def dumped() -> tuple[dict[str, str], str]:
    """What nvFuser prints of each program, and all errors."""
    env = {**os.environ, "NVFUSER_DUMP": "pre_segmenter_logging"}
    script = str(Path(plans.__file__))
    done = subprocess.run([sys.executable, script], env=env, capture_output=True, text=True, timeout=280)
    parts = re.split(r"^PROGRAM (\w+)\n", done.stdout, flags=re.MULTILINE)
    return dict(zip(parts[1::2], parts[2::2], strict=True)), done.stderr


def theirs(name: str) -> list[Plan]:
    """nvFuser's plan; without a GPU it plans and then raises when it comes to a kernel."""
    programs, errors = dumped()
    found = _AFTER.search(programs[name])
    assert found is not None, errors[-2000:]
    loops = dict(re.findall(r"(T\d+)_[a-z]_[^\[\s]*\[([^\]]*)\]", found.group(1)))
    names = json.loads(re.search(r"NAMES (.*)", programs[name]).group(1))  # type: ignore[union-attr]
    return [parsed(loops[n]) for n in names]


def compiled(name: str) -> tuple[mf.FusionDefinition, list[Plan]]:
    mesh = mf.DeviceMesh((plans.RANKS,), ("x",))
    fd = mf.FusionDefinition()

    def split(tensor: Any, dim: int) -> None:
        fd.mesh_split(tensor, mesh, ["x" if d == dim else None for d in range(tensor.ndim)])

    tensors = plans.PROGRAMS[name](fd, split)
    fd.add_output(tensors[-1])
    shardings = fd.compile().sharded.shardings
    return fd, [(tuple(map(bool, shardings[t.id].dims)), bool(shardings[t.id].partial)) for t in tensors]


@pytest.mark.parametrize("name", [name for name in plans.PROGRAMS if name not in IN_PARTS])
def test_same_plan_as_nvfuser(name: str) -> None:
    assert compiled(name)[1] == theirs(name)


@pytest.mark.parametrize("name", IN_PARTS)
def test_a_free_sum_costs_less_than_nvfusers_all_reduce(name: str) -> None:
    fd, plan = compiled(name)
    dims, partial = theirs(name)[-1]
    assert partial and not any(dims)
    assert not plan[-1][1]
    (result,) = fd.recording.outputs
    assert fd.bill().total < 2 * (plans.RANKS - 1) / plans.RANKS * 4 * math.prod(
        fd.recording.tensors[result].type.shape
    )


@pytest.mark.parametrize("name", plans.KEPT)
def test_unannotated_outputs_lie_where_nvfuser_leaves_them(name: str) -> None:
    mesh = nvfuser.multidevice.DeviceMesh(range(plans.RANKS))

    def split(tensor: Any, dim: int) -> None:
        tensor.outer_split(dim, plans.RANKS)
        tensor.axis(dim).parallelize(nvfuser.ParallelType.mesh_x)

    with nvfuser.FusionDefinition() as fd:
        tensors = plans.KEPT[name](fd, split)
        inputs: Any = fd.fusion.inputs()
        for tensor in tensors[: len(inputs)]:
            tensor.set_device_mesh(mesh)
        for tensor in tensors[len(inputs) :]:
            fd.add_output(tensor)
    found = fd.compile(*[fd.recording.tensors[tv.id].type.shape for tv in inputs]).output_shardings()
    assert [tuple(map(bool, sharding.dims)) for sharding in found] == [dims for dims, _ in theirs(name)[len(inputs) :]]
