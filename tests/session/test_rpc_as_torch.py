"""Behaviours that scripts of torch's RPC rely on, beside those of test_rpc: classes and words of errors, layouts of
tensors, identifiers of references, whose memory gradients are. Three workers; this process is worker0.
"""

from __future__ import annotations

import importlib
import os
import threading
import time
import warnings
from collections.abc import Iterator
from pathlib import Path

import pytest
import torch
import torch.distributed as dist

import meshfuse.session as di
from meshfuse.session import autograd, rpc
from session.rpc_groups import rpc_group


@pytest.fixture(scope="module", autouse=True)
def group() -> Iterator[di.ProcessSession]:
    with rpc_group(3) as session:
        yield session


class TwoPartsError(Exception):
    """One that cannot be made of a text alone."""

    def __init__(self, code: int, text: str):
        self.code = code
        super().__init__(text)


def fail_in_two_parts() -> None:
    raise TwoPartsError(3, "told")


def fail(cls: type[Exception]) -> None:
    raise cls("told")


def test_an_error_that_torch_cannot_make_again_is_a_runtime_error_too() -> None:
    with pytest.raises(RuntimeError, match="Original exception on remote side was TwoPartsError: told") as caught:
        rpc.rpc_sync(1, fail_in_two_parts)
    assert isinstance(caught.value, TwoPartsError) and caught.value.code == 3
    assert isinstance(caught.value, di.WorkerError)
    with pytest.raises(ValueError, match="told") as plain:
        rpc.rpc_sync(1, fail, (ValueError,))
    assert not isinstance(plain.value, RuntimeError)


class _Fails(torch.autograd.Function):
    @staticmethod
    def forward(ctx, x, cls):
        ctx.cls = cls
        return x * 1

    @staticmethod
    def backward(ctx, grad):
        raise ctx.cls("in the backward pass")


def failing(x: torch.Tensor, cls: type[Exception]) -> torch.Tensor:
    return _Fails.apply(x, cls)


@pytest.mark.parametrize("where", [0, 1, 2])
@pytest.mark.parametrize("cls", [Exception, ValueError, RuntimeError, KeyError])
def test_errors_of_a_backward_pass_name_their_node(
    where: int, cls: type[Exception], monkeypatch: pytest.MonkeyPatch
) -> None:  # fmt: skip
    # Where this process has a process group, which other tests leave, torch's engine makes each a RuntimeError.
    monkeypatch.setattr(dist, "is_initialized", lambda: False)
    x = torch.ones(3, requires_grad=True)
    with autograd.context() as context:
        y = rpc.rpc_sync(1, torch.mul, (failing(x, cls) if where == 0 else x, 2.0))
        loss = rpc.rpc_sync(2, torch.sin, (y if where != 1 else rpc.rpc_sync(1, failing, (y, cls)),))
        loss = loss if where != 2 else rpc.rpc_sync(2, failing, (loss, cls))
        with pytest.raises(RuntimeError, match=f"Error on Node {where}: .*in the backward pass") as caught:
            autograd.backward(context, [loss.sum()])
    assert isinstance(caught.value, cls) and isinstance(caught.value, di.WorkerError)


def stride_of(x: torch.Tensor) -> tuple[tuple[int, ...], torch.Tensor]:
    return x.stride(), x


def sparse(values: list[float]) -> torch.Tensor:
    return torch.sparse_coo_tensor([[0, 1, 1], [2, 0, 2]], values, (2, 3), requires_grad=True)


def sum_of(x: torch.Tensor, y: torch.Tensor) -> torch.Tensor:
    return torch.sparse.sum(x + y) if x.is_sparse and y.is_sparse else (x + y).sum()


def test_layouts_stay_there_and_back() -> None:
    for x in (torch.randn(5, 5).narrow(1, 2, 2), torch.randn(300, 200).t(), torch.ones(1).expand(4)):
        there, back = rpc.rpc_sync(1, stride_of, (x,))
        assert there == back.stride() == x.stride() and torch.equal(back, x)


@pytest.mark.filterwarnings("ignore")
def test_gradients_of_sparse_tensors_and_of_their_sums_with_dense_ones() -> None:
    x, y, z = sparse([1.0, 2.0, 3.0]), sparse([4.0, 5.0, 6.0]), torch.randn(2, 3, requires_grad=True)

    def loss(call) -> torch.Tensor:
        # x is used with a sparse and with a dense tensor, in both orders of the backward pass.
        return call(1, sum_of, (x, y)) + call(2, sum_of, (z, x)) + call(1, sum_of, (x, x)) * call(2, sum_of, (y, y))

    wanted = torch.autograd.grad(loss(lambda _, function, args: function(*args)), [x, y, z])
    with autograd.context() as context:
        autograd.backward(context, [loss(rpc.rpc_sync)])
        found = autograd.get_gradients(context)
    for leaf, grad in zip((x, y, z), wanted, strict=True):
        torch.testing.assert_close(found[leaf].to_dense(), grad.to_dense())


class _Shared(torch.autograd.Function):
    """Gives one and the same gradient to both arguments."""

    @staticmethod
    def forward(ctx, a, b):
        return a + b

    @staticmethod
    def backward(ctx, grad):
        return grad, grad


def test_a_gradient_is_nobody_elses_memory() -> None:
    a, b, c = (torch.ones(2, 3, requires_grad=True) for _ in range(3))
    with autograd.context() as context:
        autograd.backward(context, [(_Shared.apply(a, b) * 2).sum() + c.sum()])
        found = autograd.get_gradients(context)
        for leaf in (a, b, c):
            found[leaf].view(-1)[0] = 9.0
    assert [found[leaf].flatten().tolist() for leaf in (a, b, c)] == [[9, 2, 2, 2, 2, 2], [9, 2, 2, 2, 2, 2],
                                                                      [9, 1, 1, 1, 1, 1]]  # fmt: skip


def is_confirmed(rref: rpc.RRef) -> bool:
    return rref.confirmed_by_owner()


def confirmed_elsewhere(rref: rpc.RRef) -> bool:
    return rpc.rpc_sync(2, is_confirmed, (rref,))


def test_a_reference_that_came_from_a_user_is_known_to_its_owner() -> None:
    for _ in range(20):
        rref = rpc.remote(1, torch.add, (torch.ones(2), 1))
        assert rpc.rpc_sync(2, is_confirmed, (rref,)) and rpc.remote(2, is_confirmed, (rref,)).to_here()
    assert rpc.rpc_sync(1, confirmed_elsewhere, (rpc.RRef(1),))


def shared_values() -> list[str]:
    info = rpc._rref_context_get_debug_info()
    return [info[f"num_{what}"] for what in ("owner_rrefs", "forks", "pending_users", "pending_futures")]


def none_shared() -> bool:
    """Whether no value is shared any more; waits for what is on its way."""
    until = time.monotonic() + 20
    while shared_values() != ["0", "0", "0", "0"] and time.monotonic() < until:
        time.sleep(0.01)
    return shared_values() == ["0", "0", "0", "0"]


def test_counts_are_those_of_values_that_are_shared() -> None:
    mine = rpc.RRef(1)
    assert none_shared() and rpc.rpc_sync(1, none_shared)
    held = rpc.rpc_sync(1, rpc.RRef, (mine,))  # a value that is a reference to another one
    assert shared_values() == ["1", "1", "0", "0"] and rpc.rpc_sync(1, shared_values) == ["1", "1", "0", "0"]
    del held
    assert none_shared() and mine.local_value() == 1


def test_texts_of_references_have_their_numbers() -> None:
    mine, other = rpc.RRef(1), rpc.remote(2, torch.add, (torch.ones(2), 1))
    first = mine._id[1]
    assert str(mine) == f"OwnerRRef(GloballyUniqueId(created_on=0, local_id={first}))"
    ids = [f"GloballyUniqueId(created_on=0, local_id={first + n})" for n in (1, 2)]
    assert str(other) == f"UserRRef(RRefId = {ids[0]}, ForkId = {ids[1]})"
    here = rpc.get_worker_info()
    wanted = f"rref_id={ids[0]}, fork_id={ids[1]}), can't call localValue() on user {here}. Call it on owner WorkerInfo"
    with pytest.raises(RuntimeError) as caught:
        other.local_value()
    assert wanted in str(caught.value) and repr(here) == "WorkerInfo(id=0, name=worker0)"


def test_an_unknown_method_of_a_reference_is_an_error_at_once() -> None:
    rref = rpc.remote(1, torch.ones, (2,))
    for proxy in (rref.rpc_sync, rref.remote):
        with pytest.raises(AttributeError, match="has no attribute 'nothing'"):
            proxy().nothing()
    assert rref.remote().add(1).to_here().tolist() == [2, 2] and rref._get_type() is torch.Tensor


def test_a_value_that_was_not_made_in_time_is_told_as_that() -> None:
    rref = rpc.remote(1, time.sleep, (0.4,), timeout=0.01)
    with pytest.raises(di.WorkerTimeout, match="RPC ran for more than set timeout"):
        rref._get_future().wait()
    with pytest.raises(RuntimeError, match=r"RRef creation .*RPC ran for more than set timeout"):
        rref.to_here()


def text() -> str:
    return "text"


@rpc.functions.async_execution
def not_a_future() -> torch.Tensor:
    return torch.zeros(2)


def future() -> torch.futures.Future:
    return torch.futures.Future()


@pytest.mark.parametrize(("call", "words"), [
    (lambda: rpc.get_worker_info("nobody"), "could not find destination"),
    (lambda: rpc.rpc_sync(-1, text), "could not find destination"),
    (lambda: rpc.rpc_sync(1, not_a_future), r"decorated with @rpc.async_function must return a torch.futures.Future"),
    (lambda: rpc.remote(1, not_a_future).to_here(), "must return a torch.futures.Future object, which this is not"),
    (lambda: rpc.rpc_sync(1, future), "Can not pickle torch.futures.Future"),
    (lambda: rpc.RRef("text").backward(), "RRef should contain a tensor for .backward()"),
    (lambda: rpc.RRef(torch.ones(1)).backward(), "does not require grad and does not have a grad_fn"),
    (lambda: rpc.RRef(torch.ones(1, requires_grad=True).sum()).backward(100), "Could not find autograd context with"),
    (lambda: rpc.remote(1, text).backward(), "User RRefs require 'dist_autograd_ctx_id' to be specified"),
    (lambda: autograd.backward(100, [torch.ones(1, requires_grad=True).sum()]), "Could not find autograd .* id: 100"),
    (lambda: autograd._current_context(), "Could not find autograd context with id: None"),
])  # fmt: skip
def test_words_of_errors(call, words: str) -> None:
    with pytest.raises(RuntimeError, match=words):
        call()


def all_names(values: dict[str, int]) -> list[str]:
    return sorted(name for name, value in values.items() if name == f"worker{value}")


def gathered(count: int) -> list[list[str]]:
    """What this worker gets from so many meetings of all, and of those of even ranks, if it is one."""
    me, agent = rpc.get_worker_info(), rpc._get_current_rpc_agent()
    names = {info.name for info in agent.get_worker_infos()}
    found = [all_names(rpc.api._all_gather(me.id)) for _ in range(count)]
    rpc.api._barrier(names)
    rpc.api._wait_all_workers()
    return [*found, all_names(rpc.api._all_gather(me.id, {"worker0", "worker2"}))] if me.id % 2 == 0 else found


def test_workers_meet_by_calls() -> None:
    others = [rpc.rpc_async(rank, gathered, (3,)) for rank in (1, 2)]
    everybody = ["worker0", "worker1", "worker2"]
    assert gathered(3) == others[1].wait() == [everybody] * 3 + [["worker0", "worker2"]]
    assert others[0].wait() == [everybody] * 3
    with pytest.raises(di.WorkerTimeout, match=r"\['worker1', 'worker2'\] timed out in _all_gather after 0.10 seconds"):
        rpc.api._all_gather(0, timeout=0.1)
    for rank in (1, 2):  # They come too late, and to nobody.
        with pytest.raises(di.WorkerError, match="timed out in _all_gather"):
            rpc.rpc_sync(rank, rpc.api._all_gather, (rank, None, 0.1))


def nested(x: torch.Tensor, y: torch.Tensor) -> torch.Tensor:
    return rpc.rpc_sync(2, torch.add, (x, y))


def names_of_sent(context: int) -> list[list[str]]:
    sent = autograd._retrieve_context(context)._send_functions()
    return [[node.name().rpartition("::")[2] for node, _ in one.next_functions] for one in sent.values()]


def test_the_graph_of_a_context_can_be_looked_at() -> None:
    x, y = torch.ones(3, requires_grad=True), torch.zeros(3, requires_grad=True)
    with autograd.context() as context:
        result = rpc.rpc_sync(1, nested, (x, y * 2))
        found = autograd._current_context()
        (sent,), (received,) = found._send_functions().values(), found._recv_functions().values()
        assert sent.name().endswith("SendRpcBackward") and received.name().endswith("RecvRpcBackward")
        (leaf, _), (node, _) = sent.next_functions
        assert leaf.variable is x and node.name() == "MulBackward0" and node.next_functions[0][0].variable is y
        assert result.grad_fn == received and sent.next_functions[1][0] != received
        assert rpc.rpc_sync(1, names_of_sent, (context,)) == [["RecvRpcBackward"] * 2, ["RecvRpcBackward"]]
        assert rpc.rpc_sync(2, names_of_sent, (context,)) == [["AddBackward0"]]


def test_contexts_by_their_ids() -> None:
    with autograd.context() as context:
        assert context >> 48 == 0 and context <= autograd._get_max_id() == 2**48 - 1
        assert rpc.rpc_sync(1, autograd._get_max_id) == 2**49 - 1
        rpc.rpc_sync(2, text)
        found = autograd._retrieve_context(context)
        assert found is autograd._current_context() and found._context_id() == context
        assert found._known_worker_ids() == {1, 2}
        autograd._is_valid_context(context)
        with pytest.raises(RuntimeError, match="Already have an autograd context id for this thread"):
            autograd.context().__enter__()
    with pytest.raises(RuntimeError, match=f"Could not find autograd context with id: {context}"):
        autograd._retrieve_context(context)
    made = autograd._new_context()
    autograd._release_context(made._context_id())
    with autograd.context():
        pass


def test_limits_and_lists_of_calls() -> None:
    assert rpc.get_rpc_timeout() == 20
    rpc._set_rpc_timeout(0.05)
    try:
        with pytest.raises(RuntimeError, match="RPC ran for more than set timeout"):
            rpc.rpc_sync(1, time.sleep, (0.3,))
    finally:
        rpc._set_rpc_timeout(20)
    with rpc._wait_all():
        calls = [rpc.rpc_async(1, torch.add, (torch.ones(2), n)) for n in range(5)]
    assert all(call.done() for call in calls)
    with pytest.raises(ValueError, match="told"), rpc._wait_all():
        rpc.rpc_async(2, fail, (ValueError,))
    assert not vars(rpc.api._thread_local_var)


def scripted(x: torch.Tensor, y: float) -> torch.Tensor:
    return torch.tanh(x) * y


with warnings.catch_warnings():  # It is deprecated, and still used.
    warnings.simplefilter("ignore")
    scripted = torch.jit.script(scripted)


def test_torchscript_runs_on_peers() -> None:
    x = torch.randn(3, requires_grad=True)
    with autograd.context() as context:
        y = rpc.rpc_sync(1, scripted, (x, 2.0)) + rpc.rpc_async(2, scripted, (x, 3.0)).wait()
        assert torch.equal(y, torch.tanh(x) * 2 + torch.tanh(x) * 3)
        autograd.backward(context, [y.sum()])
        torch.testing.assert_close(autograd.get_gradients(context)[x], 5 * (1 - torch.tanh(x.detach()) ** 2))
    assert torch.equal(rpc.remote(1, scripted, (x.detach(), 1.0)).to_here(), torch.tanh(x.detach()))


_released = threading.Event()


def wait_for_release() -> bool:
    return _released.wait(20)


def release() -> None:
    _released.set()


def test_waiting_for_all_ends_with_the_first_error() -> None:
    late, failed = rpc.rpc_async(1, wait_for_release), rpc.rpc_async(1, fail, (ValueError,))
    with pytest.raises(ValueError, match="told"):
        torch.futures.wait_all([late, failed, rpc.rpc_async(2, text)])
    assert not late.done()
    rpc.rpc_sync(1, release)
    assert torch.futures.wait_all([late, rpc.rpc_async(2, text)]) == [True, "text"]


def hooked_gradients(x: torch.Tensor) -> tuple[list[str], list[torch.Tensor], torch.Tensor | None]:
    """What hooks of a leaf and of its node have seen, and its gradients: of a context, and its own."""
    w, seen = torch.full((3,), 2.0, requires_grad=True), []
    node = w.view_as(w).grad_fn.next_functions[0][0]
    node.register_hook(lambda _, grads: seen.append(f"after {grads[0].tolist()}"))
    w.register_hook(lambda grad: (seen.append("before"), grad * 2)[1])
    with autograd.context() as context:
        for _ in range(2):
            autograd.backward(context, [(rpc.rpc_sync(2, torch.mul, (w * x, 3.0)) + x * w).sum()])
        return seen, [autograd.get_gradients(context)[w], autograd.get_gradients(context).get(x)], w.grad


@pytest.mark.parametrize("where", [0, 1])
def test_hooks_of_leaves_and_of_their_nodes_run(where: int) -> None:
    """As torch runs them: those of the tensor first, once for each part of a pass; `.grad` stays as it is."""
    seen, (of_w, of_x), own = rpc.rpc_sync(where, hooked_gradients, (torch.tensor([1.0, 2.0, 3.0]),))
    # Two parts of each pass: what the call gave a gradient to, and what it did not.
    assert of_w.tolist() == [16, 32, 48] and of_x is None and own is None
    assert sorted(seen) == sorted(["before", "before", "after [2.0, 4.0, 6.0]", "after [6.0, 12.0, 18.0]"] * 2)


def load(module: str) -> None:
    importlib.import_module(module)


def averaged(path: str, rank: int) -> tuple[list[torch.Tensor], list[torch.Tensor]]:
    """Gradients of a layer, of a layer under DDP behind a call, in a context; and of plain autograd after that."""
    os.environ["GLOO_SOCKET_IFNAME"] = "lo"
    dist.init_process_group("gloo", store=dist.FileStore(path, 2), rank=rank, world_size=2)
    try:
        first, second = two_layers()
        ours, x = torch.nn.parallel.DistributedDataParallel(second), rows(rank)
        with autograd.context() as context:
            autograd.backward(context, [ours(rpc.rpc_sync(0, torch.tanh, (first(x),))).sum()])
            found = autograd.get_gradients(context)
        ours(torch.tanh(first(x))).sum().backward()
        leaves = [first.weight, second.weight, second.bias]
        return [found[leaf] for leaf in leaves], [leaf.grad for leaf in leaves]
    finally:
        # gloo's threads drop what the last collective took along, for which they need the interpreter's lock; the end
        # of their group, with DDP or with this, has it and waits for them.
        time.sleep(0.1)
        dist.destroy_process_group()


def two_layers() -> list[torch.nn.Linear]:
    torch.manual_seed(0)
    return [torch.nn.Linear(3, 4, dtype=torch.float64), torch.nn.Linear(4, 2, dtype=torch.float64)]


def rows(rank: int) -> torch.Tensor:
    return torch.arange(6, dtype=torch.float64).reshape(2, 3) * (rank + 1) - 2


def test_ddp_averages_in_a_context(tmp_path: Path) -> None:
    for rank in (1, 2):  # What DDP loads takes longer than a call may on a busy machine.
        rpc.rpc_sync(rank, load, ("torch._dynamo",), timeout=0)
    found = torch.futures.wait_all([rpc.rpc_async(rank + 1, averaged, (str(tmp_path / "s"), rank)) for rank in (0, 1)])
    wanted = []
    for rank in (0, 1):
        first, second = two_layers()
        loss = second(torch.tanh(first(rows(rank)))).sum()
        wanted.append(torch.autograd.grad(loss, [first.weight, second.weight, second.bias]))
    mean = [(a + b) / 2 for a, b in zip(*wanted, strict=True)]
    for rank, both in enumerate(found):
        for grads in both:
            for grad, expected in zip(grads, [wanted[rank][0], *mean[1:]], strict=True):
                torch.testing.assert_close(grad, expected)
