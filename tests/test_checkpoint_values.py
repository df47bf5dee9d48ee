"""Checkpoints of what has no elements, and of numpy's numbers."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import numpy
import pytest
import torch
import torch.distributed.checkpoint as dcp
from torch.distributed.checkpoint.format_utils import dcp_to_torch_save

import meshfuse as mf
from meshfuse.sharding.value import Sharding

EMPTY = {
    "no rows": torch.empty(0, 3), "no columns": torch.empty(4, 0, dtype=torch.bfloat16),
    "nothing": torch.empty(0, dtype=torch.int64), "no middle": torch.empty(2, 0, 5, dtype=torch.bool),
}  # fmt: skip


@pytest.mark.parametrize("beside", [True, False])
def test_torch_finds_tensors_without_elements(tmp_path: Path, beside: bool) -> None:
    state = {**EMPTY, **({"w": torch.arange(6.0).reshape(2, 3)} if beside else {})}
    mf.save(tmp_path, {**state, "step": 3})
    (data,) = tmp_path.glob("data-*")
    found: dict[str, Any] = {name: torch.empty_like(t) for name, t in state.items()}
    dcp.load(found, storage_reader=dcp.FileSystemReader(data), no_dist=True)
    torch.testing.assert_close(found, state, rtol=0, atol=0)
    dcp_to_torch_save(data, tmp_path / "one.pt")
    torch.testing.assert_close(torch.load(tmp_path / "one.pt"), state, rtol=0, atol=0)
    loaded = mf.load(tmp_path)
    assert loaded.pop("step") == 3
    torch.testing.assert_close(loaded, state, rtol=0, atol=0)


def test_shards_without_elements_are_saved_and_loaded(tmp_path: Path) -> None:
    """Those that a sharding gives this rank, whatever the dims that it splits."""
    mesh = mf.DeviceMesh((1,), ("x",))
    state = {name: (t, Sharding.replicated(mesh, t.ndim)) for name, t in EMPTY.items()}
    mf.save(tmp_path, state)
    (data,) = tmp_path.glob("data-*")
    stored: dict[str, Any] = dcp.FileSystemReader(data).read_metadata().state_dict_metadata
    assert {name: (entry.size, entry.properties.dtype) for name, entry in stored.items()} == {
        name: (t.shape, t.dtype) for name, t in EMPTY.items()
    }


NUMBERS = [
    numpy.float32(0.1), numpy.float16(1.5), numpy.float64(-0.25), numpy.int64(7), numpy.int8(-3), numpy.uint64(2**63),
    numpy.bool_(True), numpy.str_("adam"),
]  # fmt: skip


@pytest.mark.parametrize("number", NUMBERS, ids=lambda number: type(number).__name__)
def test_numbers_of_numpy_are_saved_as_numbers(tmp_path: Path, number: Any) -> None:
    mf.save(tmp_path, {"value": number})
    for found in (mf.load(tmp_path)["value"], mf.load(tmp_path, {"value": number})["value"]):
        assert found == number.item() and type(found) is type(number.item())


@pytest.mark.parametrize("value", [numpy.complex64(1j), numpy.datetime64("2026-01-01"), numpy.longdouble(1.0)])
def test_other_values_of_numpy_are_refused_by_name(tmp_path: Path, value: Any) -> None:
    with pytest.raises(mf.ArgumentError, match=rf"checkpoint: 'value': found {type(value).__name__}, needed a tensor"):
        mf.save(tmp_path, {"value": value})
