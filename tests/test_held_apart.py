"""What ranks save that not all of them have: whether it is one checkpoint."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
import torch

import meshfuse as mf
from frontend_models import pair
from meshfuse.checkpoint.held_apart import Saved, owners
from meshfuse.sharding.layout import Split
from pipeline_models import Words, loss_of, words


def lies(*ranks: int) -> mf.Sharding:
    return mf.Sharding(mf.DeviceMesh((len(ranks),), ("dp",), ranks=list(ranks)), [(Split(len(ranks), "dp"),)])


FIRST, LAST, ALL = lies(0, 1), lies(2, 3), lies(0, 1, 2, 3)
SHAPE = (4,)


def by_ranks(*names: dict[str, Any], whole: tuple[str, ...] = ("", "", "", "")) -> list[Saved]:
    return [Saved(text, {name: (sharding, SHAPE) for name, sharding in held.items()})
            for text, held in zip(whole, names, strict=True)]  # fmt: skip


def test_stages_save_their_own() -> None:
    first, last = {"a": FIRST, "tied": FIRST}, {"b": LAST, "tied": LAST}
    found = owners(by_ranks(first, first, last, last))
    assert found == {"a": (FIRST, SHAPE), "b": (LAST, SHAPE), "tied": (FIRST, SHAPE)}


@pytest.mark.parametrize(
    ("names", "whole"),
    [
        (({"a": FIRST}, {}, {}, {}), ("", "", "", "")),  # rank 1 is part of the mesh
        (({"a": ALL}, {"a": ALL}, {"a": LAST}, {"a": LAST}), ("", "", "", "")),  # meshes with ranks in common
        (({"a": FIRST}, {"a": FIRST}, {}, {}), ("step: 1", "step: 1", "step: 2", "step: 2")),
        (({"a": FIRST}, {"a": FIRST}, {"a": None}, {"a": None}), ("", "", "", "")),
    ],
)
def test_what_is_no_checkpoint(names: Any, whole: Any) -> None:
    assert owners(by_ranks(*names, whole=whole)) is None


def test_other_shapes_of_one_name() -> None:
    saved = by_ranks({"a": FIRST}, {"a": FIRST}, {"a": LAST}, {"a": LAST})
    other = [Saved("", {"a": (LAST, (8,))})] * 2
    assert owners([*saved[:2], *other]) is None and owners(saved) is not None


def test_a_simulated_pipeline_loads_on_another_cut(tmp_path: Path) -> None:
    def made(ranks: int, schedule: str) -> tuple[Any, Any]:
        model, eager = pair(Words)
        options = mf.Pipeline("pp", schedule, 2)
        return mf.parallelize(model, mf.DeviceMesh((ranks,), ("pp",)), pipeline=options, loss=loss_of), eager

    model, eager = made(2, "1f1b")
    with torch.no_grad():
        for mine, plain in zip(model.parameters(), eager.parameters(), strict=True):
            noise = torch.randn(mine.shape)
            mine += noise
            plain += noise
    mf.save(tmp_path, model.state_dict())
    other, _ = made(4, "gpipe")
    mf.load(tmp_path, other.state_dict())
    x, y = words(0), words(1)
    with torch.no_grad():
        assert (other.step(x, y) - loss_of(eager(x), y)).abs() < 1e-5
