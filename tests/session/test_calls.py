"""Calls, values and DRefs, on threads, on processes and on processes of other hosts (TVM Disco's test_session)."""

from __future__ import annotations

import gc
import pickle
import threading
from collections.abc import Callable

import numpy as np
import pytest
import torch

import meshfuse.session as di
from meshfuse.errors import ArgumentError
from meshfuse.session import collectives, optim

from . import functions

WORKERS = range(4)


def test_numbers_texts_and_shapes_come_back_as_they_are(session: di.Session) -> None:
    session.import_python_module("tests.session.functions")
    add_one, concat = session.get_global_func("tests.add_one"), session.get_global_func("tests.concat")
    numbers, floats, texts = add_one(1), add_one(2.5), concat("a", "b", "c")
    shape, nothing = session.call(tuple, (3, 4, 5)), session.call(lambda: None)
    for worker in WORKERS:
        assert numbers.debug_get_from_remote(worker) == 2 and type(numbers[worker]) is int
        assert (floats[worker], texts[worker], shape[worker], nothing[worker]) == (3.5, "abc", (3, 4, 5), None)
    assert add_one(add_one(numbers))[3] == 4, "a DRef as an argument"
    assert session.call(lambda pair: pair["x"][0] + 1, {"x": [numbers]})[2] == 3, "a DRef deep in an argument"
    assert session.call_packed(lambda x, *, y: x - y, 5, y=numbers)[1] == 3


@pytest.mark.parametrize("count", [1, 2])
def test_sessions_of_other_sizes(count: int) -> None:
    for kind in (di.ThreadedSession, di.ProcessSession):
        with kind(count) as session:
            found = session.call(functions.identify)
            assert [found[worker] for worker in range(count)] == [(worker, count, 0) for worker in range(count)]


def test_workers_know_who_they_are(session: di.Session) -> None:
    found = session.get_global_func("tests.identify")()
    assert list(found) == [(0, 4, 0), (1, 4, 0), (2, 4, 1), (3, 4, 1)] and len(found) == 4
    assert session.get_global_func("runtime.disco.worker_id")()[3] == 3


@pytest.mark.parametrize("dtype", [
    torch.float32, torch.float64, torch.float16, torch.bfloat16, torch.float8_e4m3fn, torch.float8_e5m2, torch.int8,
    torch.int64, torch.uint16, torch.bool, torch.complex64,
])  # fmt: skip
def test_tensors_of_every_dtype(threaded: di.Session, processes: di.Session, dtype: torch.dtype) -> None:
    small = torch.arange(12).reshape(3, 4).to(dtype)
    large = torch.arange(120_000).reshape(300, 400).remainder(2).to(dtype)  # beside the payload, in shared memory
    for session in (threaded, processes):
        for tensor in (small, large, small.t(), large[::2, 1:], small[:0], small[0, 0]):
            found = session.call(lambda x: x, tensor)[3]
            assert found.dtype == dtype and found.shape == tensor.shape
            raw, wanted = (t.contiguous().view(-1).view(torch.uint8) for t in (found, tensor))
            assert torch.equal(raw, wanted)


def test_tensors_go_to_worker_0_and_back(session: di.Session) -> None:
    host = torch.arange(32.0).reshape(8, 4)
    x = session.empty((8, 4), "float32")
    session.copy_to_worker_0(host, x)
    y = session.call(lambda t: t * 2, x)
    back = torch.empty(8, 4)
    session.copy_from_worker_0(back, y)
    assert torch.equal(back, host * 2)
    assert torch.equal(session.copy_to_worker_0(host)[0], host), "into a register of its own"
    x.debug_copy_from(2, host + 1)
    assert torch.equal(x[2], host + 1) and torch.equal(x[0], host)
    with pytest.raises(ArgumentError, match=r"copy_from_worker_0: found shape .8, 4., needed a tensor of shape .2."):
        session.copy_from_worker_0(torch.empty(2), x)


def test_arguments_are_copies(session: di.Session) -> None:
    tensor, items = torch.zeros(50_000), [1]
    ref = session.call(lambda t, i: (t.add_(1), i.append(2), t)[2], tensor, items)
    assert ref[0].sum() == ref[3].sum() == 50_000 and tensor.sum() == 0 and items == [1]


def test_a_function_of_a_script_travels_with_what_it_uses(session: di.Session) -> None:
    offset, table = 10, {"a": torch.ones(2)}

    def countdown(n: int) -> int:
        return offset if n == 0 else countdown(n - 1) + 1

    assert session.call(countdown, 5)[2] == 15, "a closure that refers to itself"
    assert torch.equal(session.call(lambda: table["a"] * offset)[1], torch.full((2,), 10.0))


def test_registered_local_functions(session: di.Session) -> None:
    @di.register_global_func("tests.local")
    def local(x: int) -> int:
        return x * 3

    assert session.get_global_func("tests.local")(2)[3] == 6
    with pytest.raises(ArgumentError, match=r"a function 'tests.local' is registered already"):
        di.register_global_func("tests.local", local, override=False)


def test_an_unknown_function_is_an_error_at_the_next_wait(session: di.Session) -> None:
    session.get_global_func("tests.no_such")
    with pytest.raises(ArgumentError, match=r"no function 'tests.no_such' is registered on this worker") as caught:
        session.sync_worker_0()
    assert isinstance(caught.value, di.WorkerError)


def test_registers_end_with_their_drefs(session: di.Session) -> None:
    def count() -> int:
        from meshfuse.session.executor import current

        return len(current().registers)

    session.sync()
    before = session.call(count)[3]
    refs = [session.call(int, i) for i in range(2500)]
    assert refs[-1][3] == 2499
    threads = [threading.Thread(target=refs[i::4].clear) for i in range(4)]
    for thread in threads:
        thread.start()
        thread.join()
    del refs
    gc.collect()
    session.sync()
    assert abs(session.call(count)[3] - before) <= 1


def test_drefs_belong_to_their_session(threaded: di.Session, processes: di.Session) -> None:
    ref = threaded.call(int, 1)
    with pytest.raises(ArgumentError, match="a DRef cannot be pickled"):
        pickle.dumps(ref)
    with pytest.raises(ArgumentError, match="a DRef cannot be pickled"):
        processes.call(int, ref)
    with pytest.raises(ArgumentError, match="no such worker: found 4, needed a number from 0 to 3"):
        ref[4]
    assert "DRef" in repr(ref) and "on 4 workers" in repr(ref)


@pytest.mark.parametrize(("arguments", "text"), [
    ((0,), "a session's num_workers: found 0, needed a number from 1 to 4096"),
    ((4, 3), "groups of a session must be of one size: found 4 workers in 3 groups"),
    (("two",), "a session's num_workers: found 'two'"),
])  # fmt: skip
def test_wrong_sizes(arguments: tuple, text: str) -> None:
    with pytest.raises(ArgumentError, match=text):
        di.ThreadedSession(*arguments)


def test_an_ended_session_says_so() -> None:
    session = di.ThreadedSession(2)
    assert repr(session) == "<ThreadedSession of 2 workers>"
    session.shutdown()
    session.shutdown()
    assert repr(session) == "<ThreadedSession of 2 workers, ended>"
    with pytest.raises(di.SessionError, match="this session has ended"):
        session.call(int)


@pytest.mark.parametrize("kind", [di.ThreadedSession, di.ProcessSession])
@pytest.mark.parametrize("workers", [1, 2])
def test_sessions_of_one_and_two_workers(kind: Callable[[int], di.Session], workers: int) -> None:
    """What Disco's own tests do with integers, floats, texts, shapes and tensors."""
    with kind(workers) as session:
        last = session.num_workers - 1
        add_one = session.get_global_func("tests.add_one")
        assert add_one(1)[last] == 2 and add_one(0.5)[last] == 1.5
        assert session.get_global_func("tests.concat")("a", session.call(str, "b"), "c")[last] == "abc"
        assert session.call(torch.Size, (3, 4))[last] == (3, 4)
        x = torch.arange(6.0).reshape(2, 3)
        held = session.empty((2, 3), "float32")
        session.copy_to_worker_0(x, held)
        session.broadcast_from_worker0(held, held)
        assert torch.equal(add_one(held)[last], x + 1)
        back = torch.empty(2, 3)
        session.copy_from_worker_0(back, session.allreduce(held))
        assert torch.equal(back, x * session.num_workers)
        session.sync_worker_0()


def test_arrays_of_numpy_are_tensors_there(session: di.Session) -> None:
    """As scripts for Disco have them."""
    rows, there = np.arange(6, dtype="float32").reshape(2, 3), np.zeros((2, 3), "float32")
    x = session.empty((2, 3))
    x.debug_copy_from(0, rows)
    session.copy_from_worker_0(there, x)
    assert (there == rows).all()
    assert torch.equal(session.copy_to_worker_0(rows + 1)[0], torch.from_numpy(rows + 1))
    assert torch.equal(session.broadcast_from_worker0(x, in_group=False)[3], torch.from_numpy(rows))


@pytest.mark.parametrize(("call", "words"), [
    (lambda s: s.call_packed("tests.add_one", 1), r"found 'tests.add_one', needed a function.*get_global_func\('tests"),
    (lambda s: s.call(3), "call: found 3, needed a function, or a DRef to one"),
    (lambda s: s.call(id, threading.Lock()), r"an argument of a call cannot be sent \(cannot pickle '_thread.lock'"),
    (lambda s: optim.DistributedOptimizer("SGD", [s.call(int)]), "found 'SGD', needed a class of torch.optim"),
])  # fmt: skip
def test_what_cannot_be_called_or_sent_is_said_at_once(threaded: di.Session, call, words: str) -> None:
    with pytest.raises(ArgumentError, match=words):
        call(threaded)
    threaded.sync()


def test_nccl_without_a_gpu_is_said(processes: di.Session, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(torch.cuda, "is_available", lambda: False)
    processes._call(collectives.init_ccl, ("nccl", ()), {}, "init_ccl")
    with pytest.raises(ArgumentError, match=r'"nccl": found no GPU for worker .*Use "gloo"'):
        processes.sync()
