"""What ranks share of a dim follows from its digits: they may hold it in a million runs."""

from __future__ import annotations

import pytest
from hypothesis import given
from hypothesis import strategies as st

import meshfuse as mf
from meshfuse.sharding import layout as lay
from meshfuse.sharding.layout import Split

SIZES = st.sampled_from([0, 1, 2, 3, 4, 5, 6, 7, 8, 12, 16, 24, 36, 48])
SPLITS = st.lists(st.tuples(st.sampled_from([1, 2, 3, 4]), st.booleans()), max_size=3)


@given(SIZES, SPLITS, SPLITS, st.data())
def test_shared_indices_are_those_of_the_runs(
    n: int, one: list[tuple[int, bool]], other: list[tuple[int, bool]], data: st.DataObject
) -> None:
    def part(splits: list[tuple[int, bool]]) -> tuple[lay.Layout, tuple[int, ...]]:
        layout = lay.canonical(tuple(Split(size, f"a{i}" if on else None) for i, (size, on) in enumerate(splits)), n)
        return layout, tuple(data.draw(st.integers(0, (s.size or 1) - 1)) for s in lay.axes(layout))

    (a, here), (b, there) = map(part, (one, other))
    counted = lay.count(lay.intersect(lay.runs(a, n, here), lay.runs(b, n, there)))
    assert lay.shared(a, here, b, there, n) == counted
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(lay, "_FEW_RUNS", 0)  # as if these were very many
        assert lay.shared(a, here, b, there, n) == counted


def test_prices_do_not_look_at_runs(monkeypatch: pytest.MonkeyPatch) -> None:
    """A flat view of a tensor that is split along its last dim: each rank has a million runs of one long dim."""
    seen = list[int]()
    monkeypatch.setattr(lay, "intersect", lambda a, b, of=lay.intersect: seen.append(len(a) + len(b)) or of(a, b))
    mesh = mf.DeviceMesh((4,), ("a",))
    with mf.FusionDefinition(search="fast") as fd:
        x = fd.define_tensor([64, 64, 128, 64])
        y = fd.ops.relu(fd.ops.reshape(x, [2, 32 * 64 * 128 * 64]))
        fd.mesh_split(x, mesh, [None, None, None, "a"])
        fd.mesh_split(y, mesh, ["a", None])
        fd.add_output(y)
    fd.compile()
    assert sum(seen) < 10_000
