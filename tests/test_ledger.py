"""The ledger: random programs are planned as it says, it has every program, and its digests tell what they should.

The programs of the bills are compared where they are planned anyway, in test_bills.py and test_bill_classes.py.
"""

from __future__ import annotations

import dataclasses
import functools
import re
from collections.abc import Callable
from typing import Any, get_args

import pytest

import meshfuse as mf
from ledger import book
from ledger.drawn import COUNT, drawn
from ledger.facts import Entry, entry_of
from ledger.known_programs import LONG, all_programs, random_name
from meshfuse.compiler import CompiledProgram
from meshfuse.host_ir import HostProgram
from meshfuse.lowering import rank_lowering as lower
from meshfuse.lowering.instructions import Instruction, Kernel

pytestmark = pytest.mark.slow

AT_ONCE = 10
MESH = mf.DeviceMesh((4,), ("tp",))
INSTRUCTIONS = (*get_args(Instruction), Kernel)


@pytest.mark.sampled(3)
@pytest.mark.parametrize("first", range(0, COUNT, AT_ONCE))
@pytest.mark.filterwarnings("ignore::meshfuse.PlanWarning")
def test_random_programs_are_planned_as_before(first: int) -> None:
    numbers = range(first, min(first + AT_ONCE, COUNT))
    found = [book.difference(random_name(n), book.kept().get(random_name(n)), entry_of(drawn(n))) for n in numbers]
    assert not any(found), "\n".join([*filter(None, found), book.REWRITE])


@pytest.mark.parametrize("name", LONG)
def test_programs_of_many_layers_are_planned_as_before(name: str) -> None:
    book.assert_unchanged(f"long/{name}", LONG[name]())


def test_the_ledger_has_every_program_and_no_other() -> None:
    assert sorted(book.kept()) == sorted(all_programs()), book.REWRITE


def test_the_file_is_as_it_would_be_written() -> None:
    """One line for each program, so that a change is a line of a diff."""
    assert book.FILE.read_text() == book.as_text(book.kept())
    assert len(book.FILE.read_text().splitlines()) == len(book.kept()) + 2


# what digests tell ------------------------------------------------------------------------------------------------


def row_parallel(
    rows: int = 16, dtype: mf.DataType = mf.DataType.Float, reduce: str = "sum", body: str = "relu",
    mesh: mf.DeviceMesh = MESH, spec: tuple[str | None, str | None] = (None, None), scatter: bool = False,
) -> mf.FusionDefinition:  # fmt: skip
    """A product over a split dim, a reduction over another one, and what is made of both."""
    with mf.FusionDefinition() as fd:
        x, w = fd.define_tensor([rows, 32], dtype=dtype), fd.define_tensor([32, 8], dtype=dtype)
        y = fd.ops.matmul(x, w)
        z = getattr(fd.ops, body)(y)
        least = getattr(fd.ops, reduce)(x, [1])
        for tensor in (z, least):
            fd.add_output(tensor)
        fd.mesh_split(x, mesh, [None, "tp"])
        fd.mesh_split(w, mesh, ["tp", None])
        fd.mesh_split(z, mesh, ["tp", None] if scatter else list(spec))
        fd.mesh_split(least, mesh, [None])
    return fd


@functools.cache
def base() -> Entry:
    return entry_of(row_parallel())


@pytest.mark.parametrize(
    ("make", "fields"),
    [
        (lambda: row_parallel(rows=24), {"bytes", "seconds", "held", "ranks"}),
        (lambda: row_parallel(dtype=mf.DataType.Double), {"bytes", "seconds", "ranks"}),
        (lambda: row_parallel(reduce="max"), {"ranks"}),
        (lambda: row_parallel(body="tanh"), {"ranks"}),
        (lambda: row_parallel(scatter=True), {"bytes", "seconds", "collectives", "held", "ranks"}),
        (lambda: row_parallel(mesh=mf.DeviceMesh((4,), ("tp",), ranks=[2, 0, 1, 3])), {"held", "ranks"}),
        (lambda: row_parallel(mesh=mf.DeviceMesh((4,), ("tp",), links=mf.Link(1e9, 1e-6))), {"seconds"}),
    ],
    ids=["sizes", "dtype", "reduction", "op", "collective", "order of ranks", "links"],
)
def test_an_entry_tells_what_is_not_the_same(make: Callable[[], mf.FusionDefinition], fields: set[str]) -> None:
    found = entry_of(make())
    assert {field for field in base() if base()[field] != found[field]} == fields


SOME = range(0, COUNT, 20)


def unchanged(number: int) -> mf.FusionDefinition:
    fd = drawn(number)
    book.assert_unchanged(random_name(number), fd)
    return fd


@pytest.mark.parametrize("number", SOME)
def test_an_entry_tells_nothing_of_where_copies_are_done(number: int, monkeypatch: pytest.MonkeyPatch) -> None:
    """As instructions of their own, not in the kernels beside them."""
    monkeypatch.setattr(lower, "fuse_copies", lambda body, *_: list(body))
    assert not any(kernel.unpacks or kernel.packs for kernel in unchanged(number).host_program(0).kernels)


@pytest.mark.parametrize("number", SOME)
def test_an_entry_tells_nothing_of_names(number: int, monkeypatch: pytest.MonkeyPatch) -> None:
    """Of buffers and works."""
    plain = CompiledProgram.host_program
    monkeypatch.setattr(CompiledProgram, "host_program", lambda self, rank: _renamed(plain(self, rank)))
    assert "buffer_" in str(unchanged(number).host_program(0))


def _renamed(what: Any) -> Any:
    """A host program in which buffers and works have other names."""
    if isinstance(what, str):
        return re.sub(r"\bw(?=\d)", "work_", re.sub(r"\bv(?=\d)", "buffer_", what))
    if isinstance(what, tuple):
        return tuple(map(_renamed, what))
    if isinstance(what, (HostProgram, *INSTRUCTIONS)):
        return dataclasses.replace(what, **{f.name: _renamed(getattr(what, f.name)) for f in dataclasses.fields(what)})
    return what


# what is printed --------------------------------------------------------------------------------------------------


def changed(**fields: Any) -> str:
    """The difference from an entry in which some fields are others."""
    old = {"bytes": 2000, "seconds": 1e-4, "collectives": {"all-gather": 2, "all-reduce": 1}, "held": "a",
           "ranks": {"x": "0,1,2", "y": "3"}}  # fmt: skip
    return book.difference("some/program", old, {**old, **fields})


def test_a_difference_says_what_changed_in_which_program() -> None:
    assert changed() == ""
    assert changed(bytes=1500, seconds=2e-4) == (
        "some/program: bytes 2,000 -> 1,500 (-25.00 %)\nsome/program: seconds 0.0001 -> 0.0002 (+100.00 %)"
    )
    assert changed(collectives={"all-gather": 1, "permute": 1, "all-reduce": 1}) == (
        "some/program: 3 -> 3 collectives: all-gather 2 -> 1, permute 0 -> 1"
    )
    assert changed(ranks={"x": "0,1", "z": "2", "y": "3"}) == "some/program: the program of rank 2 does something else"
    assert changed(ranks={"z": "0,1,2,3"}) == "some/program: the program of all ranks does something else"
    assert changed(held="b") == "some/program: inputs or outputs lie elsewhere"


def test_new_and_missing_programs_are_reported() -> None:
    assert book.difference("a/b", None, base()) == "a/b: not in the ledger"
    assert book.difference("a/b", base(), None) == "a/b: no such program any more"
    with pytest.raises(AssertionError, match=r"no/program: not in the ledger\n.*`make ledger` writes the new ones"):
        book.assert_unchanged("no/program", row_parallel())
