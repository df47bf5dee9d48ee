"""This process as a rank of a job: its store, its groups, and what it does when a peer fails."""

from __future__ import annotations

import atexit
import contextlib
import os
import signal
import sys
import threading
import time
from collections.abc import Callable, Iterator, Sequence
from types import FrameType
from typing import Any, ClassVar, Protocol

import torch.distributed as dist

from ..errors import ArgumentError, RankError, SourceLine, caller_line, line_in_script, located, user_error
from . import exit_page
from .call_order import Calls
from .collective_order import CollectiveOrderLock
from .deadlines import STORE, left_running, within
from .device_watchdog import DeviceWatchdog, Pending
from .diagnosis import (
    FailureContext,
    connection_lost,
    failed,
    lost,
    peer_failed,
    seconds_since,
    timed_out,
    two_processes,
)
from .environment import DEFAULT_GROUP, TORCHRUN, Environment, read_environment, time_limit
from .exit_hooks import code_of, end_at_once, ending, install_hook
from .group import Group
from .peers import Peers
from .plan_handover import PlanHandover
from .planning import Plans, awaits_a_plan
from .processes import die_with_parent
from .rendezvous import Rendezvous
from .roll_call import FAILED, Responder, line_of, main_thread_frame, publish, published, roll_call
from .scratch import CLOCK
from .sigterm_report import install_sigterm_report
from .store import connect, hosts_store, joining
from .work import Work

_LINGER = 3.0  # Seconds that a failed rank goes on serving the store.


class Activity(Protocol):
    """The program that this rank runs, or ran last."""

    @property
    def name(self) -> str: ...
    def place(self, frame: FrameType | None) -> str: ...


class _OfThread(threading.local):
    """What gives a thread its world where it is a rank of its own: a worker of a session."""

    enter: Callable[[], World] | None = None


class World:
    """The ranks of this job, as one of them sees them. `World.current()` is that of this process.

    rank, size: the number of this rank, and how many ranks there are.
    local_rank, local_size: the same among the ranks of this machine.
    limit: seconds before a wait for other ranks times out, from MESHFUSE_TIMEOUT. Ranks that are planning get longer.

    The store and the process groups are meshfuse's own, independent of torch's default process group. A process that is
    alone opens no socket.
    """

    _current: ClassVar[World | None] = None
    _of_thread: ClassVar[_OfThread] = _OfThread()
    # Whether torch's default group is of a thread that is a rank of its own, and not of this process.
    default_group_is_a_threads: ClassVar[bool] = False

    def __init__(self, place: Environment, limit: float):
        self.place, self.limit = place, limit
        self.rank, self.size = place.rank, place.size
        self.local_rank, self.local_size = place.local_rank, place.local_size
        self.waiting: Work | None = None
        self.activity: Activity | None = None
        self.recorder: Any = None  # What records its programs' kernels and communications.
        self.default_groups = 0  # Times that torch's default process group was made of these ranks.
        self._gone: set[int] = set()
        self._process = os.getpid()
        self._groups: dict[tuple[int, ...], Group] = {}
        self.rendezvous, self.plans = Rendezvous(self), Plans(self.rank)
        self.handover = PlanHandover(self, self.rendezvous)
        self.calls = Calls(self.rank, self.size)
        self.order_lock, self.checkpoint_lock = (
            CollectiveOrderLock(self.rank, self.size),
            CollectiveOrderLock(self.rank, self.size, "save or load"),
        )
        self.watchdog = DeviceWatchdog(self._check_pending, self._end)
        self._store: dist.Store | None = None
        self._responder: Responder | None = None
        if self.size > 1:
            self._join()

    @classmethod
    def current(cls) -> World:
        """The world of this process; the first call joins the job. Raises RankTimeout if rank 0 cannot be reached.

        A process that was alone joins a job later if the script calls `torch.distributed.init_process_group`. A thread
        that is a worker of a session has the session's world.
        """
        if cls._of_thread.enter is not None:
            return cls._of_thread.enter()
        if cls._current is None or (cls._current.place.source == "none" and _in_default_group()):
            with located(caller_line()):
                place, limit = _place(), time_limit()
            cls._current = World(place, limit)
        return cls._current

    @classmethod
    def stand_alone(cls) -> None:
        """Let this process be no rank of its launcher's job, whose ranks serve something else."""
        cls._current = World(Environment("a session's controller"), time_limit())

    @classmethod
    def enter_by(cls, enter: Callable[[], World] | None) -> None:
        """Let this thread be a rank of its own, in the world that `enter` gives; None ends that."""
        cls._of_thread.enter = enter

    @classmethod
    def entry(cls) -> Callable[[], World] | None:
        """What gives this thread its world, for `entered_by` in a thread that works for it."""
        return cls._of_thread.enter

    @classmethod
    @contextlib.contextmanager
    def entered_by(cls, enter: Callable[[], World] | None) -> Iterator[None]:
        """A context in which this thread is the rank that another one is: autograd has threads of its own for GPUs."""
        before, cls._of_thread.enter = cls._of_thread.enter, enter
        try:
            yield
        finally:
            cls._of_thread.enter = before

    @classmethod
    def joined(cls) -> World | None:
        """The job of several ranks that this process has joined and not left, if any."""
        world = cls.current() if cls._of_thread.enter is not None else cls._current
        return None if world is None or world._responder is None or os.getpid() != world._process else world

    @classmethod
    def planning(cls, what: str) -> contextlib.AbstractContextManager[None]:
        """A context in which this process plans `what`; other ranks of its job can see that."""
        world = cls.joined()
        return contextlib.nullcontext() if world is None else world.plans.under_way(what)

    def check_number(self, line: SourceLine) -> None:
        """Check that this rank has the same number in torch's default group, whose numbers DTensors use.

        Raises ArgumentError if not: the group was made again after this process joined the job.
        """
        found = dist.get_rank() if self.size > 1 and dist.is_initialized() else self.rank
        if found != self.rank:
            raise user_error(
                "DTensors go by other numbers of the ranks than this job", f"rank {found} in torch's default group",
                f"rank {self.rank}, as which this process joined the job",
                "Make the default group with the ranks that the job has.", line, ArgumentError,
            )  # fmt: skip

    @classmethod
    def leave_off(cls, where: str, ranks_of: Callable[[int], Sequence[int]], error: BaseException) -> None:
        """Record that an error kept this rank from a step that `ranks_of(size)` run together.

        Its next execution first compares with those ranks where they stopped.
        """
        world = cls.current() if cls._of_thread.enter is not None else cls._current
        if world is not None and world.size > 1:
            ranks = [rank for rank in ranks_of(world.size) if rank < world.size]
            if world.rank in ranks:
                world.order_lock.leave_off(where, ranks, error)

    @property
    def store(self) -> dist.Store:
        """The store of the job; a world of one rank has none."""
        assert self._store is not None, "a world of one rank has no store"
        return self._store

    @property
    def attempt(self) -> int:
        """How often the launcher has restarted this job: 0 in the first attempt."""
        return self.place.restarts

    @property
    def all_ranks(self) -> tuple[int, ...]:
        """The numbers of all ranks: 0 to size - 1."""
        return tuple(range(self.size))

    def _join(self) -> None:
        if self.place.source == TORCHRUN:
            die_with_parent(signal.SIGTERM)  # torchrun's agent, when killed, leaves its ranks running.
        install_hook(self)
        with joining(self.place):
            self._introduce()
        install_sigterm_report(self.sigterm_report)
        atexit.register(self.leave)

    def _introduce(self) -> None:
        self._store = connect(self.place, self.limit)
        self._peers = Peers(self._store)
        other = self._peers.introduce(self.rank)
        if other:
            if self._peers.do_without(other, self.all_ranks):
                self._store = None  # The job goes on without this process, however it ends.
            raise two_processes(self.rank, other)
        self._peers.agree(self.rank, self.size)
        self._responder = Responder(self._store, self.rank, self._doing)

    def _doing(self) -> str:
        waiting, frame = self.waiting or self.rendezvous.waiting, main_thread_frame()
        what = self.plans.description() or (f"waits in {waiting}" if waiting else line_of(frame))
        where = self.activity.place(frame) if self.activity is not None else ""
        return f"{what}, {where}" if where else what

    def sigterm_report(self) -> str:
        """What this rank prints when it gets SIGTERM: why, as far as it knows, and where it was."""
        where = self._doing()
        ended = {rank: text for rank, text in exit_page.read(exit_page.own()).items() if text != exit_page.FINISHED}
        if not ended:
            others = [rank for rank in self.all_ranks if rank != self.rank]
            answers = within(1.5, lambda: roll_call(self.store, others, 0.5)) or {}
            ended = {rank: self._peers.fate(rank) for rank, answer in answers.items() if answer is None}
        ended = {self.rank: ended[self.rank]} if self.rank in ended else ended
        because = ", because " + "; ".join(f"rank {rank} {text}" for rank, text in ended.items()) if ended else ""
        return f"rank {self.rank}: ended by SIGTERM{because}. It {where}"

    def group(self, ranks: Sequence[int], label: str = "") -> Group:
        """The group of `ranks`, which must include this rank; every call returns the same object.

        Its members connect at their first collective. `label` names it in errors. Raises ArgumentError for ranks that
        do not exist or occur twice.
        """
        ranks = tuple(ranks)
        group = self._groups.get(ranks)
        if group is None:
            self._check_ranks(ranks)
            group = self._groups[ranks] = Group(self, ranks, label or "of ranks")
        return group

    def _check_ranks(self, ranks: tuple[int, ...]) -> None:
        if len(set(ranks)) != len(ranks) or self.rank not in ranks:
            raise user_error(
                "no group for this rank", f"rank {self.rank} and a group of ranks {list(ranks)}",
                "distinct ranks, this one among them", cls=ArgumentError,
            )  # fmt: skip
        if not 0 <= min(ranks) <= max(ranks) < self.size:
            raise user_error(
                "the group has ranks that do not exist",
                f"ranks {list(ranks)} in a world of {self.size}",
                f"ranks below {self.size}",
                f"Start more ranks: meshfuse run --ranks {max(ranks) + 1} SCRIPT, or run on simulated ranks.",
                cls=ArgumentError,
            )

    def barrier(self) -> None:
        """Wait for all ranks of the job. Raises RankTimeout where one does not come, RankError where one has failed."""
        with located(caller_line()):
            self.rendezvous.barrier()

    def begin(self, activity: Activity, ranks: tuple[int, ...], numbers: str = "") -> None:
        """Record the program that this rank runs from here on, for errors and for other ranks.

        `ranks` are those that run it; empty if this rank does not take part. Any two ranks must run the programs that
        both take part in in the same order, with the same `numbers`. They compare that at calls 4, 8, 16, …, which
        costs little in the long run. Raises RankError where ranks differ.
        """
        self.order_lock.resume(self.rendezvous.check_same)
        CLOCK.now += 1
        self.activity = activity
        if len(ranks) > 1 and self.calls.add(ranks, f"{numbers}{activity.name}"):
            self.rendezvous.check_order(self.calls, ranks)

    def check_before_meeting(self) -> None:
        """Raises RankError where this rank can meet the others no more."""
        self.order_lock.check()

    def raise_if_failed(self, what: str = "leaving") -> None:
        """Raises RankError if a peer has published a failure; `what` is what this rank is about to do."""
        failure = within(1.0, lambda: published(self.store))
        if failure is None or failure.rank == self.rank:
            return
        context = self.failure_context()
        gone = [] if failure.primary else lost(context)
        if gone:  # This rank knows itself what the other rank reports.
            raise connection_lost(context, what, gone, "a peer is gone", 0.0)
        raise peer_failed(context, what, failure)

    def check(self, work: Work) -> None:
        """Raises RankError if a collective cannot complete.

        That is so if a peer has published a failure, or its process has ended. gloo does not always notice a connection
        that breaks while a collective begins, so processes are checked as well. A peer counts as ended if two checks in
        a row find it gone without a good-bye: until then it may still publish the reason.
        """
        self._check(str(work), work.group.ranks, work.start)

    def is_patient(self, work: Work) -> bool:
        """Whether a collective that exceeds the limit waits for a rank that is planning."""
        return awaits_a_plan(self.failure_context(), work.group.ranks)

    def _check(self, what: str, ranks: Sequence[int], start: float) -> None:
        self.raise_if_failed(what)
        gone = [rank for rank in self._peers.gone(ranks) if rank != self.rank]
        before, self._gone = self._gone, set(gone)
        if before.intersection(gone) and set(lost(self.failure_context())).intersection(gone):
            raise failed(self.failure_context(), what, ranks, ConnectionError("a peer is gone"), start)

    def _check_pending(self, pending: Pending) -> None:
        """Raises RankError if pending work of a device cannot complete, RankTimeout after the limit."""
        what, trouble, after = str(pending.what), pending.trouble(), seconds_since(pending.start)
        if trouble:
            raise connection_lost(self.failure_context(), what, pending.ranks, trouble, after)
        self._check(what, pending.ranks, pending.start)
        if after > self.limit and not awaits_a_plan(self.failure_context(), pending.ranks):
            raise timed_out(self.failure_context(), what, pending.ranks, after)

    def _end(self, error: RankError) -> None:
        """End this process with an error that cannot be raised: its main thread may be blocked."""
        if not ending.acquire(blocking=False):
            return  # The main thread ends it.
        frame = main_thread_frame()
        error.where = error.where or (None if frame is None else line_in_script(frame))
        self.publish_failure(error)
        print(f"rank {self.rank}: {error}", file=sys.stderr, flush=True)
        # If the connections were broken, the main thread would go on with results that never arrived.
        self.depart(error, abort=False)
        end_at_once(code_of(error))

    def explain(self, work: Work, error: BaseException) -> RankError:
        """The error to raise for a backend's error in `work`; it names the rank that failed, if known."""
        return failed(self.failure_context(), str(work), work.group.ranks, error, work.start)

    def failure_context(self) -> FailureContext:
        """What this rank knows, for errors that name the failed rank."""
        host = None if self.place.agent_store or self.place.source == DEFAULT_GROUP else 0
        return FailureContext(self.rank, self.store, host, self.limit, self._peers, self.all_ranks)

    def publish_failure(self, error: BaseException) -> None:
        """Publish why this rank fails: the errors of its peers will show its traceback."""
        if self._store is not None:
            within(1.0, lambda: publish(self.store, self.rank, error))

    def depart(self, error: BaseException, abort: bool = True) -> None:
        """After a failure, tell the peers that this rank leaves; with `abort`, break the connections.

        A rank that serves the store stays until they have read it, those that are about to join included.
        """
        if self._store is None:
            return
        self._say("left", FAILED)
        self._say("done")
        for group in self._groups.values() if abort else ():
            group.abort()
        if hosts_store(self.place):
            peers = [rank for rank in self.all_ranks if rank not in getattr(error, "silent", ())]
            within(_LINGER, lambda: self._await(peers, _LINGER, lambda: None))

    def leave(self) -> None:
        """At a normal exit, disconnect from the other ranks and end all threads but Python's own.

        A thread that returns from torch while the interpreter is finalised ends the process with SIGABRT. It may be a
        thread of the script that executes, or one of gloo's, which drops tensors only after it has reported them.
        """
        if self._responder is None or os.getpid() != self._process:
            return
        responder, self._responder = self._responder, None
        self._say("left", exit_page.FINISHED)
        locks = (self.order_lock, self.checkpoint_lock)
        busy = [f"a thread that calls {lock.doing}" for lock in locks if not lock.end(self.limit)]
        # A peer that still waits for this rank notices now, and not only when the process ends.
        for group in self._groups.values():
            group.leave()
        self._say("done")
        if hosts_store(self.place):
            self._serve_to_the_end()
        silent = [] if responder.stop(self.limit) else [STORE]
        self.watchdog.stop(self.limit)
        left = {*busy, *silent, *left_running(self.limit)}
        if left:
            what = " and ".join(sorted(left))
            print(f"rank {self.rank}: ends, having waited {self.limit:g} s in vain for {what}", file=sys.stderr)
            end_at_once(1)

    def _say(self, what: str, how: str = "") -> None:
        """Report in the store that this rank has left the job ("left"), or no longer needs the store ("done")."""
        within(1.0, lambda: self.store.set(f"{what}/{self.rank}", how))

    def _serve_to_the_end(self) -> None:
        """Serve the store while a rank that still needs it answers: it may run definitions without this rank."""
        left: Sequence[int] | None = ()
        while left is not None:
            left = within(self.limit + 1, lambda: self._await(self._joined(), self.limit, self.raise_if_failed))
            answers = roll_call(self.store, left) if left else None
            if not answers or {*answers.values()} <= {None, exit_page.FINISHED, FAILED}:
                return

    def _joined(self) -> Sequence[int]:
        return [rank for rank in self.all_ranks if self.store.check([f"joined/{rank}"])]

    def _await(self, ranks: Sequence[int], limit: float, check: Callable[[], None]) -> Sequence[int]:
        """Wait until these ranks no longer need the store, or have ended; returns the others."""
        self._peers.remember(ranks)
        until = time.monotonic() + limit
        while ranks and time.monotonic() < until:
            check()
            left = [rank for rank in ranks if not self.store.check([f"done/{rank}"])]
            ended = self._peers.gone(left)
            ranks = [rank for rank in left if rank not in ended]
            time.sleep(0.01)
        return ranks


def _place() -> Environment:
    place = read_environment()
    return _default_group_place() if place.source == "none" and _in_default_group() else place


def _in_default_group() -> bool:
    """Whether the script is a rank by torch's default group; that of a session belongs to one of its threads."""
    return dist.is_available() and dist.is_initialized() and not World.default_group_is_a_threads


def _default_group_place() -> Environment:
    """The environment of a rank that was set up by init_process_group alone."""
    size = dist.get_world_size()
    return Environment(DEFAULT_GROUP, dist.get_rank(), size, dist.get_rank(), size)
