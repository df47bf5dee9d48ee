"""A session after a call that met its time limit: right results, or a word that it must be restarted."""

from __future__ import annotations

import contextlib
import os
import signal
import time
from collections.abc import Iterator

import pytest
import torch

import meshfuse as mf
import meshfuse.session as di

from . import functions

MESH = mf.DeviceMesh((2,), ("tp",))


@pytest.fixture(scope="module")
def pair() -> Iterator[di.ProcessSession]:
    """Two workers, whose calls have two seconds."""
    with di.ProcessSession(2, timeout=2) as session:
        yield session


@contextlib.contextmanager
def stopped(session: di.Session, worker: int = 1) -> Iterator[None]:
    """A context in which a worker's process is stopped, and that what runs in it meets the time limit."""
    pid = session.call(os.getpid)[worker]
    os.kill(pid, signal.SIGSTOP)
    try:
        with pytest.raises(di.WorkerTimeout, match=f"worker {worker} does not answer at all"):
            yield
            session.sync()
    finally:
        os.kill(pid, signal.SIGCONT)


def make_linear() -> mf.FusionDefinition:
    """Rows of x are split, and those of w: up to 64 rows x is gathered, and w for more."""
    with mf.FusionDefinition() as fd:
        x, w = fd.define_tensor([-1, 64]), fd.define_tensor([64, 64])
        fd.add_output(fd.ops.linear(x, w))
        fd.mesh_split(x, MESH, ["tp", None])
        fd.mesh_split(w, MESH, ["tp", None])
    return fd


def check_linear(step: di.session.RemoteDefinition, rows: int) -> None:
    x, w = torch.randn(rows, 64), torch.randn(64, 64)
    torch.testing.assert_close(step(x, w).full_tensor(), x @ w.T)


def test_plans_that_a_late_worker_did_not_make(pair: di.ProcessSession) -> None:
    step = pair.load_definition(make_linear())
    pair.sync()
    with stopped(pair):
        step(torch.randn(64, 64), torch.randn(64, 64))
    check_linear(step, 96)  # Another plan than that of 64 rows is best, which is near.
    check_linear(step, 64)


def test_plans_that_a_worker_did_not_make_because_of_an_error(pair: di.ProcessSession) -> None:
    """The same without a timeout: worker 1 never comes to plan for 60 rows."""

    def raise_or_run(step: object, *args: object) -> None:
        if di.worker_id() == 1:
            raise ValueError("before the plan")
        step(*args)

    step = pair.load_definition(make_linear())
    pair.call(raise_or_run, step._made, torch.randn(30, 64), torch.randn(32, 64))
    with pytest.raises(ValueError, match="before the plan"):
        pair.sync()
    check_linear(step, 100)


def test_local_calls_that_a_late_worker_has_still_to_do(pair: di.ProcessSession) -> None:
    """Others have done them: a state that calls change would differ for good."""
    state = pair.call(torch.zeros, 1)
    with stopped(pair):
        for _ in range(3):
            pair.call(torch.Tensor.add_, state, 1)
    assert [state[worker].item() for worker in (0, 1)] == [3, 3]
    assert pair.allreduce(state)[1].item() == 6


def test_models_train_on_after_a_timeout(pair: di.ProcessSession) -> None:
    plan, inputs = {"up": "colwise", "down": "rowwise"}, {"x": [None, None], "y": [None, None]}
    net = pair.load_module(functions.make_net, MESH, plan, kwargs={"dropout": 0.5}, seed=1, inputs=inputs)
    optimizer = net.optimizer(torch.optim.SGD, lr=0.1)
    torch.manual_seed(1)
    x, y = torch.randn(8, 16), torch.randn(8, 16)

    def train() -> None:
        net(x, y)["loss"].backward()
        optimizer.step()
        net.zero_grad()

    for _ in range(10):  # Planning may take longer than the limit: that is a timeout of its own.
        with contextlib.suppress(di.WorkerTimeout):
            train()
            pair.sync()
            break
    weights = net.state_dict()
    with stopped(pair):
        train()
    net.load_state_dict(weights)
    net.manual_seed(3)
    train()
    after = net.state_dict()
    net.load_state_dict(weights)
    net.manual_seed(3)
    train()
    for name, value in net.state_dict().items():
        torch.testing.assert_close(value, after[name], msg=name)


def test_a_worker_that_stays_away_is_named_again(pair: di.ProcessSession) -> None:
    with stopped(pair):
        with pytest.raises(di.WorkerTimeout):
            pair.call(int)
            pair.sync()
        for _ in range(2):
            with pytest.raises(di.WorkerTimeout, match="worker 1 does not answer at all"):
                pair.call(int)
    assert pair.call(int, 3)[1] == 3


def test_workers_that_differ_for_good_are_not_used_again(pair: di.ProcessSession) -> None:
    """Worker 0 has gone on after a call that worker 1 could not finish."""

    def give(tensor: torch.Tensor) -> None:
        if di.worker_id() == 1:
            time.sleep(2.5)
            di.executor.current().world().barrier()

    x = pair.call(torch.ones, 2)
    pair.call(give, x)
    pair.call(torch.Tensor.add_, x, 1)
    with pytest.raises(di.WorkerTimeout, match="worker 1 runs call"):
        pair.sync()
    for _ in range(2):
        with pytest.raises(
            di.SessionError,
            match=r"worker 0 did calls after give at test_after.*, which worker 1 had to leave: "
            r"what they hold differs. Call restart\(\)",
        ):
            pair.call(int)
    pair.restart()
    assert pair.call(int, 3)[1] == 3
