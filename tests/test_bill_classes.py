"""Classes of programs beyond the table of bills: no plan moves more than XLA's or a person's; none changes unseen."""

from __future__ import annotations

import pytest

from bill_classes import CLASSES
from ledger.book import assert_unchanged

pytestmark = pytest.mark.slow


# Planning these takes longest, and others are like them: other convolutions and rolls forward and backward, and other
# ways to pick a token.
SAMPLED_OUT = {
    "rolls/states_that_go_from_stage_to_stage_backward", "rolls/derivatives_on_a_round_grid",
    "rolls/attention_to_places_before_backward", "convolutions/its_backward",
    "convolutions/strided_convolution_of_what_is_padded_before_its_relu",
    "convolutions/convolution_behind_zeros_in_a_row_backward",
    "convolutions/blur_of_images_split_both_ways", "picked/logits_of_one_token_by_take_expanded",
    "picked/logits_of_one_token_by_select", "picked/logits_of_one_token_by_take",
}  # fmt: skip
NAMES = [pytest.param(name, marks=pytest.mark.sampled) if name in SAMPLED_OUT else name for name in CLASSES]


@pytest.mark.parametrize("name", NAMES)
def test_no_more_than_xla_and_a_plan_by_hand(name: str) -> None:
    assert_unchanged(name, CLASSES[name].check())
