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
from concurrent.futures import ProcessPoolExecutor, as_completed
from multiprocessing import get_context
from pathlib import Path

# Before meshfuse and torch are loaded. Plans are made, not read from the disk.
os.environ.update(MESHFUSE_CACHE="off", OMP_NUM_THREADS="1")
_TESTS = Path(__file__).resolve().parents[1]
sys.path[:0] = [str(_TESTS), str(_TESTS.parent / "benchmarks" / "bills")]

from ledger import book  # noqa: E402
from ledger.facts import Entry, entry_of  # noqa: E402
from ledger.known_programs import all_programs  # noqa: E402


def worked_out(name: str) -> tuple[str, Entry, float]:
    """(name, entry, seconds of planning and lowering) of a program."""
    start = time.process_time()
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")
        entry = entry_of(all_programs()[name]())
    return name, entry, time.process_time() - start


def all_worked_out(names: list[str]) -> dict[str, Entry]:
    """The entries of these programs, with a line for each while they are made."""
    found: dict[str, Entry] = {}
    with ProcessPoolExecutor(mp_context=get_context("spawn")) as pool:
        for done in as_completed([pool.submit(worked_out, name) for name in names]):
            name, found[name], seconds = done.result()
            print(f"{seconds:6.2f} s  {name}", file=sys.stderr, flush=True)
    return found


def main(arguments: list[str]) -> int:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--check", action="store_true", help="compare only")
    parser.add_argument("names", nargs="*", help="starts of names, such as random/ or bills/d")
    given = parser.parse_args(arguments)
    chosen = [name for name in all_programs() if name.startswith(tuple(given.names) or "")]
    old = book.read()
    kept = {name: entry for name, entry in old.items() if given.names and name in all_programs()}
    new = {**kept, **all_worked_out(chosen)}
    texts = [book.difference(name, old.get(name), new.get(name)) for name in sorted({*old, *new})]
    changed = [text for text in texts if text]
    print("\n".join([*changed, f"{len(changed)} of {len(new)} programs are not as the ledger has them"]))
    if not given.check:
        book.write(new)
    return int(given.check and bool(changed))


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
