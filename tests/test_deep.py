"""Programs deeper than Python's stack, or in which ops read the one before them twice: planned, run, explained."""

from __future__ import annotations

import sys
from collections.abc import Callable, Iterator, Sequence
from typing import Any

import pytest
import torch

import meshfuse as mf
from meshfuse.report.explain import explain_all

MESH = mf.DeviceMesh((2, 2), ("dp", "tp"))
# Less than Python allows: what is deeper than that is deeper than the stack, and takes less time than its thousand.
STACK, DEEP, TWICE = 250, 300, 40
T = mf.TensorView
Shape, Spec = list[int], list[Any]
X: tuple[Shape, Spec] = ([4, 8], ["dp", "tp"])
TERMS = [([8, 4], ["tp", None])] * 3


@pytest.fixture(autouse=True)
def shallow() -> Iterator[None]:
    before = sys.getrecursionlimit()
    sys.setrecursionlimit(STACK)
    yield
    sys.setrecursionlimit(before)


def total(terms: Sequence[Any]) -> Any:
    found = terms[0]
    for term in terms[1:]:
        found = found + term
    return found


def again(times: int, op: Callable[[Any], Any], x: Any) -> Any:
    for _ in range(times):
        x = op(x)
    return x


def products(ops: Any, x: Any, *weights: Any) -> Any:
    """Terms that are all sums over ranks."""
    return total([ops.matmul(x, weights[i % 3]) * (1 / DEEP) for i in range(DEEP)])


def mixed(ops: Any, x: Any, *weights: Any) -> Any:
    """Terms of which every other one is a sum over ranks."""
    terms = [
        ops.matmul(x, weights[i % 3]) if i % 2 else ops.sin(ops.slice(weights[i % 3], [0, 0], [4, 4]))
        for i in range(DEEP)
    ]
    return total(terms) * (1 / DEEP)


def nested(ops: Any, x: Any, *weights: Any) -> Any:
    """A sum of few additions with many terms each, from both sides."""
    found = total([ops.matmul(x, w) for w in weights])
    for i in range(DEEP // 2):
        found = (ops.matmul(x, weights[i % 3]) + found) + ops.sin(found)
    return ops.tanh(found)


def cell(ops: Any, x: Any, *weights: Any) -> Any:
    """A recurrent cell, whose weights' gradients are sums over all steps."""
    w = weights[0]
    return again(DEEP, lambda h: ops.tanh(ops.matmul(h, w) @ ops.permute(w, [1, 0]) + x), x)


def between_pad_and_slice(ops: Any, x: Any) -> Any:
    return ops.slice(again(DEEP, ops.tanh, ops.pad(x, [1, 1])), [0, 1], [4, 9])


def between_pad_and_slice_twice(ops: Any, x: Any) -> Any:
    return ops.slice(again(TWICE, lambda y: ops.tanh(y * y + y), ops.pad(x, [1, 1])), [0, 1], [4, 9])


def beside_parts(ops: Any, x: Any) -> Any:
    """Parts put together, and what is alike along them."""
    alike = again(DEEP, ops.tanh, ops.expand(ops.slice(x, [0, 0], [4, 1]), [4, 16]))
    return ops.sum(ops.cat([x, ops.sin(x)], 1) * alike, [1])


def beside_parts_twice(ops: Any, x: Any) -> Any:
    alike = again(TWICE, lambda y: ops.tanh(y * y + y), ops.expand(ops.slice(x, [0, 0], [4, 1]), [4, 16]))
    return ops.sum(ops.cat([x, ops.sin(x)], 1) * alike, [1])


def windows(ops: Any, x: Any) -> Any:
    """Every op's operand is seen from another place."""
    return again(DEEP // 4, lambda y: ops.slice(ops.cat([y, ops.sin(x)], 1), [0, 2], [4, 10]), x)


def turned(ops: Any, x: Any) -> Any:
    return again(DEEP // 2, lambda y: ops.permute(ops.sin(ops.permute(y, [1, 0])), [1, 0]), x)


def whole_and_split(ops: Any, x: Any) -> Any:
    """What each op makes is summed and read beside the sum."""
    return again(DEEP // 3, lambda y: ops.tanh(y - ops.sum(y, [1], keepdim=True)), x)


class Torch:
    """The ops of `fd.ops` that the programs use, in torch."""

    sin, tanh, matmul = torch.sin, torch.tanh, torch.matmul
    permute = staticmethod(lambda x, dims: x.permute(dims))
    pad = staticmethod(lambda x, widths: torch.nn.functional.pad(x, widths))
    slice = staticmethod(lambda x, starts, ends: x[tuple(map(slice, starts, ends))])
    cat = staticmethod(lambda xs, dim: torch.cat(xs, dim))
    expand = staticmethod(lambda x, shape: x.expand(shape))
    sum = staticmethod(lambda x, dims, keepdim=False: x.sum(dims, keepdim=keepdim))


PROGRAMS: dict[Callable[..., Any], list[tuple[Shape, Spec]]] = {
    products: [X, *TERMS],
    mixed: [X, *TERMS],
    nested: [X, *TERMS],
    cell: [X, *TERMS[:1]],
    between_pad_and_slice: [X],
    between_pad_and_slice_twice: [X],
    beside_parts: [X],
    beside_parts_twice: [X],
    windows: [X],
    turned: [X],
    whole_and_split: [X],
}


def defined(program: Callable[..., Any]) -> mf.FusionDefinition:
    with mf.FusionDefinition() as fd:
        given = [fd.define_tensor(shape, dtype=mf.DataType.Double) for shape, _ in PROGRAMS[program]]
        for tensor, (_, spec) in zip(given, PROGRAMS[program], strict=True):
            fd.mesh_split(tensor, MESH, spec)
        made = program(fd.ops, *given)
        for result in (made, *fd.grad(fd.ops.sum(made * made, list(range(made.ndim))), given)):
            fd.add_output(result)
    return fd


def reference(program: Callable[..., Any], given: list[torch.Tensor]) -> Sequence[torch.Tensor]:
    leaves = [x.clone().requires_grad_() for x in given]
    made = program(Torch, *leaves)
    return [made, *torch.autograd.grad((made * made).sum(), leaves)]


@pytest.mark.slow
@pytest.mark.parametrize("program", PROGRAMS, ids=lambda program: program.__name__)
def test_deep_programs_are_as_torch_computes_them(program: Callable[..., Any]) -> None:
    fd = defined(program)
    torch.manual_seed(0)
    given = [torch.rand(shape, dtype=torch.float64) for shape, _ in PROGRAMS[program]]
    found = fd.simulate(given)
    for a, b in zip(found, reference(program, given), strict=True):
        torch.testing.assert_close(a, b)
    assert fd.bill().total >= 0 and str(fd) and str(fd.host_program(0)) and explain_all(fd.compile())
