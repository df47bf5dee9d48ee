"""Segments of whole programs as definitions of the real nvFuser, for every rank.

What the definitions take and give is compared with the tensors that the ranks' own programs pass to their
kernels and get from them when they are run in torch.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Sequence
from typing import Any

import fake_kernels
import pytest
import torch
from native_calls import differences

import meshfuse as mf
from meshfuse import compiler
from meshfuse.backends.nvfuser import build_segment, partitioned
from meshfuse.backends.nvfuser.copies import type_of
from meshfuse.backends.nvfuser.partition import copies_of, partitioned_kernel
from meshfuse.backends.nvfuser.segment import value_types
from meshfuse.compiler import CompiledProgram
from meshfuse.dtypes import DataType, from_torch
from meshfuse.executor.simulate import Simulation
from meshfuse.lowering.segments import Segment
from meshfuse.ops.opdef import ToTorch
from meshfuse.ops.values import TensorRef

pytestmark = pytest.mark.nvfuser

MESH = mf.DeviceMesh((2, 2), ("dp", "tp"))
Program = Callable[[], mf.FusionDefinition]


def mlp() -> mf.FusionDefinition:
    """Rows over dp; the hidden dim over tp."""
    with mf.FusionDefinition() as fd:
        x, up = (
            fd.define_tensor([8, 16], dtype=DataType.BFloat16),
            fd.define_tensor([32, 16], dtype=DataType.BFloat16),
        )
        bias, down = (
            fd.define_tensor([32], dtype=DataType.BFloat16),
            fd.define_tensor([16, 32], dtype=DataType.BFloat16),
        )
        hidden = fd.ops.gelu(fd.ops.linear(x, up, bias), "tanh")
        out = fd.ops.linear(hidden, down, fd.define_tensor([16], dtype=DataType.BFloat16))
        fd.add_output(fd.ops.add(out, x))
        fd.mesh_split(x, MESH, ["dp", None])
        fd.mesh_split(up, MESH, ["tp", None])
    return fd


def attention() -> mf.FusionDefinition:
    """Projections, scores, softmax and the output projection, heads over tp."""
    with mf.FusionDefinition() as fd:
        x, qkv = fd.define_tensor([4, 6, 16]), [fd.define_tensor([16, 16]) for _ in range(3)]
        heads = [fd.ops.permute(fd.ops.reshape(fd.ops.linear(x, w), [4, 6, 4, 4]), [0, 2, 1, 3]) for w in qkv]
        scores = fd.ops.matmul(heads[0], fd.ops.permute(heads[1], [0, 1, 3, 2]))
        mask = fd.ops.triu(fd.ops.full([6, 6], True, DataType.Bool), 1)
        scores = fd.ops.where(mask, -math.inf, fd.ops.mul(scores, 0.5))
        mixed = fd.ops.matmul(fd.ops.softmax(scores, -1), heads[2])
        merged = fd.ops.reshape(fd.ops.permute(mixed, [0, 2, 1, 3]), [4, 6, 16])
        fd.add_output(fd.ops.linear(merged, fd.define_tensor([16, 16])))
        fd.mesh_split(x, MESH, ["dp", None, None])
        for w in qkv:
            fd.mesh_split(w, MESH, ["tp", None])
    return fd


def layer_norm() -> mf.FusionDefinition:
    """A norm over a sharded hidden dim, its statistics by two ways."""
    with mf.FusionDefinition() as fd:
        x, weight = (
            fd.define_tensor([8, 16], dtype=DataType.Half),
            fd.define_tensor([16], dtype=DataType.Half),
        )
        normed = fd.ops.layer_norm(x, [16], weight, fd.define_tensor([16], dtype=DataType.Half))
        var, mean = fd.ops.var_mean(fd.ops.cast(x, DataType.Float), [0], 0)
        fd.add_output(normed)
        fd.add_output(fd.ops.mul(fd.ops.rsqrt(fd.ops.add(var, 1e-5)), mean))
        fd.mesh_split(x, MESH, ["dp", "tp"])
    return fd


def reductions() -> mf.FusionDefinition:
    """Every reduction over sharded dims, of integers too, scaled by a scalar input."""
    with mf.FusionDefinition() as fd:
        x, counts = fd.define_tensor([8, 6]), fd.define_tensor([8, 6], dtype=DataType.Int32)
        scale = fd.define_scalar(dtype=DataType.Double)
        fd.add_output(fd.ops.mul(fd.ops.sum(x, [0]), scale))
        fd.add_output(fd.ops.max(x, [0, 1]))
        fd.add_output(fd.ops.prod(counts, [1], True))
        fd.add_output(fd.ops.cast(fd.ops.min(counts), DataType.Double))
        fd.mesh_split(x, MESH, [["dp", "tp"], None])
        fd.mesh_split(counts, MESH, ["tp", "dp"])
    return fd


def reshapes() -> mf.FusionDefinition:
    """Merged and split dims, a lookup in a sharded table and a scatter, unevenly sharded."""
    with mf.FusionDefinition() as fd:
        x, table = fd.define_tensor([4, 6, 10]), fd.define_tensor([7, 10])
        index = fd.define_tensor([4, 6], dtype=DataType.Int)
        rows = fd.ops.reshape(fd.ops.add(x, fd.ops.embedding_fwd(index, table)), [24, 10])
        fd.add_output(fd.ops.permute(fd.ops.reshape(rows, [4, 3, 20]), [2, 0, 1]))
        fd.add_output(fd.ops.scatter(rows, fd.ops.reshape(index, [24, 1]), 0.0, 1))
        fd.add_output(fd.ops.slice(rows, [0, 2], [24, 8]))
        fd.mesh_split(x, MESH, ["dp", None, None])
        fd.mesh_split(table, MESH, ["tp", None])
    return fd


PROGRAMS = [mlp, attention, layer_norm, reductions, reshapes]


def arguments(fd: mf.FusionDefinition) -> list[Any]:
    torch.manual_seed(0)
    return [_argument(fd, ref) for ref in fd.recording.inputs]


def _argument(fd: mf.FusionDefinition, ref: Any) -> Any:
    if not isinstance(ref, TensorRef):
        return 2.0
    ttype = fd.recording.tensors[ref.id].type
    return torch.randint(0, 5, ttype.shape).to(getattr(torch, ttype.dtype.value))


Launched = tuple[list[torch.Tensor], list[torch.Tensor]]


def launches(fd: mf.FusionDefinition, monkeypatch: pytest.MonkeyPatch) -> tuple[CompiledProgram, dict[Any, Launched]]:
    """The program, and by (rank, kernel) the tensors that the kernel takes and gives when all ranks run."""
    found: dict[Any, Launched] = {}
    made = Simulation.__init__

    def recording(self: Simulation, programs: Any, *args: Any) -> None:
        made(self, programs, *args)
        for program in programs:
            scope = self.bound[program.rank].main.__globals__
            for kernel in program.kernels:
                scope[kernel.name] = _recorded(scope[kernel.name], found, (program.rank, kernel.name))

    monkeypatch.setattr(Simulation, "__init__", recording)
    fd.simulate(arguments(fd))
    return next(iter(fd._programs.compiled.values())), found


def _recorded(kernel: Callable[..., Any], found: dict[Any, Launched], key: Any) -> Callable[..., Any]:
    def run(*args: Any) -> Any:
        made = kernel(*args)
        results = made if isinstance(made, tuple) else (made,)
        tensors = [a for a in args if isinstance(a, torch.Tensor)]
        found[key] = (tensors, [t for t in results if isinstance(t, torch.Tensor)])
        return made

    return run


def types(tensors: Sequence[torch.Tensor]) -> list[tuple[tuple[int, ...], DataType]]:
    return [(tuple(t.shape), from_torch(t.dtype)) for t in tensors]


def check(compiled: CompiledProgram, rank: int, name: str, launched: Launched) -> int:
    """The definitions of a kernel, its copies in them, take and give what the kernel does; how many there are."""
    segmented = compiled.segmented
    segment = next(p for p in segmented.parts if isinstance(p, Segment) and p.name == name)
    kernel = next(k for k in compiled.host_program(rank).kernels if k.name == name)
    params = [param for param in kernel.params if param.startswith("v")]
    known = {param: type_of(t) for param, t in zip(params, launched[0], strict=True)}
    parts = partitioned_kernel(segmented, segment, rank, kernel, known)
    for part in parts:
        if part.reason:
            made = value_types(segmented, [int(name[1:]) for name in part.gives], rank)
        else:
            copies = copies_of(segmented, part, rank, known)
            native = build_segment(segmented, part.segment, rank, copies=copies)
            assert not differences(native)
            assert native.inputs == tuple(known[name] for name in part.takes)
            made = native.outputs
        known.update(zip(part.gives, made, strict=True))
    assert [known[name][:2] for name in kernel.results] == types(launched[1])
    return sum(not part.reason for part in parts)


@pytest.mark.parametrize("program", PROGRAMS)
def test_segments_build_as_their_kernels_run(program: Program, monkeypatch: pytest.MonkeyPatch) -> None:
    """But for merged moments, which are torch's."""
    fake_kernels.staged(monkeypatch)
    monkeypatch.setattr(compiler, "fuse_mean_variance", lambda sharded, world: sharded)
    compiled, launched = launches(program(), monkeypatch)
    assert sum(check(compiled, rank, name, tensors) for (rank, name), tensors in launched.items()) >= 4


def dropout() -> mf.FusionDefinition:
    """Random numbers, which are torch's, between ops that are nvFuser's."""
    with mf.FusionDefinition() as fd:
        x = fd.define_tensor([8, 6])
        kept = fd.ops.ge(fd.ops.rand_like(fd.ops.exp(x)), 0.5)
        fd.add_output(fd.ops.where(kept, fd.ops.neg(x), 0.0))
        fd.mesh_split(x, MESH, ["dp", "tp"])
    return fd


def test_what_is_torchs_is_cut_out(monkeypatch: pytest.MonkeyPatch) -> None:
    compiled, launched = launches(dropout(), monkeypatch)
    (segment,) = (p for p in compiled.segmented.parts if isinstance(p, Segment))
    with pytest.raises(ToTorch, match=r"rand_like \(test_segments.py:\d+\): nvFuser's random numbers"):
        build_segment(compiled.segmented, segment, 0)
    before, random, after = partitioned(compiled.segmented, segment, 0)
    assert "random numbers" in random.reason and not before.reason and not after.reason
    assert [c for part in (before, random, after) for c in part.segment.computes] == list(segment.computes)
    taken, given = launched[0, segment.name]
    first, last = (build_segment(compiled.segmented, part.segment, 0) for part in (before, after))
    assert [t[:2] for t in first.inputs] == types(taken)
    assert [t[:2] for t in last.outputs] == types(given)
    assert set(after.segment.inputs) <= {*segment.inputs, *before.segment.outputs, *random.segment.outputs}


@pytest.mark.parametrize("steps", [40, 3000])
@pytest.mark.timeout(60)
def test_scalars_that_are_made_of_one_another_many_times(steps: int) -> None:
    """Each is one expression of the kernel, however often it is read, and however many there are in a row."""
    with mf.FusionDefinition() as fd:
        x, s = fd.define_tensor([4], dtype=DataType.Double), fd.define_scalar(dtype=DataType.Double)
        for _ in range(steps):
            s = s + s
        fd.add_output(fd.ops.mul(x, s))
    segmented = fd.compile().segmented
    (segment,) = segmented.parts
    assert isinstance(segment, Segment)
    kernel = build_segment(segmented, segment, 0)
    assert len(kernel.scalars) == 1
