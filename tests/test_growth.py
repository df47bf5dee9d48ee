"""Reports do as much for each op of many layers as of few: none looks through the whole program for each of its ops.
So does planning for each rank of many.
"""

from __future__ import annotations

import sys
from collections.abc import Callable
from typing import Any

import pytest

import meshfuse as mf
from meshfuse import caches
from meshfuse.report.explain import explain_all
from meshfuse.report.page import page


@pytest.fixture(autouse=True)
def tables_stay(monkeypatch: pytest.MonkeyPatch) -> None:
    """What is counted is work with warm tables: none are dropped between one count and the next."""
    monkeypatch.setattr(caches, "MOST", 1e12)


MESH = mf.DeviceMesh((2, 4), ("dp", "tp"))
ROWS, WIDTH, HIDDEN = 64, 64, 128


def norm(fd: mf.FusionDefinition, x: mf.TensorView) -> mf.TensorView:
    centred = x - fd.ops.mean(x, [-1], keepdim=True)
    return centred * fd.ops.rsqrt(fd.ops.mean(centred * centred, [-1], keepdim=True) + 1e-5)


def stack(layers: int, **settings: Any) -> mf.FusionDefinition:
    """Forward and backward of an MLP's layers: splits that go through all layers, and moves in each."""
    given: list[mf.TensorView] = []

    def weight(fd: mf.FusionDefinition, shape: list[int], spec: list[str | None]) -> mf.TensorView:
        given.append(fd.define_tensor(shape))
        fd.mesh_split(given[-1], MESH, spec)
        return given[-1]

    with mf.FusionDefinition(search="fast", **settings) as fd:
        x = weight(fd, [ROWS, WIDTH], ["dp", None])
        for _ in range(layers):
            hidden = fd.ops.relu(fd.ops.linear(norm(fd, x), weight(fd, [HIDDEN, WIDTH], ["tp", "dp"])))
            x = x + fd.ops.linear(hidden, weight(fd, [WIDTH, HIDDEN], [None, "tp"]))
        loss = fd.ops.sum(x * x, [0, 1])
        for result in (loss, *fd.grad(loss, given[1:])):
            fd.add_output(result)
    return fd


def calls(work: Callable[[], object]) -> int:
    """Of functions, Python's and C's, that the work makes."""
    count = 0

    def seen(frame: object, event: str, argument: object) -> None:
        nonlocal count
        count += event in ("call", "c_call")

    sys.setprofile(seen)
    try:
        work()
    finally:
        sys.setprofile(None)
    return count


REPORTS: dict[str, Callable[[mf.FusionDefinition], object]] = {
    "bill": lambda fd: str(fd.bill().details()),
    "table": lambda fd: explain_all(fd.compile()),
    "page": lambda fd: page([fd.compile()], "growth", alternatives=False),
    "memory": lambda fd: str(fd.memory()),
    "definition": str,
    "program of a rank": lambda fd: str(fd.host_program(1)),
    "outputs": lambda fd: fd.output_shardings(),
}


@pytest.mark.parametrize("name", REPORTS)
def test_reports_do_as_much_for_an_op_of_many_layers(name: str) -> None:
    def work(layers: int) -> float:
        fd = stack(layers)
        fd.compile()
        return calls(lambda: REPORTS[name](fd)) / len(fd.recording.nodes)

    work(2)
    assert work(24) <= 1.15 * work(6)


def halves_swapped(fd: mf.FusionDefinition, x: mf.TensorView) -> mf.TensorView:
    rows, columns = x.size(0), x.size(1)
    last = fd.ops.slice(x, [rows // 2, 0], [rows, columns])
    return fd.ops.cat([last, fd.ops.slice(x, [0, 0], [rows // 2, columns])], 0)


ON_MANY_RANKS: dict[str, Callable[[mf.FusionDefinition, mf.TensorView], mf.TensorView]] = {
    "halves swapped": halves_swapped,
    "padded by a row": lambda fd, x: fd.ops.pad(x, [0, 0, 1, -1]),
    "without its first row": lambda fd, x: fd.ops.slice(x, [1, 0], [x.size(0), x.size(1)]),
    "scanned along its rows": lambda fd, x: fd.ops.cumsum(x, 0),
    "transposed": lambda fd, x: fd.ops.permute(x, [1, 0]),
    "sent to another mesh": lambda fd, x: fd.ops.relu(x),
}


@pytest.mark.parametrize("name", ON_MANY_RANKS)
def test_planning_does_as_much_for_a_rank_of_many(name: str) -> None:
    """A rank of thousands has a few neighbours, or one equal block for each other: none looks at all pairs of ranks,
    nor a sample of ranks at all others each.
    """

    def work(ranks: int) -> int:
        mesh = mf.DeviceMesh((ranks,), ("dp",))
        other = mf.DeviceMesh((ranks,), ("dp",), ranks=range(ranks, 2 * ranks))
        with mf.FusionDefinition() as fd:
            x = fd.define_tensor([4 * 1024, 1024])
            y = ON_MANY_RANKS[name](fd, x)
            fd.mesh_split(x, mesh, ["dp", None])
            fd.mesh_split(y, other if name == "sent to another mesh" else mesh, ["dp", None])
            fd.add_output(y)
        return calls(lambda: (fd.compile(), fd.host_program(1), fd.bill()))

    work(4)
    assert work(512) - work(256) <= 256 * 700
