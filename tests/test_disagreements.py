"""Errors of ranks that differ show the difference, wherever in a text it is."""

from __future__ import annotations

import pytest

from meshfuse.runtime.diagnosis import disagreement


@pytest.mark.parametrize("place", [0, 10, 59, 60, 61, 79, 80, 200, 5000])
@pytest.mark.parametrize("rest", [0, 5, 300])
def test_what_differs_is_shown(place: int, rest: int) -> None:
    start = "".join(chr(ord("a") + i % 17) for i in range(place))
    first, second = (f"same line\n{start}{digit}{'z' * rest}\nother {digit}" for digit in "12")
    text = str(disagreement("the program", [first, second, first], (0, 1, 4)))
    shown = text.split("found ")[1].split(", needed")[0]
    ours, theirs = shown.split("; ")
    assert ours.startswith("ranks 0, 4 '") and theirs.startswith("rank 1 '")
    assert "1" in ours.partition("'")[2] and "2" in theirs.partition("'")[2] and ours != theirs
    assert start[-15:] in ours and len(shown) < 230


def test_a_text_that_ends_before_another() -> None:
    assert "rank 0 'nothing'; rank 1 'b'" in str(disagreement("steps", ["a", "a\nb"], (0, 1)))
    long = "x" * 100
    assert "rank 0 '...xxxxxxxxxxxxxxxxxxxx'; rank 1 '...xxxxxxxxxxxxxxxxxxxxyz'" in str(
        disagreement("steps", [long, f"{long}yz"], (0, 1))
    )
