"""`Session`: tensors, collectives and definitions on workers; and its kinds, by where the workers are."""

from __future__ import annotations

import os
import secrets
import weakref
from collections.abc import Callable, Mapping, Sequence
from typing import Any

import numpy as np
import torch

from ..argument_checks import as_int
from ..checkpoint.safetensors import find
from ..errors import ArgumentError, caller_line, shown, user_error
from ..fusion_definition import FusionDefinition
from ..mesh import DeviceMesh
from ..runtime.environment import DEFAULT_TIMEOUT
from ..sharding.data import shard, unshard
from ..sharding.value import Sharding
from . import builtin, collectives, distributed
from .controller import Controller
from .crew import Crew, LocalEngine, processes, sockets, threads
from .distributed import Placed
from .dref import DRef
from .handshake import TOKEN, token_of
from .nodes import Nodes
from .profile import Profile
from .remote_module import RemoteModule, load_module
from .rpc import api as rpc_api


class Session(Controller):
    """A controller's calls, and what workers hold: tensors, shards of global tensors, definitions.

    `in_group`: a collective is of each group of workers by itself; False for one of all workers.
    """

    _rpc_groups = 0
    _rpc_token = ""  # of the latest
    _engine: LocalEngine | None = None

    def _local_engine(self) -> LocalEngine:
        """What starts this machine's processes; a new one where there is none that runs."""
        if self._engine is None or self._engine.server.process.poll() is not None:
            self._engine = LocalEngine()
            weakref.finalize(self, self._engine.server.close).atexit = False
        return self._engine

    def restart(self) -> None:
        """End all workers at once and start new ones, which import the modules and have the functions of before.

        DRefs of before can no longer be used, and `rpc` needs `init_rpc` again.
        """
        rpc_api.abandon(self._rpc_token)
        super().restart()

    def shutdown(self) -> None:
        """End the workers after the calls that were issued, on all hosts. Several calls do no harm."""
        super().shutdown()
        rpc_api.abandon(self._rpc_token)
        if self._engine is not None:
            self._engine.server.close()

    # Values

    def copy_to_worker_0(self, host_array: torch.Tensor | np.ndarray, remote_array: DRef | None = None) -> DRef:
        """Copy a tensor or an array of numpy to worker 0: into a DRef's tensor, or a new register. Returns the DRef."""
        host_array = _as_tensor(host_array, "copy_to_worker_0")
        ref = remote_array or self._call(builtin.constant, (None,), {}, "copy_to_worker_0")
        ref.debug_copy_from(0, host_array)
        return ref

    def copy_from_worker_0(self, host_array: torch.Tensor | np.ndarray, remote_array: DRef) -> None:
        """Copy worker 0's tensor into a tensor, or array of numpy, of this process. Waits for all calls before."""
        host_array = _as_tensor(host_array, "copy_from_worker_0")
        found = remote_array.debug_get_from_remote(0)
        if not isinstance(found, torch.Tensor) or found.numel() != host_array.numel():
            needed = f"a tensor of shape {list(host_array.shape)} on worker 0, or of as many elements"
            raise user_error("copy_from_worker_0", _described(found), needed, "", caller_line(), ArgumentError)
        with torch.no_grad():
            host_array.copy_(found.reshape(host_array.shape))

    def empty(
        self, shape: Sequence[int], dtype: Any = "float32", device: Any = None, worker0_only: bool = False,
        in_group: bool = True,
    ) -> DRef:  # fmt: skip
        """A tensor of any content on every worker; with `worker0_only` on the first of each group, or of all."""
        place = None if device is None else str(device)
        args = (tuple(shape), builtin.as_dtype(dtype), place, worker0_only, in_group)
        return self._call(builtin.empty, args, {}, "empty")

    # Collectives

    def init_ccl(self, ccl: str = "gloo", *device_ids: int) -> None:
        """Connect the workers' groups: "gloo" for CPU tensors, "nccl" for GPUs, one for each worker.

        Without it they are connected by the first collective.
        """
        if ccl not in ("gloo", "nccl") or (device_ids and len(device_ids) != self.num_workers):
            raise user_error("init_ccl", f"{shown(ccl)} with {len(device_ids)} devices",
                             '"gloo" or "nccl", and no devices or one for each worker', "", caller_line(),
                             ArgumentError)  # fmt: skip
        self._call_now_and_after_restarts(collectives.init_ccl, (ccl, device_ids), "init_ccl")

    def allreduce(self, src: DRef, dst: DRef | None = None, op: str = "sum", in_group: bool = True) -> DRef:
        """Reduce the workers' tensors into `dst` (None: a new one) of each. op: sum, prod, min, max or avg."""
        if op not in collectives.OPS:
            raise user_error("allreduce: op", shown(op), f"one of {', '.join(collectives.OPS)}", "", caller_line(),
                             ArgumentError)  # fmt: skip
        return self._call(collectives.allreduce, (src, dst, op, in_group), {}, "allreduce")

    def allgather(self, src: DRef, dst: DRef | None = None, in_group: bool = True) -> DRef:
        """Put the workers' tensors, of any sizes, behind each other along dim 0, into `dst` of each."""
        return self._call(collectives.allgather, (src, dst, in_group), {}, "allgather")

    def broadcast_from_worker0(self, src: DRef, dst: DRef | None = None, in_group: bool = True) -> DRef:
        """Copy the tensor of the first worker into `dst` of all."""
        return self._call(collectives.broadcast, (src, dst, in_group), {}, "broadcast_from_worker0")

    def scatter_from_worker0(self, src: DRef, dst: DRef, in_group: bool = True) -> DRef:
        """Cut the tensor of the first worker into parts of the sizes of the workers' `dst`, in order."""
        return self._call(collectives.scatter, (src, dst, in_group), {}, "scatter_from_worker0")

    def gather_to_worker0(self, src: DRef, dst: DRef | None = None, in_group: bool = True) -> DRef:
        """Put the workers' tensors, of any sizes, behind each other into `dst` of the first worker."""
        return self._call(collectives.gather, (src, dst, in_group), {}, "gather_to_worker0")

    def broadcast(self, array: torch.Tensor | np.ndarray, dst: DRef | None = None, in_group: bool = True) -> DRef:
        """Copy a tensor of this process to all workers, by way of worker 0 (the first of each group)."""
        return self.broadcast_from_worker0(self._on_firsts(array, "broadcast", in_group), dst, in_group)

    def scatter(self, array: torch.Tensor | np.ndarray, dst: DRef | None = None, in_group: bool = True) -> DRef:
        """Cut a tensor of this process into the workers' `dst`, by way of worker 0 (the first of each group).

        Without `dst` each gets one of its rows: dim 0 has as many as there are workers.
        """
        array = _as_tensor(array, "scatter")
        dst = self._rows_of(array, self._members(in_group)) if dst is None else dst
        return self.scatter_from_worker0(self._on_firsts(array, "scatter", in_group), dst, in_group)

    def _rows_of(self, array: torch.Tensor, members: int) -> DRef:
        """On each worker a tensor for one of the rows. Raises ArgumentError where these are not one for each."""
        if not array.ndim or array.shape[0] != members:
            raise user_error("scatter without dst", _described(array), f"{members} rows, one for each worker",
                             "Pass dst.", caller_line(), ArgumentError)  # fmt: skip
        return self.empty(array.shape[1:], array.dtype, array.device)

    def _members(self, in_group: bool) -> int:
        """How many workers a collective is of."""
        return self.num_workers // self.num_groups if in_group else self.num_workers

    def _on_firsts(self, array: torch.Tensor | np.ndarray, what: str, in_group: bool) -> DRef:
        """A tensor on worker 0; if `in_group` on the first worker of each group."""
        array, size = _as_tensor(array, what), self._members(in_group)
        return self.call_each(
            builtin.constant, [(array if worker % size == 0 else None,) for worker in range(self.num_workers)], what
        )

    def send_to_next_group(self, src: DRef, dst: DRef) -> DRef:
        """Each worker's `src` goes into the `dst` of the worker of the same place in the next group."""
        return self._call(collectives.pass_on, (src, dst, 1), {}, "send_to_next_group")

    def send_to_previous_group(self, src: DRef, dst: DRef) -> DRef:
        """Each worker's `src` goes into the `dst` of the worker of the same place in the group before."""
        return self._call(collectives.pass_on, (src, dst, -1), {}, "send_to_previous_group")

    def send_to_worker(self, src: DRef, sender: int, dst: DRef, receiver: int) -> DRef:
        """One worker's `src` goes into another one's `dst`."""
        for worker in (sender, receiver):
            src._worker(worker)
        return self._call(collectives.send_between, (src, dst, sender, receiver), {}, "send_to_worker")

    def init_rpc(self, timeout: float | None = None) -> None:
        """Let the workers, this process among them, call one another by `rpc`, under the names worker0, worker1, ...

        Ends by `s.call(rpc.shutdown)`, or with the session. Workers must be processes. timeout: seconds of a call.
        """
        if isinstance(self, ThreadedSession):
            raise user_error("init_rpc", "workers that are threads", "one process for each", "Use a ProcessSession.",
                             caller_line(), ArgumentError)  # fmt: skip
        self._rpc_groups += 1
        self._rpc_token = secrets.token_hex(32)
        limit = self.timeout if timeout is None else timeout
        self._call(rpc_api.join, (self._rpc_token, limit, self._rpc_groups), {}, "init_rpc")
        self.sync()

    def profile(self, path: str | os.PathLike[str] = "session.json") -> Profile:
        """A context in which the controller's and the workers' times are recorded; then a file for Perfetto is written.

        It has a row of calls for each worker, with rows of kernels, communications and waits of the definitions and
        models that it runs, and what the controller issues and waits for. On a GPU kernels have the times of their
        launches. Clocks of several hosts are compared at the beginning.
        """
        return Profile(self, path)

    # Distributed tensors and definitions

    def distribute_tensor(self, tensor: torch.Tensor, sharding: Sharding) -> DRef:
        """Give each worker its shard of a global tensor. The ranks of the sharding's mesh are the workers."""
        tensor = _as_tensor(tensor, "distribute_tensor")
        self._check_sharding(sharding, "distribute_tensor")
        placed = Placed(sharding.placement(tuple(tensor.shape)), tuple(tensor.shape))
        parts = [(self._shard(tensor, placed.sharding, worker),) for worker in range(self.num_workers)]
        return self.call_each(builtin.constant, parts, "distribute_tensor", placed)

    def _shard(self, tensor: torch.Tensor, sharding: Sharding, worker: int) -> torch.Tensor | None:
        return shard(tensor, sharding, worker) if worker in sharding.mesh else None

    def _check_sharding(self, sharding: Any, what: str) -> None:
        ranks = max(sharding.mesh.ranks) + 1 if isinstance(sharding, Sharding) and not sharding.partial else 0
        if not 0 < ranks <= self.num_workers:
            found = shown(sharding) if not ranks else f"a mesh of ranks up to {ranks - 1}"
            raise user_error(what, found, f"a Sharding, not partial, on the {self.num_workers} workers", "",
                             caller_line(), ArgumentError)  # fmt: skip

    def load_shards(self, path: str | os.PathLike[str], shardings: Mapping[str, Sharding]) -> list[DRef]:
        """Read tensors of safetensors files by name; each worker reads its shards alone, and keeps them.

        path: a file, or an index of several, which every worker can open. Raises CheckpointError for what is not there.
        """
        for sharding in shardings.values():
            self._check_sharding(sharding, "load_shards")
        stored = find(path, list(shardings))
        return [
            self._call(distributed.load_shard, (stored[name], sharding), {}, f"load_shards of {name}",
                       placed=Placed(sharding.placement(stored[name].shape), stored[name].shape))
            for name, sharding in shardings.items()
        ]  # fmt: skip

    def load_definition(self, fd: FusionDefinition) -> RemoteDefinition:
        """A definition on all workers. They make it from its text, so its ops must be registered there.

        Call it with DRefs of shards, or with global tensors, which are cut here; numbers go to all.
        """
        if not isinstance(fd, FusionDefinition):
            raise user_error("load_definition", shown(fd), "a FusionDefinition", "", caller_line(), ArgumentError)
        return RemoteDefinition(self, fd, self._call(distributed.make_definition, (repr(fd),), {}, "load_definition"))

    def load_module(
        self, make: Any, mesh: DeviceMesh, plan: Any = None, *, args: Sequence[Any] = (),
        kwargs: Mapping[str, Any] | None = None, seed: int | None = None, **options: Any,
    ) -> RemoteModule:  # fmt: skip
        """A PyTorch model on all workers, which must be processes (or one thread). Waits until it is there.

        make: a function that makes the model, called with `args` and `kwargs` on every worker under one seed (None:
            that of torch here); "module:name" of one; or a model, which is copied there.
        mesh: of all workers. plan, options: as `mf.parallelize` takes them.

        Raises ArgumentError for other makers and meshes, and what `mf.parallelize` raises.
        """
        if isinstance(self, ThreadedSession) and self.num_workers > 1:
            raise user_error("load_module", "workers that are threads", "one process for each: DTensors need them",
                             "Use a ProcessSession.", caller_line(), ArgumentError)  # fmt: skip
        return load_module(self, make, mesh, plan, args, kwargs, seed, options)

    def whole(self, ref: DRef) -> torch.Tensor:
        """The global tensor of a distributed one."""
        placed: Any = ref.placed() if callable(ref.placed) else ref.placed
        if placed is None:
            raise user_error(
                "full_tensor of a DRef that is not distributed", repr(ref),
                "one of distribute_tensor, load_shards or a definition", "Read one worker's value: d[i].",
                caller_line(), ArgumentError,
            )  # fmt: skip
        shards = {worker: self.fetch(ref, worker) for worker in placed.readers()}
        return unshard(shards, placed.sharding, placed.shape)


class RemoteDefinition:
    """A definition on a session's workers; calling it gives a DRef for each output, or the one of the only output."""

    def __init__(self, session: Session, fd: FusionDefinition, made: DRef):
        self._session, self._fd, self._made = session, fd, made
        self._count = len(fd.recording.outputs)

    def __call__(self, *arguments: Any) -> Any:
        """Run it on all workers; waits for nothing."""
        if len(arguments) != len(self._fd.recording.inputs):
            raise user_error("a definition on workers", f"{len(arguments)} arguments",
                             f"{len(self._fd.recording.inputs)}", "", caller_line(), ArgumentError)  # fmt: skip
        results = self._session.call_packed(self._made, *self._distributed(arguments))
        found = [self._output(results, index) for index in range(self._count)]
        return found[0] if self._count == 1 else tuple(found)

    def _distributed(self, arguments: Sequence[Any]) -> list[Any]:
        shardings = distributed.input_shardings(self._fd, arguments)
        return [
            self._session.distribute_tensor(value, shardings[place]) if place in shardings else value
            for place, value in enumerate(arguments)
        ]

    def _output(self, results: DRef, index: int) -> DRef:
        ref = self._session.call_packed(distributed.item, results, index)
        ref.placed = lambda: self._placed(index)
        return ref

    def _placed(self, index: int) -> Placed:
        """How an output lies on the workers, as worker 0 has planned it."""
        return self._session.call_packed(distributed.placed_outputs, self._made).debug_get_from_remote(0)[index]

    def __repr__(self) -> str:
        return f"<definition of {self._count} outputs on {self._session!r}>"


class ThreadedSession(Session):
    """Workers that are threads of this process: the quickest to start, and to debug. They share its interpreter."""

    def __init__(self, num_workers: int, num_groups: int = 1, timeout: float = DEFAULT_TIMEOUT):
        super().__init__(num_workers, num_groups, timeout)

    def _start(self) -> Crew:
        return threads(self.num_workers, self.num_groups, self.timeout)


class ProcessSession(Session):
    """Worker 0 in this process, and the others as processes of this machine.

    `entrypoint`, which Disco has, is ignored: workers run this Python.
    """

    def __init__(
        self, num_workers: int, num_groups: int = 1, entrypoint: str | None = None, timeout: float = DEFAULT_TIMEOUT
    ):
        super().__init__(num_workers, num_groups, timeout)

    def _start(self) -> Crew:
        if self.num_workers == 1:
            return threads(1, 1, self.timeout)
        return processes(self._local_engine(), self.num_workers, self.num_groups, self.timeout)


class SocketSession(Session):
    """Workers on several hosts. This process' host is the first; the others run `python -m meshfuse.session.remote`.

    num_nodes, num_workers_per_node: hosts, this one included, and the workers of each.
    host, port: the address of this host at which the others connect (port 0: any free one, then `s.port`).
    token: a secret that both sides know; MESHFUSE_TOKEN if None, and a new one, which is printed, if that is not set.

    Waits for the other hosts when it is made. Raises SessionError where they do not come.
    """

    def __init__(
        self, num_nodes: int, num_workers_per_node: int, num_groups: int = 1, host: str = "127.0.0.1", port: int = 0,
        token: str | None = None, timeout: float = DEFAULT_TIMEOUT, make_nodes: Callable[[], Nodes] | None = None,
    ):  # fmt: skip
        count = (as_int(num_nodes) or 0) * (as_int(num_workers_per_node) or 0)
        is_new = token is None and not os.environ.get(TOKEN)
        self._nodes: Nodes | None = None
        self._make_nodes = make_nodes or (
            lambda: Nodes(num_nodes - 1, num_workers_per_node, host, port, token_of(token), is_new)
        )
        super().__init__(count, num_groups, timeout)

    @property
    def port(self) -> int:
        """Where this session listens."""
        assert self._nodes is not None
        return self._nodes.port

    def _start(self) -> Crew:
        if self._nodes is None:
            self._nodes = self._make_nodes()
            weakref.finalize(self, self._nodes.close).atexit = False
        engine = self._local_engine() if self._nodes.per_node > 1 else None
        return sockets(engine, self._nodes, self.num_groups, self.timeout)

    def shutdown(self) -> None:
        super().shutdown()
        if self._nodes is not None:
            self._nodes.close()


def _as_tensor(value: Any, what: str) -> torch.Tensor:
    """A tensor, or one of an array's memory. Raises ArgumentError for anything else."""
    if isinstance(value, np.ndarray):
        return torch.from_numpy(value)
    if not isinstance(value, torch.Tensor):
        raise user_error(what, shown(value), "a tensor or an array of numpy", "", caller_line(), ArgumentError)
    return value


def _described(value: Any) -> str:
    return f"shape {list(value.shape)}" if isinstance(value, torch.Tensor) else shown(value)
