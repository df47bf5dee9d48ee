"""Indices of a dim that is cut several times in turn, as torch's DTensor cuts it: each cut counts what is left by then.

A dim of 6 over two axes of 2 is chunks of 3 first, and each of these is 2 and 1. A number of digits cannot say that,
as it has equal chunks but for the last.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence

Runs = tuple[tuple[int, int], ...]


def cut_in_turn(n: int, cuts: Sequence[tuple[int, int]], digits: Sequence[int]) -> Runs:
    """The indices of the rank with these digits, one per cut.

    A cut (size, chunks) takes what is held as so many chunks, each of these as `size` parts, and keeps one part of
    each. Chunks and parts are those of `torch.chunk`.
    """
    held: Runs = ((0, n),) if n else ()
    for (size, chunks), digit in zip(cuts, digits, strict=True):
        count = sum([b - a for a, b in held])
        held = tuple(_at(held, _parts(count, size, chunks, digit)))
    return held


def _parts(count: int, size: int, chunks: int, digit: int) -> Iterator[tuple[int, int]]:
    """The places among `count` that part number `digit` of each chunk has."""
    chunk = max(1, -(-count // chunks))
    for start in range(0, count, chunk):
        end = min(start + chunk, count)
        part = -(-(end - start) // size)
        low, high = min(start + digit * part, end), min(start + (digit + 1) * part, end)
        if low < high:
            yield low, high


def _at(held: Runs, places: Iterator[tuple[int, int]]) -> list[tuple[int, int]]:
    """The indices at these places, which ascend, among those held; neighbours joined."""
    found: list[tuple[int, int]] = []
    rest, before = iter(held), 0
    low, high = next(rest, (0, 0))
    for start, end in places:
        while start < end:
            while start >= before + high - low:
                before += high - low
                low, high = next(rest)
            stop = min(end, before + high - low)
            run = (low + start - before, low + stop - before)
            if found and found[-1][1] == run[0]:
                run = (found.pop()[0], run[1])
            found.append(run)
            start = stop
    return found
