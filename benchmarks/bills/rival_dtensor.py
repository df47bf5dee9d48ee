"""What torch's DTensor moves for the programs of the table, run on meta tensors by rank 0 of a fake process group of 8.

Each program is plain torch on DTensors laid out as the table says. Collectives are counted as rings as they are
issued, and their number is held against CommDebugMode's. Outputs are free, but no unreduced sum may be left in one.
`python benchmarks/bills/rival_dtensor.py [ids]` prints JSON: MB of rank 0 by program, or why DTensor cannot run it.
"""

from __future__ import annotations

import functools
import json
import sys
from collections.abc import Callable, Sequence
from typing import Any

import torch
import torch.distributed as dist
import torch.nn.functional as F
from registry import PROGRAMS, program
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.tensor import DTensor, Partial, Replicate, Shard, placement_types
from torch.distributed.tensor.debug import CommDebugMode
from torch.distributed.tensor.experimental import implicit_replication
from torch.distributed.tensor.parallel import loss_parallel
from torch.testing._internal.distributed.fake_pg import FakeStore
from torch.utils._python_dispatch import TorchDispatchMode

B, S, D, FF, H, V, E, C, HIDDEN = 8, 512, 1024, 4096, 16, 32768, 16, 64, 1024
T, K = B * S, D // H
MESHES = {"tp": ((8,), ("tp",)), "dp": ((8,), ("dp",)), "ep": ((8,), ("ep",)),
          "dp_tp": ((2, 4), ("dp", "tp")), "x_y": ((4, 2), ("x", "y"))}  # fmt: skip
# Per functional collective: (place of the group's name among its arguments, passes round the ring, of what).
COLLECTIVES = {
    "all_reduce": (2, 2.0), "all_gather_into_tensor": (2, 1.0), "reduce_scatter_tensor": (3, 1.0),
    "all_to_all_single": (3, 1.0), "shard_dim_alltoall": (3, 1.0), "broadcast": (2, 1.0),
}  # fmt: skip

# (shape, dtype, placement: per mesh axis the dim that it splits, None for none)
Argument = tuple[tuple[int, ...], torch.dtype, tuple[int | None, ...]]
# Of a program: its arguments, and what runs it on them and gives the tensors that it outputs.
Built = tuple[list[Argument], Callable[..., Sequence[torch.Tensor]]]


class WireCounter(TorchDispatchMode):
    """Bytes that this rank puts on the wire, collectives as rings, and how many collectives there were."""

    def __init__(self) -> None:
        super().__init__()
        self.wire, self.count = 0.0, 0

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        if any(kind is DTensor for kind in types):
            return NotImplemented  # its own collectives come here by themselves
        out = func(*args, **(kwargs or {}))
        name = func.name().split("::")[-1].split(".")[0]
        if func.namespace in ("_c10d_functional", "_dtensor") and name in COLLECTIVES:
            self._add(name, args, out)
        elif func.namespace == "c10d":
            raise NotImplementedError(f"a collective that is not counted: {func.name()}")
        return out

    def _add(self, name: str, args: Any, out: torch.Tensor) -> None:
        place, passes = COLLECTIVES[name]
        group = args[place] if isinstance(args[place], str) else args[place].group_name
        n = dist.get_world_size(dist.distributed_c10d._resolve_process_group(group))
        whole = max(t.numel() * t.element_size() for t in (args[0], out))
        self.wire += passes * (n - 1) / n * whole
        self.count += 1


def all_to_all(tensor: torch.Tensor, gathered: int, split: int, mesh: Any, axis: int) -> torch.Tensor:
    """DTensor's all-to-all as on GPUs: on CPUs, where gloo long had none, it would be counted as a gather."""
    group = mesh.get_group(axis).group_name
    return torch.ops._dtensor.shard_dim_alltoall(tensor, gathered, split, group)


def measure(name: str) -> float:
    """MB of rank 0."""
    shape, names = MESHES[PROGRAMS[name][0]]
    mesh = init_device_mesh("cpu", shape, mesh_dim_names=names)
    arguments, run = PROGRAMS[name][1](mesh)
    tensors = [_argument(mesh, *argument) for argument in arguments]
    with implicit_replication(), CommDebugMode() as official, WireCounter() as counter:
        for out in run(*tensors):
            _reduced(out)
    if official.get_total_counts() != counter.count:
        raise RuntimeError(
            f"{name}: CommDebugMode counts {official.get_total_counts()} collectives, not {counter.count}"
        )
    return counter.wire / 1e6


def _argument(mesh: Any, shape: tuple[int, ...], dtype: torch.dtype, dims: tuple[int | None, ...]) -> DTensor:
    local = list(shape)
    for size, dim in zip(mesh.shape, dims, strict=True):
        if dim is not None:
            local[dim] //= size
    placements = [Replicate() if dim is None else Shard(dim) for dim in dims]
    made = DTensor.from_local(torch.empty(local, dtype=dtype, device="meta"), mesh, placements, run_check=False)
    made.requires_grad_(dtype.is_floating_point)
    return made


def _reduced(out: torch.Tensor) -> torch.Tensor:
    """The output without unreduced sums."""
    if isinstance(out, DTensor) and any(isinstance(p, Partial) for p in out.placements):
        placements = [Replicate() if isinstance(p, Partial) else p for p in out.placements]
        return out.redistribute(placements=placements)
    return out


def f32(*dims: int | None, shape: Sequence[int]) -> Argument:
    return tuple(shape), torch.float32, dims


def gradients(y: torch.Tensor, wrt: Sequence[torch.Tensor], like: bool = False) -> list[torch.Tensor]:
    """The gradients of half the sum of squares; laid out as the tensors themselves, if `like`."""
    y = _reduced(y)  # once: DTensor reduces an unreduced sum anew at each use
    made = torch.autograd.grad(0.5 * (y * y).sum(), list(wrt))
    return [g.redistribute(placements=w.placements) for g, w in zip(made, wrt, strict=True)] if like else list(made)  # type: ignore[attr-defined]


# layers -----------------------------------------------------------------------------------------------------------


def mlp(x: Any, w1: Any, w2: Any) -> Any:
    return F.gelu(x @ w1) @ w2


def attention(x: Any, q: Any, k: Any, v: Any, o: Any) -> Any:
    """Causal softmax attention of x [B, S, D] with weights [D, H, K] and [H, K, D]."""
    batch, length, width = x.shape
    a, b, c = ((x @ w.reshape(D, H * K)).reshape(batch, length, H, K).permute(0, 2, 1, 3) for w in (q, k, v))
    scores = a @ b.transpose(-1, -2) / K**0.5
    mask = torch.ones(length, length, dtype=torch.bool, device="meta").triu(1)
    weights = torch.softmax(scores.masked_fill(mask, float("-inf")), -1)
    return (weights @ c).permute(0, 2, 1, 3).reshape(batch, length, width) @ o.reshape(H * K, D)


def block(keep: Callable[[Any], Any], x: Any, *w: Any) -> Any:
    """Pre-LN attention and MLP; `keep` annotates the residual stream."""
    q, k, v, o, w1, w2, g1, b1, g2, b2 = w
    middle = keep(x + attention(F.layer_norm(x, [D], g1, b1), q, k, v, o))
    return keep(middle + mlp(F.layer_norm(middle, [D], g2, b2), w1, w2))


def free(x: Any) -> Any:
    return x


MLP = [(B, S, D), (D, FF), (FF, D)]
BLOCK = [(D, H, K)] * 3 + [(H, K, D), (D, FF), (FF, D)] + [(D,)] * 4
MEGATRON: list[int | None] = [1, 1, 1, 0, 1, 0, None, None, None, None]


def arguments(shapes: Sequence[Sequence[int]], *dims: Sequence[int | None]) -> list[Argument]:
    """float32 arguments; `dims` gives for each mesh axis the dim of each argument that it splits."""
    return [f32(*of, shape=shape) for shape, of in zip(shapes, zip(*dims, strict=True), strict=True)]


@program("a1", "tp")
def _(mesh: Any) -> Built:
    return arguments(MLP, [None, 1, 0]), lambda *a: [mlp(*a)]


@program("b", "tp")
def _(mesh: Any) -> Built:
    return arguments(MLP, [None, 1, 0]), lambda *a: gradients(mlp(*a), a)


@program("c2", "tp")
def _(mesh: Any) -> Built:
    return arguments([MLP[0], *BLOCK[:4]], [None, *MEGATRON[:4]]), lambda *a: gradients(attention(*a), a)


@program("d2", "tp")
def _(mesh: Any) -> Built:
    return arguments([MLP[0], *BLOCK], [None, *MEGATRON]), lambda *a: gradients(block(free, *a), a)


def sequence_parallel(batch: int, length: int) -> tuple[list[Argument], Callable[..., Any]]:
    def keep(x: Any) -> Any:
        return x.redistribute(placements=[Shard(1)])

    return arguments([(batch, length, D), *BLOCK], [1, *MEGATRON]), functools.partial(block, keep)


@program("d3", "tp")
def _(mesh: Any) -> Built:
    given, made = sequence_parallel(B, S)
    return given, lambda *a: [made(*a)]


@program("d4", "tp")
def _(mesh: Any) -> Built:
    given, made = sequence_parallel(B, S)
    return given, lambda *a: gradients(made(*a), a)


@program("d7", "tp")
def _(mesh: Any) -> Built:
    given, made = sequence_parallel(1, S // 4)
    return given, lambda *a: [made(*a)]


@program("e2", "dp")
def _(mesh: Any) -> Built:
    return arguments(MLP, [0, 0, 0]), lambda *a: gradients(mlp(*a), a[1:], like=True)


@program("e3", "dp")
def _(mesh: Any) -> Built:
    return arguments([MLP[0], *BLOCK], [0] * 11), lambda *a: gradients(block(free, *a), a[1:], like=True)


@program("f1", "dp_tp")
def _(mesh: Any) -> Built:
    return arguments(MLP, [0, None, None], [None, 1, 0]), lambda *a: gradients(mlp(*a), a[1:])


@program("f2", "dp_tp")
def _(mesh: Any) -> Built:
    given = arguments([MLP[0], *BLOCK], [0] + [None] * 10, [None, *MEGATRON])
    return given, lambda *a: gradients(block(free, *a), a[1:])


# losses and norms -------------------------------------------------------------------------------------------------

LOGITS: list[Argument] = [f32(1, shape=(T, V)), ((T,), torch.int64, (None,))]


def loss_of(logits: Any, targets: Any) -> Any:
    """As DTensor's users write it: without loss_parallel the logits are gathered."""
    with loss_parallel():
        return F.cross_entropy(logits, targets)


@program("g1", "tp")
def _(mesh: Any) -> Built:
    return LOGITS, lambda x, t: [loss_of(x, t)]


@program("g2", "tp")
def _(mesh: Any) -> Built:
    def run(x: Any, t: Any) -> list[Any]:
        with loss_parallel():
            loss = F.cross_entropy(x, t)
            return [loss, *torch.autograd.grad(loss, [x])]

    return LOGITS, run


@program("h1", "tp")
def _(mesh: Any) -> Built:
    return arguments([(T, D), (D,), (D,)], [1, 0, 0]), lambda x, g, b: [F.layer_norm(x, [D], g, b)]


# mixture of experts -----------------------------------------------------------------------------------------------


def one_hot(index: Any, classes: int) -> Any:
    return (index.unsqueeze(-1) == torch.arange(classes, device="meta")).float()


def experts(x: Any, router: Any, w1: Any, w2: Any) -> Any:
    """Top-1 routing with one-hot products to the experts and back."""
    probabilities = torch.softmax(x @ router, -1)
    chosen = one_hot(probabilities.argmax(-1), E)
    gate = (probabilities * chosen).sum(-1, keepdim=True)
    place = (chosen.cumsum(1) * chosen).sum(-1) - 1.0
    dispatch = chosen.unsqueeze(-1) * one_hot(place.long(), C).unsqueeze(-2)
    combine = (dispatch * gate.unsqueeze(-1)).reshape(B, S, E * C)
    sent = dispatch.reshape(B, S, E * C).transpose(1, 2) @ x
    by_expert = sent.reshape(B, E, C, D).permute(1, 0, 2, 3).reshape(E, B * C, D)
    made = (F.gelu(by_expert @ w1) @ w2).reshape(E, B, C, D).permute(1, 0, 2, 3)
    return combine @ made.reshape(B, E * C, D)


EXPERTS = [(B, S, D), (D, E), (E, D, HIDDEN), (E, HIDDEN, D)]


@program("i1", "ep")
def _(mesh: Any) -> Built:
    return arguments(EXPERTS, [0, None, 0, 0]), lambda *a: [experts(*a)]


@program("i3", "ep")
def _(mesh: Any) -> Built:
    return arguments(EXPERTS, [0, None, 0, 0]), lambda *a: gradients(experts(*a), a[2:])


# products, shapes and indexing ------------------------------------------------------------------------------------


def fused_projection(x: Any, w: Any) -> Any:
    q, k, v = (x @ w).split(D, -1)
    return q * k + v


X, W = (T, D), (D, D)
# (id, mesh, arguments, function)
SMALL: list[tuple[str, str, list[Argument], Callable[..., Any]]] = [
    ("j2", "tp", arguments([X, W], [1, None]), torch.matmul),
    ("j4", "dp_tp", arguments([X, W], [0, 1], [1, 0]), torch.matmul),
    ("k1", "tp", arguments([(B, S, D)], [1]), lambda x: x.reshape(T, D).sin()),
    ("k2", "tp", arguments([X], [0]), lambda x: x.reshape(4, T // 4, D).sin()),
    ("k3", "tp", arguments([(B, S, 1536)], [2]), lambda x: x.reshape(B, S, 12, 128).sin()),
    ("l1", "tp", arguments([X, X], [1, 1]), lambda a, b: torch.cat([a, b], 1).sin()),
    ("l2", "tp", arguments([X], [1]), lambda a: a[:, : D // 2].sin()),
    ("l5", "tp", arguments([X], [1]), lambda a: torch.roll(a, 1, 1)),
    ("l7", "tp", arguments([X, (D, 3 * D)], [None, 1]), fused_projection),
    ("m1", "x_y", arguments([X, W], [0, 1], [1, 0]), torch.matmul),
    ("m2", "tp", arguments([X], [0]), lambda x: x @ x.T),
    ("m5", "tp", arguments([X, (D, FF)], [0, 0]), lambda x, w: (x @ w).relu() @ w.T),
    ("n2", "tp", [f32(1, shape=(V, D)), ((T,), torch.int64, (None,))], lambda t, i: F.embedding(i, t)),
    ("n4", "tp", arguments([(256, V)], [1]), lambda x: torch.topk(x, 8)),
    ("n6", "tp", arguments([X], [0]), lambda x: x.cumsum(0)),
]


def _outputs(made: Callable[..., Any], *tensors: Any) -> list[Any]:
    out = made(*tensors)
    return list(out) if isinstance(out, tuple) else [out]


for _name, _mesh, _arguments, _made in SMALL:
    PROGRAMS[_name] = (_mesh, lambda mesh, given=_arguments, made=_made: (given, functools.partial(_outputs, made)))


def main() -> int:
    placement_types.shard_dim_alltoall = all_to_all
    dist.init_process_group("fake", store=FakeStore(), rank=0, world_size=8)
    found: dict[str, float] = {}
    failed: dict[str, str] = {}
    for name in sys.argv[1:] or PROGRAMS:
        try:
            found[name] = measure(name)
        except (RuntimeError, NotImplementedError) as error:
            failed[name] = " ".join(str(error).split()).split(". ")[0]
    dist.destroy_process_group()
    print(json.dumps({"version": torch.__version__, "mb": found, "failed": failed}))
    return 0


if __name__ == "__main__":
    sys.exit(main())
