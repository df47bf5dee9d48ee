"""PyTorch models on workers, against the same model in one process."""

from __future__ import annotations

import time
from pathlib import Path

import pytest
import torch
from torch import nn

import meshfuse as mf
import meshfuse.session as di
from meshfuse.errors import ArgumentError
from session.conftest import start_socket_session
from session.functions import Net, make_net

MESH = mf.DeviceMesh((2, 2), ("dp", "tp"))
PLAN = {"up": "colwise", "down": "rowwise"}
INPUTS = {"x": ["dp", None], "y": ["dp", None]}


def data() -> tuple[torch.Tensor, torch.Tensor]:
    generator = torch.Generator().manual_seed(3)
    return torch.randn(5, 16, generator=generator), torch.randn(5, 16, generator=generator)


def reference(module: di.RemoteModule) -> Net:
    made = make_net()
    made.load_state_dict(module.state_dict())
    return made


def check_training(session: di.Session) -> None:
    """Steps of AdamW with clipped gradients; a batch that the ranks do not divide."""
    module = session.load_module("session.functions:make_net", MESH, PLAN, inputs=INPUTS, seed=1)
    plain, (x, y) = reference(module), data()
    here = torch.optim.AdamW(plain.parameters(), lr=1e-2)
    there = module.optimizer(torch.optim.AdamW, lr=1e-2)
    for _ in range(2):
        out, expected = module(x, y=y), plain(x, y)
        torch.testing.assert_close(out["loss"][session.num_workers - 1], expected["loss"].detach())
        torch.testing.assert_close(out["out"].full_tensor(), expected["out"].detach())
        assert torch.equal(out["loss"].full_tensor(), out["loss"][0].detach())
        out["loss"].backward()
        expected["loss"].backward()
        norm = module.clip_grad_norm_(0.1)
        torch.testing.assert_close(
            norm[session.num_workers // 2], nn.utils.clip_grad_norm_(plain.parameters(), 0.1).detach()
        )
        for optimizer in (here, there):
            optimizer.step()
            optimizer.zero_grad()
    for name, value in module.state_dict().items():
        torch.testing.assert_close(value, plain.state_dict()[name], msg=name)


def test_a_model_trains_on_processes(processes: di.Session) -> None:
    check_training(processes)


@pytest.mark.slow
def test_a_model_trains_on_hosts(processes: di.Session) -> None:
    """Models of two sessions, whose workers 0 are in this process, which has one default group."""
    first = processes.load_module(make_net, MESH, PLAN, inputs=INPUTS)
    session, _ = start_socket_session()
    with session:
        check_training(session)
        norm = first.call(lambda model: model.up.weight.full_tensor().norm())
        torch.testing.assert_close(norm[1], first.state_dict()["up.weight"].norm())
        # Worker 0 of the other session has the group again.
        module = session.load_module(make_net, MESH, PLAN, inputs=INPUTS)
        assert module.state_dict().keys() == first.state_dict().keys()
    torch.testing.assert_close(norm[1], first.state_dict()["up.weight"].norm())


def test_one_worker_simulates_the_mesh() -> None:
    with di.ThreadedSession(1, timeout=60) as session:
        check_training(session)


def test_inference_and_arguments(processes: di.Session) -> None:
    module = processes.load_module(Net, MESH, PLAN, args=(16,), inputs=INPUTS).eval()
    plain, (x, _) = reference(module), data()
    expected = plain(x)["out"].detach()
    placed = processes.distribute_tensor(x, mf.Sharding.make(MESH, [(mf.Split(2, "dp"),), ()], (5, 16)))
    shards = processes.call(lambda t: t, placed)  # They say nothing of themselves, so rows must divide.
    with torch.no_grad():
        for argument in (x, placed):
            out = module(argument)
            assert out["loss"] is None
            torch.testing.assert_close(out["out"].full_tensor(), expected)
        # What one call gives another takes, as it lies.
        torch.testing.assert_close(
            module(module(x)["out"])["out"].full_tensor(), plain(plain(x)["out"])["out"].detach()
        )
        even = processes.call(lambda t: t[:2], shards)
        both = torch.cat([x[:2], x[3:5]])
        torch.testing.assert_close(module(even)["out"].full_tensor(), plain(both)["out"].detach())
    assert "all-reduce" in str(module.bill()) and "up.weight" in module.explain("up.weight")
    assert module.call(lambda model, n: (type(model).__name__, model.training, n), 7)[2] == ("Net", False, 7)
    assert repr(module).startswith("<Net of 1,072 parameters over dp 2, tp 2 of <ProcessSession of 4 workers")


def test_dropout_is_the_same_on_every_mesh(processes: di.Session) -> None:
    x, _ = data()
    found = []
    for mesh, inputs in ((MESH, INPUTS), (mf.DeviceMesh((4,), ("tp",)), None)):
        module = processes.load_module(make_net, mesh, PLAN, kwargs={"dropout": 0.5}, inputs=inputs, seed=4)
        with torch.no_grad():
            module.manual_seed(9)
            found.append([module(x)["out"].full_tensor() for _ in range(2)])
    torch.testing.assert_close(found[0], found[1])
    assert not torch.allclose(found[0][0], found[0][1])


def test_state_is_saved_and_restored_on_another_mesh(processes: di.Session, tmp_path: Path) -> None:
    x, y = data()
    first = processes.load_module(make_net, MESH, PLAN, inputs=INPUTS, seed=1)
    second = processes.load_module(make_net, MESH, {"up": "rowwise"}, inputs=INPUTS, seed=2)
    optimizers = [m.optimizer(torch.optim.AdamW, lr=rate) for m, rate in ((first, 1e-2), (second, 1.0))]

    def train(module: di.RemoteModule, optimizer: di.RemoteOptimizer) -> None:
        module(x, y)["loss"].backward()
        optimizer.step()
        optimizer.zero_grad()

    train(first, optimizers[0])
    first.save(tmp_path / "saved")
    second.restore(tmp_path / "saved")
    for module, optimizer in zip((first, second), optimizers, strict=True):
        train(module, optimizer)
    for name, value in second.state_dict().items():
        torch.testing.assert_close(value, first.state_dict()[name], msg=name)
    assert mf.load(tmp_path / "saved")["model.up.weight"].shape == (32, 16)
    given = {name: torch.ones_like(value) for name, value in first.state_dict().items()}
    assert second.load_state_dict(given) == ([], [])
    assert all(bool((value == 1).all()) for value in second.state_dict().values())
    with pytest.raises(ArgumentError, match="load_state_dict: found missing"):
        second.load_state_dict({"up.weight": given["up.weight"]})


def test_a_model_outlives_errors(processes: di.Session) -> None:
    """Also one that comes while others are in a collective of torch's own groups."""
    module = processes.load_module(make_net, MESH, PLAN, inputs=INPUTS)
    (x, y), plain = data(), reference(module)
    for fail in (lambda: 1 // (di.worker_id() - 1), None):
        before = time.monotonic()
        if fail is not None:
            processes.call(fail)
        else:
            module.call(lambda m: 1 // (di.worker_id() - 2) and m.up.weight.full_tensor())
        with pytest.raises(ZeroDivisionError) as error:
            processes.sync()
        assert len(error.value.failures) == 1 and time.monotonic() - before < 20
        out = module(x, y)
        out["loss"].backward()
        torch.testing.assert_close(out["out"].full_tensor(), plain(x, y)["out"].detach())
    norm = module.clip_grad_norm_(1.0)
    for _ in range(2):
        plain(x, y)["loss"].backward()
    torch.testing.assert_close(norm[0], nn.utils.clip_grad_norm_(plain.parameters(), 1.0).detach())


def test_what_cannot_be_loaded(processes: di.Session, threaded: di.Session) -> None:
    with pytest.raises(ArgumentError, match="load_module: found workers that are threads, needed one process for each"):
        threaded.load_module(make_net, MESH)
    for make, text in (("nowhere", "a function that makes a model"), (3, "found 3")):
        with pytest.raises(ArgumentError, match=text):
            processes.load_module(make, MESH)
    with pytest.raises(ArgumentError, match=r"an mf\.DeviceMesh of all 4 workers"):
        processes.load_module(make_net, mf.DeviceMesh((2,), ("tp",)))
    with pytest.raises(ArgumentError, match=r"no function 'no' in session\.functions"):
        processes.load_module("session.functions:no", MESH)
    with pytest.raises(ArgumentError, match=r"found 3, needed an nn\.Module"):
        processes.load_module(lambda: 3, MESH)
    module = processes.load_module(make_net, MESH, PLAN, inputs=INPUTS)
    with pytest.raises(ArgumentError, match=r"argument x: found shape \[16\], needed 2 dims, as in inputs"):
        module(torch.ones(16))
