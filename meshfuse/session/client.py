"""`connect`: a client of `meshfuse serve`. Programs and weights are on the server; the client has handles to them."""

from __future__ import annotations

import itertools
import threading
import weakref
from collections import deque
from collections.abc import Mapping, Sequence
from typing import Any

import torch
from torch.utils import _pytree as pytree

from ..errors import ArgumentError, caller_line, shown, user_error
from ..fusion_definition import FusionDefinition
from ..ops.values import TensorRef
from .errors import Raised, SessionError, rebuild
from .handshake import token_of
from .listener import connect as connect_to
from .messages import DONE
from .nodes import Greeting, version
from .pickling import dumps, loads
from .wire import Closed, Connection, Frame

ROLE, REQUEST, ROOT = "client", 70, 0
_CONNECT = 30.0  # Seconds.


class Handle:
    """An object on the server, in a message: its number, its kind and how it prints."""

    def __init__(self, number: int, kind: str, text: str):
        self.number, self.kind, self.text = number, kind, text


class ServedObject:
    """A program, a model, an optimizer or a value on a server: its methods run there.

    Values have `full_tensor()`, `backward()` and `[worker]`; models and optimizers what RemoteModule and
    RemoteOptimizer have; programs `kept()`, `set_kept(values)`, `save(path)`, `restore(path)` and `plan()`. The server
    drops it some time after the client has.
    """

    def __init__(self, client: Client, handle: Handle):
        self._client, self._handle = client, handle
        weakref.finalize(self, client._freed.append, handle.number).atexit = False

    def __getattr__(self, name: str) -> Any:
        if name.startswith("_"):  # Notebooks ask for some.
            raise AttributeError(name)
        return lambda *args, **kwargs: self._client._request(self._handle.number, name, args, kwargs)

    def __call__(self, *args: Any, **kwargs: Any) -> Any:
        return self._client._request(self._handle.number, "__call__", args, kwargs)

    def __getitem__(self, worker: int) -> Any:
        return self._client._request(self._handle.number, "__getitem__", (worker,), {})

    def __repr__(self) -> str:
        return f"<on {self._client.address}: {self._handle.text}>"


class Client:
    """A connection to a server, whose state on the server is this client's own and ends with it.

    Each call waits for its result, and raises what was raised there, as its own class. Calls of several threads come
    one after the other. Raises SessionError once the server is gone.
    """

    def __init__(self, address: str, connection: Connection):
        self.address, self._connection = address, connection
        self._lock, self._numbers = threading.Lock(), itertools.count(1)
        self._freed: deque[int] = deque()

    def load_definition(
        self, fd: FusionDefinition, *, kept: Mapping[Any, torch.Tensor] | None = None,
        updates: Mapping[Any, Any] | None = None, shapes: Sequence[Sequence[int]] | None = None,
        axes: Mapping[str, int] | None = None, max_memory: float | None = None,
    ) -> ServedObject:  # fmt: skip
        """A definition on the server, which can be called with the global inputs that it does not keep.

        The inputs that have no annotation are placed by `fd.auto`, for these global `shapes` of all input tensors
        (those of the definition, with sizes of `kept`, if None).

        kept: by input (a TensorView, or its place) the tensor that the server keeps as its value.
        updates: by kept input the output (or its place) that is its next value; a call returns the others, whole.
        axes: of the mesh of all workers, {"dp": 2, "tp": 4}; None for machines by workers of each.
        max_memory: bytes that a worker may hold.

        Raises ArgumentError for arguments that are none of these.
        """
        if not isinstance(fd, FusionDefinition):
            raise user_error("load_definition", shown(fd), "a FusionDefinition", "", caller_line(), ArgumentError)
        inputs = [ref.id if isinstance(ref, TensorRef) else None for ref in fd.recording.inputs]
        outputs = fd.recording.outputs
        places = {_place(fd, key, inputs): value for key, value in dict(kept or {}).items()}
        pairs = {_place(fd, key, inputs): _place(fd, value, outputs) for key, value in dict(updates or {}).items()}
        told = [list(shape) for shape in shapes] if shapes is not None else None
        args = (repr(fd), places, pairs, told, dict(axes or {}), max_memory)
        return self._request(ROOT, "load_definition", args, {})

    def load_module(
        self, make: Any, plan: Any = None, *, axes: Mapping[str, int] | None = None, **options: Any
    ) -> ServedObject:
        """A PyTorch model on the server, as `Session.load_module` has it; the server says the mesh.

        Without a plan weights are fully sharded: each is cut over all workers, and gathered for its use. axes: as for
        `load_definition`. options: of `load_module` (args, kwargs, seed) and of `mf.parallelize`.
        """
        return self._request(ROOT, "load_module", (make, plan, dict(axes or {}), options), {})

    def call(self, function: Any, *args: Any, **kwargs: Any) -> ServedObject:
        """Call a function on every worker; a handle to what it returns."""
        return self._request(ROOT, "call", (function, *args), kwargs)

    def describe(self) -> dict[str, Any]:
        """The server's workers and machines, and how many objects this client has there."""
        return self._request(ROOT, "describe", (), {})

    def _request(self, number: int, method: str, args: Sequence[Any], kwargs: Mapping[str, Any]) -> Any:
        line = caller_line()
        with self._lock:
            freed = [self._freed.popleft() for _ in range(len(self._freed))]
            sent = pytree.tree_map_only(ServedObject, lambda found: found._handle, (tuple(args), dict(kwargs)))
            payload, buffers = dumps((number, method, *sent, torch.is_grad_enabled()))
            try:
                self._connection.send(Frame(REQUEST, 0, next(self._numbers), payload, buffers, freed))
                answer = self._connection.receive()
            except BaseException as error:
                self._connection.close()  # What comes later would be taken for another call's answer.
                if isinstance(error, (Closed, OSError)):
                    raise SessionError(f"the server at {self.address} is gone: {error}", line) from None
                raise
        found = loads(answer.payload, answer.buffers)
        if answer.kind != DONE:
            raised: Raised = found
            raise rebuild(raised, line, f"{method} at {line}")
        return pytree.tree_map_only(Handle, lambda handle: ServedObject(self, handle), found)

    def close(self) -> None:
        """End the connection; the server drops all that this client has there."""
        self._connection.close()

    def __enter__(self) -> Client:
        return self

    def __exit__(self, *_: object) -> None:
        self.close()

    def __repr__(self) -> str:
        return f"<client of {self.address}>"


def _place(fd: FusionDefinition, key: Any, among: Sequence[Any]) -> int:
    """The place of a tensor among the inputs or outputs of a definition."""
    number = getattr(getattr(key, "ref", None), "id", getattr(key, "id", None))
    if number in among and not isinstance(key, int):
        return list(among).index(number)
    if isinstance(key, int) and not isinstance(key, bool) and 0 <= key < len(among):
        return key
    raise user_error("load_definition: kept and updates", shown(key), f"tensors of the definition, or places below "
                     f"{len(among)}", "", caller_line(), ArgumentError)  # fmt: skip


def connect(address: str, token: str | None = None, timeout: float = _CONNECT) -> Client:
    """Connect to a server that `meshfuse serve` has started. address: "host:port".

    token: the server's secret; None for that of MESHFUSE_TOKEN. Raises ConnectionRefused where it is another one's,
    SessionError where nobody listens within `timeout` seconds, ArgumentError for what is no address.
    """
    host, _, port = address.rpartition(":") if isinstance(address, str) else ("", "", "")
    if not host or not port.isdecimal():
        raise user_error("connect: address", shown(address), '"host:port"', "", caller_line(), ArgumentError)
    try:
        greeting = Greeting(ROLE, 0, version())
        connection = connect_to((host.strip("[]"), int(port)), token_of(token), greeting, timeout)
    except SessionError:
        raise
    except OSError as error:
        raise SessionError(f"no server at {address}: {error}", caller_line()) from None
    return Client(address, connection)
