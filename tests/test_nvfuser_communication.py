"""Communication that a script writes itself, in nvFuser's words: what it sends, its text, and its errors."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import pytest
import torch

import meshfuse as mf
import meshfuse.nvfuser_direct as nv
from defining import nvfuser_rebuilt
from meshfuse.nvfuser_direct import CommunicationType, FusionDefinition

Mesh = nv.multidevice.DeviceMesh
LINE, GRID = Mesh([0, 1]), Mesh([[0, 1], [2, 3]])
X, W = torch.randn(8, 4), torch.randn(4, 6)


def kinds(fd: mf.FusionDefinition) -> list[tuple[str, str]]:
    return [(entry.collective, entry.axes) for entry in fd.bill().entries]


def test_collectives_of_a_product() -> None:
    with FusionDefinition() as fd:
        x, w = fd.define_tensor([8, 4]), fd.define_tensor([4, 6])
        part = nv.ops.reduce_scatter(fd.ops.matmul(x, w), GRID, dim=0, axis="y")
        whole = fd.ops.all_gather(fd.ops.neg(part), GRID, axis="y")
        fd.add_output(whole)
        fd.add_output(fd.ops.all_reduce(fd.ops.sum(w, [0, 1]), GRID, axis="x", reduced=0))
    found = fd.simulate([X, W], check_replicas=True)
    torch.testing.assert_close(found, [-(X @ W), W.sum()])
    assert kinds(fd) == [("reduce-scatter", "y"), ("all-gather", "y"), ("all-reduce", "x")]
    again = nvfuser_rebuilt(fd)
    assert repr(again) == repr(fd)
    torch.testing.assert_close(again.simulate([X, W]), found)
    assert kinds(again) == kinds(fd)


def test_no_plan_does_without_a_copy_that_undoes_another() -> None:
    """What is gathered and scattered again could stay where it was."""
    with FusionDefinition() as fd:
        x = fd.define_tensor([8, 4])
        root = fd.ops.gather(fd.ops.exp(x), LINE)
        again = fd.ops.exp(fd.ops.scatter(root, LINE))
        fd.add_output(fd.ops.all_gather(again, LINE))
        fd.mesh_split(x, LINE, ["x", None])
    assert [entry.collective for entry in fd.bill().entries] == ["send-recv", "send-recv", "all-gather"]
    torch.testing.assert_close(fd.simulate([X])[0], X.exp().exp())


def test_names_of_ops_by_index_stay() -> None:
    with FusionDefinition() as fd:
        x, index = fd.define_tensor([8, 4]), fd.define_tensor([2, 4], dtype=nv.DataType.Int)
        fd.add_output(fd.ops.gather(x, index, 0))
    places = torch.tensor([[0, 1, 2, 3], [3, 2, 1, 0]])
    assert torch.equal(fd.simulate([X, places])[0], X.gather(0, places))


def test_copies_in_a_definition_that_is_written() -> None:
    """Readers so far read the copy; what comes later reads the tensor. The text is that of the same program."""
    with FusionDefinition() as fd:
        x, w = fd.define_tensor([8, 4]), fd.define_tensor([4, 6])
        y = fd.ops.sum(fd.ops.cat([x, x], 1), [1])
        copy = x.cache_after(CommunicationType.Allgather)
        z = fd.ops.matmul(x, w)
        fd.add_output(y)
        fd.add_output(z)
        terms = fd.sched.cache_before(y, CommunicationType.Allgather)
        for tensor, spec in ((x, ["x", None]), (copy, [None, None]), (terms, ["x"]), (y, [None])):
            fd.mesh_split(tensor, LINE, spec)
    wanted = [2 * X.sum(1), X @ W]
    torch.testing.assert_close(fd.simulate([X, W]), wanted)
    gathered = [entry.tensor for entry in fd.bill().entries if entry.collective == "all-gather"]
    assert gathered == ["x (t0)", "y (t5)"] or len(gathered) == 2
    torch.testing.assert_close(nvfuser_rebuilt(fd).simulate([X, W]), wanted)
    (grad,) = FusionDefinition.grad(fd2 := _copied(), [fd2.fusion.outputs()[0]], [fd2.fusion.inputs()[0]])
    fd2.add_output(grad)
    torch.testing.assert_close(fd2.simulate([X])[1], X.exp())


def _copied() -> FusionDefinition:
    with FusionDefinition() as fd:
        x = fd.define_tensor([8, 4])
        fd.add_output(fd.ops.exp(x))
        x.cache_after(CommunicationType.Scatter)
    return fd


def test_placements_of_a_tensor_and_of_a_copy_of_it() -> None:
    from torch.distributed.tensor import Replicate, Shard

    with FusionDefinition() as fd:
        x = fd.define_tensor([8, 4])
        split = fd.ops.create_dtensor(x, LINE, [Shard(0)])
        again = fd.ops.create_dtensor(split, LINE, [Replicate()])
        assert split.id == x.id != again.id
        fd.add_output(fd.ops.exp(split).to_local())
        fd.add_output(again.to_local())
    assert [str(s) for s in fd.output_shardings()] == ["[x, -]", "[-, -]"]
    assert kinds(fd) == [("all-gather", "x")]


# errors


def defined(call: Callable[..., Any]) -> Callable[[], Any]:
    def run() -> Any:
        fd = FusionDefinition()
        x, w = fd.define_tensor([8, 4]), fd.define_tensor([4, 6])
        fd.mesh_split(w, LINE, ["x", None])
        return call(fd, x, w)

    return run


def annotated_result(fd: Any, x: Any, w: Any) -> Any:
    y = fd.ops.neg(x)
    y.set_device_mesh(LINE)
    return y.cache_before(CommunicationType.Gather)


ERRORS: dict[str, tuple[Callable[..., Any], str]] = {
    "an axis that is not named": (
        lambda fd, x, w: fd.ops.all_gather(x, GRID),
        r"all_gather: mesh axis: found None of .*, needed one of 'y', 'x'\. Name the axis to communicate over\.",
    ),
    "a dim that there is not": (
        lambda fd, x, w: fd.ops.all_gather(x, LINE, dim=2),
        r"all_gather: no such dim: found 2, needed a dim of Float\[8, 4\]\. Pass an existing dim\.",
    ),
    "a dim that is not split": (
        lambda fd, x, w: fd.ops.all_gather(w, LINE, dim=1),
        r"all_gather of t1: found dim 1 annotated as not split over 'x', needed a dim that is\.",
    ),
    "another mesh": (
        lambda fd, x, w: fd.ops.all_gather(w, Mesh([0, 1, 2])),
        r"all_gather of t1: found .*, where it is annotated, needed .*\. Pass the mesh that it is on",
    ),
    "no mesh": (lambda fd, x, w: fd.ops.all_gather(x, "tp"), r"found 'tp', needed"),
    "a root beside the mesh": (
        lambda fd, x, w: fd.ops.scatter(x, LINE, root=2),
        r"scatter: root: found 2, needed a rank of .*\. Pass one of the mesh's ranks\.",
    ),
    "a mesh of two axes": (lambda fd, x, w: fd.ops.gather(x, GRID), r"gather: mesh axis: found None .*a mesh of one"),
    "no rank": (
        lambda fd, x, w: fd.ops.send(x, 0, "one"),
        r"send_recv: target: found 'one', needed the number of a rank\. Count ranks from 0\.",
    ),
    "what is elsewhere": (lambda fd, x, w: fd.ops.scatter(w, LINE), r"tensor t1 is annotated twice"),
    "no reduction": (
        lambda fd, x, w: fd.ops.all_reduce(fd.ops.neg(x), LINE),
        r"all_reduce of .*: found no reduction, needed the result of a sum, a matmul",
    ),
    "a dim that is not reduced": (
        lambda fd, x, w: fd.ops.reduce_scatter(fd.ops.sum(x, [0]), LINE, reduced=1),
        r"reduce_scatter of .*: found reduced dim 1 of 1, needed the result",
    ),
    "a copy that nothing reads": (
        lambda fd, x, w: x.cache_after(CommunicationType.Scatter),
        r"cache_after of t0: found a tensor that no op reads, needed one with readers\. Call cache_before",
    ),
    "a copy before an input": (
        lambda fd, x, w: x.cache_before(CommunicationType.Gather),
        r"cache_before of t0: found an input, needed the result of an op, before it is annotated\.",
    ),
    "a copy before what is annotated": (
        annotated_result,
        r"cache_before of y \(t2\): found a tensor that is annotated",
    ),
}


@pytest.mark.parametrize("name", ERRORS)
def test_communication_that_cannot_be(name: str) -> None:
    call, message = ERRORS[name]
    with pytest.raises(mf.DefinitionError, match=message):
        defined(call)()
