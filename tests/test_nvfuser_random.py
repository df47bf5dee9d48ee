"""Random numbers in nvFuser's words: torch's generator says which, and a seed and an offset of the script's own."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import pytest
import torch

import meshfuse as mf
import meshfuse.nvfuser_direct as nvfuser
from meshfuse.nvfuser_direct import DataType, FusionDefinition

X = torch.arange(45.0).reshape(5, 9)


def drawing(name: str, stated: bool, places: int = 0, seed: int | None = None) -> FusionDefinition:
    """A draw behind other ops, by the script's own state where that is stated."""
    with FusionDefinition(seed) as fd:
        x = fd.define_tensor([-1, -1])
        for _ in range(places):
            x = fd.ops.neg(fd.ops.neg(x))
        state: dict[str, Any] = {}
        if stated:
            state = {key: fd.define_scalar(DataType.Int) for key in ("rng_seed", "rng_offset")}
        low, high = (fd.define_scalar(value, DataType.Float) for value in (0.3, 1.7))
        fd.add_output(fd.ops.mul(x, getattr(fd.ops, name)(low, high, shape=[5, 9], **state)))
    return fd


@pytest.mark.parametrize("seed", [0, 7, 2**63 - 1, -3, 2**64 - 1])
@pytest.mark.parametrize("places", [0, 2])
@pytest.mark.parametrize("name", ["uniform", "normal"])
def test_executions_since_torchs_seed_are_those_by_that_seed_and_their_number(
    name: str, places: int, seed: int
) -> None:
    free, stated = drawing(name, False, places), drawing(name, True)
    for _ in range(2):
        torch.manual_seed(seed)
        found = [free.execute([X])[0] for _ in range(4)]
        signed = seed - 2**64 if seed >= 2**63 else seed
        wanted = [stated.execute([X, signed, n])[0] for n in range(4)]
        assert all(map(torch.equal, found, wanted))
        assert not torch.equal(found[0], found[1])


BETWEEN: dict[str, Callable[[], Any]] = {
    "nothing": lambda: None,
    "a draw of torch's": lambda: torch.rand(3),
    "another definition": lambda: drawing("normal", False).execute([X]),
    "one that draws by its own state": lambda: drawing("normal", True).execute([X, 1, 2]),
    "one by hand": lambda: drawing("uniform", False).manual_execute([X]),
}


@pytest.mark.parametrize("name", BETWEEN)
def test_what_comes_between_two_executions(name: str) -> None:
    """Numbers are never drawn again before torch is seeded again; whoever draws, draws the next ones."""
    free, stated = drawing("uniform", False), drawing("uniform", True)
    torch.manual_seed(5)
    first = free.execute([X])[0]
    BETWEEN[name]()
    second = free.execute([X])[0]
    taken = 2 if name in ("another definition", "one by hand") else 1
    assert torch.equal(first, stated.execute([X, 5, 0])[0])
    assert torch.equal(second, stated.execute([X, 5, taken])[0])


def test_ops_of_one_execution_draw_apart_and_are_counted() -> None:
    with FusionDefinition() as fd:
        x = fd.define_tensor([5, 9])
        for _ in range(3):
            fd.add_output(fd.ops.mul(x, fd.ops.uniform(0.3, 1.7, [5, 9])))
    stated = drawing("uniform", True)
    torch.manual_seed(11)
    once, again = fd.execute([X]), fd.execute([X])
    assert torch.equal(once[0], stated.execute([X, 11, 0])[0])
    assert torch.equal(again[0], stated.execute([X, 11, 3])[0])
    drawn = [*once, *again]
    assert not any(torch.equal(a, b) for place, a in enumerate(drawn) for b in drawn[:place])


def test_a_definition_with_a_seed_asks_no_generator() -> None:
    found = []
    for seed in (1, 2):
        torch.manual_seed(seed)
        before = torch.get_rng_state()
        found.append(drawing("normal", False, seed=3).execute([X])[0])
        assert torch.equal(torch.get_rng_state(), before)
    assert torch.equal(found[0], found[1])


def test_a_program_without_draws_leaves_torchs_generator_alone() -> None:
    with FusionDefinition() as fd:
        q = fd.define_tensor([1, 2, 8, 8])
        fd.add_output(fd.ops.sdpfa_fwd(q, q, q, dropout_p=0.0)[0])
    before = torch.get_rng_state()
    fd.execute([torch.ones(1, 2, 8, 8)])
    drawing("uniform", True).execute([X, 1, 2])
    assert torch.equal(torch.get_rng_state(), before)


@pytest.mark.parametrize("seed", [None, 0, 4])
def test_what_was_drawn_is_drawn_again_to_validate(seed: int | None) -> None:
    fd = drawing("uniform", False, seed=seed)
    for _ in range(3):
        fd.validate([X])
    nvfuser.validate_with_auto_inferred_outputs(fd.fusion, fd.execute([X]), [X])


def test_simulated_ranks_draw_by_the_definitions_seed() -> None:
    fd, whole = drawing("uniform", False, seed=0), drawing("uniform", True)
    before = torch.get_rng_state()
    assert torch.equal(fd.simulate([X])[0], whole.simulate([X, 0, 0])[0])
    assert torch.equal(torch.get_rng_state(), before)


def test_gradients_and_dropout_draw_once() -> None:
    with FusionDefinition() as fd:
        x = fd.define_tensor([64])
        y = fd.ops.dropout(x, 0.5)
        fd.add_output(y)
        fd.add_output(fd.grad(y, x))
    torch.manual_seed(1)
    y, dx = fd.execute([torch.ones(64)])
    assert torch.equal(y, dx) and 0 < int((y == 0).sum()) < 64
    core = mf.FusionDefinition()
    core.add_output(core.ops.dropout(core.define_tensor([64]), 0.5))
    before = torch.get_rng_state()
    core.execute([torch.ones(64)])
    assert torch.equal(torch.get_rng_state(), before)
