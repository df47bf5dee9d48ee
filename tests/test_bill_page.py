"""The page of a bill: it parses, needs nothing from elsewhere, and holds every collective; layers that are folded."""

from __future__ import annotations

import itertools
import json
import re
from collections.abc import Callable
from html.parser import HTMLParser

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
    assert len(program["rows"]) == len(fd.compile().graph.input_tensors) + len(fd.compile().graph.nodes) + 1
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
    inputs, ops = program["folds"]
    assert inputs[1] * inputs[2] == 24 and ops[1] * ops[2] >= 4 * 11
    for start, period, count in program["folds"]:
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


def bars_by_rank(compiled: CompiledProgram) -> dict[int, list]:
    return {rank: list(bars) for ranks, bars in timeline_lanes(compiled) for rank in ranks}


@pytest.mark.slow
@pytest.mark.parametrize("make", PROGRAMS)
def test_the_timeline_has_each_rank_s_work_one_after_the_other(make: Callable[[], mf.FusionDefinition]) -> None:
    fd = make()
    compiled, lanes = fd.compile(), bars_by_rank(fd.compile())
    assert sorted(lanes) == list(compiled.ranks)
    for bars in lanes.values():
        for a, b in itertools.pairwise(bars):
            assert b.start >= a.start + a.seconds - 1e-15
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
