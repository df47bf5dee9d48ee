"""Remote calls, references, distributed autograd and optimizers (the behaviours of torch's RpcTest, DistAutogradTest
and DistOptimizerTest that have public names), over four processes; this one is worker0.
"""

from __future__ import annotations

import gc
import os
import pickle
import signal
import textwrap
import threading
import time
from collections.abc import Callable, Iterator
from pathlib import Path

import pytest
import torch
import torch.distributed as dist

import meshfuse.session as di
from meshfuse.errors import ArgumentError
from meshfuse.session import autograd, optim, rpc
from meshfuse.session.rpc.contexts import Contexts
from meshfuse.session.rpc.members import Member, Members, OpenMembers
from session.fork_servers import forked
from session.rpc_groups import rpc_group


@pytest.fixture(scope="module", autouse=True)
def group() -> Iterator[di.ProcessSession]:
    with rpc_group(4) as session:
        yield session


@pytest.fixture(autouse=True)
def nothing_left() -> Iterator[None]:
    """After each test no worker owns a value for another one, and no context is open."""
    yield
    until = time.monotonic() + 5
    while (left := [rpc.rpc_sync(to, held) for to in range(4)]) != [(0, 0, 0)] * 4 and time.monotonic() < until:
        gc.collect()
        time.sleep(0.02)
    assert left == [(0, 0, 0)] * 4


def held() -> tuple[int, int, int]:
    from meshfuse.session.rpc.calls import calls

    gc.collect()
    info = rpc.rref_debug_info()
    return info["num_owner_rrefs"], info["num_pending_users"], calls().contexts.count()


def add(a, b=1):
    return a + b


def fail(kind: str) -> None:
    raise {"value": ValueError, "key": KeyError}[kind]("told")


def relay(names: list[str], value):
    """Pass a call on from worker to worker."""
    return rpc.rpc_sync(names[0], relay, (names[1:], value)) if names else value + 1


def to_here(rref: rpc.RRef) -> object:
    return rref.to_here()


def pass_on(rref: rpc.RRef, to: str) -> object:
    return rpc.rpc_sync(to, to_here, (rref,))


def keep_and_let_go(rref: rpc.RRef, to: str) -> rpc.RRef:
    """The caller's child of a reference lets go before its own child is known to the owner."""
    return rpc.remote(to, to_here, (rref,))


def make_rref(value) -> rpc.RRef:
    return rpc.RRef(value)


class Counter:
    def __init__(self, start: int = 0):
        self.value = start

    def add(self, n: int = 1) -> int:
        self.value += n
        return self.value

    def fail(self) -> None:
        raise IndexError("counter")


@rpc.functions.async_execution
def chained(to: str, value: int) -> torch.futures.Future:
    return rpc.rpc_async(to, add, (value, 1)).then(lambda done: done.wait() * 10)


def test_results_of_all_kinds() -> None:
    tensor = torch.arange(100_000.0)
    for to in ("worker1", 2, rpc.get_worker_info("worker3"), "worker0"):
        assert rpc.rpc_sync(to, add, (1, 2)) == 3 and rpc.rpc_sync(to, add, ("a",), {"b": "b"}) == "ab"
        assert torch.equal(rpc.rpc_sync(to, add, (tensor,)), tensor + 1)
        assert rpc.rpc_sync(to, torch.add, (torch.ones(2), 1)).tolist() == [2.0, 2.0]
        assert rpc.rpc_sync(to, Counter, (5,)).value == 5
        assert rpc.rpc_async(to, add, (1,)).wait() == 2 and rpc.remote(to, add, (1,)).to_here() == 2
        assert rpc.rpc_sync(to, lambda x: [x, {"k": x}], (1,)) == [1, {"k": 1}]
    assert rpc.get_worker_info() == rpc.WorkerInfo("worker0", 0) and rpc.get_rpc_timeout() == 20


def test_nested_calls_that_come_back() -> None:
    assert rpc.rpc_sync("worker1", relay, (["worker2", "worker1", "worker0", "worker3", "worker0"], 1)) == 2
    assert rpc.rpc_sync("worker1", chained, ("worker2", 4)) == 50
    assert rpc.remote("worker1", chained, ("worker0", 4)).to_here() == 50


def many(to: int) -> None:
    assert [rpc.rpc_sync(to, add, (i,)) for i in range(25)] == list(range(1, 26))


def test_many_at_a_time() -> None:
    futures = [rpc.rpc_async(i % 4, add, (i,)) for i in range(400)]
    assert torch.futures.wait_all(futures) == [i + 1 for i in range(400)]
    threads = [threading.Thread(target=many, args=(to,)) for to in (1, 2, 3)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()


@pytest.mark.parametrize(("kind", "cls"), [("value", ValueError), ("key", KeyError)])
def test_exceptions_keep_their_class(kind: str, cls: type[Exception]) -> None:
    for call in (lambda: rpc.rpc_sync(1, fail, (kind,)), lambda: rpc.rpc_async(1, fail, (kind,)).wait(),
                 lambda: rpc.remote(1, fail, (kind,)).to_here(), lambda: rpc.rpc_sync("worker0", fail, (kind,)),
                 lambda: rpc.rpc_sync(2, pass_on, (rpc.remote(3, fail, (kind,)), "worker1"))):  # fmt: skip
        with pytest.raises(cls, match="told") as caught:
            call()
        assert isinstance(caught.value, di.WorkerError) and "in fail" in caught.value.trace
        del caught


def test_time_limits() -> None:
    start = time.monotonic()
    for call in (lambda: rpc.rpc_sync(1, time.sleep, (1,), timeout=0.1),
                 lambda: rpc.rpc_async(1, time.sleep, (1,), timeout=0.1).wait()):  # fmt: skip
        with pytest.raises(di.WorkerTimeout, match="RPC ran for more than set timeout: worker1 did not answer"):
            call()
    assert time.monotonic() - start < 0.9
    assert rpc.rpc_sync(1, add, (1,), timeout=0) == 2, "0 is no limit"
    slow = rpc.remote(1, lambda: time.sleep(0.5) or 7)
    with pytest.raises(di.WorkerTimeout):
        slow.to_here(timeout=0.05)
    assert slow.to_here() == 7


@pytest.mark.parametrize(("call", "text"), [
    (lambda: rpc.rpc_sync("nobody", add), "no such rpc worker: found 'nobody', needed one of worker0, worker1"),
    (lambda: rpc.rpc_sync(7, add), "no such rpc worker: found 7"),
    (lambda: rpc.rpc_sync(1, "add"), "rpc: found 'add', needed a function"),
    (lambda: rpc.rpc_sync(1, add, (1,), timeout=-3), "rpc: timeout: found -3, needed seconds"),
    (lambda: pickle.dumps(rpc.RRef(1)), "an RRef cannot be pickled"),
    (lambda: rpc.remote(1, add, (1,)).local_value(), "localValue.* on user .*: found a reference on worker0"),
])  # fmt: skip
def test_wrong_arguments(call, text: str) -> None:
    with pytest.raises(ArgumentError, match=text):
        call()


def test_references() -> None:
    mine, other = rpc.RRef(torch.ones(3)), rpc.remote("worker1", add, (torch.ones(3),))
    assert mine.is_owner() and mine.owner().id == 0 and mine.confirmed_by_owner() and mine.local_value().sum() == 3
    assert (
        not other.is_owner() and other.owner_name() == "worker1" and torch.equal(other.to_here(), torch.full((3,), 2.0))
    )
    assert other.confirmed_by_owner()
    for rref in (mine, other):
        for first, second in (("worker2", "worker3"), ("worker1", "worker0"), ("worker1", "worker2")):
            assert torch.equal(rpc.rpc_sync(first, pass_on, (rref, second)), rref.to_here())
    assert repr(mine).startswith("<OwnerRRef 0.") and repr(other).endswith("on worker1>")
    returned = rpc.rpc_sync("worker2", make_rref, (5,))
    assert returned.owner().id == 2 and returned.to_here() == 5


def test_users_that_let_go_early() -> None:
    """0 -> 2 -> 3, owner 1: the value lives until the last of them has let go, and not longer."""
    for _ in range(20):
        rref = rpc.remote("worker1", add, (1,))
        answer = rpc.rpc_sync("worker2", keep_and_let_go, (rref, "worker3"))
        del rref
        assert answer.to_here() == 2
        del answer


def test_proxies_of_references() -> None:
    counter = rpc.remote("worker2", Counter, (10,))
    assert counter.rpc_sync().add() == 11 and counter.rpc_async().add(4).wait() == 15
    assert counter.remote().add(n=1).to_here() == 16
    with pytest.raises(IndexError, match="counter"):
        counter.rpc_sync().fail()
    with pytest.raises(AttributeError):
        counter.rpc_sync().nothing()


def layer(x: torch.Tensor, w: torch.Tensor) -> torch.Tensor:
    return torch.tanh(x @ w)


def through(x: torch.Tensor, w: torch.Tensor) -> torch.Tensor:
    """A diamond: two workers use what this one makes, and its own weight goes along."""
    y = layer(x, w)
    return rpc.rpc_sync("worker2", layer, (y, w)) + rpc.rpc_async("worker3", layer, (y * 2, w)).wait() * y


def expected(x: torch.Tensor, w: torch.Tensor) -> torch.Tensor:
    y = layer(x, w)
    return layer(y, w) + layer(y * 2, w) * y


def test_gradients_through_three_workers_are_local_ones() -> None:
    x, w = torch.randn(4, 3, requires_grad=True), torch.randn(3, 3, requires_grad=True)
    gx, gw = torch.autograd.grad(expected(x, w).sum(), [x, w])
    with autograd.context() as context:
        loss = rpc.rpc_sync("worker1", through, (x, w)).sum()
        for times in (1, 2, 3):
            autograd.backward(context, [loss], retain_graph=True)
            found = autograd.get_gradients(context)
            assert set(found) == {x, w} and x.grad is None
            torch.testing.assert_close(found[x], times * gx)
            torch.testing.assert_close(found[w], times * gw)
    with pytest.raises(ArgumentError, match="no such autograd context"):
        autograd.get_gradients(context)


def test_contexts_do_not_mix() -> None:
    x = torch.ones(2, requires_grad=True)
    for factor in (2.0, 3.0):
        with autograd.context() as context:
            unused = rpc.rpc_sync("worker2", add, (x, x))
            loss = (rpc.rpc_sync("worker1", torch.mul, (x, factor)) + x).sum()
            autograd.backward(context, [loss])
            assert (
                torch.equal(autograd.get_gradients(context)[x], torch.full((2,), factor + 1)) and unused.requires_grad
            )
    assert not rpc.rpc_sync("worker1", lambda t: t.requires_grad, (torch.ones(1),))


def test_several_roots_and_leaves_elsewhere() -> None:
    weight = rpc.remote("worker1", lambda: torch.nn.Parameter(torch.ones(3)))
    x = torch.ones(3, requires_grad=True)
    with autograd.context() as context:
        y = rpc.rpc_sync("worker1", lambda r, t: r.local_value() * t, (weight, x))
        autograd.backward(context, [y.sum(), (y * x).sum()])
        assert torch.equal(autograd.get_gradients(context)[x], torch.full((3,), 3.0))
        remote = rpc.rpc_sync("worker1", lambda c: list(autograd.get_gradients(c).values()), (context,))
        assert torch.equal(remote[0], torch.full((3,), 2.0))


def test_a_reference_runs_the_backward_pass() -> None:
    x = torch.ones(3, requires_grad=True)
    with autograd.context() as context:
        loss = rpc.remote("worker2", lambda t: (t * 5).sum(), (x,))
        loss.backward(context)
        assert torch.equal(autograd.get_gradients(context)[x], torch.full((3,), 5.0))


def test_a_call_that_goes_on_after_its_context_has_ended_leaves_nothing() -> None:
    contexts = Contexts(0)
    number = contexts.begin().number
    contexts.enter(None)
    contexts.end(number)
    contexts.enter(number)
    assert contexts.current() is not None and contexts.count() == 0
    contexts.enter(None)
    assert contexts.begin().number != number and contexts.count() == 1


class _Fails(torch.autograd.Function):
    @staticmethod
    def forward(ctx, x):
        return x * 1

    @staticmethod
    def backward(ctx, grad):
        raise ValueError("in the backward pass")


def failing(x: torch.Tensor) -> torch.Tensor:
    return _Fails.apply(x)


def test_an_error_in_a_backward_pass_arrives() -> None:
    x = torch.ones(3, requires_grad=True)
    with autograd.context() as context:
        loss = rpc.rpc_sync("worker1", failing, (rpc.rpc_sync("worker2", torch.mul, (x, 2.0)),)).sum()
        with pytest.raises(ValueError, match="in the backward pass"):
            autograd.backward(context, [loss])


@pytest.mark.parametrize(("roots", "text"), [
    ([], "No tensors provided for gradient computation"), ([torch.ones(1)], "requires_grad not set"),
    ([torch.ones(3, requires_grad=True)], r"not a scalar.* found shape \[3\], needed scalar tensors"),
    ([torch.ones(1, requires_grad=True)], "does not have a valid gradient function"), (None, "incompatible function"),
])  # fmt: skip
def test_wrong_roots(roots: list, text: str) -> None:
    with autograd.context() as context, pytest.raises(ArgumentError, match=text):
        autograd.backward(context, roots)


@pytest.mark.parametrize(("cls", "options"), [
    (torch.optim.SGD, {"lr": 0.1, "momentum": 0.9}), (torch.optim.Adam, {"lr": 0.1}), (torch.optim.AdamW, {"lr": 0.1}),
    (torch.optim.Adagrad, {"lr": 0.1}),
])  # fmt: skip
def test_optimizers_step_as_local_ones(cls: type, options: dict) -> None:
    start, x = torch.randn(3, 3), torch.randn(2, 3)
    params = [rpc.remote(to, lambda t: torch.nn.Parameter(t), (start * to,)) for to in (1, 2, 3)]
    local = [torch.nn.Parameter(start * to) for to in (1, 2, 3)]
    remote, here = optim.DistributedOptimizer(cls, params, **options), cls(local, **options)
    for _ in range(3):
        with autograd.context() as context:
            y = x
            for param in params:
                y = rpc.rpc_sync(param.owner(), lambda r, t: torch.tanh(t @ r.local_value()), (param, y))
            autograd.backward(context, [y.square().sum()])
            remote.step(context)
        here.zero_grad()
        torch.tanh(torch.tanh(torch.tanh(x @ local[0]) @ local[1]) @ local[2]).square().sum().backward()
        here.step()
    for param, own in zip(params, local, strict=True):
        torch.testing.assert_close(param.to_here().detach(), own.detach())
    with pytest.raises(TypeError, match="unexpected keyword argument"):
        optim.DistributedOptimizer(cls, params, no_such_option=1)


SCRIPT = """
    import os, signal, sys, time
    import meshfuse.session as di
    from meshfuse.session import rpc
    from meshfuse.session.rpc import members

    SHARED = []

    def note(x):
        SHARED.append(x)
        return len(SHARED)

    def only_on_rank_0():
        pass

    if __name__ == "__main__":
        rank = int(os.environ["RANK"])
        if rank:
            del only_on_rank_0
        for round in range(2):
            rpc.init_rpc(f"peer{rank}")
            if rank == 0:
                assert rpc.rpc_sync("peer1", note, (1,)) == 1 + 2 * round
                assert rpc.rpc_sync("peer1", lambda: note(2)) == 2 + 2 * round
                kept = rpc.remote("peer2", note, (1,))
                try:
                    rpc.rpc_sync("peer2", only_on_rank_0)
                except RuntimeError as error:
                    assert "RPC pickler does not serialize" in str(error) and "peer2" in str(error), error
                    print("missing")
            # Whoever comes to shutdown serves the others for as long as these take.
            rpc._set_rpc_timeout(0.3)
            if rank == 0:
                time.sleep(1.0)
                assert rpc.rpc_sync("peer1", min, (1, 2), timeout=20) == 1
            rpc.shutdown()
        rpc.init_rpc(f"peer{rank}")
        while rank < 2 and not os.path.exists("late"):
            time.sleep(0.01)
        try:
            rpc.shutdown(timeout=0.1 if rank == 2 else 20)
        except di.WorkerTimeout as error:
            assert "did not come to leaving: found none of ranks 0, 1 within 0.1 s" in str(error), error
            open("late", "w").close()
            print("late")
        except di.WorkerLost as error:
            assert "peer2 (rank 2) is gone: it has left the group before it came to" in str(error), error
            print("alone")
        rpc.init_rpc(f"peer{rank}")
        if rank == 2:  # It sees the others as a worker of another machine does, which knows of no processes here.
            members.state_of, members.ASK_AGAIN = lambda process: None, 0.1
        if rank == 0:
            pid = rpc.rpc_sync(1, os.getpid)
            waiting = rpc.rpc_async("peer1", time.sleep, (30,))
            time.sleep(0.2)
            start = time.monotonic()
            os.kill(pid, signal.SIGKILL)
            try:
                waiting.wait()
            except di.WorkerLost as error:
                assert "peer1 (rank 1) is gone" in str(error) and time.monotonic() - start < 0.5
                print("named")
        try:
            rpc.shutdown()
        except di.WorkerLost as error:
            how = "its process has ended" if rank == 0 else ""
            print("left", f"peer1 (rank 1) is gone: {how}" in str(error) or error)
        if rank == 2:
            open("done", "w").close()
        while not os.path.exists("done"):  # The store is in rank 0.
            time.sleep(0.01)
"""


def test_a_script_of_ranks_twice_and_with_a_killed_peer(tmp_path: Path) -> None:
    script = tmp_path / "ranks.py"
    script.write_text(textwrap.dedent(SCRIPT))
    with __import__("socket").create_server(("127.0.0.1", 0)) as probe:
        port = probe.getsockname()[1]
    base = {**os.environ, "WORLD_SIZE": "3", "MASTER_ADDR": "127.0.0.1", "MASTER_PORT": str(port),
            "TORCH_CPP_LOG_LEVEL": "ERROR"}  # fmt: skip
    logs = [(tmp_path / f"out{rank}", tmp_path / f"errors{rank}") for rank in range(3)]
    ranks = [
        forked.start(script, {**base, "RANK": str(rank)}, out, errors=errors) for rank, (out, errors) in enumerate(logs)
    ]
    for rank in ranks:
        rank.join(120)
    outputs = [[path.read_text() for path in both] for both in logs]
    assert outputs[0][0].split() == ["missing", "missing", "alone", "named", "left", "True"], outputs
    assert outputs[2][1].count("rpc: on peer2 a call of peer0 raised ArgumentError: a call names what is not") == 2
    assert outputs[2][0].split() == ["late", "left", "True"], outputs
    assert [rank.exitcode for rank in ranks] == [0, -signal.SIGKILL, 0]


@pytest.mark.parametrize("make", [lambda me, store: Members(me, store, 2), OpenMembers])
def test_leaving_after_the_host_of_the_store_has_ended(make: Callable[..., Members]) -> None:
    """The error that made a worker leave is not replaced by one of the store."""
    host = dist.TCPStore("127.0.0.1", 0, is_master=True, wait_for_workers=False)
    store = dist.TCPStore("127.0.0.1", host.port, is_master=False)
    members = make(rpc.WorkerInfo("me", 1), store)
    members._add(Member(members.me, "", 0, "", "", ""))
    del host
    with pytest.raises(dist.DistError):
        for _ in range(100):
            store.set("gone/1", "")
    members.leave()


def test_without_a_group(threaded: di.Session) -> None:
    with pytest.raises(ArgumentError, match="init_rpc: found workers that are threads"):
        threaded.init_rpc()
    with pytest.raises(di.SessionError, match="RPC is already initialized"):
        rpc.init_rpc("again", rank=0, world_size=1)
