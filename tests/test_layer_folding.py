"""Equal layers are one row in what is printed: names, bills, memory, explain, host programs and traces."""

from __future__ import annotations

import json
import re
from functools import cache
from pathlib import Path

import pytest
import torch
import transformers
from hypothesis import given
from hypothesis import strategies as st

import meshfuse as mf
from meshfuse.errors import DefinitionError
from meshfuse.executor.spans import Span, longest_waits
from meshfuse.layer_folding import fold_rows, layer_key, layer_pattern
from meshfuse.report.explain import tensor_named

SCREEN = 40


@pytest.mark.parametrize(
    ("text", "pattern"),
    [
        ("h0.mlp.up (t3)", "h*.mlp.up"),
        ("model.layers.0.self_attn.o_proj.mm_3 (t103)", "model.layers.*.self_attn.o_proj.mm"),
        ("layers.3.experts.7.w1", "layers.*.experts.*.w1"),
        ("layers.0.fc1.weight", "layers.*.fc1.weight"),
        ("layers.0.mlp.mm", "layers.*.mlp.mm"),
        ("layers.1.mlp.mm_7", "layers.*.mlp.mm"),
        ("add_30 (t218)", "add_*"),
        ("h (t6)", "h"),
        ("t12", "t*"),
        ("dp from h0.attn.q (t1), tp from h0.fc2 (t4)", "dp from h*.attn.q, tp from h*.fc2"),
        ("operand 0 of conv2d", "operand 0 of conv2d"),
        ("annotated at script.py:10", "annotated at script.py:10"),
        ("over tp:(2)2", "over tp:(2)2"),
    ],
)
def test_numbers_of_layers_are_left_out_and_no_others(text: str, pattern: str) -> None:
    assert layer_key(text) == pattern


def test_a_pattern_of_parameters_keeps_all_other_numbers() -> None:
    assert layer_pattern("layers.0.w_1") == "layers.*.w_1" and layer_pattern("h3.fc2.weight") == "h*.fc2.weight"
    assert layer_pattern("layers.3.2.weight") == "layers.*.2.weight" and layer_pattern("head.weight") == "head.weight"


def test_numbers_that_do_not_differ_stay() -> None:
    rows = [(f"layers.{i}.experts.1.up (t{i})", "same") for i in range(3)]
    (row,) = fold_rows(rows, (0,))
    assert row.cells == ("layers.*.experts.1.up", "same") and row.times == " x3"
    assert [r.cells for r in fold_rows(rows[:1], (0,))] == rows[:1]


def test_what_else_differs_is_kept_apart() -> None:
    rows = [("h0.w", "tp"), ("h1.w", "dp"), ("h2.w", "tp")]
    assert [row.places for row in fold_rows(rows, (0,))] == [(0, 2), (1,)]
    assert [row.places for row in fold_rows(rows, (0,), [1, 2, 3])] == [(0,), (1,), (2,)]


@given(st.lists(st.tuples(st.text("h.12*"), st.sampled_from("ab"))))
def test_every_row_is_in_one_group_that_it_fits(rows: list[tuple[str, str]]) -> None:
    found = fold_rows(rows, (0,))
    assert sorted(i for row in found for i in row.places) == list(range(len(rows)))
    for row in found:
        shape = re.escape(row.cells[0]).replace(r"\*", r"(\*|\d+)")
        assert all(rows[i][1] == row.cells[1] for i in row.places)
        assert all(re.fullmatch(shape, re.sub(r"(\.\w+)_\d+$", r"\1", rows[i][0])) for i in row.places)


@cache
def deep(layers: int = 32) -> mf.FusionDefinition:
    mesh = mf.DeviceMesh((2, 4), ("dp", "tp"))
    with mf.FusionDefinition() as fd:
        x = h = fd.define_tensor([8, 16, 64], name="x")
        for i in range(layers):
            up, down = (
                fd.define_tensor([256, 64], name=f"h{i}.mlp.up"),
                fd.define_tensor([64, 256], name=f"h{i}.mlp.down"),
            )
            fd.mesh_split(up, mesh, ["tp", None])
            fd.mesh_split(down, mesh, [None, "tp"])
            h = h + fd.ops.linear(fd.ops.relu(fd.ops.linear(h, up)), down)
        fd.add_output(h)
        fd.mesh_split(x, mesh, ["dp", None, None])
    return fd


def test_a_bill_of_many_layers_fits_a_screen_and_its_rows_add_up() -> None:
    bill = deep().bill()
    assert len(bill.entries) >= 32
    *rows, total = [line for line in str(bill).splitlines()[1:] if not line.startswith("a step")]
    assert len(rows) < 6
    count, wire = 0, 0.0
    for row in rows:
        found = re.search(r" x(\d+) ", row)
        count += int(found.group(1)) if found else 1
        wire += float(row.split()[2].replace(",", ""))
    assert count == len(bill.entries) and wire == bill.total
    assert f"{bill.total:,.0f}" in total and f"{len(bill.entries)} collectives" in total
    listed = json.loads(json.dumps(bill.to_dict()))["entries"]
    assert len(listed) == len(bill.entries) and len({e["tensor"] for e in listed}) == len(listed)


def test_details_of_equal_layers_are_said_once() -> None:
    details = deep().bill().details()
    assert len(details.splitlines()) < SCREEN and "h*.mlp.up, annotated at" in details


def test_memory_explain_and_a_notebook_say_layers_once() -> None:
    fd = deep()
    memory, table = str(fd.memory()), fd.explain()
    for text in (memory, table):
        assert "h*.mlp.up x32" in text and "h*.mlp.down x32" in text and "h7.mlp" not in text
        assert len(text.splitlines()) < SCREEN
    assert "x31" in fd.bill()._repr_html_() or "x32" in fd.bill()._repr_html_()
    held = sum(int(line.split()[0].replace(",", "")) for line in memory.splitlines()[2:])
    assert held == fd.memory().peak


def test_a_small_table_has_every_tensor() -> None:
    assert "h1.mlp.up" in deep(3).explain() and "h*" not in deep(3).explain()


def test_a_host_program_names_its_inputs_and_folds_layers() -> None:
    program = deep().host_program(0)
    assert re.search(r"# h\*\.mlp\.up x32: v\d+, v\d+, \.\.\., v\d+\n", str(program))
    folded = program.folded().splitlines()
    assert len(folded) < len(str(program).splitlines()) / 4
    assert any(re.fullmatch(r" +# \d+ more times these \d+ lines", line) for line in folded)
    assert "more times" in program._repr_html_()


def test_waits_for_equal_layers_are_one_line() -> None:
    spans = [Span("wait", f"all_reduce h{i}.up (t{i}) (w{i})", i, i + 1e-6) for i in range(5)]
    assert longest_waits(spans) == ["  waits 5.0 us for all_reduce h*.up x5"]


def test_a_name_is_kept_by_the_text_of_a_definition() -> None:
    assert "name='h3.mlp.up'" in repr(deep(4))


def test_a_name_that_is_not_there_is_answered_with_near_ones() -> None:
    compiled = deep(4).compile()
    assert compiled.graph.tensors[tensor_named(compiled, "h2.mlp.up")].line.name == "h2.mlp.up"
    with pytest.raises(DefinitionError, match=r"needed one of h\d\.mlp\.up, ") as caught:
        tensor_named(compiled, "h2.mlp.upp")
    assert len(str(caught.value)) < 200


@pytest.mark.slow
def test_a_llama_s_bill_and_page_say_its_modules_once(tmp_path: Path) -> None:
    config = transformers.LlamaConfig(
        hidden_size=32, intermediate_size=64, num_hidden_layers=2, num_attention_heads=4, num_key_value_heads=4,
        vocab_size=64, use_cache=False,
    )  # fmt: skip
    split = {f"self_attn.{name}_proj": ["tp", None] for name in "qkv"} | {
        "self_attn.o_proj": [None, "tp"], "mlp.up_proj": ["tp", None], "mlp.gate_proj": ["tp", None],
        "mlp.down_proj": [None, "tp"],
    }  # fmt: skip
    plan = {f"model.layers.*.{name}.weight": spec for name, spec in split.items()}
    model = mf.parallelize(transformers.LlamaForCausalLM(config), mf.DeviceMesh((2,), ("tp",)), plan)
    with torch.no_grad():
        model(input_ids=torch.zeros(2, 4, dtype=torch.long))
    bill = model.bill()
    text = str(bill)
    for module in ("self_attn.o_proj", "mlp.down_proj"):
        assert text.count(f"model.layers.*.{module}.mm x2 ") == 1
    assert sum(e.tensor.startswith("model.layers.1.mlp.down_proj.mm_") for e in bill.entries) == 1
    assert "model.layers.*" in model.explain()
    shown = model.show(tmp_path / "page.html")
    assert "model.layers.*.mlp.down_proj.mm" in shown.html and '"names":["forward"]' in shown.html


def test_a_prompt_shows_what_print_shows() -> None:
    fd = deep(3)
    assert repr(fd.bill()) == str(fd.bill()) and repr(fd.memory()) == str(fd.memory())
    assert repr(fd.explain("x")) == fd.explain("x") and fd.explain("x").startswith("x (t0): Float[8, 16, 64]")
    assert re.fullmatch(r"<HostProgram of rank 0: \d+ instructions, \d+ communications; print shows it>",
                        repr(fd.host_program(0)))  # fmt: skip
    assert re.fullmatch(r"<CompiledProgram: \d+ ops on 8 ranks>", repr(fd.compile()))
    assert re.fullmatch(r"<fd\.ops: \d+ ops; dir\(fd\.ops\) lists them, .*>", repr(fd.ops))


def test_a_misspelt_name_of_the_package_carries_what_python_needs_to_suggest_another() -> None:
    with pytest.raises(AttributeError) as caught:
        mf.visualise  # noqa: B018
    assert caught.value.name == "visualise" and caught.value.obj is mf


def test_explain_of_a_name_that_is_not_there_is_at_the_user_s_line() -> None:
    with pytest.raises(DefinitionError, match=r"no such tensor: found 'h9\.mlp\.up', .*test_layer_folding\.py:\d+"):
        deep(3).explain("h9.mlp.up")
