"""What `meshfuse trace` prints: from the files of real ranks, or from a modelled run."""

from __future__ import annotations

import contextlib
import os
import re
from collections.abc import Sequence

from ..compiler import CompiledProgram
from ..errors import user_error
from ..executor.spans import (
    RankTime,
    hidden_share,
    longest_waits,
    make_writable,
    rank_text,
    read_trace,
    write_trace,
)
from ..lowering.durations import CostModel
from .timeline import timeline

# Of how many ranks a modelled run writes files.
_WRITTEN = 16
# The files that are written here: no other in the user's folder is removed or read.
_OURS = re.compile(r"(program\d+\.)?rank\d+\.json")


def empty_folder(path: str) -> str:
    """The folder, made if it is missing, and cleared of earlier traces.

    Raises DefinitionError where it cannot be made.
    """
    try:
        folder = os.path.abspath(path)  # fails where the working directory is gone
        make_writable(folder)
        for name in filter(_OURS.fullmatch, os.listdir(folder)):
            with contextlib.suppress(FileNotFoundError):  # another rank of the job was faster
                os.remove(os.path.join(folder, name))
    except OSError as error:
        raise user_error(f"cannot write traces to {path}", error.strerror or str(error), "a folder", "") from None
    return folder


def modelled(programs: Sequence[CompiledProgram], folder: str) -> str:
    """Play every program, write the files of its first ranks, and say what overlap saves."""
    folder = empty_folder(folder)
    return "\n\n".join(_one(compiled, folder, number) for number, compiled in enumerate(programs))


def _one(compiled: CompiledProgram, folder: str, number: int) -> str:
    made = [compiled.host_program(rank) for rank in compiled.ranks]
    model = CostModel.of(dict.fromkeys(v.sharding.mesh for v in compiled.resharded.values))
    together = timeline(made, model, traced=compiled.ranks[:_WRITTEN])
    apart = timeline(made, model, overlapped=False)
    for rank, spans in together.spans.items():
        write_trace(os.path.join(folder, f"program{number}.rank{rank}.json"), rank, spans)
    gain = apart.makespan / together.makespan if together.makespan else 1.0
    last = max((time for time in together.ranks if time.rank in together.spans), key=lambda time: time.end).rank
    lines = [f"program {number}, modelled: {together}", *longest_waits(together.spans[last])]
    return "\n".join([*lines, f"waiting where each is issued would take {gain:.2f} times as long"])


def measured(folder: str) -> str:
    """What the files of real ranks in a folder show. Raises DefinitionError if there are none."""
    paths = [os.path.join(folder, name) for name in os.listdir(folder) if _OURS.fullmatch(name)]
    traces = dict(map(read_trace, paths))
    times = [RankTime.of(rank, spans) for rank, spans in traces.items()]
    if not times:
        raise user_error("no trace", "no rank that executed a definition", "one", "Call fd.execute or fd(...) in it.")
    times.sort(key=lambda time: time.rank)
    lines = [f"rank {time.rank}: {rank_text(time)}" for time in times]
    last = max(times, key=lambda time: time.end).rank
    lines += [f"rank {last} ends last:", *longest_waits(traces[last])]
    return "\n".join([*lines, f"hidden: {hidden_share(times):.0%} of all communication", f"traces: {folder}"])
