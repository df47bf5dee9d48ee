"""Draws the benchmarks' results.json as SVG files for the docs: `benchmarks/plots.py [bills] [compile] [runtime]
[session]`.

Needs matplotlib (the extra `bench`). Equal results give equal files.
"""

from __future__ import annotations

import argparse
import json
import sys
from collections.abc import Callable, Mapping, Sequence
from pathlib import Path
from typing import Any

HERE = Path(__file__).resolve().parent
PLOTTED = HERE.parent / "docs" / "plots"
OURS, XLA, DTENSOR, HAND, GREY = "#2563eb", "#c2410c", "#15803d", "#111827", "#8a8f9a"
LEAST_MB = 1e-3  # What moves nothing stands at the left edge of the logarithmic axis.
VARIANTS = {
    "meshfuse": ("meshfuse", OURS, "o"), "meshfuse_eager": ("meshfuse, eager", OURS, "."),
    "dtensor_compiled": ("DTensor, compiled", DTENSOR, "o"), "dtensor": ("DTensor, eager", DTENSOR, "."),
    "hand_compiled": ("by hand, compiled", HAND, "."),
}  # fmt: skip
Results = Sequence[dict[str, Any]]


def bills(axes: Any, results: Results) -> None:
    """Megabytes per rank of every program: ours, XLA's and DTensor's, on one line each."""
    places = range(len(results))
    for column, label, colour, marker in (
        ("dtensor_mb", "DTensor", DTENSOR, "s"), ("xla_cpu_mb", "XLA", XLA, "D"), ("ours_mb", "meshfuse", OURS, "o"),
    ):  # fmt: skip
        there = [(max(r[column], LEAST_MB), place) for place, r in zip(places, results, strict=True)
                 if r.get(column) is not None]  # fmt: skip
        axes.scatter(*zip(*there, strict=True), s=22, color=colour, marker=marker, label=label, zorder=3)
    _logarithmic(axes, [LEAST_MB, 0.01, 0.1, 1, 10, 100], {LEAST_MB: "0"})
    axes.set_yticks(places, [r["id"] for r in results])
    axes.invert_yaxis()
    axes.set_xlabel("MB that a rank sends")
    axes.set_title(f"Bytes on the wire of {len(results)} programs, the same annotations")


def planning(axes: Any, results: Results) -> None:
    """Seconds to compile, and microseconds per op, over the number of ops."""
    ops = [r["ops"] for r in results]
    axes.plot(ops, [r["ops"] * r["us_per_op"] / 1e6 for r in results], color=OURS, marker="o", label="compiling")
    axes.plot(ops, [r["ops"] * r["define_us_per_op"] / 1e6 for r in results], color=GREY, marker=".", label="defining")
    for r in results:
        axes.annotate(f"{r['us_per_op']:,.0f} µs per op", (r["ops"], r["ops"] * r["us_per_op"] / 1e6), (4, 8),
                      textcoords="offset points", ha="right", fontsize=8, color=OURS)  # fmt: skip
    axes.set_xscale("log")
    axes.set_yscale("log")
    axes.margins(x=0.12, y=0.12)
    axes.set_xlabel("ops of the definition")
    axes.set_ylabel("seconds on one core")
    axes.set_title("Planning and compiling equal layers")


def steps(axes: Any, results: Results) -> None:
    """The time of a step beside the hand-written one's, by work and number of ranks."""
    works = list(dict.fromkeys((r["work"], r["ranks"]) for r in results))
    for variant, (label, colour, marker) in VARIANTS.items():
        ratios = {(r["work"], r["ranks"]): r["wall_ratio"] for r in results if r["variant"] == variant}
        there = [(ratios[work], place) for place, work in enumerate(works) if work in ratios]
        if there:
            axes.scatter(*zip(*there, strict=True), s=26, color=colour, marker=marker, label=label, zorder=3)
    axes.axvline(1, color=HAND, linewidth=1)
    _logarithmic(axes, [0.05, 0.1, 0.2, 0.5, 1, 2, 5], {})
    axes.set_yticks(range(len(works)), [f"{work}, {ranks} ranks" for work, ranks in works])
    axes.invert_yaxis()
    axes.set_xlabel("time of a step, the eager hand-written one's = 1")
    axes.set_title("Steps on gloo ranks, beside torch by hand and DTensor")


def calls(axes: Any, results: Results) -> None:
    """Times of calls, and of copies by their rates, beside torch's or a bare channel's: the left side is faster."""
    names = [r["name"] for r in results]
    for of, colour, marker in (("torch", OURS, "o"), ("torch's rpc", OURS, "D"), ("a bare channel", GREY, "s"),
                               ("meshfuse run", HAND, "^")):  # fmt: skip
        there = [(1 / r["ratio"] if "GiB" in r["name"] else r["ratio"], place)
                 for place, r in enumerate(results) if r["rival_name"] == of]  # fmt: skip
        if there:
            axes.scatter(*zip(*there, strict=True), s=26, color=colour, marker=marker, label=f"beside {of}", zorder=3)
    axes.axvline(1, color=HAND, linewidth=1)
    _logarithmic(axes, [0.05, 0.1, 0.2, 0.5, 1, 2, 5, 10], {})
    axes.set_yticks(range(len(names)), names)
    axes.invert_yaxis()
    axes.set_xlabel("time, the other's = 1")
    axes.set_title("Calls of a session and of rpc, four workers")


def _logarithmic(axes: Any, ticks: Sequence[float], labels: Mapping[float, str]) -> None:
    axes.set_xscale("log")
    axes.set_xticks(ticks, [labels.get(tick, f"{tick:g}") for tick in ticks])
    axes.minorticks_off()


# By benchmark what draws it, and the size of the picture in inches.
PLOTS: dict[str, tuple[Callable[[Any, Results], None], tuple[float, float]]] = {
    "bills": (bills, (7.5, 7.0)),
    "compile": (planning, (6.5, 3.8)),
    "runtime": (steps, (7.5, 5.2)),
    "session": (calls, (7.5, 3.4)),
}


def draw(name: str, results: Results, folder: Path) -> Path:
    """Write the picture of a benchmark's results into a folder. Raises ImportError without matplotlib."""
    import matplotlib

    matplotlib.use("svg")
    matplotlib.rcParams.update({"svg.hashsalt": "meshfuse", "svg.fonttype": "none", "font.size": 9})
    from matplotlib.figure import Figure

    plot, size = PLOTS[name]
    figure = Figure(figsize=size, layout="constrained")
    axes = figure.add_subplot()
    plot(axes, results)
    axes.grid(visible=True, color="#ddd", linewidth=0.6)
    axes.spines[["top", "right"]].set_visible(False)
    axes.legend(frameon=False, fontsize=8)
    path = folder / f"{name}.svg"
    figure.savefig(path, metadata={"Date": None, "Creator": None})
    return path


def main(words: Sequence[str]) -> int:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("names", nargs="*", help=f"of {', '.join(PLOTS)}; all without any")
    parser.add_argument("--out", type=Path, default=PLOTTED, help="the folder to write to")
    args = parser.parse_args(words)
    unknown = set(args.names) - set(PLOTS)
    if unknown:
        parser.error(f"no such benchmark: {', '.join(sorted(unknown))}; there are {', '.join(PLOTS)}")
    for name in args.names or PLOTS:
        results = json.loads((HERE / name / "results.json").read_text())
        try:
            print(f"picture: {draw(name, results, args.out)}")
        except ImportError as error:
            print(f"no picture of {name}: {error}; pip install meshfuse[bench]", file=sys.stderr)
    return 0


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
