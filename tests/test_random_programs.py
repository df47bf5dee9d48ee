"""Random programs on random meshes with random annotations, against plain torch in float64."""

from __future__ import annotations

import pytest
import torch
from hypothesis import given, seed, settings
from hypothesis import strategies as st

import meshfuse as mf
from interpreter import interpret
from meshfuse.testing import annotations, assert_same_as_unsharded, definitions, inputs_for
from meshfuse.testing.blocks import FAMILIES

BATCHES = {**{name: (name, "pointwise") for name in FAMILIES}, "all": ()}


def check(fd: mf.FusionDefinition, number: int) -> None:
    inputs = inputs_for(fd, number)
    assert_same_as_unsharded(fd, inputs, interpret(fd, inputs))


@pytest.mark.fuzz
@pytest.mark.parametrize("family", BATCHES)
def test_a_random_program_is_what_torch_computes(family: str) -> None:
    torch.set_num_threads(1)

    @settings(max_examples=100)
    @given(definitions(BATCHES[family]).flatmap(annotations), st.integers(0, 99))
    def run(fd: mf.FusionDefinition, number: int) -> None:
        check(fd, number)

    run()
