"""`meshfuse serve` and its clients."""

from __future__ import annotations

import contextlib
import json
import os
import re
import signal
import socket
import subprocess
import sys
import time
from collections.abc import Iterator
from pathlib import Path

import pytest
import torch
from rank_pool import free_port

import meshfuse as mf
import meshfuse.session as di
from meshfuse.cluster import Cluster, Host
from meshfuse.errors import ArgumentError
from meshfuse.session import server as serving
from session.functions import make_net

TOKEN = "a token of the server's tests"
CLUSTER = Cluster((Host("127.0.0.1", 4),), 0)


@pytest.fixture(scope="module")
def server() -> Iterator[serving.Server]:
    """A server in this process, with four workers."""
    found = serving.start(CLUSTER, TOKEN, 60)
    yield found
    found.close()


def connect(server: serving.Server) -> di.Client:
    return di.connect(f"{server.host}:{server.port}", token=TOKEN)


def training(annotated: bool) -> tuple[mf.FusionDefinition, list]:
    """A step of gradient descent on a linear layer: (loss, the next weight)."""
    mesh = mf.DeviceMesh((4,), ("dp",))
    with mf.FusionDefinition() as fd:
        x, y, w = fd.define_tensor([8, 16]), fd.define_tensor([8, 4]), fd.define_tensor([4, 16])
        error = fd.ops.sub(fd.ops.linear(x, w), y)
        loss = fd.ops.mean(error * error)
        (gradient,) = fd.grad([loss], [w])
        new = fd.ops.sub(w, fd.ops.mul(gradient, 0.1))
        fd.add_output(loss)
        fd.add_output(new)
        if annotated:
            for tensor in (x, y):
                fd.mesh_split(tensor, mesh, ["dp", None])
            fd.mesh_split(w, mesh, [None, "dp"])
    return fd, [x, y, w, new]


@pytest.mark.parametrize("annotated", [True, False])
def test_a_definition_trains_on_the_server(server: serving.Server, annotated: bool, tmp_path: Path) -> None:
    fd, (_, _, w, new) = training(annotated)
    x, y, weight = torch.randn(8, 16), torch.randn(8, 4), torch.randn(4, 16)
    with connect(server) as client:
        step = client.load_definition(fd, kept={w: weight}, updates={w: new})
        plain = weight.clone().requires_grad_()
        for number in range(3):
            (found,) = step(x, y)
            loss = (torch.nn.functional.linear(x, plain) - y).square().mean()
            torch.testing.assert_close(found, loss.detach())
            (gradient,) = torch.autograd.grad(loss, plain)
            plain = (plain - 0.1 * gradient).detach().requires_grad_()
            if number == 1:
                step.save(str(tmp_path / "kept"))
                saved = plain.detach()
        torch.testing.assert_close(step.kept()[2], plain.detach())
        step.restore(str(tmp_path / "kept"))
        torch.testing.assert_close(step.kept()[2], saved)
        assert bool(step.plan()) != annotated and "mesh_split" in (step.plan() or "mesh_split")
        with pytest.raises(ArgumentError, match="found 1 arguments, needed 2, as 1 of its 3 inputs are kept"):
            step(x)


def test_a_model_trains_on_the_server(server: serving.Server, tmp_path: Path) -> None:
    x, y = torch.randn(8, 16), torch.randn(8, 16)
    with connect(server) as client:
        models = [
            client.load_module("session.functions:make_net", seed=1, inputs={"x": ["dp", None], "y": ["dp", None]}),
            client.load_module(make_net, {"up": "colwise", "down": "rowwise"}, axes={"tp": 4}, seed=1),
        ]
        plain = make_net()
        plain.load_state_dict(models[0].state_dict())
        here = torch.optim.SGD(plain.parameters(), lr=0.1)
        optimizers = [model.optimizer(torch.optim.SGD, lr=0.1) for model in models]
        for _ in range(2):
            expected = plain(x, y)
            for model, optimizer in zip(models, optimizers, strict=True):
                out = model(x, y=y)
                torch.testing.assert_close(out["out"].full_tensor(), expected["out"].detach())
                out["loss"].backward()
                optimizer.step()
                optimizer.zero_grad()
            expected["loss"].backward()
            here.step()
            here.zero_grad()
        models[0].save(str(tmp_path / "model"))
        for model in models:
            for name, value in model.state_dict().items():
                torch.testing.assert_close(value, plain.state_dict()[name], msg=name)
        assert repr(models[1].eval()) == repr(models[1])
        models[1].init_weights(3)
        models[1].restore(str(tmp_path / "model"))
        with torch.no_grad():
            torch.testing.assert_close(models[1](x)["out"].full_tensor(), plain(x)["out"].detach())
        assert re.match(r"<on 127\.0\.0\.1:\d+: <Net of 1,072 parameters over dp 4 of ", repr(models[0]))


def test_clients_have_their_own_state_and_errors(server: serving.Server) -> None:
    first, second = connect(server), connect(server)
    value = first.call(lambda: di.worker_id() * 10)
    assert value[3] == 30 and repr(first) == f"<client of 127.0.0.1:{server.port}>"
    assert first.describe()["objects"] == 1 and second.describe() == {"workers": 4, "hosts": 1, "objects": 0}
    with pytest.raises(ZeroDivisionError) as error:
        first.call(lambda n: 1 // (di.worker_id() - n), 2)
    assert isinstance(error.value, di.WorkerError) and error.value.worker == 2
    assert "test_server.py" in str(error.value)
    assert second.call(int, 3)[1] == 3
    with pytest.raises(ArgumentError, match="DRef on a server: found no method 'free'"):
        value.free(1)
    # Objects end with their handles, or with their client.
    del value
    first.call(int)
    assert first.describe()["objects"] <= 1
    first.close()
    with pytest.raises(di.SessionError, match=r"the server at .* is gone"):
        first.describe()
    assert second.call(int, 4)[0] == 4
    second.close()


def test_a_lost_worker_ends_state_and_the_server_goes_on(server: serving.Server) -> None:
    with connect(server) as client:
        value = client.call(int, 3)
        with pytest.raises(di.WorkerLost, match="worker 1 is gone"):
            client.call(lambda: os.kill(os.getpid(), signal.SIGKILL) if di.worker_id() == 1 else None)
        with pytest.raises(di.SessionError, match="no longer has this object: its workers were started anew"):
            value[0]
        assert client.call(int, 5)[2] == 5


def test_strangers_are_closed(server: serving.Server, caplog: pytest.LogCaptureFixture) -> None:
    with pytest.raises(di.ConnectionRefused):
        di.connect(f"127.0.0.1:{server.port}", token="another token")
    for data in (b"GET / HTTP/1.1\r\n\r\n", b"\0" * 200, b""):
        with socket.create_connection((server.host, server.port)) as sock:
            sock.settimeout(15)
            sock.sendall(data)
            with contextlib.suppress(OSError):  # the server may have closed it by now
                sock.shutdown(socket.SHUT_WR)
            with contextlib.suppress(ConnectionResetError):
                while sock.recv(4096):
                    pass
    with connect(server) as client:
        assert client.describe()["workers"] == 4
    assert "did not show this session's token" in caplog.text
    with pytest.raises(ArgumentError, match='connect: address: found 3, needed "host:port"'):
        di.connect(3)  # type: ignore[arg-type]
    with socket.create_server(("127.0.0.1", 0)) as probe:
        port = probe.getsockname()[1]
    with pytest.raises(di.SessionError, match=f"no server at 127.0.0.1:{port}"):
        di.connect(f"127.0.0.1:{port}", token=TOKEN)


def two_free_ports() -> int:
    """A port that is free, as the one behind it is: clients come to the one, the other machines to the other."""
    while True:
        port = int(free_port())
        with contextlib.suppress(OSError), socket.create_server(("127.0.0.1", port + 1)):
            return port


@pytest.mark.slow
def test_the_command_serves_two_machines(tmp_path: Path) -> None:
    """Both are this machine."""
    port = two_free_ports()
    own = {"hosts": [{"address": "127.0.0.1", "workers": 2}] * 2, "port": port}
    (tmp_path / "cluster.json").write_text(json.dumps(own))
    environment = {**os.environ, "MESHFUSE_TOKEN": TOKEN, "PYTHONPATH": os.getcwd()}
    command = [sys.executable, "-m", "meshfuse", str(tmp_path / "cluster.json")]
    processes = [subprocess.Popen([*command, "--node", str(node)], env=environment, stderr=subprocess.PIPE, text=True)
                 for node in (0, 1)]  # fmt: skip
    try:
        line = processes[0].stderr.readline()  # type: ignore[union-attr]
        assert line == f"meshfuse: serving 4 workers at 127.0.0.1:{port}\n"
        with di.connect(f"127.0.0.1:{port}", token=TOKEN) as client:
            assert client.describe() == {"workers": 4, "hosts": 2, "objects": 0}
            assert [client.call(lambda: di.worker_id())[worker] for worker in range(4)] == [0, 1, 2, 3]
        processes[0].send_signal(signal.SIGTERM)
        until = time.monotonic() + 20
        assert [process.wait(until - time.monotonic()) for process in processes] == [0, 0]
    finally:
        for process in processes:
            process.kill()
            process.communicate()
