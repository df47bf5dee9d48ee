"""What NVIDIA's multi-device tests ask of a frontend, on 1, 2 and 4 gloo ranks.

Each function of `scenarios/` runs on every rank and compares its own shards with unsharded torch.
"""

from __future__ import annotations

import ast
from collections.abc import Iterator
from pathlib import Path

import pytest
from rank_pool import RankPool, run_bare

pytestmark = pytest.mark.ranks

FOLDER = Path(__file__).parent / "scenarios"


def scenarios() -> list[str]:
    """The public functions without required arguments, as `file:function`."""
    found = []
    for file in sorted(FOLDER.glob("*.py")):
        if file.stem != "tools":
            functions = [node for node in ast.parse(file.read_text()).body if isinstance(node, ast.FunctionDef)]
            found += [f"{file.stem}:{node.name}" for node in functions if _is_scenario(node)]
    return found


def _is_scenario(node: ast.FunctionDef) -> bool:
    required = len(node.args.args) - len(node.args.defaults)
    return not required and not node.name.startswith("_") and ast.unparse(node.returns or node) == "None"


def run(pool: RankPool, scenario: str) -> None:
    file, _, function = scenario.partition(":")
    pool.run(SETUP.format(folder=str(FOLDER)), timeout=60)
    pool.run(f"{FOLDER / file}.py:{function}", timeout=60)


SETUP = """
import sys
import torch

def main():
    torch.manual_seed(0)
    if {folder!r} not in sys.path:
        sys.path.insert(0, {folder!r})
"""


@pytest.fixture(scope="module")
def rank1() -> Iterator[RankPool]:
    """One process that a launcher started: a world of size 1."""
    pool = RankPool(1)
    yield pool
    pool.close()


@pytest.mark.parametrize("scenario", scenarios())
def test_one_rank(rank1: RankPool, scenario: str) -> None:
    run(rank1, scenario)


@pytest.mark.sampled(2)
@pytest.mark.parametrize("scenario", scenarios())
def test_two_ranks(ranks2: RankPool, scenario: str) -> None:
    run(ranks2, scenario)


@pytest.mark.sampled(2, 1)  # those that are not in the sample for two ranks
@pytest.mark.parametrize("scenario", scenarios())
def test_four_ranks(ranks4: RankPool, scenario: str) -> None:
    run(ranks4, scenario)


SCRIPT = """
import torch
import torch.distributed as dist
import meshfuse.nvfuser_direct as nvfuser

def run():
    world = nvfuser.multidevice.Communicator.instance()
    with nvfuser.FusionDefinition() as fd:
        x = fd.define_tensor([-1, 3])
        fd.add_output(fd.ops.sum(x, [0]))
        x.set_device_mesh(nvfuser.multidevice.DeviceMesh(range(world.size())))
        x.outer_split(0, world.size())
        x.axis(0).parallelize(nvfuser.ParallelType.mesh_x)
    whole = torch.arange(6.0 * world.size()).view(-1, 3)
    (found,) = fd.execute([nvfuser.multidevice.shard_tensor(whole, x)])
    assert torch.equal(found, whole.sum(0))
    world.barrier()

def default_group():
    dist.init_process_group("gloo")
    t = torch.ones(1)
    dist.all_reduce(t)
    assert t.item() == dist.get_world_size() == 2
"""


@pytest.mark.parametrize("order", [("default_group", "run"), ("run", "default_group")])
def test_with_torchs_default_process_group(tmp_path: Path, order: tuple[str, str]) -> None:
    script = SCRIPT + "".join(f"{name}()\n" for name in order)
    results = run_bare(script, tmp_path, size=2)
    assert [code for code, _ in results] == [0, 0], results
