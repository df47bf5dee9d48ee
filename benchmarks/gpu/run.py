"""nvFuser's segments on a GPU: right, and how fast. Writes <date>-<device>.json and .md to results/, or --out.

One call of at most `--limit` seconds: single ops against torch on the CPU; a GPT block's forward and backward against
float64, on simulated and on real ranks; the GPT example; medians over CUDA events of segments by nvFuser, eager torch
and torch.compile, what bandwidth they reach beside a plain copy, and the host's time per step. The results are written
after every section; what fails, crashes or does not fit the limit is named in them. Exit status: 0 all is right,
1 something is wrong or was not reached, 2 no CUDA or no nvFuser here (nothing is written).
"""

from __future__ import annotations

import argparse
import datetime
import functools
import json
import os
import re
import sys
import time
from collections.abc import Callable, Mapping
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import Any

import gpu_checks
import gpu_times
import torch
from pieces import Lines, Outcome, Piece, Section, run_section, work

from meshfuse.backends.nvfuser import NvfuserMissing, load_nvfuser

HERE = Path(__file__).parent
# What is checked takes processors to compile, so these sections run beside each other; what is timed has the machine
# for itself. The seconds are shares of --limit; what a section leaves is the next one's.
SECTIONS = (
    Section("block", 125, 7, alone=False), Section("ops", 125, 10, alone=False), Section("ranks", 125, alone=False),
    Section("example", 125, 3, alone=False), Section("segments", 25), Section("host", 22), Section("gpt_block", 66),
)  # fmt: skip
REFUSED = re.compile("nvFuser (cannot run it|gives|computes something)").search
TARGETS = "Targets: of_copy 0.85 for nvfuser; gpt_block's nvfuser <= compile; meshfuse <= fd.execute + 10 us."


def refusal() -> str | None:
    """Why nothing can be measured here."""
    if not torch.cuda.is_available():
        return f"benchmarks/gpu needs a CUDA device: found none (torch {torch.__version__}); nothing is written."
    try:
        load_nvfuser()
    except NvfuserMissing as error:
        return f"{error}; nothing is written."
    return None


def pieces_of(name: str, end: float) -> list[Piece]:
    """A section's pieces."""
    makers: dict[str, Callable[[], list[Piece]]] = {
        "block": gpu_checks.block, "ops": gpu_checks.ops, "ranks": gpu_checks.ranks, "example": gpu_checks.example,
        "segments": functools.partial(gpu_times.segments, end), "host": functools.partial(gpu_times.host, end),
        "gpt_block": functools.partial(gpu_times.gpt_block, end),
    }  # fmt: skip
    return makers[name]()


def usable() -> bool:
    """Whether the device still works: an error in a kernel leaves it broken for the process."""
    try:
        torch.cuda.synchronize()
    except RuntimeError:
        return False
    return True


def measure(names: list[str], limit: float, write: Callable[[Mapping[str, Any]], None]) -> dict[str, Any]:
    """The chosen sections one after another; `write` is called with the results so far after each."""
    start, now = time.time(), datetime.datetime.now(datetime.timezone.utc)
    chosen = [section for section in SECTIONS if section.name in names]
    found: dict[str, Any] = {
        "device": torch.cuda.get_device_name(), "date": f"{now:%Y-%m-%d}", "torch": torch.__version__,
        "nvfuser": load_nvfuser().__version__, "failed": {}, "seconds": {}, **{section.name: [] for section in chosen},
    }  # fmt: skip
    rounds = [[s for s in chosen if not s.alone], *([s] for s in chosen if s.alone)]
    rounds = [sections for sections in rounds if sections]
    share, spent = limit / sum(sections[0].seconds for sections in rounds), 0.0
    for sections in rounds:
        begun, spent = time.time(), spent + sections[0].seconds * share
        for section, outcome in zip(sections, _all_at_once(sections, start + spent), strict=True):
            found[section.name] = outcome.lines
            found["failed"].update({f"{section.name}: {label}": why for label, why in outcome.failed.items()})
            found["seconds"][section.name] = round(time.time() - begun, 1)
            print(f"{section.name}: {len(outcome.lines)} lines, {len(outcome.failed)} failed", flush=True)
        write(found)
    return found


def _all_at_once(sections: list[Section], end: float) -> list[Outcome]:
    def ran(section: Section) -> Outcome:
        return run_section(section, [sys.executable, __file__, "--work"], end)

    with ThreadPoolExecutor(len(sections)) as pool:
        return list(pool.map(ran, sections))


def wrong(found: Mapping[str, Any]) -> Lines:
    return [x for s in SECTIONS for x in found.get(s.name, ()) if x.get("state") == "wrong"]


# results ----------------------------------------------------------------------------------------------------------


def markdown(found: Mapping[str, Any]) -> str:
    out = [f"# {found['device']}, {found['date']}", "", f"torch {found['torch']}, nvFuser {found['nvfuser']}.", ""]
    states = [line["state"] for line in found.get("ops", ())]
    out += ["## Correctness", "", *(f"- ops, {state}: {states.count(state)}" for state in sorted(set(states)))]
    out += [f"- wrong: {_sample(x)}: {x['why']}" for x in wrong(found) if "op" in x]
    for line in found.get("ops", ()):
        refused = filter(REFUSED, line.get("by", ()))
        out += [f"- left to torch on this device: {_sample(line)}: {why}" for why in refused]
    for x in (*found.get("block", ()), *found.get("ranks", ())):
        out.append(f"- GPT block on {x['ranks']} {x['how']} ranks: {x['state']}")
    out += [f"- GPT example on {x['mesh']}: {x['state']} ({x['error']:.1e})" for x in found.get("example", ())]
    for title in ("segments", "gpt_block", "host"):
        out += ["", f"## {title}", "", *_table(found.get(title, []))]
    out += ["", TARGETS, "", *(f"- failed: {name}: {why}" for name, why in found["failed"].items())]
    return "\n".join(out) + "\n"


def _sample(line: Mapping[str, Any]) -> str:
    return f"{line['op']} {line['sample']} {line.get('dtype', '')}".strip()


def _table(lines: Lines) -> list[str]:
    if not lines:
        return ["Not measured."]
    rows = [list(lines[0]), ["---"] * len(lines[0])]
    rows += [[f"{v:.3g}" if isinstance(v, float) else str(v) for v in line.values()] for line in lines]
    return [f"| {' | '.join(row)} |" for row in rows]


def write_to(folder: Path, found: Mapping[str, Any]) -> None:
    folder.mkdir(parents=True, exist_ok=True)
    name = f"{found['date']}-{re.sub(r'[^A-Za-z0-9]+', '-', found['device']).strip('-')}"
    (folder / f"{name}.json").write_text(json.dumps(found, indent=1) + "\n")
    (folder / f"{name}.md").write_text(markdown(found))


def main() -> int:
    names = [section.name for section in SECTIONS]
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--limit", type=float, default=480, help="seconds for everything")
    parser.add_argument("--out", type=Path, default=HERE / "results")
    parser.add_argument("--sections", default=",".join(names), help="some of them, as in ops,host")
    parser.add_argument("--work", nargs=5, metavar=("SECTION", "FIRST", "STEP", "FILE", "END"), help=argparse.SUPPRESS)
    args = parser.parse_args()
    os.environ["MESHFUSE_BACKEND"] = "nvfuser"
    if args.work:
        name, first, step, into, end = args.work
        return work(pieces_of(name, float(end)), int(first), int(step), Path(into), usable)
    chosen = args.sections.split(",")
    if unknown := sorted(set(chosen) - set(names)):
        parser.error(f"--sections: found {', '.join(unknown)}, needed some of {', '.join(names)}")
    why = refusal()
    if why is not None:
        print(why, file=sys.stderr)
        return 2
    found = measure(chosen, args.limit, functools.partial(write_to, args.out))
    print(markdown(found))
    return 1 if wrong(found) or found["failed"] else 0


if __name__ == "__main__":
    sys.exit(main())
