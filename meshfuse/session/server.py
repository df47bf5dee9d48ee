"""`meshfuse serve`: a session that clients share. Each has programs, models and weights of its own on the workers."""

from __future__ import annotations

import os
import signal
import sys
import threading
from collections.abc import Mapping, Sequence
from typing import Any

import torch
from torch.utils import _pytree as pytree

from ..cluster import Cluster
from ..errors import ArgumentError, user_error
from ..executor.dtensor import same_elements
from ..mesh import DeviceMesh
from ..ops.values import TensorRef
from ..runtime.environment import interface_of
from ..sharding.value import Sharding
from .client import ROLE, Handle
from .dref import DRef
from .errors import SessionError, WorkerLost, describe
from .handshake import TOKEN, token_of
from .host import run as serve_host
from .listener import Listener, log
from .messages import DONE, FAILED
from .nodes import Greeting, version
from .pickling import dumps, loads
from .remote_module import RemoteModule, RemoteOptimizer
from .session import ProcessSession, RemoteDefinition, Session, SocketSession
from .wire import Closed, Connection, Frame

_VALUE = frozenset({"full_tensor", "backward", "__getitem__", "debug_get_from_remote"})
_MODEL = frozenset({
    "__call__", "call", "train", "eval", "zero_grad", "clip_grad_norm_", "manual_seed", "optimizer", "bill", "explain",
    "load", "init_weights", "state_dict", "load_state_dict", "save", "restore",
})  # fmt: skip
_OPTIMIZER = frozenset({"step", "zero_grad", "call"})


class ServedProgram:
    """A definition on the workers, some of whose inputs the server keeps."""

    METHODS = frozenset({"__call__", "kept", "set_kept", "plan", "save", "restore"})

    def __init__(
        self, session: Session, fd: Any, remote: RemoteDefinition, kept: Mapping[int, torch.Tensor],
        updates: Mapping[int, int], plan: str,
    ):  # fmt: skip
        self._session, self._fd, self._remote, self._updates, self._plan = session, fd, remote, updates, plan
        self._shardings: dict[int, Sharding | None] = {}
        self._kept: dict[int, DRef] = {}
        self._checked: set[int] = set()
        for place, value in kept.items():
            self._kept[place] = self._placed(place, value)

    def _placed(self, place: int, value: torch.Tensor) -> DRef:
        """A whole value, as the definition takes it."""
        number = self._fd.recording.inputs[place].id
        annotation, tensor = self._fd.recording.annotations.get(number), self._fd.recording.tensors[number]
        shape = tuple(value.shape)
        if annotation is None:
            return self._session.distribute_tensor(value, Sharding.replicated(self._mesh(), len(shape)))
        sharding = annotation.sharding(tensor.name, shape).placement(shape)
        self._shardings[place] = sharding
        return self._session.distribute_tensor(value, sharding)

    def _mesh(self) -> DeviceMesh:
        return DeviceMesh(list(range(self._session.num_workers)))

    def __call__(self, *arguments: Any) -> list[torch.Tensor]:
        """Run it on the other inputs, whole; the outputs that update nothing, whole."""
        count = len(self._fd.recording.inputs)
        if len(arguments) != count - len(self._kept):
            raise user_error("a program on a server", f"{len(arguments)} arguments",
                             f"{count - len(self._kept)}, as {len(self._kept)} of its {count} inputs are kept", "",
                             cls=ArgumentError)  # fmt: skip
        rest = iter(arguments)
        found = self._remote(*[self._kept[i] if i in self._kept else next(rest) for i in range(count)])
        outputs = list(found) if isinstance(found, tuple) else [found]
        for place, output in self._updates.items():
            self._kept[place] = self._as_input(place, outputs[output])
        return [out.full_tensor() for i, out in enumerate(outputs) if i not in self._updates.values()]

    def _as_input(self, place: int, output: DRef) -> DRef:
        """An output as the next value of an input; it moves where it lies otherwise."""
        placed: Any = output.placed
        wanted = self._shardings.get(place)
        if place not in self._checked:
            found = placed()
            if wanted is None or not same_elements(found.sharding, wanted, found.shape):
                return self._placed(place, output.full_tensor())
            self._checked.add(place)
        return output

    def kept(self) -> dict[int, torch.Tensor]:
        """The kept inputs, whole, by place."""
        return {place: ref.full_tensor() for place, ref in self._kept.items()}

    def set_kept(self, values: Mapping[int, torch.Tensor]) -> None:
        """Replace kept inputs, by place."""
        unknown = [place for place in values if place not in self._kept]
        if unknown:
            raise user_error("set_kept", f"input {unknown[0]}", f"one of {sorted(self._kept)}, which are kept", "",
                             cls=ArgumentError)  # fmt: skip
        self._kept |= {place: self._placed(place, value) for place, value in values.items()}

    def save(self, path: str) -> None:
        """Save the kept inputs to a file on the server."""
        torch.save(self.kept(), path)

    def restore(self, path: str) -> None:
        """Load what `save` has saved."""
        self.set_kept(torch.load(path, weights_only=True))

    def plan(self) -> str:
        """How the inputs that had no annotation were placed; "" where all had one."""
        return self._plan

    def __repr__(self) -> str:
        inputs, outputs = len(self._fd.recording.inputs), len(self._fd.recording.outputs)
        return f"<a program of {inputs} inputs, of which {len(self._kept)} are kept, and {outputs} outputs>"


class _State:
    """What one client has. Its methods are those that the client calls by number 0."""

    METHODS = frozenset({"load_definition", "load_module", "call", "describe"})

    def __init__(self, server: Server):
        self._server, self._session = server, server.session
        self.objects: dict[int, Any] = {0: self}
        self._next = 1

    def put(self, value: Any) -> Handle:
        """Keep an object for the client."""
        number, self._next = self._next, self._next + 1
        self.objects[number] = value
        return Handle(number, type(value).__name__, repr(value))

    def get(self, number: int) -> Any:
        """An object of the client. SessionError for one that is gone."""
        if number not in self.objects:
            raise SessionError("the server no longer has this object: its workers were started anew since it was made")
        return self.objects[number]

    def load_definition(
        self, text: str, kept: Any, updates: Any, shapes: Any, axes: Any, max_memory: float | None
    ) -> ServedProgram:
        """A definition from its text, with automatic places for inputs without annotations."""
        space: dict[str, Any] = {"torch": torch}
        exec(compile(text, "<definition of a client>", "exec"), space)
        fd, plan = space["fd"], ""
        refs = fd.recording.inputs
        if any(ref.id not in fd.recording.annotations for ref in refs if isinstance(ref, TensorRef)):
            plan = self._automatic(fd, kept, updates, shapes, axes, max_memory)
        return ServedProgram(self._session, fd, self._session.load_definition(fd), kept, updates, plan)

    def _automatic(self, fd: Any, kept: Any, updates: Any, shapes: Any, axes: Any, max_memory: Any) -> str:
        inputs, outputs = fd.fusion.inputs(), fd.fusion.outputs()
        pairs = {inputs[place]: outputs[output] for place, output in updates.items()}
        if shapes is None and kept:
            tensors = fd.recording.tensors
            shapes = [list(kept[i].shape) if i in kept else list(tensors[ref.id].type.shape)
                      for i, ref in enumerate(fd.recording.inputs) if isinstance(ref, TensorRef)]  # fmt: skip
        return str(fd.auto(self._server.mesh(axes), *(shapes or ()), max_memory=max_memory, updates=pairs))

    def load_module(self, make: Any, plan: Any, axes: Any, options: Mapping[str, Any]) -> RemoteModule:
        """A model; fully sharded without a plan."""
        mesh = self._server.mesh(axes)
        given = dict(options)
        if plan is None:
            given.setdefault("fsdp", list(mesh.names))
        return self._session.load_module(make, mesh, plan, **given)

    def call(self, function: Any, *args: Any, **kwargs: Any) -> DRef:
        """Call a function on every worker."""
        return self._session.call(function, *args, **kwargs)

    def describe(self) -> dict[str, Any]:
        """What the server has."""
        cluster = self._server.cluster
        return {"workers": cluster.workers, "hosts": len(cluster.hosts), "objects": len(self.objects) - 1}


_METHODS: list[tuple[type, frozenset[str]]] = [
    (_State, _State.METHODS), (ServedProgram, ServedProgram.METHODS), (DRef, _VALUE), (RemoteModule, _MODEL),
    (RemoteOptimizer, _OPTIMIZER),
]  # fmt: skip
_KINDS = tuple(kind for kind, _ in _METHODS)


class Server:
    """A session whose controller is this process, and clients that each have their state there.

    Requests run one after the other: what one client's calls raise is that client's alone. A lost worker ends all
    state, and the workers are started anew.
    """

    def __init__(self, session: Session, cluster: Cluster, host: str, port: int, token: str):
        self.session, self.cluster = session, cluster
        self._running = threading.Lock()
        self._clients: dict[Connection, _State] = {}
        self._listener = Listener(host, port, token, self._welcome)
        self.host, self.port = self._listener.host, self._listener.port

    def mesh(self, axes: Mapping[str, int]) -> DeviceMesh:
        """The mesh of all workers with these axes; without any one by machines, and one axis for one machine."""
        if axes:
            return self.cluster.mesh(tuple(axes), tuple(axes.values()))
        return self.cluster.mesh(("dp", "tp") if len(self.cluster.hosts) > 1 else ("dp",))

    def _welcome(self, connection: Connection, greeting: object) -> None:
        if not isinstance(greeting, Greeting) or (greeting.role, greeting.version) != (ROLE, version()):
            log.warning("closed a connection of %s: this side serves clients of %s", greeting, version())
            connection.close()
            return
        self._clients[connection] = _State(self)
        threading.Thread(target=self._serve, args=(connection,), name="meshfuse-client", daemon=True).start()

    def _serve(self, connection: Connection) -> None:
        state = self._clients[connection]
        try:
            while True:
                frame = connection.receive()
                with self._running:
                    answer = self._answer(state, frame)
                connection.send(answer)
                del frame, answer
        except (Closed, OSError) as error:
            log.info("a client has gone: %s", error)
        finally:
            connection.close()
            del self._clients[connection]
            with self._running:
                state.objects.clear()

    def _answer(self, state: _State, frame: Frame) -> Frame:
        for number in frame.freed:
            state.objects.pop(number, None)
        try:
            result = self._run(state, *loads(frame.payload, frame.buffers))
            payload, buffers = dumps(pytree.tree_map_only(_KINDS, state.put, result))
            return Frame(DONE, 0, frame.number, payload, buffers)
        except BaseException as error:
            if isinstance(error, WorkerLost):
                self._start_anew()
            text = describe(error, getattr(error, "worker", -1), getattr(error, "call", -1))
            return Frame(FAILED, 0, frame.number, dumps(text)[0])

    def _run(
        self, state: _State, number: int, method: str, args: Sequence[Any], kwargs: Mapping[str, Any], records: bool
    ) -> Any:
        target = state.get(number)
        allowed = next(methods for kind, methods in _METHODS if isinstance(target, kind))
        if method not in allowed:
            raise user_error(f"{type(target).__name__} on a server", f"no method {method!r}",
                             f"one of {', '.join(sorted(allowed))}", "", cls=ArgumentError)  # fmt: skip
        args, kwargs = pytree.tree_map_only(Handle, lambda handle: state.get(handle.number), (args, kwargs))
        with torch.set_grad_enabled(records):
            result = getattr(target, method)(*args, **kwargs)
        self.session.sync()  # An error must not come at another client's next call.
        return result

    def _start_anew(self) -> None:
        for state in list(self._clients.values()):
            state.objects = {0: state}
        self.session.restart()

    def close(self) -> None:
        """Let all clients go, and end the workers."""
        self._listener.close()
        for connection in list(self._clients):
            connection.close()
        self.session.shutdown()


def start(cluster: Cluster, token: str, timeout: float, host: str | None = None, port: int | None = None) -> Server:
    """Start controller and workers of a cluster. Waits for the other machines."""
    address = cluster.hosts[0].address if host is None else host
    number = cluster.port if port is None else port
    if len(cluster.hosts) == 1:
        session: Session = ProcessSession(cluster.workers, timeout=timeout)
    else:
        inner = number + 1 if number else 0
        session = SocketSession(len(cluster.hosts), cluster.per_host, host=address, port=inner, token=token,
                                timeout=timeout)  # fmt: skip
    try:
        if gpus := [gpu for found in cluster.hosts for gpu in found.gpus]:
            session.init_ccl("nccl", *gpus)
        return Server(session, cluster, address, number, token)
    except BaseException:
        session.shutdown()
        raise


def own_place(cluster: Cluster) -> int:
    """Which of the cluster's machines this is, by its addresses; the first where none fits."""
    return next((i for i, host in enumerate(cluster.hosts) if interface_of(host.address)), 0)


def main(path: str, node: int | None, timeout: float) -> int:
    """Serve until SIGINT or SIGTERM: as controller on the first machine, as host of workers on the others."""
    cluster = Cluster.load(path)
    place = own_place(cluster) if node is None else node
    if place:
        return serve_host(cluster.hosts[0].address, cluster.port + 1, cluster.per_host, timeout)
    is_new = not os.environ.get(TOKEN)
    token = token_of()
    ended = threading.Event()
    for number in (signal.SIGINT, signal.SIGTERM):
        signal.signal(number, lambda *_: ended.set())
    server = start(cluster, token, timeout)
    _say(f"serving {cluster.workers} workers at {server.host}:{server.port}")
    if is_new:
        _say(f"clients need the token: export {TOKEN}={token}")
    ended.wait()
    server.close()
    return 0


def _say(text: str) -> None:
    print(f"meshfuse: {text}", file=sys.stderr, flush=True)
