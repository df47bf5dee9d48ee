"""The words of `explain` and `bill`: who needs what, alternatives that differ, numbers that can be read."""

from __future__ import annotations

import os
import re
from collections.abc import Callable

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

import meshfuse as mf
import meshfuse.nvfuser_direct as nvfuser
from meshfuse.number_text import duration, figures, micro
from meshfuse.plans.plan_cache import packed, unpacked
from meshfuse.report.explain import explain_tensor
from meshfuse.testing import annotations, definitions, inputs_for
from test_explain import lines

HERE = os.path.basename(__file__)
MESH = mf.DeviceMesh((4,), ("tp",))
EXPONENT = re.compile(r"\d[eE][+-]?\d")


def first_line(text: str) -> int:
    """The number of the first line of this file with this text in it."""
    with open(__file__) as file:
        return next(i for i, line in enumerate(file, 1) if text in line)


# what no annotation says


class Sharded(nvfuser.FusionDefinition):
    """Two products in nvFuser's words; none of the outputs is annotated, and one is written into an argument."""

    def __init__(self) -> None:
        super().__init__()
        mesh = nvfuser.multidevice.DeviceMesh(range(4))
        with self as fd:
            self.x = x = fd.define_tensor([8, 64, 512])
            w1, w2 = fd.define_tensor([2048, 512]), fd.define_tensor([512, 2048])
            self.made = made = fd.ops.linear(fd.ops.relu(fd.ops.linear(x, w1)), w2)
            self.last = last = fd.ops.neg(made)
            self.written = written = fd.ops.exp(made)
            fd.add_output(made)
            fd.add_output(last)
            fd.add_output(written, alias_input=x)
            for t, dim in ((w1, 0), (w2, 1)):
                t.set_device_mesh(mesh)
                t.outer_split(dim, 4)
                t.axis(dim).parallelize(nvfuser.ParallelType.mesh_x)


def test_outputs_in_nvfuser_mode_are_not_called_annotated() -> None:
    fd = Sharded()
    (entry,) = fd.bill(alternatives=True).entries
    assert (entry.collective, entry.why) == ("all-reduce", "output")
    assert entry.line == f"{HERE}:{first_line('self.made = made =')}"
    assert entry.needed_by == ("made (t5), an output, left where nvFuser would leave it",)
    assert all("w" in held and ", annotated at" in held for held in entry.held_by)
    assert "no annotation" not in fd.bill(alternatives=True).details()
    origin = f"asked for by output at {HERE}:{first_line('self.made = made =')}"
    assert any(origin in line for line in lines(fd.explain(fd.made)))
    for tensor in (fd.made, fd.last):
        found = lines(fd.explain(tensor))
        assert "an output, left where nvFuser would leave it" in found and "annotated so" not in "\n".join(found)
    assert "written into x (t0), and laid out as that is" in lines(fd.explain(fd.written))
    rows = {line.split("  ")[0]: line for line in fd.explain().splitlines()}
    assert all("annotated" not in rows[name] for name in ("made (t5)", "last (t6)", "written (t7)"))
    asking = {first_line("entry,) = fd.bill"), first_line("for line in lines(fd.explain(fd.made))")}
    assert not any(f"{HERE}:{line}" in fd.explain(fd.made) + fd.bill().details() for line in asking)


def trained(annotated: bool) -> tuple[mf.FusionDefinition, mf.TensorView]:
    with mf.FusionDefinition() as fd:
        x = fd.define_tensor([64, 32])
        w = fd.define_tensor([16, 32])
        gradient = fd.grad(fd.ops.sum(fd.ops.linear(x, w)), w)
        fd.add_output(gradient)
        fd.mesh_split(x, MESH, ["tp", None])
        if annotated:
            fd.mesh_split(w, MESH, ["tp", None])
    return fd, gradient


@pytest.mark.parametrize("annotated", [True, False])
def test_gradients_lie_as_what_they_are_the_gradients_of(annotated: bool) -> None:
    fd, gradient = trained(annotated)
    line = f"{HERE}:{first_line('fd.mesh_split(w, MESH')}"
    message = f"laid out as w (t1), whose gradient it is, {f'annotated at {line}' if annotated else 'never annotated'}"
    found = lines(fd.explain(gradient))
    assert message in found and not any(text.startswith("annotated so at") for text in found)
    reduction = next(e for e in fd.bill().entries if e.tensor == fd.recording.tensors[gradient.id].label)
    assert reduction.why == "output" and reduction.line == str(fd.recording.tensors[gradient.id].line)
    assert any(text.endswith(message) for text in reduction.needed_by)


def test_outputs_that_dtensors_cannot_be_laid_out_as_are_not_called_annotated() -> None:
    with mf.FusionDefinition() as fd:
        x = fd.define_tensor([8, 4])
        fd.add_output(fd.ops.neg(x))
    graph = fd.compile().graph
    (out,) = graph.outputs
    origin = graph.annotated({out: mf.Sharding.replicated(MESH, 2)}, "an output, laid out as DTensors can be")
    assert origin.brought_for(out) == "output"


# alternatives


def alternatives(text: str) -> list[tuple[str, str]]:
    """What the op follows, and what its alternative does."""
    taken = re.search(r" is computed (.*): .* modelled, what happens", text)
    other = re.search(r"the alternative, (.*): .* modelled", text)
    return [(taken.group(1), other.group(1))] if taken and other else []


@pytest.mark.slow
@settings(max_examples=20)
@given(definitions((), open_sizes=True).flatmap(annotations))
def test_an_alternative_is_another_one(fd: mf.FusionDefinition) -> None:
    fd.simulate(inputs_for(fd, 0))
    compiled = fd.latest()
    for node in compiled.graph.nodes:
        text = explain_tensor(compiled, node.outputs[0])
        assert all(taken != other for taken, other in alternatives(text)), text


def repeated() -> tuple[mf.FusionDefinition, mf.TensorView]:
    """Where several placements follow one operand."""
    with mf.FusionDefinition() as fd:
        x, w = fd.define_tensor([64, 64]), fd.define_tensor([64, 64])
        h = fd.ops.linear(x, w)
        y = fd.ops.matmul(h, h)
        fd.add_output(y)
        fd.mesh_split(x, mf.DeviceMesh((2, 2), ("dp", "tp")), ["dp", "tp"])
    return fd, y


def test_an_alternative_that_follows_the_same_operand_says_what_else_is_different() -> None:
    fd, _ = repeated()
    message = [pair for i in range(len(fd.recording.tensors)) for pair in alternatives(explain_tensor(fd.compile(), i))]
    assert message and all(taken != other for taken, other in message)


def test_equal_alternatives_are_called_equal() -> None:
    with mf.FusionDefinition() as fd:
        x, w = fd.define_tensor([64, 64]), fd.define_tensor([64, 64])
        y = fd.ops.add(x, w)
        fd.add_output(y)
        fd.mesh_split(x, MESH, ["tp", None])
        fd.mesh_split(w, MESH, [None, "tp"])
    text = fd.explain(y)
    (cost,) = re.findall(r"is computed .*: (.*) modelled, what", text)
    assert f": {cost} modelled, as long: the first of equals was taken" in text and "no cheaper" not in text


def test_a_stored_plan_keeps_its_alternatives() -> None:
    fd, _ = repeated()
    planned = fd.compile().planned
    again = unpacked(packed(planned), fd.compile().graph)
    assert again.choices == planned.choices and any(choice.runner_up for choice in again.choices)


# numbers


@pytest.mark.parametrize(
    ("write", "value", "text"),
    [
        (duration, 0.0, "0 us"), (duration, 5.24e-9, "0.00524 us"), (duration, 1e-12, "<0.001 us"),
        (duration, 13.2e-6, "13.2 us"), (duration, 9.994e-4, "999 us"), (duration, 1.1e-2, "11 ms"),
        (duration, 0.4321, "432 ms"), (duration, 2.5, "2.5 s"), (duration, 123456.0, "123,456 s"),
        (micro, 1.1e-2, "11,000"), (micro, 31.5e-6, "31.5"), (micro, 1e-13, "<0.001"),
        (figures, 99.96, "100"), (figures, 6001.4, "6,001"), (figures, 1.0061, "1.01"), (figures, 1e9, "1,000,000,000"),
    ],
)  # fmt: skip
def test_numbers_have_three_figures_and_no_exponent(write: Callable[[float], str], value: float, text: str) -> None:
    assert write(value) == text


@given(st.floats(0, 1e15))
def test_no_number_has_an_exponent(value: float) -> None:
    for write in (duration, micro, figures):
        assert not EXPONENT.search(write(value))


def test_a_long_program_is_explained_in_milliseconds() -> None:
    with mf.FusionDefinition() as fd:
        x, w = fd.define_tensor([32768, 8192]), fd.define_tensor([8192, 8192])
        y = fd.ops.linear(x, w)
        fd.add_output(y)
        fd.mesh_split(x, MESH, ["tp", None])
        fd.mesh_split(w, MESH, ["tp", None])
    text = "\n".join([fd.explain(y), fd.explain(w), fd.bill(alternatives=True).details()])
    assert re.search(r"[1-9][\d.]* ms modelled", text) and not EXPONENT.search(text)
    assert torch.Size([32768, 8192]) == fd.compile().graph.shape(y.id)
