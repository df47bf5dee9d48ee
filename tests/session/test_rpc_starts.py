"""How `rpc` starts and what it refuses then, by the words and classes of torch's RPC."""

from __future__ import annotations

import pickle
from datetime import timedelta
from typing import Any

import pytest
import torch
from torch.distributed import rpc as torchs

from meshfuse.errors import ArgumentError
from meshfuse.session import rpc


@pytest.mark.parametrize("name", ["", " ", "abc*", "a" * 128, "ä", 3])
def test_names_that_are_none(name: Any) -> None:
    for make in (lambda: rpc.WorkerInfo(name, 0), lambda: rpc.init_rpc(name, rank=0, world_size=1)):
        with pytest.raises(ArgumentError, match=r"Worker name must match .* shorter than 128 .* must be non-empty"):
            make()
    with pytest.raises((RuntimeError, TypeError)):  # as torch's
        torchs.WorkerInfo(name, 0)


def test_names_as_values() -> None:
    info = rpc.WorkerInfo("Trainer-3:a_b", 3)
    assert pickle.loads(pickle.dumps(info)) == info and len({info, rpc.WorkerInfo("Trainer-3:a_b", 3)}) == 1


class _Own(rpc.RpcBackendOptions):
    def __init__(self) -> None:
        rpc.RpcBackendOptions.__init__(self)


@pytest.mark.parametrize(("cls", "words", "arguments"), [
    (TypeError, "Argument backend must be a member of BackendType", {"backend": "TENSORPIPE"}),
    (TypeError, "options must be an instance of RpcBackendOptions", {"rpc_backend_options": {"init_method": "env://"}}),
    (TypeError, "Could not infer backend for options", {"rpc_backend_options": _Own()}),
    (TypeError, "`rpc_backend_options` must be a `TensorPipeRpcBackendOptions`",
     {"rpc_backend_options": _Own(), "backend": rpc.BackendType.TENSORPIPE}),
    (ValueError, "environment variable RANK expected", {"rank": -1, "world_size": None}),
    (ValueError, "rank parameter missing",
     {"rank": -1, "rpc_backend_options": rpc.TensorPipeRpcBackendOptions(init_method="tcp://127.0.0.1:23456")}),
])  # fmt: skip
def test_what_init_rpc_refuses(
    cls: type, words: str, arguments: dict[str, Any], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.delenv("RANK", raising=False)
    monkeypatch.delenv("WORLD_SIZE", raising=False)
    with pytest.raises(cls, match=words):
        rpc.init_rpc("me", **{"rank": 0, "world_size": 1, **arguments})
    assert not rpc.api._running()


@pytest.mark.parametrize("options", [
    None, rpc.TensorPipeRpcBackendOptions(rpc_timeout=7.0, num_worker_threads=3, devices=["cpu"]),
    torchs.TensorPipeRpcBackendOptions(rpc_timeout=7.0),
    rpc.backend_registry.construct_rpc_backend_options(rpc.BackendType.TENSORPIPE, rpc_timeout=7.0),
], ids=["none", "ours", "torch's", "constructed"])  # fmt: skip
@pytest.mark.parametrize("backend", [None, rpc.BackendType.TENSORPIPE, torchs.BackendType.TENSORPIPE])
def test_a_world_of_one_again_and_again(options: Any, backend: Any) -> None:
    rpc.init_rpc("me", backend=backend, rank=0, world_size=1, rpc_backend_options=options)
    kept = rpc.remote("me", torch.add, (torch.ones(2), 1))
    assert rpc.get_rpc_timeout() == (60 if options is None else 7) and kept.to_here().tolist() == [2, 2]
    rpc.shutdown()
    for use, words in (
        (kept.to_here, r"Cannot call to_here\(\) on it after deletion"),
        (lambda: pickle.dumps(kept), "Cannot call fork an UserRRef after deletion"),
        (lambda: rpc.rpc_sync("me", min, (1, 2)), "^RPC has not been initialized"),
        (lambda: rpc.RRef(1), "Current RPC agent is not set! Did you initialize the RPC framework"),
    ):
        with pytest.raises(RuntimeError, match=words):
            use()


def test_options() -> None:
    with pytest.raises(TypeError, match="incompatible constructor arguments"):
        rpc.TensorPipeRpcBackendOptions(rpc_timeout=timedelta(seconds=1))
    with pytest.raises(ArgumentError, match="rpc_timeout: found -1, needed seconds of 0 or more"):
        rpc.TensorPipeRpcBackendOptions(rpc_timeout=-1)
    options = rpc.TensorPipeRpcBackendOptions(device_maps={"peer": {"cuda:0": 0}})
    options.set_device_map("peer", {1: torch.device("cuda:1")})
    assert options.device_maps == {"peer": {torch.device("cuda", n): torch.device("cuda", n) for n in (0, 1)}}
    with pytest.raises(ArgumentError, match=r"a device map of rpc: found .*, needed each device mapped to the one"):
        options.set_device_map("peer", {0: 1})
    for name in ("DEFAULT_RPC_TIMEOUT_SEC", "DEFAULT_INIT_METHOD", "DEFAULT_NUM_WORKER_THREADS", "UNSET_RPC_TIMEOUT"):
        assert getattr(rpc.constants, name) == getattr(torchs.constants, name)
    assert rpc.backend_registry.backend_registered("TENSORPIPE") and not rpc.backend_registry.backend_registered("x")
