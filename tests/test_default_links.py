"""Meshes of which no links are given: the machine that they are on, and what plans there look like."""

from __future__ import annotations

import os
import sys
from collections import Counter
from pathlib import Path

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

import meshfuse as mf
from interpreter import has_reference, interpret
from meshfuse import costs, default_machine
from meshfuse.placement.roofline import computing_seconds
from meshfuse.testing import assert_same_as_unsharded, inputs_for
from refusing import raises
from test_random_programs import examples, keeps_annotations, programs

EXAMPLE = Path(__file__).parent.parent / "examples" / "gpt"
ONE_HOST = {"WORLD_SIZE": "2", "LOCAL_WORLD_SIZE": "2"}


@pytest.fixture(autouse=True)
def on_a_machine(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.delenv("MESHFUSE_LINKS")


def test_a_mesh_without_links_is_on_a_common_machine() -> None:
    machine = costs.DGX_H100
    assert mf.DeviceMesh((2, 4), ("dp", "tp")).links == (machine.inside, machine.inside)
    far = mf.DeviceMesh((2, 8), ("dp", "tp"))
    assert far.links == (machine.between, machine.inside) and not far.linked
    assert (far.flops, far.memory) == (machine.flops, machine.memory)
    assert repr(far) == "DeviceMesh((2, 8), ('dp', 'tp'))"
    assert far == mf.DeviceMesh((2, 8), ("dp", "tp"), links="dgx-h100")


def test_a_variable_names_another(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("MESHFUSE_LINKS", "laptop")
    mesh = mf.DeviceMesh((2,), ("tp",))
    assert mesh.links == (costs.LAPTOP.inside,) and (mesh.flops, mesh.memory) == (50e9, 10e9)
    monkeypatch.setenv("MESHFUSE_LINKS", "bytes")
    assert mf.DeviceMesh((2,), ("tp",)) == mf.DeviceMesh((2,), ("tp",), links=mf.Link.bytes_only())


def test_a_name_that_no_machine_has(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("MESHFUSE_LINKS", "dgx-h1000")
    raises("MESHFUSE_LINKS: found 'dgx-h1000', needed one of 'dgx-h100', ", lambda: mf.DeviceMesh((2,), ("tp",)))


def test_bytes_alone_decide_where_asked_for() -> None:
    mesh = mf.DeviceMesh((2, 8), ("dp", "tp"), links=mf.Link.bytes_only())
    assert mesh.is_bytes_only and mesh.linked
    assert mesh == mf.DeviceMesh((2, 8), ("dp", "tp"), links="bytes") == eval(repr(mesh), {**vars(mf), "mf": mf})
    assert not mf.DeviceMesh((2,), ("tp",), links=mf.Link.bytes_only(), flops=1e12).is_bytes_only


def test_links_alone_leave_the_rates_of_the_default() -> None:
    mesh = mf.DeviceMesh((4,), ("tp",), links=mf.Link(25e9, 2e-6))
    assert (mesh.flops, mesh.memory) == (costs.DGX_H100.flops, costs.DGX_H100.memory)
    assert mf.DeviceMesh((4,), ("tp",), links=mf.Link(25e9, 2e-6), flops=1e12, memory=1e11).costs[1:] == (1e12, 1e11)


@pytest.mark.parametrize("memory", [0, -1.0, float("nan"), "3e12", True, 1e31])
def test_a_memory_that_is_no_rate(memory: object) -> None:
    link, given = mf.Link(1e9, 0), repr(memory)
    rest = ", needed bytes per second, more than 0"
    raises(f"a mesh's memory: found {given!s}{rest}", lambda: mf.DeviceMesh((2,), ("tp",), memory=memory))
    raises(f"a machine's memory: found {given!s}{rest}", lambda: mf.Machine(link, link, 8, 1e12, memory))


# measured here ------------------------------------------------------------------------------------------------------


@pytest.fixture
def measured(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> mf.Machine:
    monkeypatch.setenv("MESHFUSE_CACHE", str(tmp_path))
    link = mf.Link(6.27e8, 1.77e-4)
    machine = mf.Machine(link, link, 2, 7.11e10, 1.07e10)
    assert default_machine.keep(machine) == tmp_path / "links.json"
    return machine


def test_what_was_measured_here_is_the_default(measured: mf.Machine) -> None:
    mesh = mf.DeviceMesh((2, 4), ("dp", "tp"))
    assert mesh.links == (measured.inside,) * 2 and (mesh.flops, mesh.memory) == (measured.flops, measured.memory)
    assert default_machine.name_of(measured) == "this host, as it was measured"


@pytest.mark.fuzz
@pytest.mark.timeout(600)
@pytest.mark.parametrize("links", ["", "laptop"])
def test_random_programs_are_what_torch_computes(links: str, monkeypatch: pytest.MonkeyPatch) -> None:
    """With latency plans are others than where bytes alone decide, as in the other tests of random programs."""
    monkeypatch.setenv("MESHFUSE_LINKS", links)

    @settings(max_examples=examples(20))
    @given(programs(), st.integers(0, 99))
    def check(fd: mf.FusionDefinition, number: int) -> None:
        inputs = inputs_for(fd, number)
        assert_same_as_unsharded(fd, inputs, interpret(fd, inputs) if has_reference(fd) else None)
        keeps_annotations(fd, fd.latest().sharded)

    check()


@pytest.mark.parametrize("env", [{"WORLD_SIZE": "16", "LOCAL_WORLD_SIZE": "8"}, {"OMPI_COMM_WORLD_SIZE": "4"}])
def test_ranks_on_several_hosts_do_not_read_what_each_has_measured(
    measured: mf.Machine, env: dict[str, str], monkeypatch: pytest.MonkeyPatch
) -> None:
    """They might have read different figures, and made different plans."""
    for name, value in (ONE_HOST | env).items():
        monkeypatch.setenv(name, value)
    assert default_machine.default_machine() == costs.DGX_H100


@pytest.mark.parametrize("text", ["", "{}", "[1]", '{"inside": [1, 2], "between": [0, 0]}', "\x00\xff"])
def test_a_broken_file_is_none(text: str, measured: mf.Machine) -> None:
    Path(os.environ["MESHFUSE_CACHE"], "links.json").write_text(text)
    default_machine._read.cache_clear()
    assert default_machine.default_machine() == costs.DGX_H100


def test_a_folder_that_cannot_be_written_keeps_nothing(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    (tmp_path / "file").write_text("")
    monkeypatch.setenv("MESHFUSE_CACHE", str(tmp_path / "file"))
    assert default_machine.keep(costs.LAPTOP) is None
    monkeypatch.setenv("MESHFUSE_CACHE", "off")
    assert default_machine.keep(costs.LAPTOP) is None


# plans --------------------------------------------------------------------------------------------------------------


def test_the_examples_gpt_is_megatrons(monkeypatch: pytest.MonkeyPatch) -> None:
    """Two all-reduces per layer, and the tied embedding gathered, which its rows take longer than."""
    monkeypatch.syspath_prepend(str(EXAMPLE))
    from fused import annotate, define

    gpt = define()
    annotate(gpt, mf.DeviceMesh((4,), ("tp",)))
    gpt.fd.compile(*[(8, 128)] * 2, *[tv.type.shape for tv in gpt.weights.values()])
    bill = gpt.fd.bill()
    assert Counter(entry.collective for entry in bill.entries) == {"all-reduce": 8, "all-gather": 1}
    assert bill.gap == 0 and bill.machine == "dgx-h100"
    assert "modelled on dgx-h100 (no links are given), proven the least of all placements" in str(bill)
    for name in ("fused", "model"):
        sys.modules.pop(name, None)


def test_work_repeated_on_all_ranks_is_not_free() -> None:
    """A long tensor that is whole on all ranks is worked on in parts as far as bytes of memory pay for that."""
    mesh = mf.DeviceMesh((8,), ("tp",))
    with mf.FusionDefinition() as fd:
        x, other = fd.define_tensor([1 << 24]), fd.define_tensor([8])
        fd.mesh_split(x, mesh, [None])
        fd.mesh_split(other, mesh, ["tp"])  # axes that nothing names stay idle
        fd.add_output(fd.ops.sum(fd.ops.exp(x), [0]))
        fd.add_output(fd.ops.neg(other))
    graph = fd.compile()
    (kind,) = [entry.collective for entry in fd.bill().entries]
    assert kind == "all-reduce" and all(choice.placement.ways == 8 for choice in graph.planned.choices)


def test_the_roofline_of_a_product() -> None:
    rows, inner, columns = 4096, 64, 512
    mesh = mf.DeviceMesh((4,), ("tp",), links="dgx-a100")
    with mf.FusionDefinition() as fd:
        x, w = fd.define_tensor([rows, inner]), fd.define_tensor([inner, columns])
        y = fd.ops.matmul(x, w)
        fd.add_output(y)
        fd.mesh_split(x, mesh, ["tp", None])
        fd.mesh_split(w, mesh, [None, None])
        fd.mesh_split(y, mesh, ["tp", None])
    compiled = fd.compile()
    (node,), (choice,) = compiled.graph.nodes, compiled.planned.choices
    flops, nbytes = 2 * rows / 4 * inner * columns, 4 * (rows / 4 * (inner + columns) + inner * columns)
    found = computing_seconds(node.call, choice.placement, (True,) * 3)
    assert found == pytest.approx(max(flops / 312e12, nbytes / 2e12)) == pytest.approx(nbytes / 2e12)
    assert compiled.planned.seconds == choice.seconds == found
