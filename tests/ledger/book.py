"""The ledger's file: reading, writing and comparing it."""

from __future__ import annotations

import functools
import json
from collections.abc import Iterator, Mapping
from pathlib import Path

import meshfuse as mf

from .facts import Entry, entry_of

FILE = Path(__file__).parent / "ledger.json"
REWRITE = "If plans are meant to change, `make ledger` writes the new ones; its diff belongs to the same change."


def as_text(entries: Mapping[str, Entry]) -> str:
    """The file's text: a line for each program, sorted by name."""
    lines = [f"{json.dumps(name)}: {json.dumps(entry)}" for name, entry in sorted(entries.items())]
    return "{\n" + ",\n".join(lines) + "\n}\n"


def read() -> dict[str, Entry]:
    return json.loads(FILE.read_text()) if FILE.exists() else {}


@functools.cache
def kept() -> dict[str, Entry]:
    """The entries as they are in the repository, read once."""
    return read()


def write(entries: Mapping[str, Entry]) -> None:
    FILE.write_text(as_text(entries))


def assert_unchanged(name: str, fd: mf.FusionDefinition) -> None:
    """Check a program against its entry."""
    text = difference(name, kept().get(name), entry_of(fd))
    assert not text, f"{text}\n{REWRITE}"


def difference(name: str, old: Entry | None, new: Entry | None) -> str:
    """What is not as it was in a program, as one line for each field; "" where nothing changed."""
    if old is None or new is None:
        return "" if old is new else f"{name}: {'not in the ledger' if old is None else 'no such program any more'}"
    lines = [*_numbers(old, new), *_collectives(old, new), *_ranks(old, new)]
    return "\n".join(f"{name}: {line}" for line in lines)


def _numbers(old: Entry, new: Entry) -> Iterator[str]:
    for field in ("bytes", "seconds"):
        if old[field] != new[field]:
            share = f" ({(new[field] / old[field] - 1) * 100:+.2f} %)" if old[field] else ""
            yield f"{field} {old[field]:,} -> {new[field]:,}{share}"


def _collectives(old: Entry, new: Entry) -> Iterator[str]:
    before, after = old["collectives"], new["collectives"]
    if before != after:
        kinds = [k for k in sorted({*before, *after}) if before.get(k, 0) != after.get(k, 0)]
        changed = ", ".join(f"{k} {before.get(k, 0)} -> {after.get(k, 0)}" for k in kinds)
        yield f"{sum(before.values())} -> {sum(after.values())} collectives: {changed}"


def _ranks(old: Entry, new: Entry) -> Iterator[str]:
    """Whose programs do something else, and whether inputs and outputs lie elsewhere."""
    before, after = (by_rank(entry) for entry in (old, new))
    changed = [rank for rank in sorted({*before, *after}) if before.get(rank) != after.get(rank)]
    if changed:
        whose = "all ranks" if len(changed) == len(after) > 1 else f"rank {', '.join(map(str, changed))}"
        yield f"the program of {whose} does something else"
    if old["held"] != new["held"]:
        yield "inputs or outputs lie elsewhere"


def by_rank(entry: Entry) -> dict[int, str]:
    """The digest of each rank's program."""
    return {int(rank): digest for digest, ranks in entry["ranks"].items() for rank in ranks.split(",")}
