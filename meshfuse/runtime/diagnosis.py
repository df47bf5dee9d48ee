"""The error that names the rank at fault, from a backend's own error or a wait that reached its limit."""

from __future__ import annotations

import itertools
import os
import re
import textwrap
import time
from collections.abc import Iterable, Sequence
from dataclasses import dataclass

import torch.distributed as dist

from ..errors import MeshfuseError, RankError, RankTimeout, user_error
from . import processes
from .deadlines import within
from .peers import Peers
from .roll_call import Failure, goodbye, look_for_failure, published, roll_call


@dataclass(frozen=True, slots=True)
class FailureContext:
    """What this rank knows when something fails.

    rank: this rank.
    store: the job's store; `host` is the rank that serves it, None where no rank does.
    limit: of every wait, in seconds.
    peers: the processes of `all_ranks`.
    """

    rank: int
    store: dist.Store
    host: int | None
    limit: float
    peers: Peers
    all_ranks: tuple[int, ...]


def peer_failed(context: FailureContext, what: str, failure: Failure) -> RankError:
    """The error of this rank, whose peer published a failure; `what` is what cannot finish."""
    error = RankError(
        f"{what} cannot finish on rank {context.rank}: found rank {failure.rank} failed, needed all ranks "
        f"running. Rank {failure.rank} says:\n{textwrap.indent(failure.text, '    ')}"
    )
    error.peer, error.ended = failure.rank, what
    return error


def two_processes(rank: int, other: str) -> MeshfuseError:
    """The error of a process that finds another process under its own rank number."""
    return user_error(
        f"two processes are rank {rank} of this job", f"process {os.getpid()}, after {processes.pid_of(other)}",
        "one for each rank", "Give each its own RANK, and each job a MASTER_PORT of its own.", cls=RankError,
    )  # fmt: skip


def connection_lost(context: FailureContext, what: str, peers: Iterable[int], cause: str, after: float) -> RankError:
    """The error of a collective whose connection broke after so many seconds.

    It has the failed peer's traceback if that left one.
    """
    failure = look_for_failure(context.store, lambda: bool(lost(context)))
    if failure is not None and failure.rank != context.rank and (failure.primary or not lost(context)):
        return peer_failed(context, what, failure)
    silent, report = _report(context, peers)
    error = RankError(
        f"{what} failed on rank {context.rank} after {after:.1f} s: found a lost connection ({_brief(cause)}), "
        f"needed all ranks of the group running. See why the silent ranks ended.\n{report}"
    )
    error.silent = silent
    return error


def failed(context: FailureContext, what: str, peers: Iterable[int], error: BaseException, start: float) -> RankError:
    """The error to raise for a backend's `error` in `what`, which began at `start` (a `time.monotonic()`).

    It says who failed or did not arrive, as far as that can be found out.
    """
    after = seconds_since(start)
    if "timed out" in str(error).lower() or "timeout" in str(error).lower():
        return timed_out(context, what, peers, after)
    return connection_lost(context, what, peers, str(error), after)


def lost(context: FailureContext) -> list[int]:
    """Ranks whose processes ended without a good-bye."""
    gone = [rank for rank in context.peers.gone(context.all_ranks) if rank != context.rank]
    return [rank for rank in gone if _goodbye(context, rank) is None]


def _goodbye(context: FailureContext, rank: int) -> str | None:
    return within(1.0, lambda: goodbye(context.store, rank))


def peers_gone(context: FailureContext, what: str, gone: Sequence[int]) -> RankError:
    """The error of a meeting to which the ranks in `gone` will never come."""
    _, report = _report(context, gone)
    error = RankError(
        f"{what} cannot finish on rank {context.rank}: found {_ranks(gone)} ended, needed all ranks to arrive. "
        f"See why {'it' if len(gone) == 1 else 'they'} ended.\n{report}"
    )
    error.silent = tuple(gone)
    return error


def timed_out(
    context: FailureContext, what: str, peers: Iterable[int], after: float, limit: float | None = None
) -> RankError:
    """The error of a wait that reached its limit (MESHFUSE_TIMEOUT): who does not answer, and where the others are."""
    failure = within(1.0, lambda: published(context.store))
    if failure is not None and failure.primary and failure.rank != context.rank:
        return peer_failed(context, what, failure)
    silent, report = _report(context, peers)
    error = RankTimeout(
        f"{what} timed out on rank {context.rank}: found no end after {after:.1f} s, needed all ranks to arrive "
        f"within {limit or context.limit:g} s. See the ranks below, or raise MESHFUSE_TIMEOUT if they are slow.\n"
        f"{report}"
    )
    error.silent = silent
    return error


def _brief(cause: str) -> str:
    """gloo's message without its source position and advice."""
    text = re.sub(r"^\[[^\]]*\]\s*", "", cause.strip())
    return processes.hindrance() + (text.split(". ")[0].splitlines()[0] if text else "no message")


def _report(context: FailureContext, peers: Iterable[int]) -> tuple[tuple[int, ...], str]:
    others = [peer for peer in peers if peer != context.rank]
    within(1.0, lambda: context.peers.remember(others))
    # Ranks outside of the group that are gone may be the reason why the others wait.
    others += [peer for peer in context.peers.gone(context.all_ranks) if peer not in others and peer != context.rank]
    mute = [*context.peers.silent_already(others), *context.peers.strangers(others)]
    answers = roll_call(context.store, [peer for peer in others if peer not in mute])
    if answers is None:
        return _no_store(context)
    answers |= {peer: _goodbye(context, peer) for peer in mute}
    silent = tuple(peer for peer in others if answers[peer] is None)
    return silent, "\n".join(f"    rank {peer} {answers[peer] or context.peers.fate(peer)}" for peer in others)


def _no_store(context: FailureContext) -> tuple[tuple[int, ...], str]:
    if context.host is None:
        return (), "    the launcher's agent, which serves the store of the job, does not answer"
    if context.peers.runs(context.host):
        return (), f"    rank {context.host} runs, but the connection to the store of the job, which it serves, is lost"
    fate = context.peers.fate(context.host)
    report = f"    rank {context.host} {fate}, and with it the store through which the others would"
    return (context.host,), report


SAME_PROGRAM = "Make every rank run the same definition with the same shapes; let nothing in it depend on the rank."
# So many letters of a value are shown, so many of them before the first in which values differ.
_SHOWN, _BEFORE = 80, 20


def disagreement(what: str, values: Sequence[str], ranks: Sequence[int], do: str = SAME_PROGRAM) -> RankError:
    """The error of `ranks` that were given different `values`: which rank has which.

    Of values with several lines only the first line that differs is shown, and of long lines where they first differ.
    `do` is the advice.
    """
    by_value: dict[str, list[int]] = {}
    for rank, value in zip(ranks, _first_difference(values), strict=True):
        by_value.setdefault(value, []).append(rank)
    alike = next((i for i, letters in enumerate(itertools.zip_longest(*by_value)) if len({*letters}) > 1), 0)
    start = alike - _BEFORE if alike > _SHOWN - _BEFORE else 0
    have = "; ".join(f"{_ranks(members)} {_shorten(value, start)}" for value, members in by_value.items())
    return RankError(f"ranks disagree on {what}: found {have}, needed one value on all of them. {do}")


def _first_difference(values: Sequence[str]) -> Sequence[str]:
    """Of each text the first line in which the texts differ; "nothing" where a text has ended before."""
    lines = itertools.zip_longest(*(value.splitlines() for value in values), fillvalue="nothing")
    return next(([line.strip() for line in row] for row in lines if len(set(row)) > 1), values)


def _ranks(members: Sequence[int]) -> str:
    return f"{'rank' if len(members) == 1 else 'ranks'} {', '.join(map(str, members))}"


def _shorten(value: str, start: int) -> str:
    cut = f"...{value[start:]}" if start else value
    return repr(cut if len(cut) <= _SHOWN else cut[: _SHOWN - 3] + "...")


def seconds_since(start: float) -> float:
    """Seconds that have passed since `start`, a `time.monotonic()`."""
    return time.monotonic() - start
