"""Distributed tensors, weights from files, and definitions on workers, against the unsharded program."""

from __future__ import annotations

import json
from pathlib import Path

import pytest
import torch

import meshfuse as mf
import meshfuse.session as di
from meshfuse.errors import ArgumentError

MESH = mf.DeviceMesh((4,), ("tp",))
GRID = mf.DeviceMesh((2, 2), ("dp", "tp"))


def sharding(mesh: mf.DeviceMesh, spec: list, shape: tuple[int, ...]) -> mf.Sharding:
    with mf.FusionDefinition() as fd:
        x = fd.define_tensor(list(shape))
        fd.mesh_split(x, mesh, spec)
        fd.add_output(fd.ops.neg(x))
    return fd.recording.annotations[x.id].sharding(x.name, shape)


def test_distribute_and_full_tensor(session: di.Session) -> None:
    tensor = torch.randn(7, 5)
    for mesh, spec in ((MESH, ["tp", None]), (GRID, ["tp", "dp"]), (GRID, [None, "dp"]), (GRID, [None, None])):
        placed = sharding(mesh, spec, (7, 5))
        ref = session.distribute_tensor(tensor, placed)
        assert torch.equal(ref.full_tensor(), tensor)
        assert all(torch.equal(ref[w], mf.shard_tensor(tensor, placed, w)) for w in range(4))
    with pytest.raises(ArgumentError, match="full_tensor of a DRef that is not distributed"):
        session.call(int, 1).full_tensor()
    with pytest.raises(ArgumentError, match="ranks up to 4, needed a Sharding, not partial, on the 4 workers"):
        session.distribute_tensor(tensor, sharding(mf.DeviceMesh((5,), ("x",)), ["x", None], (7, 5)))


def write_model(folder: Path) -> dict[str, torch.Tensor]:
    """Two safetensors files and their index."""
    save_file = pytest.importorskip("safetensors.torch").save_file
    weights = {"up": torch.randn(32, 16), "down": torch.randn(8, 32).bfloat16(), "scale": torch.tensor([2.0])}
    save_file({"up": weights["up"], "scale": weights["scale"]}, folder / "a.safetensors")
    save_file({"down": weights["down"]}, folder / "b.safetensors")
    index = {"weight_map": {"up": "a.safetensors", "scale": "a.safetensors", "down": "b.safetensors"}}
    (folder / "model.safetensors.index.json").write_text(json.dumps(index))
    return weights


def test_shards_of_files(session: di.Session, tmp_path: Path) -> None:
    weights = write_model(tmp_path)
    wanted = {
        "down": sharding(MESH, [None, "tp"], (8, 32)), "up": sharding(GRID, [("dp", "tp"), None], (32, 16)),
        "scale": sharding(MESH, [None], (1,)),
    }  # fmt: skip
    refs = session.load_shards(tmp_path / "model.safetensors.index.json", wanted)
    for name, ref in zip(wanted, refs, strict=True):
        assert torch.equal(ref.full_tensor(), weights[name])
        assert torch.equal(ref[3], mf.shard_tensor(weights[name], wanted[name], 3))


@pytest.mark.parametrize(("content", "text"), [
    (b"", "no safetensors file"), (b"\xff" * 8 + b"{}", "a header of 18446744073709551615 bytes"),
    (b"\x02" + b"\0" * 7 + b"{}", "found no tensor 'up', needed one of its 0 names"),
    (b"\x3e" + b"\0" * 7 + b'{"up":{"dtype":"F32","shape":[32,16],"data_offsets":[0,2048]}}', "a wrong entry of 'up'"),
])  # fmt: skip
def test_broken_files(threaded: di.Session, tmp_path: Path, content: bytes, text: str) -> None:
    path = tmp_path / "x.safetensors"
    path.write_bytes(content)
    with pytest.raises(mf.CheckpointError, match=text):
        threaded.load_shards(path, {"up": sharding(MESH, ["tp", None], (32, 16))})


def mlp() -> mf.FusionDefinition:
    with mf.FusionDefinition() as fd:
        x, up, down = fd.define_tensor([-1, 16]), fd.define_tensor([32, 16]), fd.define_tensor([8, 32])
        y = fd.ops.linear(fd.ops.gelu(fd.ops.linear(x, up)), down)
        fd.add_output(y)
        fd.mesh_split(up, MESH, ["tp", None])
        fd.mesh_split(down, MESH, [None, "tp"])
    return fd


def test_a_definition_on_workers(session: di.Session, tmp_path: Path) -> None:
    weights = write_model(tmp_path)
    fd = mlp()
    up, down = session.load_shards(
        tmp_path / "model.safetensors.index.json",
        {"up": sharding(MESH, ["tp", None], (32, 16)), "down": sharding(MESH, [None, "tp"], (8, 32))},
    )
    down = session.call(lambda t: t.float(), down)
    step = session.load_definition(fd)
    x = torch.randn(5, 16)
    expected = torch.nn.functional.gelu(x @ weights["up"].T) @ weights["down"].float().T
    out = step(x, up, down)
    torch.testing.assert_close(out.full_tensor(), expected)
    torch.testing.assert_close(step(x, weights["up"], weights["down"].float()).full_tensor(), expected)
    # After an error the groups are other ones, and the definition takes those.
    session.call(lambda: 1 // (di.worker_id() - 1))
    with pytest.raises(ZeroDivisionError):
        session.sync()
    torch.testing.assert_close(step(x, up, down).full_tensor(), expected)
    with pytest.raises(ArgumentError, match="a definition on workers: found 1 arguments, needed 3"):
        step(x)
