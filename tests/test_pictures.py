"""Pictures of shardings, and what notebooks show of meshfuse's values."""

from __future__ import annotations

import html.parser
import itertools
import xml.etree.ElementTree as ElementTree
from pathlib import Path
from typing import Any

import pytest
import torch
from rich.console import Console

import meshfuse as mf
from meshfuse.sharding.picture import Picture, picture_of

ROOT = Path(__file__).parent.parent
MESH = mf.DeviceMesh((2, 2), ("dp", "tp"))


def split(*sizes_axes: tuple[int, str | None]) -> tuple[mf.Split, ...]:
    return tuple(mf.Split(size, axis) for size, axis in sizes_axes)


def test_a_grid_of_uneven_pieces_as_text(capsys: pytest.CaptureFixture[str]) -> None:
    mf.Sharding.make(MESH, [split((2, "dp")), split((2, "tp"))], [5, 6]).show([5, 6])
    assert capsys.readouterr().out == (
        "[5, 6] [dp, tp]\n"
        "      0:3   3:6\n"
        "    +-----+-----+\n"
        "0:3 |  0  |  1  |\n"
        "    +-----+-----+\n"
        "3:5 |  2  |  3  |\n"
        "    +-----+-----+\n"
    )  # fmt: skip


CASES: list[tuple[list[tuple[mf.Split, ...]], list[int]]] = [
    ([split((2, "dp")), split((2, "tp"))], [7, 5]),
    ([split((2, "dp"), (2, "tp")), ()], [6, 3]),
    ([split((2, "tp"), (2, "dp")), ()], [8, 3]),
    ([split((3, None), (2, "tp"))], [12]),
    ([(), split((2, "dp"))], [4, 1]),
    ([()], [4]),
    ([], []),
]


@pytest.mark.parametrize(("dims", "shape"), CASES)
def test_the_ranks_of_a_piece_are_those_that_hold_its_elements(dims: list[Any], shape: list[int]) -> None:
    """Each rank's shard, cut out of the numbers of the elements by torch's slices alone, says what it holds."""
    sharding = mf.Sharding.make(MESH, dims, shape)
    picture = picture_of(sharding, shape, "t")
    numbers = torch.arange(max(torch.Size(shape).numel(), 1)).reshape(shape)
    held = {rank: set(mf.shard_tensor(numbers, sharding, rank).flatten().tolist()) for rank in MESH.ranks}
    spans = [picture.rows, picture.columns][2 - len(shape) :]
    for (i, _), (j, _) in itertools.product(enumerate(picture.rows), enumerate(picture.columns)):
        place = [span[k] for span, k in zip(spans, (i, j)[2 - len(shape) :], strict=True)]
        piece = set(numbers[tuple(slice(*interval) for interval in place)].flatten().tolist())
        assert {rank for rank in MESH.ranks if piece <= held[rank]} == set(picture.ranks[i][j])
        assert all(piece <= mine or not piece & mine for mine in held.values())
    covered = [sum(b - a for a, b in span) for span in spans]
    assert covered == shape


def test_of_many_dims_the_two_are_shown_that_are_cut_most_and_of_many_pieces_the_first() -> None:
    mesh = mf.DeviceMesh((2, 2, 2), ("a", "b", "c"))
    sharding = mf.Sharding.make(mesh, [split((2, "a")), (), split((2, "b")), split((2, "c"))], [2, 3, 4, 5])
    shown = picture_of(sharding, [2, 3, 4, 5], "t")
    assert shown.title == "t (dims 0 and 2, at index 0 of the others)"
    assert shown.ranks == (((0,), (2,)), ((4,), (6,)))
    cyclic = mf.Sharding.make(MESH, [split((64, None), (2, "tp"))], [128])
    shown = picture_of(cyclic, [128], "t")
    assert shown.title == "t (the first 24 of 128 pieces of dim 0)" and len(shown.columns) == 24


def test_terms_of_a_sum_are_said() -> None:
    sharding = mf.Sharding(MESH, [(), ()], [mf.Split(2, "tp")], "sum")
    assert sharding.note() == "; each rank has a term of a sum over tp"


def rects(picture: Picture) -> list[tuple[float, str]]:
    """(area, colour) of each piece of an SVG, which is well-formed and has no scripts."""
    root = ElementTree.fromstring(picture.svg())
    assert not [e for e in root.iter() if e.tag.rpartition("}")[2] in ("script", "foreignObject", "a", "image")]
    found = [e for e in root.iter() if e.tag.endswith("rect")]
    return [(float(e.attrib["width"]) * float(e.attrib["height"]), e.attrib["fill"]) for e in found]


def test_an_svg_has_a_piece_for_each_and_a_colour_for_each_set_of_ranks() -> None:
    shape = [12, 9]
    found = rects(picture_of(mf.Sharding.make(MESH, [split((3, None), (2, "tp")), ()], shape), shape, "a < b & c"))
    assert len(found) == 6 and len({colour for _, colour in found}) == 2
    uneven = rects(picture_of(mf.Sharding.make(MESH, [split((2, "dp")), ()], [5, 4]), [5, 4], "t"))
    assert uneven[0][0] == pytest.approx(uneven[1][0] * 3 / 2)


def test_a_terminal_shows_colours() -> None:
    picture = picture_of(mf.Sharding.make(MESH, [split((2, "dp")), ()], [4, 4]), [4, 4], "t")
    console = Console(force_terminal=True, color_system="truecolor", width=60)
    with console.capture() as printed:
        console.print(picture)
    assert printed.get().count("\x1b[30;48;2;") == 2 and "0,1" in printed.get()


def defined() -> tuple[mf.FusionDefinition, mf.TensorView, mf.TensorView]:
    with mf.FusionDefinition() as fd:
        x, w = fd.define_tensor([8, 4], name="<b>x</b>"), fd.define_tensor([6, 4])
        y = fd.ops.linear(x, w)
        fd.add_output(y)
        fd.mesh_split(x, MESH, ["dp", "tp"])
        fd.mesh_split(w, MESH, ["tp", None])
    return fd, x, y


def test_visualize_shows_where_the_latest_program_has_a_tensor(capsys: pytest.CaptureFixture[str]) -> None:
    fd, x, y = defined()
    fd(torch.ones(8, 4), torch.ones(6, 4))
    mf.visualize(x)
    mf.visualize(y)
    first, second = capsys.readouterr().out.split("y (")
    assert first.startswith("<b>x</b> (t0) [8, 4] [dp, tp]\n") and "0:4 |  0  |  1  |" in first
    assert f"[8, 6] {fd.output_shardings()[0]}" in second


def test_what_has_no_picture_is_an_error() -> None:
    for wrong in (torch.ones(3), None, "x"):
        with pytest.raises(mf.ArgumentError, match="needed a tensor of a definition, or a DTensor"):
            mf.visualize(wrong)
    with pytest.raises(mf.DefinitionError, match=r"the shape of a tensor in .*needed 2 sizes of 0 or more"):
        mf.Sharding.replicated(MESH, 2).show([1])


class Reader(html.parser.HTMLParser):
    """The text and the elements of a piece of HTML, all of which are closed."""

    def __init__(self) -> None:
        super().__init__()
        self.text, self.open, self.seen = "", [], set[str]()

    def handle_starttag(self, tag: str, attrs: Any) -> None:
        assert not any(name.startswith("on") for name, _ in attrs)
        self.open.append(tag)
        self.seen.add(tag)

    def handle_endtag(self, tag: str) -> None:
        assert self.open.pop() == tag

    def handle_data(self, data: str) -> None:
        self.text += f"{data} "


def read(value: Any) -> str:
    reader = Reader()
    reader.feed(value._repr_html_())
    assert reader.open == [] and not reader.seen & {"script", "b", "style", "link"}
    assert len(value._repr_html_()) < 25_000
    return reader.text


def test_what_notebooks_show_of_each_value() -> None:
    fd, x, _ = defined()
    assert "fd.define_tensor([8, 4]" in read(fd) and not fd._programs.compiled
    bill = fd.bill()
    for entry in bill.entries:
        assert entry.collective in read(bill) and entry.line in read(bill)
    assert "total" in read(bill) and "a step takes" in read(bill) and "total" in read(fd)
    assert "<b>x</b> (t0)" in read(fd.explain()) and "<b>x</b>" in read(fd.explain(x))
    assert f"at most {fd.memory().peak} bytes per rank" in read(fd.memory()).replace(",", "")
    assert read(fd.host_program(3)).startswith("rank 3: ") and "def main(" in read(fd.host_program(3))
    assert "rank 3" in read(MESH) and "tp" in read(MESH)
    (sharding,) = fd.output_shardings()
    assert "dim axes" in read(sharding).replace("  ", " ") and "DeviceMesh" in read(sharding)
    assert "(240 more lines)" in read(mf.DeviceMesh((256, 2), ("dp", "tp")))
    assert "no communication" in read(mf.FusionDefinition.bill(whole()))


def test_what_is_long_is_cut() -> None:
    with mf.FusionDefinition() as fd:
        x = fd.define_tensor([8, 4])
        for _ in range(3000):
            x = fd.ops.relu(x)
        fd.add_output(x)
    assert read(fd).endswith("and 2,606 more lines ")
    mesh = mf.DeviceMesh((2,), ("x",))
    fd = mf.FusionDefinition()
    inputs = [fd.define_tensor([2, 2], name=f"of{chr(97 + place // 26)}{chr(97 + place % 26)}") for place in range(150)]
    for x in inputs:
        fd.mesh_split(x, mesh, ["x", None])
        y = fd.ops.relu(x)
        fd.mesh_split(y, mesh, [None, "x"])
        fd.add_output(y)
    text = read(fd.bill())
    assert "51 more" in text and "150 collectives" in text


def whole() -> mf.FusionDefinition:
    with mf.FusionDefinition() as fd:
        x = fd.define_tensor([4])
        fd.add_output(fd.ops.relu(x))
    return fd


@pytest.mark.slow
def test_the_notebook_runs() -> None:
    import nbformat
    from nbclient import NotebookClient

    notebook = nbformat.read(ROOT / "examples" / "notebook.ipynb", as_version=4)
    assert not any(cell.get("outputs") for cell in notebook.cells), "clear the outputs before the commit"
    NotebookClient(notebook, timeout=200, kernel_name="python3").execute()
    shown = [out.get("data", {}) for cell in notebook.cells for out in cell.get("outputs", ())]
    assert sum("<svg" in data.get("text/html", "") for data in shown) == 2
    assert sum("<table" in data.get("text/html", "") for data in shown) >= 4
