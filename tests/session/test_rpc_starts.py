"""How `rpc` starts and what it refuses then, by the words and classes of torch's RPC."""

from __future__ import annotations

import contextlib
import os
import pickle
import socket
import subprocess
import sys
import textwrap
from datetime import timedelta
from pathlib import Path
from typing import Any

import pytest
import torch
from torch.distributed import rpc as torchs

import meshfuse.session as di
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


JOINS = """
    import sys
    from meshfuse.session import rpc

    options = rpc.TensorPipeRpcBackendOptions(init_method=sys.argv[1])
    for words, name, rank, size in (("is not unique", "first", 5, None), ("is not unique", "other", 0, None),
                                    ("mixes statically and dynamically", "other", 0, 1)):
        try:
            rpc.init_rpc(name, rank=rank, world_size=size, rpc_backend_options=options)
        except RuntimeError as error:
            assert words in str(error), error
        else:
            raise AssertionError(words)
    for name in ("second", "third"):
        rpc.init_rpc(name, rank=1, rpc_backend_options=options)
        assert rpc.rpc_sync("first", max, (1, 2)) == 2
        print(name, flush=True)
        sys.stdin.readline()
        rpc.shutdown()
        print("left", flush=True)
        sys.stdin.readline()
"""


def test_a_group_that_workers_join_and_leave(tmp_path: Path) -> None:
    script, method = tmp_path / "joins.py", f"file://{tmp_path}/store"
    script.write_text(textwrap.dedent(JOINS))
    rpc.init_rpc("first", rank=0, rpc_backend_options=rpc.TensorPipeRpcBackendOptions(init_method=method))
    env = {**os.environ, "PYTHONPATH": os.getcwd()}
    pipes: dict[str, Any] = {"stdin": subprocess.PIPE, "stdout": subprocess.PIPE, "text": True}
    try:
        with subprocess.Popen([sys.executable, str(script), method], env=env, **pipes) as other:
            for name in ("second", "third"):
                with pytest.raises(ArgumentError, match=f"could not find destination.*'{name}', needed one of first"):
                    rpc.rpc_sync(name, min, (1, 2))
                assert other.stdout.readline() == f"{name}\n"
                assert rpc.get_worker_info(name) == rpc.WorkerInfo(name, 1)
                # The other calls back, and keeps a value for this one.
                assert rpc.rpc_sync(name, rpc.rpc_sync, ("first", max, (1, 2))) == 2
                assert rpc.remote(1, torch.ones, (2,)).to_here().tolist() == [1, 1]
                other.stdin.write("leave\n")
                other.stdin.flush()
                assert other.stdout.readline() == "left\n"
                # What ends the reference may notice it first, and forget the worker.
                words = rf"rpc worker {name} \(rank 1\) is gone|could not find destination.*'{name}'"
                with pytest.raises(RuntimeError, match=words):
                    rpc.rpc_sync(name, min, (1, 2))
                other.stdin.write("go on\n")
                other.stdin.flush()
            assert other.wait(20) == 0
    finally:
        rpc.shutdown()  # It waits for nobody.


def test_where_a_worker_listens(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.delenv("LOCAL_WORLD_SIZE", raising=False)
    monkeypatch.setenv("MASTER_PORT", "29500")
    with socket.socket(socket.AF_INET, socket.SOCK_DGRAM) as probe, contextlib.suppress(OSError):
        own = "127.0.0.1"  # where this machine has no other network
        probe.connect(("192.0.2.1", 9))  # no packet; an address of nobody, by the route to other machines
        own = probe.getsockname()[0]
    for address, wanted in (("127.0.0.1", "127.0.0.1"), ("localhost", "127.0.0.1"), (own, own)):
        monkeypatch.setenv("MASTER_ADDR", address)
        for method in ("env://", f"tcp://{address}:29500"):
            assert rpc.api._own_host(rpc.api._place(method, 0, 2)) == wanted


def test_a_session_that_ends_or_starts_anew_leaves_its_group() -> None:
    wait_for_all = torch.futures.wait_all
    held = []
    with di.ProcessSession(2, timeout=20) as session:
        for _ in range(2):
            session.init_rpc(timeout=10)
            held += [rpc.remote(1, torch.add, (torch.ones(2), n)) for n in range(3)]
            assert held[-1].to_here().tolist() == [3, 3]
            session.restart()
            with pytest.raises(RuntimeError, match="RPC has not been initialized"):
                rpc.rpc_sync(1, int)
        session.init_rpc(timeout=10)
        held.append(rpc.remote(1, int))
    with pytest.raises(RuntimeError, match="RPC has not been initialized"):
        rpc.rpc_sync(1, int)
    assert torch.futures.wait_all is wait_for_all
    with di.ProcessSession(2, timeout=20) as session:
        session.init_rpc(timeout=10)
        assert rpc.rpc_sync(1, int, (3,)) == 3
