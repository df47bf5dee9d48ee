"""Gradients through calls and collectives of a session, against torch's autograd in one process."""

from __future__ import annotations

import pytest
import torch

import meshfuse.session as di
from meshfuse.errors import ArgumentError
from meshfuse.session import autograd, optim


def leaf(*shape: int, seed: int = 0) -> torch.Tensor:
    generator = torch.Generator().manual_seed(seed)
    return torch.randn(*shape, generator=generator, dtype=torch.float64).requires_grad_()


def own_leaf(*shape: int) -> torch.Tensor:
    return leaf(*shape, seed=di.worker_id())


def own_zeros() -> torch.Tensor:
    return torch.zeros(2 + di.worker_id() % 2, dtype=torch.float64)


# By name: the collective of a session, of x on each worker, and what it gives each worker, by all x.
COLLECTIVES = {
    "allreduce": (lambda s, x: s.allreduce(x), lambda xs: [sum(xs)] * 4),
    "average in groups": (
        lambda s, x: s.allreduce(x, op="avg"),
        lambda xs: [(xs[w - w % 2] + xs[w - w % 2 + 1]) / 2 for w in range(4)],
    ),
    "allgather": (lambda s, x: s.allgather(x, in_group=False), lambda xs: [torch.cat(xs)] * 4),
    "broadcast": (lambda s, x: s.broadcast_from_worker0(x, in_group=False), lambda xs: [xs[0]] * 4),
    "scatter": (
        lambda s, x: s.scatter_from_worker0(x, s.call(own_zeros)),
        lambda xs: [xs[w - w % 2].reshape(-1)[0 if w % 2 == 0 else 2 :][: 2 + w % 2] for w in range(4)],
    ),
    "gather": (
        lambda s, x: s.gather_to_worker0(x),
        lambda xs: [torch.cat([xs[0], xs[1]]), None, torch.cat([xs[2], xs[3]]), None],
    ),
    "next group": (
        lambda s, x: s.send_to_next_group(x, s.call(torch.zeros, 5, dtype=torch.float64)),
        lambda xs: [torch.zeros(5, dtype=torch.float64)] * 2 + [xs[0], xs[1]],
    ),
    "between": (
        lambda s, x: s.send_to_worker(x, 1, s.call(torch.zeros, 5, dtype=torch.float64), 3),
        lambda xs: [torch.zeros(5, dtype=torch.float64)] * 3 + [xs[1]],
    ),
}  # fmt: skip


def loss_of(x: torch.Tensor, got: torch.Tensor | None, worker: int) -> torch.Tensor:
    rest = (x.sin() * (worker + 1)).sum()
    return rest if got is None else rest + (got.cos() * torch.arange(1, got.numel() + 1).view(got.shape)).sum()


def loss_on_worker(x: torch.Tensor, got: torch.Tensor | None) -> torch.Tensor:
    return loss_of(x * x, got, di.worker_id())


@pytest.mark.parametrize("name", COLLECTIVES)
def test_a_collective_has_the_gradient_of_what_it_does(processes: di.Session, name: str) -> None:
    there, here = COLLECTIVES[name]
    if name == "allreduce":
        there = lambda s, x: s.allreduce(x, in_group=False)  # noqa: E731
    xs = [leaf(5, seed=worker) for worker in range(4)]
    squares = [x * x for x in xs]
    sum(loss_of(q, got, w) for w, (q, got) in enumerate(zip(squares, here(squares), strict=True))).backward()
    x = processes.call(own_leaf, 5)
    with autograd.context(processes) as context_id:
        got = there(processes, processes.call(lambda t: t * t, x))
        loss = processes.call(loss_on_worker, x, got)
        autograd.backward(context_id, [loss])
        found = autograd.get_gradients(context_id)[x]
        for worker in range(4):
            torch.testing.assert_close(found[worker], xs[worker].grad)


def test_three_workers_in_a_row_and_an_optimizer(session: di.Session) -> None:
    """A pipeline, as a training script writes it; several backward passes accumulate."""
    plain = [leaf(6, 6, seed=worker) for worker in range(4)]
    optimizer = torch.optim.Adagrad(plain, lr=0.1)
    x = torch.linspace(-1, 1, 6, dtype=torch.float64)
    w = session.call(own_leaf, 6, 6)
    there = optim.DistributedOptimizer(torch.optim.Adagrad, [w], lr=0.1)
    for _ in range(2):
        with autograd.context(session) as context_id:
            h = session.call(lambda x, w: torch.tanh(x @ w), x, w)
            for worker in (0, 1):
                space = session.call(torch.zeros, 6, dtype=torch.float64)
                received = session.send_to_worker(h, worker, space, worker + 1)
                h = session.call(lambda r, h, w, n: torch.tanh(r @ w) if di.worker_id() == n else h, received, h, w,
                                 worker + 1)  # fmt: skip
            loss = session.call(lambda h: h.sum(), h)
            autograd.backward(context_id, [loss], retain_graph=True, worker=2)
            autograd.backward(context_id, [loss], worker=2)
            for w_plain in plain:
                w_plain.grad = None
            result = x
            for w_plain in plain[:3]:
                result = torch.tanh(result @ w_plain)
            (2 * result.sum()).backward()
            gradient = autograd.get_gradients(context_id)[w]
            for worker in range(3):
                torch.testing.assert_close(gradient[worker], plain[worker].grad)
            assert gradient[3] is None
            there.step(context_id)
            optimizer.step()
    for worker in range(4):
        torch.testing.assert_close(w[worker], plain[worker])


def test_errors_of_contexts(threaded: di.Session) -> None:
    x = threaded.call(own_leaf, 2)
    with autograd.context(threaded) as context_id:
        with pytest.raises(ArgumentError, match="an autograd context inside of another"), autograd.context(threaded):
            pass
        with pytest.raises(ArgumentError, match="needed a list of DRefs to scalars"):
            autograd.backward(context_id, [torch.ones(())])
        loss = threaded.call(torch.sum, threaded.allreduce(x))
        autograd.backward(context_id, [loss])
        autograd.backward(context_id, [loss])
        with pytest.raises(RuntimeError, match="a second time"):
            threaded.sync()
        threaded.allreduce(x, op="max")
        with pytest.raises(
            ArgumentError, match="allreduce of max in an autograd context: found a tensor that requires"
        ):
            threaded.sync()
        threaded.allreduce(x, threaded.call(lambda t: t + 1, x))
        with pytest.raises(ArgumentError, match="a destination that has a gradient"):
            threaded.sync()
        autograd.backward(context_id, [x], retain_graph=True)
        with pytest.raises((ArgumentError, RuntimeError)):
            threaded.sync()
    # An error in a worker's backward is raised here, and the others leave their collectives.
    with autograd.context(threaded) as context_id:
        y = threaded.call(lambda t: Broken.apply(t) if di.worker_id() == 1 else t * 2, x)
        autograd.backward(context_id, [threaded.call(torch.sum, threaded.allreduce(y))])
        with pytest.raises(ZeroDivisionError, match="in backward"):
            threaded.sync()
    autograd.backward(context_id, [y])
    with pytest.raises(ArgumentError, match="no such autograd context"):
        threaded.sync()


class Broken(torch.autograd.Function):
    @staticmethod
    def forward(ctx, x):
        return x * 2

    @staticmethod
    def backward(ctx, grad):
        raise ZeroDivisionError("in backward")


def hooked_leaf() -> torch.Tensor:
    """One whose node has a hook, which notes the gradient that it sees."""
    w = torch.full((2,), float(di.worker_id() + 1), requires_grad=True)
    w.node = w.view_as(w).grad_fn.next_functions[0][0]  # type: ignore[attr-defined]
    w.node.register_hook(lambda _, grads: setattr(w, "seen", grads[0].tolist()))  # type: ignore[attr-defined]
    return w


def test_hooks_of_nodes_run_behind_collectives(session: di.Session) -> None:
    w = session.call(hooked_leaf)
    with autograd.context(session) as context_id:
        loss = session.call(torch.sum, session.allreduce(session.call(torch.mul, w, w), in_group=False))
        autograd.backward(context_id, [loss])
        grads = autograd.get_gradients(context_id)[w]
        for worker in range(4):
            # The sum of four workers' losses, each of the sum of all squares.
            assert grads[worker].tolist() == [8.0 * (worker + 1)] * 2
            assert session.call(lambda w: (w.seen, w.grad), w)[worker] == ([8.0 * (worker + 1)] * 2, None)
