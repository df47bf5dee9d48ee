"""`nn.RemoteModule`: modules of other rpc workers, against the same modules in one process."""

from __future__ import annotations

import pickle
from collections.abc import Iterator

import pytest
import torch

import meshfuse.session as di
from meshfuse.errors import ArgumentError
from meshfuse.session import autograd, nn, optim, rpc
from session.rpc_groups import rpc_group


@pytest.fixture(scope="module", autouse=True)
def group() -> Iterator[di.ProcessSession]:
    with rpc_group(3) as session:
        yield session


class Part(torch.nn.Module):
    """A layer with weights that are the same wherever it is made."""

    def __init__(self, seed: int, scale: float = 1.0):
        super().__init__()
        self.linear = torch.nn.Linear(4, 4)
        generator = torch.Generator().manual_seed(seed)
        with torch.no_grad():
            for parameter in self.parameters():
                parameter.copy_(torch.randn(parameter.shape, generator=generator) * scale)

    def forward(self, x: torch.Tensor, times: int = 1) -> torch.Tensor:
        for _ in range(times):
            x = torch.tanh(self.linear(x))
        return x


class Hybrid(torch.nn.Module):
    """Layers here and on two workers."""

    def __init__(self) -> None:
        super().__init__()
        self.first = nn.RemoteModule("worker1/cpu", Part, args=(1,))
        self.local = Part(2)
        self.last = nn.RemoteModule("rank:2", Part, (3,), {"scale": 0.5})

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return self.last(self.local(self.first(x)))


def test_calls_wait_or_do_not(group: di.ProcessSession) -> None:
    remote, plain, x = nn.RemoteModule("worker1", Part, (5,)), Part(5), torch.randn(2, 4)
    torch.testing.assert_close(remote(x), plain(x))
    torch.testing.assert_close(remote.forward(x, times=3), plain(x, times=3))
    futures = [remote.forward_async(x, times=times) for times in (1, 2)]
    for times, future in enumerate(futures, 1):
        torch.testing.assert_close(future.wait(), plain(x, times))
    assert "worker1/cpu" in repr(remote)


def test_training_is_that_of_one_process() -> None:
    model, plain, x = Hybrid(), torch.nn.Sequential(Part(1), Part(2), Part(3, 0.5)), torch.randn(6, 4)
    local = [rpc.RRef(parameter) for parameter in model.local.parameters()]
    parameters = [*model.first.remote_parameters(), *local, *model.last.remote_parameters()]
    ours = optim.DistributedOptimizer(torch.optim.Adam, parameters, lr=0.05)
    theirs = torch.optim.Adam(plain.parameters(), lr=0.05)
    for _ in range(3):
        with autograd.context() as context:
            loss, expected = model(x).square().sum(), plain(x).square().sum()
            torch.testing.assert_close(loss, expected)
            autograd.backward(context, [loss])
            ours.step(context)
        theirs.zero_grad()
        expected.backward()
        theirs.step()
    for rref, parameter in zip(parameters, plain.parameters(), strict=True):
        torch.testing.assert_close(rref.to_here(), parameter)


def forward_there(remote: nn.RemoteModule, x: torch.Tensor) -> torch.Tensor:
    return remote.forward_async(x).wait()


def training_there(rref: rpc.RRef) -> bool:
    return rref.local_value().training


def test_it_can_be_sent_and_made_of_a_reference() -> None:
    remote, x = nn.RemoteModule("worker1", Part, (5,)), torch.randn(2, 4)
    expected = Part(5)(x)
    torch.testing.assert_close(rpc.rpc_sync("worker2", forward_there, (remote, x)), expected)
    again = rpc.rpc_sync("worker2", nn.RemoteModule.init_from_module_rref, ("worker1/cpu", remote.get_module_rref()))
    torch.testing.assert_close(again(x), expected)
    with pytest.raises(ArgumentError, match="Cannot pickle RemoteModule in python pickler") as caught:
        pickle.dumps(remote)
    assert isinstance(caught.value, (RuntimeError, ValueError))


def test_train_and_eval() -> None:
    remote = nn.RemoteModule("worker2", torch.nn.Dropout, (0.5,))
    x = torch.ones(1000)
    assert (remote(x) == 0).any() and remote.eval() is remote and not remote.training
    assert torch.equal(remote(x), x) and not rpc.rpc_sync("worker2", training_there, (remote.module_rref,))
    remote.train()
    assert (remote(x) == 0).any()


def test_what_is_refused() -> None:
    with pytest.raises(ArgumentError, match=r"RemoteModule: remote_device.*needed .worker/device"):
        nn.RemoteModule("a/b/c", Part, (1,))
    with pytest.raises(ArgumentError, match="no such rpc worker"):
        nn.RemoteModule("nobody", Part, (1,))
    with pytest.raises(ValueError, match=r"Expect `module_cls\(\*args, \*\*kwargs\)` returns an instance of"):
        nn.RemoteModule("worker1", dict).forward()
    with pytest.raises(TypeError, match="missing 1 required positional argument"):
        nn.RemoteModule("worker1", Part).forward()
    remote = nn.RemoteModule("worker1", Part, (1,))
    with pytest.raises(ValueError, match="Method ``state_dict`` not supported for RemoteModule"):
        remote.state_dict()
    with pytest.raises(ValueError, match=r"Method ``parameters`` not supported.*use ``remote_parameters`` instead"):
        remote.parameters()
