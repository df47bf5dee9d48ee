"""What NVIDIA's multi-device tests ask of a frontend, on 2 and 4 gloo ranks.

Each function of `scenarios/` runs on every rank and compares its own shards with unsharded torch.
"""

from __future__ import annotations

import ast
from pathlib import Path

import pytest
from rank_pool import RankPool

pytestmark = pytest.mark.ranks

FOLDER = Path(__file__).parent / "scenarios"


def scenarios() -> list[str]:
    """The public functions without required arguments, as `file:function`."""
    found = []
    for file in sorted(FOLDER.glob("*.py")):
        if file.stem != "tools":
            functions = [
                node for node in ast.parse(file.read_text()).body if isinstance(node, ast.FunctionDef)
            ]
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


@pytest.mark.parametrize("scenario", scenarios())
def test_two_ranks(ranks2: RankPool, scenario: str) -> None:
    run(ranks2, scenario)


@pytest.mark.parametrize("scenario", scenarios())
def test_four_ranks(ranks4: RankPool, scenario: str) -> None:
    run(ranks4, scenario)
