"""Classes of programs beyond the table of bills: no plan moves more than XLA's or a person's; none changes unseen."""

from __future__ import annotations

import pytest

from bill_classes import CLASSES
from ledger.book import assert_unchanged

pytestmark = pytest.mark.slow


@pytest.mark.parametrize("name", CLASSES)
def test_no_more_than_xla_and_a_plan_by_hand(name: str) -> None:
    assert_unchanged(name, CLASSES[name].check())
