"""Random programs on random meshes with random annotations, against plain torch in float64."""

from __future__ import annotations

import contextlib
from collections.abc import Callable, Sequence

import pytest
import torch
from hypothesis import Phase, assume, find, given, settings
from hypothesis import strategies as st
from hypothesis.errors import NoSuchExample

import meshfuse as mf
from interpreter import has_reference, interpret
from laws import LAWS, WORLD, Law, annotated_with_all, annotated_with_one, propagate
from meshfuse.ops import OPS
from meshfuse.plans.plan_cost import plan_cost
from meshfuse.propagation import ShardedDefinition
from meshfuse.testing import annotations, assert_same_as_unsharded, definitions, inputs_for, shapes_for
from meshfuse.testing.blocks import FAMILIES
from meshfuse.testing.op_blocks import any_op
from op_references import NVIDIA_ONLY

# Programs per family of ops, 120 in all: `make fuzz` draws other ones without end.
FAMILY_NAMES = [*FAMILIES, "all"]
PROGRAMS = {
    "pointwise": 9, "reductions": 13, "products": 13, "shapes": 17, "lookups": 14, "random": 8, "complex": 8,
    "ops": 17, "all": 21,
}  # fmt: skip


def examples(count: int) -> int:
    """So many in CI, as many as the profile says in `make fuzz`."""
    return count if settings.get_current_profile_name() == "ci" else settings().max_examples


def families(name: str) -> tuple[str, ...]:
    return () if name == "all" else (name, "pointwise")


def programs(chosen: Sequence[str] = ()) -> st.SearchStrategy[mf.FusionDefinition]:
    return definitions(chosen, open_sizes=True).flatmap(annotations)


@pytest.mark.fuzz
@pytest.mark.timeout(600)
@pytest.mark.parametrize("family", FAMILY_NAMES)
def test_a_random_program_is_what_torch_computes_and_propagation_keeps_its_laws(family: str) -> None:
    @settings(max_examples=examples(PROGRAMS[family]))
    @given(programs(families(family)), st.integers(0, 99), st.sampled_from(LAWS))
    def check(fd: mf.FusionDefinition, number: int, law: Law) -> None:
        inputs = inputs_for(fd, number)
        assert_same_as_unsharded(fd, inputs, interpret(fd, inputs) if has_reference(fd) else None)
        compiled = fd.latest()
        keeps_annotations(fd, compiled.sharded)
        law(propagate(compiled.planned.graph, WORLD), number)

    check()


def keeps_annotations(fd: mf.FusionDefinition, done: ShardedDefinition) -> None:
    for i, annotation in fd.recording.annotations.items():
        shape = done.graph.shape(i)
        assert done.shardings[i] == annotation.sharding("t", shape).placement(shape)


@pytest.mark.fuzz
def test_annotating_what_was_chosen_changes_next_to_nothing() -> None:
    """Idempotence. A beam that is told more may find another plan: that is rare, and all take next to no more time."""
    before: list[float] = []
    twins: dict[Callable[..., ShardedDefinition], list[tuple[bool, float]]] = {
        annotated_with_all: [], annotated_with_one: [],
    }  # fmt: skip

    @settings(max_examples=examples(50))
    @given(programs(), st.integers(0, 99))
    def collect(fd: mf.FusionDefinition, number: int) -> None:
        done = fd.compile(*shapes_for(fd)).planned
        before.append(plan_cost(done).seconds)
        for again, found in twins.items():
            twin = again(done, number)
            found.append((any(done.shardings[i] != twin.shardings[i] for i in done.shardings), plan_cost(twin).seconds))

    collect()
    for again, found in twins.items():
        different, after = zip(*found, strict=True)
        assert sum(different) <= 0.04 * len(found), again
        assert sum(after) <= 1.05 * sum(before), again


def test_random_programs_reach_every_op() -> None:
    """All of the table but those that need nvFuser and a GPU."""
    seen: set[str] = set()

    def all_seen(fd: mf.FusionDefinition) -> bool:
        seen.update(node.op.name for node in fd.recording.nodes)
        return seen.issuperset(set(OPS) - set(NVIDIA_ONLY))

    drawn = definitions(blocks=[any_op], min_ops=20, max_ops=30)
    with contextlib.suppress(NoSuchExample):
        find(drawn, all_seen, settings=settings(max_examples=1500, phases=[Phase.generate]))
    assert sorted(set(OPS) - seen) == sorted(NVIDIA_ONLY)


@settings(max_examples=20)
@given(definitions(("pointwise", "products", "shapes"), dtypes=[mf.DataType.Double]).flatmap(annotations), st.data())
def test_a_wrong_number_on_any_rank_is_noticed(fd: mf.FusionDefinition, data: st.DataObject) -> None:
    """The comparison itself: with one output changed by one it fails."""
    assume(has_reference(fd))
    inputs = inputs_for(fd)
    wrong = interpret(fd, inputs)
    place = data.draw(st.integers(0, len(wrong) - 1))
    wrong[place] = ~wrong[place] if wrong[place].dtype == torch.bool else wrong[place] + 1 + wrong[place].abs()
    if not torch.isfinite(wrong[place].double()).all():
        return
    with pytest.raises(AssertionError, match=f"output {fd.recording.tensors[fd.recording.outputs[place]].name}"):
        assert_same_as_unsharded(fd, inputs, wrong)
