"""The works as meshfuse definitions: annotated on inputs and weights, and where a gradient must lie.

The mesh says what the ranks are: processes of one laptop over gloo, where a call's start costs more than its bytes.
"""

from __future__ import annotations

from collections.abc import Callable

from works import CHAIN, CHANNELS, HEADS, WIDE, WIDTH, Work, layered

import meshfuse as mf

View = mf.TensorView
Body = Callable[..., View]


def _mlp(fd: mf.FusionDefinition, x: View, w1: View, w2: View) -> View:
    return fd.ops.linear(fd.ops.gelu(fd.ops.linear(x, w1)), w2)


def _block(fd: mf.FusionDefinition, x: View, wq: View, wk: View, wv: View, wo: View, w1: View, w2: View,
           g1: View, b1: View, g2: View, b2: View) -> View:  # fmt: skip
    h, (length, batch, _) = fd.ops.layer_norm(x, [WIDTH], g1, b1), x.type.shape

    def heads(weight: View) -> View:
        rows = fd.ops.reshape(fd.ops.linear(h, weight), [length, batch, HEADS, WIDTH // HEADS])
        return fd.ops.permute(rows, [1, 2, 0, 3])

    mixed, *_ = fd.ops.sdpfa_fwd(heads(wq), heads(wk), heads(wv), is_causal=True)
    rows = fd.ops.reshape(fd.ops.permute(mixed, [2, 0, 1, 3]), [length, batch, WIDTH])
    x = x + fd.ops.linear(rows, wo)
    return x + _mlp(fd, fd.ops.layer_norm(x, [WIDTH], g2, b2), w1, w2)


def _pointwise(fd: mf.FusionDefinition, x: View, y: View) -> View:
    for _ in range(CHAIN):
        x = fd.ops.relu(x * 0.9 + y) - 0.1
    return x


def _layer_norm(fd: mf.FusionDefinition, x: View, gain: View, bias: View) -> View:
    return fd.ops.layer_norm(x, [WIDE], gain, bias)


def _softmax(fd: mf.FusionDefinition, x: View) -> View:
    return fd.ops.softmax(x, -1)


def _cross_entropy(fd: mf.FusionDefinition, logits: View, targets: View) -> View:
    return fd.ops.cross_entropy(logits, targets)


def _layers(fd: mf.FusionDefinition, x: View, *parameters: View) -> View:
    for g, b, w1, c1, w2, c2 in layered(dict(enumerate(parameters))):
        h = fd.ops.layer_norm(x, [CHANNELS], g, b)
        x = x + fd.ops.linear(fd.ops.gelu(fd.ops.linear(h, w1, c1)), w2, c2)
    return x


BODIES: dict[str, Body] = {
    "mlp": _mlp,
    "block_tp": _block,
    "block_sp": _block,
    "pointwise": _pointwise,
    "layer_norm": _layer_norm,
    "softmax": _softmax,
    "cross_entropy": _cross_entropy,
    "dp_tp_mlp": _mlp,
    "layers_fsdp": _layers,
}


def definition(work: Work, ranks: int) -> mf.FusionDefinition:
    """The work's definition; its inputs are in the order of `work.shapes`."""
    mesh = mf.DeviceMesh(work.mesh_shape(ranks), work.axes, links="laptop")
    with mf.FusionDefinition() as fd:
        made = {
            name: fd.define_tensor(list(shape), dtype=mf.DataType.Int if name == "targets" else mf.DataType.Float)
            for name, shape in work.shapes.items()
        }
        views = {name: view for name, view in made.items() if name != "seed"}
        y = BODIES[work.name](fd, *views.values())
        grads = fd.grad([y], [views[name] for name in work.trained], [made["seed"]]) if work.trained else []
        for output, spec in zip((y, *grads), work.results, strict=True):
            fd.add_output(output)
            fd.mesh_split(output, mesh, list(spec))
        for name, view in made.items():
            fd.mesh_split(view, mesh, list(work.specs[name]))
    return fd
