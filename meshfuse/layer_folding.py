"""Equal layers as one: names, `h0.mlp.up` and `h1.mlp.up` as `h*.mlp.up`, rows of tables, and stretches of lists."""

from __future__ import annotations

import itertools
import re
from collections.abc import Collection, Hashable, Sequence
from dataclasses import dataclass
from functools import lru_cache

# The number that the compiler gives a tensor, after its name; names without it say the same of all layers.
_SERIAL = re.compile(r" \(t\d+\)")
# Names in a text: no numbers of their own, and no lines of files, which come after a colon.
_NAME = re.compile(r"(?<![\w.:)])[^\W\d][\w.]*")
# The running number that torch's capture gives what a module makes: `layers.0.mm`, `layers.1.mm_7`.
_RUNNING = re.compile(r"(?<=\.)([^\W\d]\w*)_\d+(?![\w.])")
# Numbers in names: children of a module (`layers.0.`) and others (`h0.`, `w1`).
_CHILD = re.compile(r"(?<=\.)\d+(?=\.|$)")
_OTHER = re.compile(r"(?<=[^\W\d])\d+(?=[._]|$)")

# A stretch of at most so many entries counts as repeated if it comes so many times in a row.
_LONGEST = 400
_LEAST = 3


@dataclass(frozen=True, slots=True)
class FoldedRow:
    """Rows of a table that are equal but for their layers: the cells with `*` for what differs, and their places."""

    cells: tuple[str, ...]
    places: tuple[int, ...]

    @property
    def times(self) -> str:
        """` x32` where it stands for so many rows, "" for a single one."""
        return f" x{len(self.places)}" if len(self.places) > 1 else ""


def fold_rows(
    rows: Sequence[Sequence[str]], named: Collection[int], more: Sequence[Hashable] | None = None
) -> list[FoldedRow]:
    """The rows, with those as one that differ only in the numbers of names in the columns `named`.

    They stand where the first of them stood. more: what else must be equal, by row.
    """
    groups: dict[Hashable, list[int]] = {}
    for place, row in enumerate(rows):
        cells = tuple([_pieces(_plain(text))[::2] if column in named else text for column, text in enumerate(row)])
        groups.setdefault((cells, more[place] if more is not None else None), []).append(place)
    return [FoldedRow(_merged([rows[i] for i in places], named), tuple(places)) for places in groups.values()]


def _merged(rows: Sequence[Sequence[str]], named: Collection[int]) -> tuple[str, ...]:
    if len(rows) == 1:
        return tuple(rows[0])
    return tuple([merged_names(cells) if column in named else cells[0]
                  for column, cells in enumerate(zip(*rows, strict=True))])  # fmt: skip


def merged_names(texts: Sequence[str]) -> str:
    """Texts of one pattern as one, with `*` for the numbers that differ."""
    if len(set(texts)) == 1:
        return texts[0]
    columns = zip(*[_pieces(_plain(text)) for text in texts], strict=True)
    return "".join(found[0] if len(set(found)) == 1 else "*" for found in columns)


def layer_pattern(name: str) -> str:
    """A name with `*` for the number of its layer, the first: `layers.*.0.weight` is one of a layer's own modules."""
    before, *after = _pieces(name)
    return "*".join([before, "".join(after[1:])]) if after else name


def layer_key(text: str) -> str:
    """Equal for texts that differ only in the layers of their names, and in what numbers tensors and captured ops."""
    return "*".join(_pieces(_plain(text))[::2])


def _plain(text: str) -> str:
    return _RUNNING.sub(r"\1", _SERIAL.sub("", text))


@lru_cache(maxsize=1 << 14)
def _pieces(text: str) -> tuple[str, ...]:
    """What stands between numbers of layers, and these numbers, in turns."""
    spans = [(found.start() + start, found.start() + end)
             for found in _NAME.finditer(text) for start, end in _numbers(found.group())]  # fmt: skip
    ends = [0, *(end for span in spans for end in span), len(text)]
    return tuple([text[a:b] for a, b in itertools.pairwise(ends)])


def _numbers(name: str) -> list[tuple[int, int]]:
    """Where numbers of layers stand in a name: all children, else the first number.

    So `layers.0.fc1` and `layers.0.fc2` are different names, and `h0.fc1` and `h0.fc2` as well.
    """
    children = [found.span() for found in _CHILD.finditer(name)]
    first = None if children else _OTHER.search(name)
    return [first.span()] if first is not None else children


# stretches of lists


def repeats(keys: Sequence[Hashable]) -> list[tuple[int, int, int]]:
    """(start, period, count) of parts of a sequence that are repeated `count` >= 3 times in a row, from the left.

    Where several begin at one place, the one that covers most counts; of these the one with the shortest period, from
    2.
    """
    numbers: dict[Hashable, int] = {}
    ids = [numbers.setdefault(key, len(numbers)) for key in keys]
    found, start = [], 0
    while start < len(ids):
        best = max(((_count(ids, start, p) * p, -p) for p in _periods(ids, start)), default=(0, 0))
        covered, period = best[0], -best[1]
        if period and covered // period >= _LEAST:
            found.append((start, period, covered // period))
            start += covered
        else:
            start += 1
    return found


def _periods(ids: Sequence[int], start: int) -> list[int]:
    """The distances at which the first element occurs again."""
    reach = min(len(ids), start + _LONGEST + 1)
    return [place - start for place in range(start + 2, reach) if ids[place] == ids[start]]


def _count(ids: Sequence[int], start: int, period: int) -> int:
    """How often the first `period` elements are repeated in a row."""
    part, count = ids[start : start + period], 1
    while ids[start + count * period : start + (count + 1) * period] == part:
        count += 1
    return count
