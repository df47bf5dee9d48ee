"""`fd.bill`: the bytes of every collective, counted by hand here."""

from __future__ import annotations

import json

import meshfuse as mf


def gathered(n: int, shape: tuple[int, int], dtype: mf.DataType = mf.DataType.Float) -> mf.FusionDefinition:
    mesh = mf.DeviceMesh((n,), ("tp",))
    with mf.FusionDefinition() as fd:
        x = fd.define_tensor(list(shape), dtype=dtype)
        y = fd.ops.set(x)
        fd.add_output(y)
        fd.mesh_split(x, mesh, ["tp", None])
        fd.mesh_split(y, mesh, [None, None])
    return fd


def test_an_all_gather_is_counted_as_a_ring() -> None:
    bill = gathered(4, (8, 16)).bill()
    (entry,) = bill.entries
    assert (entry.collective, entry.axes) == ("all-gather", "tp")
    assert entry.wire == bill.total == 3 / 4 * 8 * 16 * 4
    assert gathered(4, (8, 16), mf.DataType.Half).bill().total == bill.total / 2


def test_the_mean_over_the_ranks_counts() -> None:
    mesh = mf.DeviceMesh((3,), ("tp",))
    with mf.FusionDefinition() as fd:
        x = fd.define_tensor([7, 9])
        y = fd.ops.set(x)
        fd.add_output(y)
        fd.mesh_split(x, mesh, ["tp", None])
        fd.mesh_split(y, mesh, [None, "tp"])
    (entry,) = fd.bill().entries
    assert entry.collective == "all-to-all"
    sent = sum(rows * (9 - 3) for rows in (3, 3, 1))  # all but the three columns that each rank keeps
    assert entry.wire == sent * 4 / 3


def test_the_table_and_json() -> None:
    bill = gathered(2, (1000, 1000)).bill()
    text = str(bill).splitlines()
    assert text[0].split() == ["collective", "axis", "bytes", "tensor", "why", "line"]
    assert text[1].split()[:3] == ["all-gather", "tp", "2,000,000"]
    assert text[2].split() == ["total", "2,000,000", "1", "collective"]
    assert text[1].index("2,000,000") == text[2].index("2,000,000")
    found = json.loads(bill.to_json())
    assert found["total"] == 2e6
    assert found["entries"][0]["collective"] == "all-gather"
    assert set(found["entries"][0]) == {"collective", "axes", "tensor", "wire", "why", "line", "move"}


def test_no_communication() -> None:
    with mf.FusionDefinition() as fd:
        x = fd.define_tensor([4])
        fd.add_output(fd.ops.relu(x))
        fd.mesh_split(x, mf.DeviceMesh((2,), ("tp",)), ["tp"])
    assert str(fd.bill()) == "no communication"
    assert fd.bill().total == 0
