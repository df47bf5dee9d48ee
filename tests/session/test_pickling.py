"""Values as bytes and back: what a tensor's layout, gradient and kind become, against the tensor that was sent."""

from __future__ import annotations

import warnings
from typing import Any

import pytest
import torch

from meshfuse.session.pickling import dumps, loads

LARGE = torch.arange(60_000.0).view(200, 300)


def source(x: torch.Tensor) -> torch.Tensor:
    return torch.tanh(x) + 1


with warnings.catch_warnings():  # It is deprecated, and still used.
    warnings.simplefilter("ignore")
    source = scripted = torch.jit.script(source)


class Held:
    """What has no short form."""

    def __init__(self, value: Any):
        self.value = value


def sent(value: Any) -> Any:
    payload, buffers = dumps(value)
    return loads(bytes(payload), [bytearray(buffer) for buffer in buffers])


@pytest.mark.parametrize("tensor", [
    torch.randn(5, 5).narrow(1, 2, 2), torch.randn(3, 4).t(), torch.ones(1).expand(9), LARGE.t(), LARGE[:, 1:200],
    torch.randn(2, 3, 4, 5).to(memory_format=torch.channels_last), torch.arange(9.0).unfold(0, 3, 1),
    torch.randn(3, 4, dtype=torch.cfloat).t(), LARGE.t().to(torch.bfloat16), torch.randn(30)[::2],
], ids=lambda tensor: f"{list(tensor.shape)} {tensor.stride()}")  # fmt: skip
def test_layouts_stay(tensor: torch.Tensor) -> None:
    for got in (sent(tensor), sent(Held(tensor)).value):  # the short form, and pickle's
        assert torch.equal(got, tensor) and got.stride() == tensor.stride() and got.dtype == tensor.dtype


@pytest.mark.parametrize("tensor", [
    LARGE[:, :10], LARGE[::2, ::2], torch.randn(3, 4, dtype=torch.cfloat).t().conj(), torch.empty(0, 3).t(),
], ids=lambda tensor: f"{list(tensor.shape)} {tensor.stride()}")  # fmt: skip
def test_gaps_and_lazy_conjugates_are_not_sent(tensor: torch.Tensor) -> None:
    payload, buffers = dumps(tensor)
    assert torch.equal(sent(tensor), tensor) and torch.equal(sent(Held(tensor)).value, tensor)
    assert len(payload) + sum(map(len, buffers)) <= tensor.numel() * tensor.itemsize + 200


@pytest.mark.filterwarnings("ignore")
@pytest.mark.parametrize("make", [
    lambda: torch.sparse_coo_tensor([[0, 1, 1], [2, 0, 2]], [3.0, 4.0, 5.0], (2, 3)),
    lambda: torch.eye(3).to_sparse_coo().coalesce(), lambda: torch.eye(3).to_sparse_csr(),
    lambda: torch.eye(3, device="meta"), lambda: LARGE.t().clone(),
], ids=["uncoalesced", "coalesced", "csr", "meta", "strided"])  # fmt: skip
def test_gradients_are_required_of_every_layout(make: Any) -> None:
    for requires in (True, False):
        tensor = make().requires_grad_(requires)
        for got in (sent(tensor), sent(Held(tensor)).value, sent((tensor, [tensor]))[0]):
            assert got.requires_grad is requires and got.layout == tensor.layout and got.device == tensor.device
            assert tensor.is_meta or torch.equal(got.detach().to_dense(), tensor.detach().to_dense())


@pytest.mark.filterwarnings("ignore")
def test_torchscript_goes_by_name_or_by_value() -> None:
    x = torch.ones(1, 2)
    assert sent(scripted) is scripted
    local = torch.jit.script(torch.nn.Linear(2, 2))
    assert torch.equal(sent(local)(x), local(x))
    by_value = torch.jit.trace(lambda t: t * 3, (x,))
    assert torch.equal(sent([by_value])[0](x), x * 3)


def test_lists_and_dicts_are_as_pickle_has_them() -> None:
    items, x = [1, (2, "a")], torch.arange(3)
    value = {"a": items, 3: [items, {}, {"x": x, None: x}], "deep": [[[[[[[[[[1]]]]]]]]]]}
    for got in (sent(value), sent(Held(value)).value):
        assert list(got) == list(value) and got["deep"] == value["deep"]
        assert got["a"] == items and got[3][0] is got["a"] and got[3][1] == {}
        assert torch.equal(got[3][2]["x"], x) and got[3][2][None] is got[3][2]["x"]
    loop: list[Any] = [1]
    loop.append(loop)
    got = sent(loop)
    assert got[0] == 1 and got[1] is got
    assert sent({(1, 2): 3, frozenset({1}): 4}) == {(1, 2): 3, frozenset({1}): 4}
