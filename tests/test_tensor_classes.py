"""Arguments that are tensors, but not plain ones, and modes of torch: their numbers or a house error; never a crash."""

from __future__ import annotations

import contextlib
import re
from collections.abc import Callable
from typing import Any

import pytest
import torch
from torch._subclasses.fake_tensor import FakeTensorMode
from torch.autograd import forward_ad
from torch.fx.experimental import proxy_tensor
from torch.utils.flop_counter import FlopCounterMode

import meshfuse as mf

X = torch.arange(24.0).reshape(4, 6)
HOW = ["simulate", "execute"]


class Named(torch.Tensor):
    """As torchvision's: attributes and functions alone."""


class Loud(torch.Tensor):
    """Has a method of its own for every attribute."""

    @classmethod
    def __torch_function__(cls, function: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        with torch._C.DisableTorchFunctionSubclass():
            found = function(*args, **(kwargs or {}))
        return found + 1 if isinstance(found, torch.Tensor) else found


class Held(torch.Tensor):
    """As quantized tensors: no memory of its own."""

    @staticmethod
    def __new__(cls, like: torch.Tensor) -> Any:
        return torch.Tensor._make_wrapper_subclass(cls, like.shape, dtype=like.dtype)

    @classmethod
    def __torch_dispatch__(cls, function: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        raise NotImplementedError(function)


def defined(how: str) -> mf.FusionDefinition:
    fd = mf.FusionDefinition()
    x = fd.define_tensor([4, 6])
    fd.add_output(fd.ops.matmul(x, fd.ops.permute(fd.ops.relu(x), [1, 0])))
    fd.mesh_split(x, mf.DeviceMesh((1 if how == "execute" else 2,), ("tp",)), [None, "tp"])
    return fd


def called(how: str, value: Any) -> torch.Tensor:
    return getattr(defined(how), how)([value])[0]


def freed() -> torch.Tensor:
    tensor = X.clone()
    tensor.untyped_storage().resize_(0)
    return tensor


def faked() -> torch.Tensor:
    with FakeTensorMode():
        return torch.ones(4, 6)


GOOD: dict[str, Callable[[], torch.Tensor]] = {
    "a parameter": lambda: torch.nn.Parameter(X),
    "a class of names": lambda: X.as_subclass(Named),
    "a class of functions": lambda: X.as_subclass(Loud),
    "expanded": lambda: torch.ones(1, 1).expand(4, 6),
    "of another order": lambda: X.t().contiguous().t(),
    "negated lazily": lambda: torch._neg_view(X),
    "the imaginary part": lambda: torch.complex(X, X + 1).conj().imag,
}
BAD: dict[str, tuple[Callable[[], torch.Tensor], str]] = {
    "freed memory": (freed, "has no memory: found a storage of 0 bytes, freed by its owner, needed Float[4, 6]"),
    "a class with ops": (lambda: Held(X), "is of a class with ops of its own: found Held, needed a plain torch tensor"),
    "a fake tensor": (faked, "is of a class with ops of its own: found FakeTensor"),
    "without a shape": (torch.nn.UninitializedParameter, "has the wrong number of dims: found shape [0]"),
}


@pytest.mark.parametrize("how", HOW)
@pytest.mark.parametrize("what", GOOD)
def test_what_holds_numbers_is_its_numbers(what: str, how: str) -> None:
    value = GOOD[what]()
    with torch._C.DisableTorchFunctionSubclass():
        plain = value.detach().as_subclass(torch.Tensor).resolve_neg()
    found = called(how, value)
    assert type(found) is torch.Tensor
    torch.testing.assert_close(found, plain @ plain.relu().t())


def refused(text: str, call: Callable[[], Any]) -> None:
    with pytest.raises(mf.ArgumentError) as caught:
        call()
    assert f"argument 0, x (t0) (defined at test_tensor_classes.py:51) {text}" in str(caught.value)
    assert re.search(r"\(at test_tensor_classes\.py:\d+\)$", str(caught.value))


@pytest.mark.parametrize("how", HOW)
@pytest.mark.parametrize("what", BAD)
def test_what_holds_none_is_refused(what: str, how: str) -> None:
    make, text = BAD[what]
    refused(text, lambda: called(how, make()))


@pytest.mark.parametrize("how", HOW)
def test_memory_that_is_freed_between_calls(how: str) -> None:
    """As FSDP frees parameters: to read it would end the process."""
    fd, tensor = defined(how), X.clone()
    for _ in range(2):
        getattr(fd, how)([tensor])
    tensor.untyped_storage().resize_(0)
    refused("has no memory", lambda: getattr(fd, how)([tensor]))


TRANSFORMS: dict[str, Callable[[Callable[[torch.Tensor], torch.Tensor]], Any]] = {
    "vmap": lambda function: torch.vmap(function)(X.expand(3, 4, 6)),
    "grad": lambda function: torch.func.grad(lambda x: function(x).sum())(X),
    "jvp": lambda function: torch.func.jvp(function, (X,), (X,)),
    "jacrev": lambda function: torch.func.jacrev(function)(X),
    "functionalize": lambda function: torch.func.functionalize(function)(X),
}


@pytest.mark.parametrize("how", HOW)
@pytest.mark.parametrize("name", TRANSFORMS)
def test_transforms_of_torch_are_refused(name: str, how: str) -> None:
    """Their result would be without derivatives, or of the wrong shape."""
    refused("cannot be looked into: found a tensor of torch.func", lambda: TRANSFORMS[name](lambda x: called(how, x)))


@contextlib.contextmanager
def dual(tensors: list[torch.Tensor]) -> Any:
    with forward_ad.dual_level():
        tensors[0] = forward_ad.make_dual(tensors[0], torch.ones_like(tensors[0]))
        yield


@contextlib.contextmanager
def traced(tensors: list[torch.Tensor]) -> Any:
    with proxy_tensor.ProxyTorchDispatchMode(proxy_tensor.PythonKeyTracer(), "real"):
        yield


FOLLOWED: dict[str, tuple[Callable[[list[torch.Tensor]], Any], str]] = {
    "derivatives forward": (dual, "a dual tensor of torch.autograd.forward_ad"),
    "shapes alone": (lambda _: FakeTensorMode(allow_non_fake_inputs=True), "a call in torch's FakeTensorMode"),
    "a trace": (traced, "a call in torch's ProxyTorchDispatchMode"),
}


@pytest.mark.parametrize("how", HOW)
@pytest.mark.parametrize("what", FOLLOWED)
def test_tracers_of_torch_get_an_error(what: str, how: str) -> None:
    """Arguments of a call that is known to fit, too; programs write to memory, by addresses among others."""
    fd, tensors, (enter, text) = defined(how), [X], FOLLOWED[what]
    wanted = getattr(fd, how)([X])[0]
    with enter(tensors):
        refused(f"cannot be looked into: found {text}", lambda: called(how, tensors[0]))
        refused(f"cannot be looked into: found {text}", lambda: getattr(fd, how)(tensors))
    assert torch.equal(getattr(fd, how)([X])[0], wanted)


MODES: dict[str, Callable[[], Any]] = {
    "autocast": lambda: torch.autocast("cpu", dtype=torch.bfloat16),
    "a default device": lambda: torch.device("meta"),
    "inference": torch.inference_mode,
    "gradients": torch.enable_grad,
    "a count of operations": lambda: FlopCounterMode(display=False),
    "a default dtype": lambda: _default_dtype(torch.float64),
}


@contextlib.contextmanager
def _default_dtype(dtype: torch.dtype) -> Any:
    torch.set_default_dtype(dtype)
    try:
        yield
    finally:
        torch.set_default_dtype(torch.float32)


@pytest.mark.parametrize("how", HOW)
@pytest.mark.parametrize("mode", MODES)
def test_modes_of_torch_change_nothing(mode: str, how: str) -> None:
    """At the first call and at the next one, and not for the calls after it."""
    x = torch.randn(4, 6)
    wanted, fd = x @ x.relu().t(), defined(how)
    with MODES[mode]():
        inside = [getattr(fd, how)([x])[0] for _ in range(2)]
        on = torch._C._is_any_autocast_enabled()
    assert on is (mode == "autocast")
    for found in (*inside, getattr(fd, how)([x])[0]):
        assert found.dtype == torch.float32 and found.device == x.device
        torch.testing.assert_close(found, wanted)


def makes_tensors(how: str) -> mf.FusionDefinition:
    """Of what programs make tensors of themselves: numbers, places of indices, random numbers, parts of chunks."""
    fd, ranks = mf.FusionDefinition(seed=1), 1 if how == "execute" else 2
    x = fd.define_tensor([7, 6])
    mesh, o = mf.DeviceMesh((ranks,), ("tp",)), fd.ops
    fd.mesh_split(x, mesh, [[mf.Split(None), mf.Split(ranks, "tp")], None])
    rows = o.iota(7)
    made = [
        o.where(o.gt(x, 0.0), x, 0.0), o.where(o.lt(rows, 3), 1.0, 2.0), o.embedding_fwd(rows, x), o.argmax(x, 0),
        o.mul(x, o.uniform(0.0, 1.0, [7, 6])), o.triu(o.full([6, 6], 2.0, mf.DataType.Float)), o.cumsum(x, 0),
        o.pad(x, [1, 2], 0.5), o.sdpfa_fwd(*[o.reshape(x, [1, 1, 7, 6])] * 3, is_causal=True)[0], *o.topk(x, 3, 0),
    ]  # fmt: skip
    for t in made:
        fd.add_output(t)
    y = o.mul(o.var(x, [1], 0), 2.0)
    fd.mesh_split(y, mesh, ["tp"])
    fd.add_output(y)
    fd.overlap(y, 3)
    return fd


@pytest.mark.parametrize("how", HOW)
@pytest.mark.parametrize("mode", MODES)
def test_modes_of_torch_change_nothing_of_what_programs_make(mode: str, how: str) -> None:
    x = torch.randn(7, 6, generator=torch.Generator().manual_seed(0))
    wanted = getattr(makes_tensors(how), how)([x])
    fd = makes_tensors(how)
    with MODES[mode]():
        inside = getattr(fd, how)([x])
    for found, expected in zip(inside, wanted, strict=True):
        assert found.device == x.device
        torch.testing.assert_close(found, expected)
