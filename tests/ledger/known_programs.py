"""All programs of the ledger, by name: those of the bills, random ones, and a few of many layers."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from unittest.mock import patch

import programs
from layers import FULL, SMALL, Tensor, block, block_weights, floats, mlp
from programs import DP2_TP4, TP8, Fd

import meshfuse as mf
from bill_classes import CLASSES

from .drawn import COUNT, drawn

Make = Callable[[], mf.FusionDefinition]
LINKS = mf.Link(450e9, 1e-9), mf.Link(5e9, 1e-9)
# (program of the table, which axis has the fast links)
ON_LINKS = tuple((name, fast) for name in ("f1", "j4", "m1") for fast in (0, 1))


def table(name: str) -> mf.FusionDefinition:
    """A program of the table of bills."""
    return programs.PROGRAMS[name].define(FULL)


def on_links(name: str, fast: int) -> mf.FusionDefinition:
    """A program of the table, small, on axes of unequal speed."""
    links = LINKS if fast == 0 else LINKS[::-1]
    meshes = {mesh: _linked(getattr(programs, mesh), links) for mesh in ("DP2_TP4", "X4_Y2")}
    with patch.multiple(programs, **meshes):
        return programs.PROGRAMS[name].define(SMALL)


def _linked(mesh: mf.DeviceMesh, links: tuple[mf.Link, mf.Link]) -> mf.DeviceMesh:
    return mf.DeviceMesh(mesh.shape, mesh.names, links=dict(zip(mesh.names, links, strict=True)))


# Of more than 400 ops: these are planned by a few of their layers.


def mlps_backward() -> mf.FusionDefinition:
    """Forty residual MLPs on two axes, and the gradients of their weights."""
    with mf.FusionDefinition() as fd:
        x = y = floats(fd, 512, 256)
        programs.on_dim0(fd, DP2_TP4, "dp", x)
        weights: list[Tensor] = []
        for _ in range(40):
            w1, w2 = floats(fd, 256, 1024), floats(fd, 1024, 256)
            programs.megatron_mlp(fd, DP2_TP4, w1, w2)
            weights += [w1, w2]
            y = y + mlp(fd, y, w1, w2)
        programs.gradients(fd, y, weights)
    return fd


def blocks() -> mf.FusionDefinition:
    """Twelve blocks of attention and an MLP, forward."""
    with mf.FusionDefinition() as fd:
        y, _ = _blocks(fd, 12)
        programs.outputs(fd, y)
    return fd


def blocks_backward() -> mf.FusionDefinition:
    """Four blocks, and the gradients of their weights."""
    with mf.FusionDefinition() as fd:
        programs.gradients(fd, *_blocks(fd, 4))
    return fd


def _blocks(fd: Fd, count: int) -> tuple[Tensor, list[Tensor]]:
    """The last block's result, and all weights."""
    y, weights = floats(fd, SMALL.batch, SMALL.length, SMALL.width), list[Tensor]()
    programs.replicated(fd, TP8, y)
    for _ in range(count):
        w = block_weights(fd, SMALL)
        programs.megatron_block(fd, TP8, w)
        weights += w.all
        _, y = block(fd, SMALL, y, w)
    return y, weights


LONG: Mapping[str, Make] = {"mlps_backward": mlps_backward, "blocks": blocks, "blocks_backward": blocks_backward}


def random_name(number: int) -> str:
    return f"random/{number:03}"


def all_programs() -> Mapping[str, Make]:
    """What makes each program."""
    return {
        **{f"bills/{name}": lambda name=name: table(name) for name in programs.PROGRAMS},
        **{f"links/{name}-{fast}": lambda name=name, fast=fast: on_links(name, fast) for name, fast in ON_LINKS},
        **{name: lambda known=known: known.defined(FULL) for name, known in CLASSES.items()},
        **{f"long/{name}": make for name, make in LONG.items()},
        **{random_name(number): lambda number=number: drawn(number) for number in range(COUNT)},
    }
