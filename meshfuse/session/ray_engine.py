"""A session whose workers Ray places: one actor per worker in a placement group. Ray starts, watches and kills them.

The actors keep the session's own channel, so that a call takes as long as without Ray. Ray is an optional extra
(`pip install meshfuse[cluster]`), and is imported when a session is made.
"""

from __future__ import annotations

import contextlib
import importlib
import os
import sys
import threading
from typing import Any

from ..argument_checks import as_int
from ..errors import ArgumentError, caller_line, shown, user_error
from ..runtime.environment import DEFAULT_TIMEOUT, LOOPBACK
from .errors import SessionError, WorkerLost
from .forkserver import START_LIMIT
from .handshake import token_of
from .host import run as serve_host
from .listener import log
from .nodes import Nodes
from .session import SocketSession

_POLL = 0.2  # Seconds between two looks at what Ray says of the actors.


class RaySession(SocketSession):
    """A session of `num_workers` workers: the first in this process, and each other one in an actor of Ray's.

    resources: what Ray reserves for each actor, {"CPU": 1} if None, {"GPU": 1} for a GPU each.
    strategy: Ray's for the placement group: "PACK", "SPREAD", "STRICT_PACK" or "STRICT_SPREAD".
    host: the address of this machine at which the actors connect, as for SocketSession.

    Uses the cluster that this process has joined by `ray.init`, else the one that runs here or RAY_ADDRESS names.
    Raises SessionError where Ray is not installed or runs nowhere, or has no room within `timeout` seconds.
    """

    def __init__(
        self, num_workers: int, num_groups: int = 1, *, resources: dict[str, float] | None = None,
        strategy: str = "PACK", host: str = LOOPBACK, token: str | None = None, timeout: float = DEFAULT_TIMEOUT,
    ):  # fmt: skip
        count = as_int(num_workers) or 0
        if count < 2:
            raise user_error("a RaySession's num_workers", shown(num_workers), "two or more", "", caller_line(),
                             ArgumentError)  # fmt: skip
        self._actors = _Actors(count - 1, dict(resources or {"CPU": 1}), strategy, timeout)
        secret = token_of(token)

        def announce(address: str, port: int) -> None:
            self._actors.serve(address, port, secret)

        def make() -> Nodes:
            return Nodes(count - 1, 1, host, 0, secret, False, announce, self._actors.check)

        try:
            super().__init__(count, 1, num_groups, host, 0, secret, timeout, make)
        except BaseException:
            self._actors.close()
            raise

    def shutdown(self) -> None:
        """End the workers and their actors, and give their room back to Ray."""
        super().shutdown()
        self._actors.close()


class _Actors:
    """The actors in their placement group, and what Ray says of their ends."""

    def __init__(self, count: int, resources: dict[str, float], strategy: str, timeout: float):
        self._ray = _ray()
        placement = importlib.import_module("ray.util.placement_group")
        scheduling = importlib.import_module("ray.util.scheduling_strategies")
        self._remove = placement.remove_placement_group
        self._group = placement.placement_group([dict(resources)] * count, strategy=strategy)
        self._actors: list[Any] = []
        self._refs: list[Any] = []
        self.deaths: list[str] = []
        self._is_closed = False
        if not self._group.wait(timeout_seconds=timeout):
            self.close()
            raise SessionError(
                f"Ray has no room for {count} workers of {resources} within {timeout:g} s: found "
                f"{self._ray.available_resources()}", caller_line(),
            )  # fmt: skip
        path = os.pathsep.join([entry for entry in sys.path if entry])
        made = self._ray.remote(_Actor)
        for index in range(count):
            where = scheduling.PlacementGroupSchedulingStrategy(self._group, placement_group_bundle_index=index)
            options = {name.lower(): n for name, n in resources.items() if name in ("CPU", "GPU")}
            self._actors.append(
                made.options(
                    num_cpus=options.get("cpu", 0), num_gpus=options.get("gpu", 0), scheduling_strategy=where,
                    resources={name: n for name, n in resources.items() if name not in ("CPU", "GPU")},
                    max_concurrency=2, runtime_env={"env_vars": {"PYTHONPATH": path}},
                ).remote()
            )  # fmt: skip

    def serve(self, host: str, port: int, token: str) -> None:
        """Have each actor keep a worker."""
        self._refs = [actor.serve.remote(host, port, token) for actor in self._actors]
        threading.Thread(target=self._watch, name="meshfuse-ray", daemon=True).start()

    def _watch(self) -> None:
        """Note what Ray says of actors that die: why, and on which machine."""
        waiting = list(self._refs)
        while waiting and not self._is_closed:
            ready, waiting = self._ray.wait(waiting, timeout=_POLL)
            for ref in ready:
                try:
                    self._ray.get(ref)
                except Exception as error:
                    if not self._is_closed:
                        self.deaths.append(str(error).strip())
                        log.warning("Ray: %s", str(error).strip())

    def check(self) -> None:
        """Raises WorkerLost where Ray says that an actor has died."""
        if self.deaths:
            raise WorkerLost(f"an actor of the session has died: {self.deaths[0]}", caller_line())

    def close(self) -> None:
        """End all actors, and give their room back."""
        if self._is_closed:
            return
        self._is_closed = True
        for actor in self._actors:
            with contextlib.suppress(Exception):
                self._ray.kill(actor)
        with contextlib.suppress(Exception):
            self._remove(self._group)


class _Actor:
    """A worker's place: Ray runs this on a machine of its cluster."""

    def serve(self, host: str, port: int, token: str) -> int:
        """Keep a worker until the session ends."""
        return serve_host(host, port, 1, START_LIMIT, token)


def _ray() -> Any:
    """Ray, in its cluster. Raises SessionError."""
    try:
        ray = importlib.import_module("ray")
    except ImportError:
        raise SessionError(
            "Ray is not installed: found no module ray, needed it for a RaySession. "
            "Run `pip install meshfuse[cluster]`",
            caller_line(),
        ) from None
    if not ray.is_initialized():
        try:
            ray.init(address=os.environ.get("RAY_ADDRESS", "auto"), log_to_driver=True)
        except ConnectionError as error:
            raise SessionError(
                f"no Ray runs here: {error}. Start it: ray start --head --node-ip-address=127.0.0.1", caller_line()
            ) from None
    return ray
