"""The pictures of the benchmarks: the script draws them from the results, and the docs show files that are there."""

from __future__ import annotations

import json
import re
import xml.etree.ElementTree as ElementTree
from collections.abc import Iterator
from pathlib import Path

import pytest

from scripts import ROOT, script

SVG = "{http://www.w3.org/2000/svg}"
PLOTS = script("benchmarks/plots.py")
PAGES = [ROOT / "README.md", *sorted((ROOT / "docs").glob("*.md"))]


def elements(text: str, name: str) -> Iterator[ElementTree.Element]:
    return ElementTree.fromstring(text).iter(SVG + name)


def results(name: str) -> list[dict]:
    return json.loads((ROOT / "benchmarks" / name / "results.json").read_text())


@pytest.mark.slow
@pytest.mark.parametrize("name", PLOTS.PLOTS)
def test_a_plot_has_a_mark_for_every_result_and_is_the_one_in_the_docs(name: str, tmp_path: Path) -> None:
    assert PLOTS.main([name, "--out", str(tmp_path)]) == 0
    text = (tmp_path / f"{name}.svg").read_text()
    assert text == (ROOT / "docs" / "plots" / f"{name}.svg").read_text(), "run .venv/bin/python benchmarks/plots.py"
    words = {"".join(node.itertext()).strip() for node in elements(text, "text")}
    if name == "bills":
        assert {r["id"] for r in results(name)} <= words and {"meshfuse", "XLA", "DTensor"} <= words
    elif name == "compile":
        assert {f"{r['us_per_op']:,.0f} µs per op" for r in results(name)} <= words
    elif name == "session":
        assert {r["name"] for r in results(name)} <= words
    else:
        assert {f"{r['work']}, {r['ranks']} ranks" for r in results(name)} <= words


@pytest.mark.slow
def test_marks_stand_where_the_results_are(tmp_path: Path) -> None:
    """Twice the bytes are as far to the right everywhere, as the axis is logarithmic; no program is left out."""
    made = [{"id": f"p{i}", "ours_mb": 2.0**i, "xla_cpu_mb": 2.0 ** (i + 1), "dtensor_mb": None if i else 8.0}
            for i in range(4)]  # fmt: skip
    text = PLOTS.draw("bills", made, tmp_path).read_text()
    groups = {node.get("id"): node for node in elements(text, "g")}
    marks = [[float(use.get("x")) for use in groups[f"PathCollection_{i}"].iter(f"{SVG}use")] for i in (1, 2, 3)]
    dtensor, xla, ours = marks
    step = ours[1] - ours[0]
    assert len(dtensor) == 1 and len(xla) == len(ours) == 4 and step > 0
    assert [b - a for a, b in zip(ours, xla, strict=True)] == pytest.approx([step] * 4, rel=1e-3)
    assert dtensor[0] == pytest.approx(ours[3], rel=1e-6)


def test_a_name_that_is_no_benchmark_is_an_error(capsys: pytest.CaptureFixture[str]) -> None:
    with pytest.raises(SystemExit) as ended:
        PLOTS.main(["bill"])
    assert (
        ended.value.code == 2
        and "no such benchmark: bill; there are bills, compile, runtime, session" in capsys.readouterr().err
    )


@pytest.mark.parametrize("page", PAGES, ids=lambda page: page.name)
def test_pictures_of_a_page_are_there(page: Path) -> None:
    for target in re.findall(r"!\[[^\]]*\]\(([^)#]+)\)", page.read_text()):
        assert (page.parent / target).is_file(), target


def test_every_plot_is_shown_by_a_page() -> None:
    shown = "".join(page.read_text() for page in PAGES)
    for path in (ROOT / "docs" / "plots").iterdir():
        assert f"plots/{path.name})" in shown, path.name
