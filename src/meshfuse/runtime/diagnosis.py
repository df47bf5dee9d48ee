"""From a backend's error or a wait without end to one that names the rank at fault."""

from __future__ import annotations

import textwrap
import time
from collections.abc import Iterable, Sequence

import torch.distributed as dist

from ..errors import RankError, RankTimeout
from .liveness import Failure, look_for_failure, published, roll_call, within


def peer_failed(what: str, rank: int, failure: Failure) -> RankError:
    """The error of a rank whose peer published a failure."""
    error = RankError(
        f"{what} cannot finish on rank {rank}: found rank {failure.rank} failed, needed all ranks running. "
        f"Rank {failure.rank} says:\n{textwrap.indent(failure.text, '    ')}"
    )
    error.peer = failure.rank
    return error


def connection_lost(what: str, rank: int, peers: Iterable[int], store: dist.Store, cause: str, after: float) -> RankError:
    """The error of a collective whose connection broke: with the failed peer's traceback if it left one."""
    failure = look_for_failure(store)
    if failure is not None and failure.rank != rank:
        return peer_failed(what, rank, failure)
    first = cause.strip().splitlines()[0] if cause.strip() else "no message"
    silent, report = _report(store, rank, peers)
    error = RankError(
        f"{what} failed on rank {rank} after {after:.1f} s: found a connection broken ({first}), needed all ranks of the "
        f"group running. See why the silent ranks ended.\n{report}"
    )
    error.silent = silent
    return error


def timed_out(what: str, rank: int, peers: Iterable[int], store: dist.Store, limit: float, after: float) -> RankError:
    """The error of a wait that reached MESHFUSE_TIMEOUT: says which peers do not answer and where the others are."""
    failure = within(1.0, lambda: published(store), None)
    if failure is not None and failure.rank != rank:
        return peer_failed(what, rank, failure)
    silent, report = _report(store, rank, peers)
    error = RankTimeout(
        f"{what} timed out on rank {rank}: found no end after {after:.1f} s, needed all ranks to arrive within "
        f"{limit:g} s. See the ranks below, or raise MESHFUSE_TIMEOUT if they are only slow.\n{report}"
    )
    error.silent = silent
    return error


def _report(store: dist.Store, rank: int, peers: Iterable[int]) -> tuple[tuple[int, ...], str]:
    others = [peer for peer in peers if peer != rank]
    answers = roll_call(store, others)
    if answers is None:
        return (), "    The store of the job, which rank 0 or torchrun's agent serves, does not answer."
    silent = tuple(peer for peer in others if answers[peer] is None)
    return silent, "\n".join(f"    rank {peer} {_state(answers[peer])}" for peer in others)


def _state(answer: str | None) -> str:
    return "does not answer: it is stopped or was killed" if answer is None else answer


def disagreement(what: str, values: Sequence[str], ranks: Sequence[int]) -> RankError:
    """The error of ranks that were given different things: which ranks have which value."""
    by_value: dict[str, list[int]] = {}
    for rank, value in zip(ranks, values, strict=True):
        by_value.setdefault(value, []).append(rank)
    have = "; ".join(f"{_ranks(members)} {_shorten(value)}" for value, members in by_value.items())
    return RankError(
        f"ranks disagree on {what}: found {have}, needed one value on all of them. Make every rank run the same "
        "definition with the same shapes; let nothing in it depend on the rank."
    )


def _ranks(members: Sequence[int]) -> str:
    return f"{'rank' if len(members) == 1 else 'ranks'} {', '.join(map(str, members))}"


def _shorten(value: str) -> str:
    return repr(value if len(value) <= 80 else value[:77] + "...")


def seconds_since(start: float) -> float:
    """Since a `time.monotonic()`."""
    return time.monotonic() - start
