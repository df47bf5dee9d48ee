"""`fd.bill`: the bytes of every collective, counted by hand here."""

from __future__ import annotations

import dataclasses
import inspect
import json
import os
import warnings

import pytest

import meshfuse as mf
from meshfuse.report import plan_warning

HERE = os.path.basename(__file__)


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


def test_the_table_and_json_have_the_same_figures() -> None:
    bill = gathered(2, (1000, 1000)).bill()
    text = str(bill).splitlines()
    assert text[0].split() == ["collective", "axis", "bytes", "us", "tensor", "why", "line"]
    assert text[1].split()[:4] == ["all-gather", "tp", "2,000,000", "40"]
    assert text[2].split() == ["total", "2,000,000", "40", "1", "collective"]
    assert text[1].index("2,000,000") == text[2].index("2,000,000")
    found = json.loads(json.dumps(bill.to_dict()))
    assert found["total"] == 2e6
    assert found["entries"][0]["collective"] == "all-gather"
    assert set(found["entries"][0]) == {
        "collective", "axes", "tensor", "wire", "why", "line", "move", "seconds", "source", "target", "op", "held_by",
        "needed_by", "instead",
    }  # fmt: skip


def test_a_bill_without_communication_says_so() -> None:
    with mf.FusionDefinition() as fd:
        x = fd.define_tensor([4])
        fd.add_output(fd.ops.relu(x))
        fd.mesh_split(x, mf.DeviceMesh((2,), ("tp",)), ["tp"])
    assert str(fd.bill()).splitlines()[0] == "no communication"
    assert fd.bill(alternatives=True).details().splitlines()[0] == "no communication"
    assert fd.bill().total == 0


# who asked, and what else there was -------------------------------------------------------------------------------


def line_of(source: str) -> int:
    """The number of the first line of `crossed` with this text."""
    lines, start = inspect.getsourcelines(crossed)
    return start + next(i for i, line in enumerate(lines) if line.strip() == source)


def crossed(n: int = 64, rows: int = 4, **options: float) -> mf.FusionDefinition:
    """x · w, where w is split in the dim summed over, and the result is wanted in columns of which x has all."""
    mesh = mf.DeviceMesh((4,), ("tp",))
    with mf.FusionDefinition(**options) as fd:  # type: ignore[arg-type]
        x = fd.define_tensor([rows * n, n])
        w = fd.define_tensor([n, n])
        h = fd.ops.matmul(x, w)
        y = fd.ops.relu(h)
        fd.add_output(y)
        fd.mesh_split(x, mesh, ["tp", None])
        fd.mesh_split(w, mesh, ["tp", None])
        fd.mesh_split(y, mesh, [None, "tp"])
    return fd


def test_an_entry_names_the_reader_and_the_annotations_behind_it() -> None:
    made = crossed().bill()
    gather = next(entry for entry in made.entries if entry.tensor.startswith("w"))
    assert (gather.collective, gather.source, gather.target) == ("all-gather", "[tp, -]", "[-, -]")
    assert gather.op == "h (t2) = matmul" and gather.why == "operand 1 of matmul"
    at = {name: line_of(f"fd.mesh_split({name}, mesh, {spec})") for name, spec in SPECS.items()}
    assert gather.held_by == (f'w (t1), annotated at {HERE}:{at["w"]}: fd.mesh_split(w, mesh, ["tp", None])',)
    assert gather.needed_by == (f'x (t0), annotated at {HERE}:{at["x"]}: fd.mesh_split(x, mesh, ["tp", None])',)
    moved = next(entry for entry in made.entries if entry is not gather)
    assert (moved.collective, moved.op) == ("all-to-all", "y (t3) = relu") and moved.needed_by[0].startswith(
        "y (t3), annotated at"
    )


SPECS = {"x": '["tp", None]', "w": '["tp", None]', "y": '[None, "tp"]'}


def test_seconds_are_those_of_the_links() -> None:
    link = mf.Link(10e9, 1e-3)
    mesh = mf.DeviceMesh((4,), ("tp",), links=link)
    with mf.FusionDefinition() as fd:
        x = fd.define_tensor([64, 64])
        y = fd.ops.set(x)
        fd.add_output(y)
        fd.mesh_split(x, mesh, ["tp", None])
        fd.mesh_split(y, mesh, [None, None])
    (entry,) = fd.bill().entries
    assert entry.seconds == fd.bill().seconds == pytest.approx(2 * 1e-3 + 3 / 4 * 64 * 64 * 4 / 10e9)


def test_the_runner_up_is_what_the_plan_costs_with_another_annotation() -> None:
    """Worked out by hand: the definition is written anew with each of the other annotations."""
    made = crossed().bill(alternatives=True)
    assert all(entry.instead is not None for entry in made.entries)
    for entry in made.entries:
        other = entry.instead
        assert other is not None
        name = other.tensor.split(" ")[0]
        spec = None if other.change.endswith("no annotation") else swapped(SPECS[name])
        again = annotated({**SPECS, name: spec}).bill()
        assert (other.total_wire, other.total_seconds) == (again.total, pytest.approx(again.seconds))
    plain = crossed().bill()
    assert [dataclasses.replace(entry, instead=None) for entry in made.entries] == list(plain.entries)


@pytest.mark.timeout(60)
def test_the_runner_up_for_a_tensor_of_many_dims_is_found_at_once() -> None:
    """All orders of its dims would take for ever, in the warning at the first call, too."""
    with mf.FusionDefinition() as fd:
        x = fd.define_tensor([8] + [1] * 20 + [8, 6])
        fd.add_output(fd.ops.sum(x, [0, 22]))
        fd.mesh_split(x, mf.DeviceMesh((2, 2), ("x", "y")), [["x", "y"], *[None] * 22])
    instead = fd.bill(alternatives=True).entries[0].instead
    assert instead is not None and instead.total_wire == 0


def swapped(spec: str) -> str:
    return '[None, "tp"]' if spec.startswith('["tp"') else '["tp", None]'


def annotated(specs: dict[str, str | None], n: int = 64) -> mf.FusionDefinition:
    mesh = mf.DeviceMesh((4,), ("tp",))
    with mf.FusionDefinition() as fd:
        x, w = fd.define_tensor([4 * n, n]), fd.define_tensor([n, n])
        y = fd.ops.relu(fd.ops.matmul(x, w))
        fd.add_output(y)
        for tensor, spec in zip((x, w, y), specs.values(), strict=True):
            if spec is not None:
                fd.mesh_split(tensor, mesh, json.loads(spec.replace("None", "null")))
    return fd


def test_the_details_show_it_all() -> None:
    text = crossed().bill(alternatives=True).details()
    assert "all-gather over tp of w (t1), 12,288 bytes" in text
    assert "asked for by operand 1 of matmul (h (t2) = matmul)" in text
    assert "follows x (t0), annotated at" in text and "runner-up: " in text and "bytes and" in text


def test_layers_that_are_annotated_alike_are_changed_together() -> None:
    mesh = mf.DeviceMesh((4,), ("tp",))
    with mf.FusionDefinition() as fd:
        x = fd.define_tensor([256, 64])
        weights = [fd.define_tensor([64, 64]) for _ in range(3)]
        y = x
        for w in weights:
            y = fd.ops.relu(fd.ops.matmul(y, w))
        fd.add_output(y)
        fd.mesh_split(x, mesh, ["tp", None])
        for w in weights:
            fd.mesh_split(w, mesh, ["tp", None])
    entries = fd.bill(alternatives=True).entries
    assert entries and all(e.instead is not None and e.instead.tensor.count(",") in (0, 2) for e in entries)
    assert any(e.instead is not None and e.instead.tensor.count(",") == 2 for e in entries)


# warnings ---------------------------------------------------------------------------------------------------------


def test_a_plan_over_its_bound_names_the_annotation_to_change() -> None:
    fd = crossed(max_wire=1000)
    with pytest.warns(mf.PlanWarning) as caught:
        fd.compile()
    (warning,) = caught
    text = str(warning.message)
    now = crossed().bill()
    assert f"the plan moves {now.total:,.0f} bytes per rank, more than max_wire=1,000" in text
    best = min((e.instead for e in crossed().bill(alternatives=True).entries if e.instead), key=lambda o: o.total_wire)
    assert best.tensor in text and best.line in text and f"saves {now.total - best.total_wire:,.0f} bytes" in text
    assert os.path.basename(warning.filename) == HERE


def test_a_plan_within_its_bound_gives_no_warning() -> None:
    with warnings.catch_warnings():
        warnings.simplefilter("error")
        crossed(max_wire=crossed().bill().total).compile()
        crossed().compile()


def test_the_environment_sets_the_bound(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("MESHFUSE_MAX_WIRE", "1e3")
    with pytest.warns(mf.PlanWarning, match="more than max_wire=1,000"):
        crossed().compile()
    monkeypatch.setenv("MESHFUSE_MAX_WIRE", "much")
    with pytest.raises(mf.DefinitionError, match="MESHFUSE_MAX_WIRE: found 'much', needed bytes per rank, 0 or more"):
        mf.FusionDefinition()


@pytest.mark.parametrize("wrong", [-1, float("nan"), "many", True, [1]])
def test_a_wrong_bound(wrong: object) -> None:
    with pytest.raises(mf.DefinitionError, match="max_wire: found .*, needed bytes per rank") as caught:  # noqa: RUF043
        mf.FusionDefinition(max_wire=wrong)  # type: ignore[arg-type]
    assert HERE in str(caught.value)


def test_without_a_bound_only_what_another_annotation_would_halve_is_warned_of() -> None:
    """Of large tensors: y is wanted by columns for no reason, so that all of it is sent to where it is not made."""
    message = r"the plan moves [\d,]+ bytes per rank; the largest collective is the all-to-all of h .*Leave out .* of y"
    with pytest.warns(mf.PlanWarning, match=message):
        crossed(16384, 16).compile()
    with warnings.catch_warnings():
        warnings.simplefilter("error")
        mesh = mf.DeviceMesh((8,), ("dp",))
        with mf.FusionDefinition() as fd:  # a weight that is split to save memory must be gathered either way
            x, w = fd.define_tensor([1 << 18, 16384]), fd.define_tensor([16384, 16384])
            fd.add_output(fd.ops.matmul(x, w))
            fd.mesh_split(x, mesh, ["dp", None])
            fd.mesh_split(w, mesh, ["dp", None])
        assert fd.bill().total > plan_warning.NOTABLE


def test_a_move_of_pieces_is_needed_by_what_its_result_follows():
    mesh = mf.DeviceMesh((4,), ("tp",))
    with mf.FusionDefinition() as fd:
        x = fd.define_tensor([1600, 2])
        y = fd.ops.relu(fd.ops.slice(x, [3, 0], [1203, 2]))
        fd.add_output(y)
        fd.mesh_split(x, mesh, ["tp", None])
        fd.mesh_split(y, mesh, ["tp", None])
    (entry,) = fd.bill().entries
    assert entry.collective == "window"
    assert entry.held_by == entry.needed_by and entry.held_by[0].startswith("x (t0), annotated at ")


def test_a_sum_is_held_by_what_its_operands_follow():
    """Not by the annotation of the result, which asks for the move."""
    mesh = mf.DeviceMesh((4,), ("tp",))
    with mf.FusionDefinition() as fd:
        x = fd.define_tensor([8, 16])
        w = fd.define_tensor([12, 16])
        y = fd.ops.linear(x, w)
        fd.add_output(y)
        fd.mesh_split(x, mesh, [None, "tp"])
        fd.mesh_split(w, mesh, [None, "tp"])
        fd.mesh_split(y, mesh, [None, None])
    (entry,) = fd.bill().entries
    assert [text.split(": ")[1] for text in entry.held_by] == [
        'fd.mesh_split(x, mesh, [None, "tp"])', 'fd.mesh_split(w, mesh, [None, "tp"])',
    ]  # fmt: skip
    assert [text.split(": ")[1] for text in entry.needed_by] == ["fd.mesh_split(y, mesh, [None, None])"]
