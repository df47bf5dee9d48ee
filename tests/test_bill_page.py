"""The page of a bill: it parses, needs nothing from elsewhere, and holds every collective; layers that are folded."""

from __future__ import annotations

import itertools
import json
import re
import sys
from collections.abc import Callable
from html.parser import HTMLParser
from pathlib import Path

import programs
import pytest
from hypothesis import given
from hypothesis import strategies as st

import meshfuse as mf
from meshfuse.compiler import CompiledProgram
from meshfuse.layer_folding import repeats
from meshfuse.report.page import page
from meshfuse.report.page_timeline import lanes as timeline_lanes

VOID = {"meta", "input", "br", "link", "img", "hr"}


class Page(HTMLParser):
    """Elements, their attributes and texts; an AssertionError where tags do not close what was opened."""

    def __init__(self, text: str):
        super().__init__()
        self.open: list[str] = []
        self.attributes: list[tuple[str, dict[str, str | None]]] = []
        self.texts: dict[str, list[str]] = {}
        self.feed(text)
        self.close()
        assert not self.open

    def handle_starttag(self, tag: str, attrs: list[tuple[str, str | None]]) -> None:
        self.attributes.append((tag, dict(attrs)))
        if tag not in VOID:
            self.open.append(tag)

    def handle_endtag(self, tag: str) -> None:
        assert self.open.pop() == tag

    def handle_data(self, data: str) -> None:
        if self.open:
            self.texts.setdefault(self.open[-1], []).append(data)

    @property
    def programs(self) -> list[dict]:
        data = next(t for t in self.texts["script"] if t.startswith("{"))
        return json.loads(data)["programs"]


def layers(count: int) -> mf.FusionDefinition:
    """Megatron's MLP, over and over."""
    mesh = mf.DeviceMesh((2, 4), ("dp", "tp"), links={"dp": mf.Link(25e9, 20e-6), "tp": mf.Link(450e9, 5e-6)})
    with mf.FusionDefinition() as fd:
        x = fd.define_tensor([8, 64])
        y, weights = x, []
        for _ in range(count):
            weights.append((fd.define_tensor([64, 256]), fd.define_tensor([256, 64])))
            y = y + fd.ops.matmul(fd.ops.gelu(fd.ops.matmul(y, weights[-1][0])), weights[-1][1])
        fd.add_output(y)
        fd.mesh_split(x, mesh, ["dp", None])
        for w1, w2 in weights:
            fd.mesh_split(w1, mesh, [None, "tp"])
            fd.mesh_split(w2, mesh, ["tp", None])
    return fd


def two_meshes() -> mf.FusionDefinition:
    first, second = mf.DeviceMesh([0, 1], ("tp",)), mf.DeviceMesh([2, 3], ("tp",))
    with mf.FusionDefinition() as fd:
        x = fd.define_tensor([8, 8])
        h = fd.ops.relu(x)
        y = fd.ops.neg(h)
        fd.add_output(y)
        fd.mesh_split(x, first, ["tp", None])
        fd.mesh_split(y, second, [None, "tp"])
    return fd


def nothing() -> mf.FusionDefinition:
    with mf.FusionDefinition() as fd:
        fd.add_output(fd.ops.relu(fd.define_tensor([4])))
    return fd


PROGRAMS: list[Callable[[], mf.FusionDefinition]] = [lambda: layers(1), lambda: layers(6), two_meshes, nothing]


@pytest.mark.slow
@pytest.mark.parametrize("make", PROGRAMS)
def test_every_collective_of_the_bill_is_on_the_page(make: Callable[[], mf.FusionDefinition]) -> None:
    fd = make()
    bill = fd.bill()
    read = Page(page([fd.compile()], alternatives=False))
    (program,) = read.programs
    rows = [attributes for tag, attributes in read.attributes if tag == "tr" and "data-collective" in attributes]
    assert [int(row["data-collective"] or -1) for row in rows] == list(range(len(bill.entries)))
    assert [(c["kind"], c["wire"], c["tensor"]) for c in program["collectives"]] == [
        (e.collective, e.wire, e.tensor) for e in bill.entries
    ]
    for made in program["collectives"]:
        assert 0 <= made["from"] <= made["to"] < len(program["rows"])
    assert program["total"] == bill.total
    graph = fd.compile().graph
    assert len(program["rows"]) == len(graph.input_tensors) + sum(len(node.outputs) for node in graph.nodes) + 1
    cells = " ".join(text for kind in ("td",) for text in read.texts.get(kind, []))
    assert all(f"{e.wire:,.0f}" in cells for e in bill.entries)


@pytest.mark.slow
def test_the_page_needs_nothing_from_elsewhere() -> None:
    text = page([layers(2).compile(), nothing().compile()], "a title", alternatives=False)
    read = Page(text)
    for tag, attributes in read.attributes:
        assert tag not in ("link", "img", "iframe", "object") and not {"src", "href", "srcset"} & set(attributes)
    outside = set(re.findall(r"[a-z]+://[^\s\"'<>]+", text)) - {"http://www.w3.org/2000/svg"}  # a name, not a place
    assert not outside and "@import" not in text and "url(" not in text and "fetch(" not in text
    assert len(read.programs) == 2 and "a title" in "".join(read.texts["title"])
    assert not re.search(r"@[A-Z]+@", text)


def test_a_script_s_own_words_cannot_break_the_page(tmp_path: object) -> None:
    source = "</script><script>alert(1)</script><!-- "
    with mf.FusionDefinition() as fd:
        mesh = mf.DeviceMesh((2,), ("<b>&",))
        x = fd.define_tensor([4, 4])  # </script><script>alert(1)</script><!--
        fd.add_output(fd.ops.sum(x, [0]))
        fd.mesh_split(x, mesh, ["<b>&", None])
    text = page([fd.compile()], source, alternatives=False)
    read = Page(text)
    assert text.count("<script") == 2 and "alert(1)" in json.dumps(read.programs)
    assert read.programs[0]["collectives"][0]["axes"] == "<b>&"


def test_the_runner_up_is_shown_with_alternatives() -> None:
    compiled = layers(1).compile()
    for alternatives in (True, False):
        (program,) = Page(page([compiled], alternatives=alternatives)).programs
        assert all((c["instead"] is not None) == alternatives for c in program["collectives"])


@pytest.mark.slow
def test_repeated_layers_are_folded() -> None:
    compiled = layers(12).compile()
    (program,) = Page(page([compiled], alternatives=False)).programs
    names = [row["name"] for row in program["rows"]]
    ((start, period, count),) = program["folds"]
    assert count >= 11 and period == names[start : start + period].count("input") + 8
    for again in range(1, count):
        assert names[start : start + period] == names[start + again * period : start + (again + 1) * period]
    assert not Page(page([layers(1).compile()], alternatives=False)).programs[0]["folds"]


@given(st.lists(st.integers(0, 9), max_size=9), st.lists(st.integers(0, 3), min_size=2, max_size=5), st.integers(3, 9))
def test_a_repeated_part_is_found(before: list[int], part: list[int], count: int) -> None:
    keys = [*(n + 10 for n in before), *part * count, 99]
    found = repeats(keys)
    covered = {i for start, period, n in found for i in range(start, start + period * n)}
    assert covered >= set(range(len(before), len(keys) - 1)) or len(set(part)) < len(part)
    for start, period, n in found:
        assert n >= 3 and period >= 2
        once = keys[start : start + period]
        assert keys[start : start + period * n] == once * n
    assert all(a[0] + a[1] * a[2] <= b[0] for a, b in itertools.pairwise(found))


def program_of(fd: mf.FusionDefinition) -> dict:
    (program,) = Page(page([fd.compile()], alternatives=False)).programs
    return program


def test_inputs_stand_under_the_op_that_reads_them_first() -> None:
    rows = program_of(layers(2))["rows"]
    readers = {row["label"].split(" ")[0]: rows[row["under"]] for row in rows if row["name"] == "input"}
    assert readers["x"]["name"] == "matmul" and readers["x"]["in"][0] == 0
    assert len([row for row in rows if row["name"] == "input"]) == 5
    for place, row in enumerate(rows):
        if row["name"] == "input":
            assert row["under"] > place and place in rows[row["under"]]["in"]
            assert all(place not in earlier["in"] for earlier in rows[: row["under"]])


def test_layers_have_one_name_while_they_are_folded() -> None:
    mesh = mf.DeviceMesh((2,), ("tp",))
    with mf.FusionDefinition() as fd:
        y = fd.define_tensor([4, 8], name="x")
        for i in range(5):
            w = fd.define_tensor([8, 8], name=f"h{i}.mlp.up")
            fd.mesh_split(w, mesh, [None, "tp"])
            y = fd.ops.tanh(fd.ops.matmul(y, w))
        fd.add_output(y)
    program = program_of(fd)
    names = {row.get("layers") for row in program["rows"]}
    assert "h*.mlp.up" in names and "y" in names


def test_results_of_one_op_stand_apart_and_repeated_work_is_marked() -> None:
    mesh = mf.DeviceMesh((2, 4), ("dp", "tp"))
    with mf.FusionDefinition() as fd:
        x = fd.define_tensor([8, 16])
        for made in fd.ops.var_mean(x, [1]):
            fd.add_output(made)
        fd.mesh_split(x, mesh, ["dp", None])
    rows = [row for row in program_of(fd)["rows"] if row["name"] == "var_mean"]
    first, second = rows
    assert second["more"] == program_of(fd)["rows"].index(first) and "repeated" not in second
    assert first["label"] != second["label"] and len(first["shards"]) == len(second["shards"]) == 1
    assert first["repeated"] == 4  # the ranks of tp do the same


def test_work_that_every_rank_has_a_part_of_is_not_marked() -> None:
    mesh = mf.DeviceMesh((2, 4), ("dp", "tp"))
    with mf.FusionDefinition() as fd:
        x = fd.define_tensor([8, 16])
        fd.add_output(fd.ops.relu(x))
        fd.mesh_split(x, mesh, ["dp", "tp"])
    assert all("repeated" not in row for row in program_of(fd)["rows"])


@pytest.mark.parametrize(("pre", "size", "place"), [(1, 2, "tp // 4"), (2, 2, "tp // 2 % 2"), (4, 2, "tp % 2")])
def test_the_legend_says_which_ranks_a_part_of_an_axis_splits(pre: int, size: int, place: str) -> None:
    mesh = mf.DeviceMesh((8,), ("tp",))
    with mf.FusionDefinition() as fd:
        x = fd.define_tensor([8, 16])
        fd.add_output(fd.ops.relu(x))
        fd.mesh_split(x, mesh, [[mf.Split(size, "tp", pre)], None])
    assert [f"tp:({pre}){size}", "tp", place] in program_of(fd)["parts"]
    for rank in range(8):
        assert mesh.digit(rank, "tp", pre, size) == eval(place, {"tp": rank})


def overlapped() -> mf.FusionDefinition:
    mesh = mf.DeviceMesh((4,), ("tp",), links={"tp": mf.Link(100e9, 1e-6)})
    with mf.FusionDefinition() as fd:
        x, w = (fd.define_tensor([4096, 4096], dtype=mf.DataType.BFloat16) for _ in range(2))
        y = fd.ops.linear(x, w)
        fd.add_output(y)
        for t, spec in ((x, [None, "tp"]), (w, [None, "tp"]), (y, [None, None])):
            fd.mesh_split(t, mesh, spec)
        fd.overlap(y, 4)
    return fd


def bars_by_rank(compiled: CompiledProgram) -> dict[int, list]:
    return {rank: list(bars) for ranks, bars in timeline_lanes(compiled) for rank in ranks}


@pytest.mark.slow
@pytest.mark.parametrize("make", PROGRAMS)
def test_the_timeline_has_each_rank_s_work_one_after_the_other(make: Callable[[], mf.FusionDefinition]) -> None:
    fd = make()
    compiled, lanes = fd.compile(), bars_by_rank(fd.compile())
    assert sorted(lanes) == list(compiled.ranks)
    bill = fd.bill().entries
    for bars in lanes.values():
        links = {entry.axes: [b for b in bars if b.collective >= 0 and bill[b.collective].axes == entry.axes]
                 for entry in bill}  # fmt: skip
        for busy in ([b for b in bars if b.node is not None], *links.values()):
            for a, b in itertools.pairwise(busy):
                assert b.start >= a.end - 1e-15
    for place, entry in enumerate(fd.bill().entries):
        shown = [s for bars in lanes.values() for s in bars if s.collective == place]
        assert shown and all(s.seconds == entry.seconds for s in shown)


@pytest.mark.slow
def test_one_mesh_s_ranks_share_a_line_and_a_transfer_waits_for_its_sender() -> None:
    ((ranks, bars),) = timeline_lanes(layers(3).compile())
    assert ranks == tuple(range(8))
    assert sum(s.seconds for s in bars if s.collective >= 0) == pytest.approx(layers(3).bill().seconds)
    lanes = bars_by_rank(two_meshes().compile())
    sent = next(s for s in lanes[2] if s.collective >= 0)
    assert sent.start == max(s.start + s.seconds for s in lanes[0] if s.node is not None) > 0


@pytest.mark.parametrize("make", [*PROGRAMS[:3], overlapped])
def test_the_critical_path_leads_from_the_beginning_to_the_end_without_a_gap(
    make: Callable[[], mf.FusionDefinition],
) -> None:
    every = [bar for bars in bars_by_rank(make().compile()).values() for bar in bars]
    path = sorted({(bar.start, bar.end) for bar in every if bar.critical and bar.seconds > 0})
    assert path[0][0] == 0 and path[-1][1] == max(bar.end for bar in every)
    assert all(a[1] == pytest.approx(b[0]) for a, b in itertools.pairwise(path))


@pytest.mark.parametrize("make", [*PROGRAMS[:3], overlapped])
def test_nothing_begins_before_what_it_reads_is_there(make: Callable[[], mf.FusionDefinition]) -> None:
    compiled = make().compile()
    for bars in bars_by_rank(compiled).values():
        last = {("op", b.node) if b.node is not None else ("sent", b.collective): b.end for b in bars}
        first = {("op", b.node) if b.node is not None else ("sent", b.collective): b.start for b in bars[::-1]}
        made = dict[int, tuple[str, int | None]]()
        sends = list(compiled.resharded.sends)
        for statement in compiled.resharded.statements:
            node = getattr(statement, "node", None)
            key = ("sent", sends.index(statement)) if statement in sends else ("op", node)
            whole = make is not overlapped  # chunks begin once a chunk is there
            for value in statement.inputs:
                if whole and key in first and made.get(value) in last:
                    assert first[key] >= last[made[value]] - 1e-15
            made.update(dict.fromkeys(statement.outputs, key))


def moves_nothing() -> mf.FusionDefinition:
    """A step between shardings for which no rank sends anything."""
    return programs.PROGRAMS["l5"].define()


def rows_of_experts() -> mf.FusionDefinition:
    mesh = mf.DeviceMesh((4,), ("ep",))
    with mf.FusionDefinition() as fd:
        x, chosen = fd.define_tensor([16, 8]), fd.define_tensor([16, 2], dtype=mf.DataType.Int)
        scores, weight = fd.define_tensor([16, 2]), fd.define_tensor([8, 8, 8])
        rows, expert = fd.ops.moe_dispatch(x, chosen, 8)
        y = fd.ops.moe_combine(fd.ops.moe_linear(rows, expert, weight), chosen, scores)
        fd.add_output(y)
        for tensor in (x, chosen, y):
            fd.mesh_split(tensor, mesh, ["ep", None])
        fd.mesh_split(weight, mesh, ["ep", None, None], stationary=True)
    return fd


@pytest.mark.slow
@pytest.mark.parametrize("make", [moves_nothing, rows_of_experts])
def test_every_collective_has_a_bar(make: Callable[[], mf.FusionDefinition]) -> None:
    program = program_of(make())
    bars = {bar[3] for lane in program["timeline"] for bar in lane["bars"]}
    assert program["collectives"] and bars - {-1} == set(range(len(program["collectives"])))


def test_chunks_overlap_with_their_collectives() -> None:
    fd = overlapped()
    ((_, bars),) = timeline_lanes(fd.compile())
    ops, sent = [b for b in bars if b.node is not None], [b for b in bars if b.node is None]
    assert len(ops) == len(sent) == 4 and max(b.end for b in bars) < sum(b.seconds for b in bars)
    (lane,) = program_of(fd)["timeline"]
    beside = sum(max(0.0, min(a.end, b.end) - max(a.start, b.start)) for a in ops for b in sent)
    assert 0 < lane["hidden"] < 1 and lane["hidden"] == pytest.approx(beside / sum(b.seconds for b in sent))


def test_show_writes_the_page_or_is_shown_by_a_notebook(tmp_path: Path) -> None:
    fd = layers(1)
    shown = fd.show(tmp_path / "page.html")
    assert shown.path == str(tmp_path / "page.html") and (tmp_path / "page.html").read_text() == shown.html
    assert "<title>test_bill_page.py</title>" in shown.html and repr(shown) == f"ShownPage(path={shown.path!r})"
    frame = Page(shown._repr_html_()).attributes[0]
    assert frame[0] == "iframe" and frame[1]["srcdoc"] == shown.html
    with pytest.raises(mf.DefinitionError, match=r"cannot write the page to .*missing"):
        shown.save(tmp_path / "missing" / "page.html")


def test_show_without_a_path_makes_a_file(monkeypatch: pytest.MonkeyPatch) -> None:
    opened = list[str]()
    monkeypatch.setattr("webbrowser.open", opened.append)
    monkeypatch.delitem(sys.modules, "ipykernel", raising=False)
    monkeypatch.setattr("sys.stdout.isatty", lambda: False, raising=False)
    shown = layers(1).show()
    assert Path(shown.path).read_text() == shown.html and not opened
    monkeypatch.setattr("sys.stdout.isatty", lambda: True, raising=False)
    again = layers(1).show()
    assert opened == [Path(again.path).as_uri()]
    monkeypatch.setitem(sys.modules, "ipykernel", sys)
    assert layers(1).show().path == ""
