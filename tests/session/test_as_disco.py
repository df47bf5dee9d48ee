"""Scripts for TVM's Disco with another import: what its own tests do (session, ccl), on sessions of all kinds.

They hold arrays of numpy, and shapes that differ from those of the tensors that they are copied into.
"""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import ExitStack

import numpy as np
import pytest
import torch

import meshfuse.session as di
from meshfuse.errors import ArgumentError

from .conftest import start_socket_session


@pytest.fixture(
    scope="module", params=["threads 1", "threads 2", "threads 4", "processes 1", "processes 2", "processes 4",
                            "sockets 2", "sockets 4"],
)  # fmt: skip
def sess(request: pytest.FixtureRequest) -> Iterator[di.Session]:
    kind, size = request.param.split()
    if kind == "sockets":
        session, remote = start_socket_session(int(size) // 2, 1)
        with session:
            yield session
        assert remote.wait(20) == 0
        return
    with ExitStack() as stack:
        yield stack.enter_context({"threads": di.ThreadedSession, "processes": di.ProcessSession}[kind](int(size)))


def workers(sess: di.Session) -> range:
    return range(sess.num_workers)


def rows(*shape: int) -> np.ndarray:
    return np.arange(np.prod(shape), dtype="float32").reshape(shape)


def test_values(sess: di.Session) -> None:
    @di.register_func("tests.disco.add_one", override=True)
    def add_one(x: int) -> int:
        return x + 1

    @di.register_global_func("tests.disco.suffixed", override=True)
    def suffixed(x: str) -> str:
        return x + "_suffix"

    @di.register_global_func("tests.disco.longer", override=True)
    def longer(x: torch.Size) -> torch.Size:
        assert isinstance(x, torch.Size)
        return torch.Size([*x, 4, 5])

    sess.import_python_module("tests.session.functions")
    func: di.DPackedFunc = sess.get_global_func("tests.disco.add_one")
    assert isinstance(func, di.DPackedFunc)
    whole, half = func(1), func(0.5)
    text, shape = sess.get_global_func("tests.disco.suffixed")("hello"), torch.Size([1, 2, 3])
    shapes = sess.call_packed(sess.get_global_func("tests.disco.longer"), shape)
    for i in workers(sess):
        assert (whole.debug_get_from_remote(i), half.debug_get_from_remote(i)) == (2, 1.5)
        assert text.debug_get_from_remote(i) == "hello_suffix"
        found = shapes.debug_get_from_remote(i)
        assert isinstance(found, torch.Size) and list(found) == [1, 2, 3, 4, 5]


def test_arrays_go_to_worker_0_and_back(sess: di.Session) -> None:
    @di.register_global_func("tests.disco.add_one_tensor", override=True)
    def add_one(x: torch.Tensor) -> torch.Tensor:
        return torch.from_numpy(x.numpy() + 1)

    x = rows(2, 3)
    there = sess.empty(x.shape, "float32", device=torch.device("cpu"))
    sess.copy_to_worker_0(x, there)
    y = sess.get_global_func("tests.disco.add_one_tensor")(there)
    for back in (np.empty((2, 3), "float32"), np.empty((6,), "float32")):
        sess.copy_from_worker_0(back, y)
        sess.sync_worker_0()
        np.testing.assert_equal(back, (x + 1).reshape(back.shape))


def test_values_of_other_shapes_are_copied_by_their_elements(sess: di.Session) -> None:
    x = sess.empty((3, 3, 2), "float32")
    for i in workers(sess):
        x.debug_copy_from(i, rows(36)[18 * (i % 2) :][:18])
        np.testing.assert_equal(x.debug_get_from_remote(i).numpy().ravel(), rows(36)[18 * (i % 2) :][:18])
    x.debug_copy_from(0, rows(6, 6)[:, :3])
    np.testing.assert_equal(x.debug_get_from_remote(0).numpy(), rows(6, 6)[:, :3].reshape(3, 3, 2))
    x.debug_copy_from(0, rows(4))
    with pytest.raises(ArgumentError, match=r"found shape \[4\], needed shape \[3, 3, 2\], or another one of 18 elem"):
        sess.sync_worker_0()


@pytest.mark.parametrize(("op", "by"), [
    ("sum", np.sum), ("prod", np.prod), ("min", np.min), ("max", np.max), ("avg", np.mean),
])  # fmt: skip
def test_allreduce(sess: di.Session, op: str, by) -> None:
    sess.init_ccl("gloo", *workers(sess))
    parts = [rows(3, 4) - 3 * i for i in workers(sess)]
    src, dst = sess.empty((3, 4), "float32"), sess.empty((3, 4), "float32")
    for i, part in enumerate(parts):
        src.debug_copy_from(i, part)
    sess.allreduce(src, dst, op=op)
    for i in workers(sess):
        np.testing.assert_allclose(dst.debug_get_from_remote(i).numpy(), by(np.stack(parts), axis=0))


def test_gathers(sess: di.Session) -> None:
    n = sess.num_workers
    whole, src = rows(18 * n), sess.empty((3, 3, 2), "float32")
    everywhere, first = sess.empty((3, 2 * n, 3), "float32"), sess.empty((3, 2 * n, 3), "float32", worker0_only=True)
    for i in workers(sess):
        src.debug_copy_from(i, whole[18 * i :][:18])
    sess.allgather(src, everywhere)
    sess.gather_to_worker0(src, first)
    for i in workers(sess):
        np.testing.assert_equal(everywhere.debug_get_from_remote(i).numpy(), whole.reshape(3, 2 * n, 3))
    np.testing.assert_equal(first.debug_get_from_remote(0).numpy(), whole.reshape(3, 2 * n, 3))


def test_broadcasts_and_scatters(sess: di.Session) -> None:
    """Of a tensor on worker 0, and of an array of this process, also without a destination."""
    n, array = sess.num_workers, rows(3, 4)
    src, copied = sess.empty((3, 4), "float32", worker0_only=True), sess.empty((3, 4), "float32")
    src.debug_copy_from(0, array)
    sess.broadcast_from_worker0(src, copied)
    made, whole = sess.broadcast(array), rows(n, 6, 3)
    on_first, parts = sess.empty((n, 6, 3), "float32", worker0_only=True), sess.empty((3, 3, 2), "float32")
    on_first.debug_copy_from(0, whole)
    sess.scatter_from_worker0(on_first, parts)
    scattered = sess.scatter(whole)
    for i in workers(sess):
        np.testing.assert_equal(copied.debug_get_from_remote(i).numpy(), array)
        np.testing.assert_equal(made.debug_get_from_remote(i).numpy(), array)
        np.testing.assert_equal(parts.debug_get_from_remote(i).numpy(), whole[i].reshape(3, 3, 2))
        np.testing.assert_equal(scattered.debug_get_from_remote(i).numpy(), whole[i])
    with pytest.raises(ArgumentError, match=rf"scatter without dst: found shape \[{n + 1}, 2\], needed {n} rows"):
        sess.scatter(rows(n + 1, 2))


def test_functions_that_disco_registers(sess: di.Session) -> None:
    last = sess.num_workers - 1
    assert sess.get_global_func("runtime.disco.worker_rank")().debug_get_from_remote(last) == last
    assert sess.get_global_func("runtime.disco.device")().debug_get_from_remote(last) == torch.device("cpu")
    sess._sync_worker(last)
