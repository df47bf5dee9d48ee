"""The page as a browser shows it: what is on it, what clicks do, and that a narrow window holds it."""

from __future__ import annotations

import html
import json
import re
from functools import cache
from pathlib import Path
from typing import Any

import pytest

import meshfuse as mf
from meshfuse.report.page import page
from scripts import script

pytestmark = pytest.mark.browser

# Run when the page has: what it shows, before and after some clicks.
LOOK = """
const text = node => node.innerText.trim(), all = what => [...document.querySelectorAll(what)];
const shown = what => all(what).filter(node => node.offsetParent !== null);
const seen = {rows: shown(".row").map(text), legend: text(document.getElementById("legend")), path: text($("path")),
  width: [document.documentElement.scrollWidth, innerWidth], same: shown(".same").length,
  table: shown("table.bill tbody tr").map(text), graph: all("#graph > div").map(node => node.scrollWidth)[0],
  cut: shown(".row .op").filter(node => node.getBoundingClientRect().right > innerWidth).length,
  bars: all("#timeline rect").length, critical: all("#timeline .critical").length, hidden: text($("timeline"))};
const inputs = all(".row button");
seen.buttons = inputs.map(node => node.title);
inputs[0].click();
seen.opened = shown(".row.input").map(text);
all(".row button")[0].click();
seen.closed = shown(".row.input").length;
all(".row.fold").forEach(node => node.click());
seen.unfolded = shown(".row").map(text);
$("each").click();
seen.each = shown("table.bill tbody tr").length;
all(".row .op")[1].dispatchEvent(new MouseEvent("mouseover", {bubbles: true}));
seen.detail = text($("detail"));
$("search").value = "h3.mlp.down";
$("search").oninput({target: $("search")});
seen.hits = shown(".row.hit").map(text);
const above = parent.document;
above.body.append(Object.assign(above.createElement("pre"), {id: "seen", textContent: JSON.stringify(seen)}));
"""


@cache
def definition() -> mf.FusionDefinition:
    """Layers with names, a part of an axis, an op of two results, and work that ranks of dp repeat."""
    mesh = mf.DeviceMesh((2, 4), ("dp", "tp"), links={"dp": mf.Link(25e9, 20e-6), "tp": mf.Link(450e9, 5e-6)})
    with mf.FusionDefinition() as fd:
        y = x = fd.define_tensor([64, 64], name="x")
        for i in range(6):
            up, down = (fd.define_tensor([64, 64], name=f"h{i}.mlp.{name}") for name in ("up", "down"))
            fd.mesh_split(up, mesh, ["tp", None])
            fd.mesh_split(down, mesh, [None, "tp"])
            y = fd.ops.linear(fd.ops.relu(fd.ops.linear(y, up)), down)
        for made in fd.ops.var_mean(y, [1]):
            fd.add_output(made)
        last = fd.ops.relu(fd.define_tensor([8, 8], name="part"))
        fd.add_output(last)
        fd.mesh_split(last, mesh, [[mf.Split(2, "tp", 2)], None])
        fd.mesh_split(x, mesh, [None, None])
    return fd


@pytest.fixture(scope="module", params=[1300, 480])
def seen(request: pytest.FixtureRequest, tmp_path_factory: pytest.TempPathFactory) -> dict[str, Any]:
    """What a frame of this width shows: windows of Chromium's are at least 500 pixels wide."""
    path: Path = tmp_path_factory.mktemp("page") / "frame.html"
    text = page([definition().compile()], "a title", alternatives=False)
    looked = html.escape(text.replace("</body>", f"<script>{LOOK}</script></body>"))
    path.write_text(f'<iframe style="width:{request.param}px;height:900px;border:0" srcdoc="{looked}"></iframe>')
    dom = script("tools/browser.py").dom(path, 1400)
    found = re.search(r'<pre id="seen">(.*?)</pre>', dom, re.S)
    assert found, "a script of the page has failed"
    made = json.loads(html.unescape(found.group(1)))
    assert made["width"][1] == request.param
    return made


def test_layers_are_folded_and_unfold(seen: dict[str, Any]) -> None:
    assert any("h*.mlp.up" in text for text in seen["buttons"])
    (fold,) = [row for row in seen["rows"] if "more times these" in row]
    times = int(fold.split()[0])
    assert any(f"×{times + 1}" in row for row in seen["rows"]) and 4 <= times <= 5
    assert len(seen["unfolded"]) > len(seen["rows"]) + 3 * times - 2


def test_inputs_open_under_their_op(seen: dict[str, Any]) -> None:
    assert not any(row.startswith("input") for row in seen["rows"])
    assert seen["opened"] and all(row.startswith("input") for row in seen["opened"]) and seen["closed"] == 0


def test_the_legend_and_marks(seen: dict[str, Any]) -> None:
    assert re.search(r"dp 2\s*tp 4", seen["legend"]) and re.search(r"tp:\(2\)2\s*= tp % 2", seen["legend"])
    assert "same on n" in seen["legend"] and seen["same"] > 1


def test_results_of_one_op_have_rows_of_their_own(seen: dict[str, Any]) -> None:
    assert [row.split("\n")[0] for row in seen["rows"] if "var_mean" in row] == ["var_mean", "↳ var_mean"]


def test_the_timeline_says_what_decides_the_time(seen: dict[str, Any]) -> None:
    assert 0 < seen["critical"] < seen["bars"] and "% hidden" in seen["hidden"]
    assert re.search(r"decide the [\d.,]+ µs: [\d.,]+ µs of ops, [\d.,]+ µs of collectives", seen["path"])


def test_the_table_has_equal_layers_as_one_row_until_asked(seen: dict[str, Any]) -> None:
    entries = definition().bill().entries
    assert len(seen["table"]) == len(definition().bill().folded()) < len(entries)
    assert any("×" in row for row in seen["table"]) and seen["each"] == len(seen["table"]) + len(entries)


def test_pointing_and_searching(seen: dict[str, Any]) -> None:
    assert "sharded" in seen["detail"]
    assert len(seen["hits"]) == 1 and seen["hits"][0].startswith("input") and "h3.mlp.down" in seen["hits"][0]


def test_the_window_holds_the_page(seen: dict[str, Any]) -> None:
    """Nothing lies beyond the right edge, but in boxes that scroll."""
    scroll, inner = seen["width"]
    assert scroll <= inner and seen["graph"] <= inner and seen["cut"] == 0
