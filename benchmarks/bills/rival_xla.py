"""What XLA's partitioner (Shardy) moves for the programs of the table, measured with the jax that is installed.

Each program is written in jax.numpy with the annotations of the table, compiled for 8 host devices, and its collectives
are read off the optimized HLO and counted as rings. Nothing is run. `python benchmarks/bills/rival_xla.py [ids]` prints
JSON: MB per device by program.
"""

from __future__ import annotations

import functools
import json
import os
import sys
from collections.abc import Callable, Sequence
from typing import Any

os.environ["XLA_FLAGS"] = "--xla_force_host_platform_device_count=8"

import jax  # pyright: ignore[reportMissingImports]
import jax.numpy as jnp  # pyright: ignore[reportMissingImports]
from hlo import wire_bytes
from jax.sharding import NamedSharding, PartitionSpec  # pyright: ignore[reportMissingImports]
from registry import PROGRAMS, program

P = PartitionSpec
B, S, D, F, H, V, E, C, HIDDEN = 8, 512, 1024, 4096, 16, 32768, 16, 64, 1024
T, K = B * S, D // H
MESHES = {"tp": {"tp": 8}, "dp": {"dp": 8}, "ep": {"ep": 8}, "dp_tp": {"dp": 2, "tp": 4}, "x_y": {"x": 4, "y": 2}}

Spec = Any
# Of a program: (function, shapes or structs of its arguments, their specs, specs of its results or None: free).
Built = tuple[Callable[..., Any], Sequence[Any], Sequence[Spec], Any]


def measure(name: str) -> float:
    """MB per device of a program."""
    axes, build = PROGRAMS[name]
    sizes = MESHES[axes]
    auto = (jax.sharding.AxisType.Auto,) * len(sizes)
    mesh = jax.make_mesh(tuple(sizes.values()), tuple(sizes), axis_types=auto)
    made, shapes, specs, outputs = build(mesh)
    of = functools.partial(NamedSharding, mesh)
    given = tuple(of(spec) for spec in specs)
    results = (
        {} if outputs is None else {"out_shardings": jax.tree.map(of, outputs, is_leaf=lambda s: isinstance(s, P))}
    )
    structs = [s if hasattr(s, "dtype") else jax.ShapeDtypeStruct(s, jnp.float32) for s in shapes]
    compiled = jax.jit(made, in_shardings=given, **results).lower(*structs).compile()
    return wire_bytes(compiled.as_text(), 8) / 1e6


def gradients(y: Callable[..., jax.Array], wrt: Sequence[int]) -> Callable[..., Any]:
    """The gradients of half the sum of squares."""
    return jax.grad(lambda *args: 0.5 * jnp.sum(jnp.square(y(*args))), argnums=tuple(wrt))


# layers -----------------------------------------------------------------------------------------------------------


def mlp(x: jax.Array, w1: jax.Array, w2: jax.Array) -> jax.Array:
    return jax.nn.gelu(x @ w1, approximate=False) @ w2


def attention(x: jax.Array, q: jax.Array, k: jax.Array, v: jax.Array, o: jax.Array) -> jax.Array:
    """Causal softmax attention of x [B, S, D] with weights [D, H, K] and [H, K, D]."""
    a, b, c = (jnp.einsum("bsd,dhk->bhsk", x, w) for w in (q, k, v))
    scores = jnp.einsum("bhsk,bhtk->bhst", a, b) / K**0.5
    causal = jnp.tril(jnp.ones((x.shape[1], x.shape[1]), bool))
    weights = jax.nn.softmax(jnp.where(causal, scores, -jnp.inf), axis=-1)
    return jnp.einsum("bhsk,hkd->bsd", jnp.einsum("bhst,bhtk->bhsk", weights, c), o)


def layer_norm(x: jax.Array, gain: jax.Array, bias: jax.Array) -> jax.Array:
    centred = x - jnp.mean(x, -1, keepdims=True)
    return centred * jax.lax.rsqrt(jnp.mean(jnp.square(centred), -1, keepdims=True) + 1e-5) * gain + bias


def block(keep: Callable[[jax.Array], jax.Array], x: jax.Array, *w: jax.Array) -> jax.Array:
    """Pre-LN attention and MLP; `keep` annotates the residual stream."""
    q, k, v, o, w1, w2, g1, b1, g2, b2 = w
    x = keep(x)
    middle = keep(x + attention(layer_norm(x, g1, b1), q, k, v, o))
    return keep(middle + mlp(layer_norm(middle, g2, b2), w1, w2))


def free(x: jax.Array) -> jax.Array:
    return x


BLOCK = [(D, H, K)] * 3 + [(H, K, D), (D, F), (F, D)] + [(D,)] * 4
MEGATRON = [P(None, "tp", None)] * 3 + [P("tp"), P(None, "tp"), P("tp")] + [P()] * 4


@program("a1", "tp")
def _(mesh: jax.sharding.Mesh) -> Built:
    return mlp, [(B, S, D), (D, F), (F, D)], [P(), P(None, "tp"), P("tp")], None


@program("b", "tp")
def _(mesh: jax.sharding.Mesh) -> Built:
    return gradients(mlp, range(3)), [(B, S, D), (D, F), (F, D)], [P(), P(None, "tp"), P("tp")], None


@program("c2", "tp")
def _(mesh: jax.sharding.Mesh) -> Built:
    return gradients(attention, range(5)), [(B, S, D), *BLOCK[:4]], [P(), *MEGATRON[:4]], None


@program("d2", "tp")
def _(mesh: jax.sharding.Mesh) -> Built:
    return gradients(functools.partial(block, free), range(11)), [(B, S, D), *BLOCK], [P(), *MEGATRON], None


def sequence_parallel(mesh: jax.sharding.Mesh, batch: int, length: int) -> Built:
    spec = P(None, "tp", None)

    def keep(x: jax.Array) -> jax.Array:
        return jax.lax.with_sharding_constraint(x, NamedSharding(mesh, spec))

    return functools.partial(block, keep), [(batch, length, D), *BLOCK], [spec, *MEGATRON], None


@program("d3", "tp")
def _(mesh: jax.sharding.Mesh) -> Built:
    return sequence_parallel(mesh, B, S)


@program("d4", "tp")
def _(mesh: jax.sharding.Mesh) -> Built:
    made, shapes, specs, _ = sequence_parallel(mesh, B, S)
    return gradients(made, range(11)), shapes, specs, None


@program("d7", "tp")
def _(mesh: jax.sharding.Mesh) -> Built:
    return sequence_parallel(mesh, 1, S // 4)


@program("e2", "dp")
def _(mesh: jax.sharding.Mesh) -> Built:
    return gradients(mlp, (1, 2)), [(B, S, D), (D, F), (F, D)], [P("dp")] * 3, (P("dp"),) * 2


@program("e3", "dp")
def _(mesh: jax.sharding.Mesh) -> Built:
    made = gradients(functools.partial(block, free), range(1, 11))
    return made, [(B, S, D), *BLOCK], [P("dp")] * 11, (P("dp"),) * 10


@program("f1", "dp_tp")
def _(mesh: jax.sharding.Mesh) -> Built:
    return gradients(mlp, (1, 2)), [(B, S, D), (D, F), (F, D)], [P("dp"), P(None, "tp"), P("tp")], None


@program("f2", "dp_tp")
def _(mesh: jax.sharding.Mesh) -> Built:
    return gradients(functools.partial(block, free), range(1, 11)), [(B, S, D), *BLOCK], [P("dp"), *MEGATRON], None


# losses and norms -------------------------------------------------------------------------------------------------


def cross_entropy(logits: jax.Array, targets: jax.Array) -> jax.Array:
    rows = jax.nn.log_softmax(logits, axis=-1)
    return -jnp.mean(jnp.take_along_axis(rows, targets[:, None], axis=-1))


LOGITS = [(T, V), jax.ShapeDtypeStruct((T,), jnp.int32)]


@program("g1", "tp")
def _(mesh: jax.sharding.Mesh) -> Built:
    return cross_entropy, LOGITS, [P(None, "tp"), P()], None


@program("g2", "tp")
def _(mesh: jax.sharding.Mesh) -> Built:
    return jax.value_and_grad(cross_entropy), LOGITS, [P(None, "tp"), P()], None


@program("h1", "tp")
def _(mesh: jax.sharding.Mesh) -> Built:
    return layer_norm, [(T, D), (D,), (D,)], [P(None, "tp"), P("tp"), P("tp")], None


# mixture of experts -----------------------------------------------------------------------------------------------


def experts(x: jax.Array, router: jax.Array, w1: jax.Array, w2: jax.Array) -> jax.Array:
    """Top-1 routing with one-hot products to the experts and back."""
    probabilities = jax.nn.softmax(x @ router, axis=-1)
    chosen = jax.nn.one_hot(jnp.argmax(probabilities, -1), E)
    gate = jnp.sum(probabilities * chosen, -1, keepdims=True)
    place = jnp.sum(jnp.cumsum(chosen, 1) * chosen, -1) - 1.0
    slots = jax.nn.one_hot(place.astype(jnp.int32), C)
    dispatch = chosen[..., :, None] * slots[..., None, :]
    combine = dispatch * gate[..., None]
    sent = jnp.einsum("gsec,gsd->egcd", dispatch, x)
    hidden = jax.nn.gelu(jnp.einsum("egcd,edf->egcf", sent, w1), approximate=False)
    made = jnp.einsum("egcf,efd->egcd", hidden, w2)
    return jnp.einsum("gsec,egcd->gsd", combine, made)


EXPERTS = [(B, S, D), (D, E), (E, D, HIDDEN), (E, HIDDEN, D)]
BY_EXPERT = [P("ep"), P(), P("ep"), P("ep")]


@program("i1", "ep")
def _(mesh: jax.sharding.Mesh) -> Built:
    return experts, EXPERTS, BY_EXPERT, None


@program("i3", "ep")
def _(mesh: jax.sharding.Mesh) -> Built:
    return gradients(experts, (2, 3)), EXPERTS, BY_EXPERT, None


# products, shapes and indexing ------------------------------------------------------------------------------------

# (id, mesh, function, shapes of its arguments, their specs)
SMALL: list[tuple[str, str, Callable[..., Any], Sequence[Any], Sequence[Spec]]] = [
    ("j2", "tp", jnp.matmul, [(T, D), (D, D)], [P(None, "tp"), P()]),
    ("j4", "dp_tp", jnp.matmul, [(T, D), (D, D)], [P("dp", "tp"), P("tp", "dp")]),
    ("k1", "tp", lambda x: jnp.sin(x.reshape(T, D)), [(B, S, D)], [P(None, "tp")]),
    ("k2", "tp", lambda x: jnp.sin(x.reshape(4, T // 4, D)), [(T, D)], [P("tp")]),
    ("k3", "tp", lambda x: jnp.sin(x.reshape(B, S, 12, 128)), [(B, S, 1536)], [P(None, None, "tp")]),
    ("l1", "tp", lambda a, b: jnp.sin(jnp.concatenate([a, b], 1)), [(T, D)] * 2, [P(None, "tp")] * 2),
    ("l2", "tp", lambda a: jnp.sin(a[:, : D // 2]), [(T, D)], [P(None, "tp")]),
    ("l5", "tp", lambda a: jnp.roll(a, 1, 1), [(T, D)], [P(None, "tp")]),
    ("m1", "x_y", jnp.matmul, [(T, D), (D, D)], [P("x", "y"), P("y", "x")]),
    ("m2", "tp", lambda x: x @ x.T, [(T, D)], [P("tp")]),
    ("m5", "tp", lambda x, w: jax.nn.relu(x @ w) @ w.T, [(T, D), (D, F)], [P("tp"), P("tp")]),
    ("n2", "tp", lambda t, i: t[i], [(V, D), jax.ShapeDtypeStruct((T,), jnp.int32)], [P(None, "tp"), P()]),
    ("n4", "tp", lambda x: jax.lax.top_k(x, 8), [(256, V)], [P(None, "tp")]),
    ("n6", "tp", lambda x: jnp.cumsum(x, 0), [(T, D)], [P("tp")]),
]


def fused_projection(x: jax.Array, w: jax.Array) -> jax.Array:
    q, k, v = jnp.split(x @ w, 3, -1)
    return q * k + v


SMALL.append(("l7", "tp", fused_projection, [(T, D), (D, 3 * D)], [P(), P(None, "tp")]))
for _name, _mesh, *_built in SMALL:
    PROGRAMS[_name] = (_mesh, functools.partial(lambda built, mesh: (*built, None), _built))


def main() -> int:
    found = {name: measure(name) for name in sys.argv[1:] or PROGRAMS}
    print(json.dumps({"version": jax.__version__, "mb": found}))
    return 0


if __name__ == "__main__":
    sys.exit(main())
