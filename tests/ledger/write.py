"""Write the ledger anew, or compare: `python tests/ledger/write.py [--check] [START OF A NAME ...]`.

Plans every program (or those whose names start so) on all cores, prints what is not as the file says, and writes the
file; with --check it writes nothing and exits 1 where something differs.
"""

from __future__ import annotations

import argparse
import os
import sys
import time
import warnings
from collections.abc import Iterator, Mapping
from concurrent.futures import Future, ProcessPoolExecutor, as_completed
from multiprocessing import get_context
from pathlib import Path

# Before meshfuse and torch are loaded. Plans are made, not read from the disk.
os.environ.update(MESHFUSE_CACHE="off", MESHFUSE_LINKS="bytes", OMP_NUM_THREADS="1")
_TESTS = Path(__file__).resolve().parents[1]
sys.path[:0] = [str(_TESTS), str(_TESTS.parent / "benchmarks" / "bills")]

from ledger import book  # noqa: E402
from ledger.facts import Entry, entry_of  # noqa: E402
from ledger.known_programs import all_programs  # noqa: E402


def worked_out(name: str) -> tuple[Entry, float]:
    """(entry, seconds of planning and lowering) of a program."""
    start = time.process_time()
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")
        entry = entry_of(all_programs()[name]())
    return entry, time.process_time() - start


def all_worked_out(names: list[str]) -> Iterator[tuple[str, Entry | None]]:
    """The programs with their entries as they come (None where planning failed), with a line for each."""
    with ProcessPoolExecutor(mp_context=get_context("spawn")) as pool:
        made = {pool.submit(worked_out, name): name for name in names}
        try:
            for done in as_completed(made):
                yield made[done], _result(made[done], done)
        finally:
            pool.shutdown(cancel_futures=True)


def _result(name: str, done: Future[tuple[Entry, float]]) -> Entry | None:
    try:
        entry, seconds = done.result()
    except Exception as error:
        _say(f"{name} failed: {type(error).__name__}: {error}")
        return None
    _say(f"{seconds:6.2f} s  {name}")
    return entry


def _say(text: str) -> None:
    print(text, file=sys.stderr, flush=True)


def main(arguments: list[str]) -> int:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--check", action="store_true", help="compare only")
    parser.add_argument("names", nargs="*", help="starts of names, such as random/ or bills/d")
    given = parser.parse_args(arguments)
    programs, old = all_programs(), book.read()
    chosen = [name for name in programs if name.startswith(tuple(given.names) or "")]
    new = {name: entry for name, entry in old.items() if name in programs and name not in chosen}
    failed = 0
    try:
        for name, entry in all_worked_out(chosen):
            if entry is not None:
                new[name] = entry
            failed += entry is None
    finally:  # Also of a run that is interrupted, as it takes minutes.
        changed = _print_changes(old, new, chosen)
        if not given.check:
            book.write({**{name: old[name] for name in chosen if name in old}, **new})
    return int(failed > 0 or (given.check and changed > 0))


def _print_changes(old: Mapping[str, Entry], new: Mapping[str, Entry], chosen: list[str]) -> int:
    """Print what is not as it was, of the programs that were planned or are gone; how many they are."""
    names = sorted({*chosen, *(name for name in old if name not in all_programs())})
    texts = [book.difference(name, old.get(name), new.get(name)) for name in names if name in new or name not in chosen]
    changed = [text for text in texts if text]
    print("\n".join([*changed, f"{len(changed)} of {len(chosen)} programs are not as the ledger had them"]))
    return len(changed)


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
