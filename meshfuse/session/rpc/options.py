"""What `init_rpc` is told beside names and ranks: backends and options, by their names in `torch.distributed.rpc`."""

from __future__ import annotations

import enum
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any

import torch

from ...errors import ArgumentError, caller_line, shown, user_error
from ..errors import WrongType
from .constants import DEFAULT_INIT_METHOD, DEFAULT_NUM_WORKER_THREADS, DEFAULT_RPC_TIMEOUT_SEC


class BackendType(enum.Enum):
    """Names of torch's backends. There is one, and it stands for all of them."""

    TENSORPIPE = "TENSORPIPE"
    PROCESS_GROUP = "PROCESS_GROUP"


@dataclass(eq=False)
class RpcBackendOptions:
    """What options of all backends have.

    rpc_timeout: seconds of every call that names no other limit; 0 for none.
    init_method: where the workers meet: "env://" (MASTER_ADDR and MASTER_PORT), "tcp://host:port" or "file:///path".
    """

    rpc_timeout: float = DEFAULT_RPC_TIMEOUT_SEC
    init_method: str = DEFAULT_INIT_METHOD

    def __post_init__(self) -> None:
        check_timeout(self.rpc_timeout)


class TensorPipeRpcBackendOptions(RpcBackendOptions):
    """Options of `init_rpc`.

    num_worker_threads and devices are taken and mean nothing here: threads are made as calls need them, and tensors of
    every device can be sent. device_maps: by peer, a device of this process and where its tensors arrive there; they
    arrive on the device of the same name, so ArgumentError for other ones.
    """

    def __init__(
        self,
        *,
        num_worker_threads: int = DEFAULT_NUM_WORKER_THREADS,
        rpc_timeout: float = DEFAULT_RPC_TIMEOUT_SEC,
        init_method: str = DEFAULT_INIT_METHOD,
        device_maps: Mapping[str, Mapping[Any, Any]] | None = None,
        devices: Sequence[Any] | None = None,
        _transports: Any = None,
        _channels: Any = None,
    ):
        super().__init__(rpc_timeout, init_method)
        self.num_worker_threads = num_worker_threads
        self.device_maps: dict[str, dict[torch.device, torch.device]] = {}
        for to, device_map in (device_maps or {}).items():
            self.set_device_map(to, device_map)
        self.set_devices(devices or [])

    def set_device_map(self, to: str, device_map: Mapping[Any, Any]) -> None:
        """Where tensors of each device arrive on a peer. Raises ArgumentError for what is not the same device."""
        found = {_device(here): _device(there) for here, there in device_map.items()}
        if any(here != there for here, there in found.items()):
            raise user_error(
                "a device map of rpc", shown(dict(device_map)), "each device mapped to the one of the same name",
                "Move tensors after they have arrived.", caller_line(), ArgumentError,
            )  # fmt: skip
        self.device_maps.setdefault(to, {}).update(found)

    def set_devices(self, devices: Sequence[Any]) -> None:
        """The devices of this process whose tensors are sent."""
        self.devices = [_device(device) for device in devices]


def _device(device: Any) -> torch.device:
    """A device by its name or, of a GPU, by its number."""
    return torch.device("cuda", device) if isinstance(device, int) else torch.device(device)


def check_timeout(seconds: Any) -> None:
    """Raises ArgumentError for a limit that is none: also a TypeError where it is no number."""
    is_number = isinstance(seconds, (int, float))
    if not is_number or seconds < 0:
        wrong = "rpc_timeout" if is_number else "rpc_timeout, incompatible constructor arguments"
        cls = ArgumentError if is_number else WrongType
        raise user_error(wrong, shown(seconds), "seconds of 0 or more", "", caller_line(), cls)


def as_options(backend: Any, given: Any) -> RpcBackendOptions:
    """The options of `init_rpc`, where they and its backend may be torch's own. Raises WrongType for others."""
    if backend is not None and not isinstance(backend, BackendType) and type(backend).__name__ != "BackendType":
        raise _wrong_type("Argument backend must be a member of BackendType", backend, "BackendType.TENSORPIPE")
    if given is None:
        return TensorPipeRpcBackendOptions()
    if isinstance(given, _classes("RpcBackendOptions", RpcBackendOptions)):
        if not isinstance(given, _classes("_TensorPipeRpcBackendOptionsBase", TensorPipeRpcBackendOptions)):
            wrong = (
                "Could not infer backend for options" if backend is None
                else "`rpc_backend_options` must be a `TensorPipeRpcBackendOptions`"
            )  # fmt: skip
            raise _wrong_type(wrong, given, "a TensorPipeRpcBackendOptions")
        check_timeout(given.rpc_timeout)
        return RpcBackendOptions(given.rpc_timeout, given.init_method)
    raise _wrong_type("Argument rpc_backend_options must be an instance of RpcBackendOptions", given,
                      "a TensorPipeRpcBackendOptions")  # fmt: skip


def _classes(name: str, own: type) -> tuple[type, ...]:
    """Our class, and torch's of that name if this build of torch has it."""
    torchs = getattr(getattr(torch._C, "_distributed_rpc", None), name, None)
    return (own,) if torchs is None else (own, torchs)


def _wrong_type(wrong: str, found: Any, needed: str) -> Exception:
    return user_error(wrong, shown(found), needed, "", caller_line(), WrongType)
