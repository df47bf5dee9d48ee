"""Every rank makes the same program: nothing in it follows from the order of a set, which Python salts per process."""

from __future__ import annotations

import hashlib
import os
import random
import subprocess
import sys
from dataclasses import replace

import pytest
from hypothesis import HealthCheck, Phase, given, seed, settings

import meshfuse as mf
from meshfuse import compiler
from meshfuse.reshard.bucketing import bucket_collectives
from meshfuse.resharding import ReshardedDefinition
from meshfuse.testing import annotations, definitions, shapes_for

MESH = mf.DeviceMesh((2, 2), ("dp", "tp"))
REDUCTIONS = ("sum", "max", "min", "prod")
SALTS = ("1", "2")


def meeting(rng: random.Random) -> mf.FusionDefinition:
    """Reductions over several axes, of several dtypes and kinds, of which ops need two at once."""
    with mf.FusionDefinition() as fd:
        made = []
        for _ in range(rng.randint(2, 6)):
            x = fd.define_tensor([8, 6], dtype=rng.choice([mf.DataType.Float, mf.DataType.Double]))
            fd.mesh_split(x, MESH, [rng.choice(["dp", "tp", ("dp", "tp")]), None])
            made.append(getattr(fd.ops, rng.choice(REDUCTIONS))(x, [0]))
            fd.mesh_split(made[-1], MESH, [None])
        while len(made) > 1:
            made.append(fd.ops.mul(made.pop(rng.randrange(len(made))), made.pop(rng.randrange(len(made)))))
        fd.add_output(made[0])
    return fd


def trained(rng: random.Random) -> mf.FusionDefinition:
    """An MLP and its gradients, a product of it in chunks."""
    with mf.FusionDefinition() as fd:
        x, w1, w2 = fd.define_tensor([16, 32]), fd.define_tensor([64, 32]), fd.define_tensor([32, 64])
        hidden = fd.ops.relu(fd.ops.linear(x, w1))
        y = fd.ops.linear(hidden, w2)
        for out in (y, *fd.grad(fd.ops.sum(fd.ops.mul(y, y)), [w1, w2])):
            fd.add_output(out)
        fd.mesh_split(x, MESH, [rng.choice(["dp", None]), rng.choice([None, "tp"])])
        fd.mesh_split(w1, MESH, [rng.choice(["tp", ("dp", "tp"), None]), None])
        fd.mesh_split(w2, MESH, [None, rng.choice(["tp", "dp", None])])
        fd.overlap(rng.choice([y, hidden]), rng.choice([2, 4]), dim=rng.choice([0, 1]), ring=rng.choice([True, False]))
    return fd


def text(fd: mf.FusionDefinition, *shapes: tuple[int, ...]) -> str:
    """All ranks' programs, in short, and the digest that ranks compare."""
    compiled = fd.compile(*shapes)
    programs = "\n".join(str(compiled.host_program(rank)) for rank in compiled.ranks)
    return f"{hashlib.sha256(programs.encode()).hexdigest()[:16]} {compiled.digest}"


def print_all() -> None:
    """One line for each of many programs, which are the same in every process."""
    rng = random.Random(0)
    for make, count in ((meeting, 24), (trained, 8)):
        for number in range(count):
            print(make.__name__, number, text(make(rng)))

    @seed(0)
    @settings(
        max_examples=24, database=None, deadline=None, suppress_health_check=list(HealthCheck), phases=[Phase.generate]
    )
    @given(definitions(max_ops=12).flatmap(annotations))
    def check(fd: mf.FusionDefinition) -> None:
        print("random", text(fd, *shapes_for(fd)))

    check()


def lines_under(salt: str) -> list[str]:
    env = {**os.environ, "PYTHONHASHSEED": salt, "MESHFUSE_CACHE": "off"}
    done = subprocess.run([sys.executable, __file__], env=env, capture_output=True, text=True, timeout=280)
    assert done.returncode == 0, done.stderr[-4000:]
    return done.stdout.splitlines()


@pytest.mark.slow
def test_programs_are_the_same_in_processes_that_hash_otherwise() -> None:
    """Of so many sets two processes have some in other orders, as a third would."""
    first, other = map(lines_under, SALTS)
    assert len(first) >= 24 + 8 + 24
    assert other == first


def test_ranks_that_reduce_in_another_order_are_an_error(monkeypatch: pytest.MonkeyPatch) -> None:
    """The digest that ranks compare before they run covers the order of steps."""

    def turned(resharded: ReshardedDefinition) -> ReshardedDefinition:
        statements = list(bucket_collectives(resharded).statements)
        first, second = [place for place, statement in enumerate(statements) if statement in resharded.collectives]
        statements[first], statements[second] = statements[second], statements[first]
        return replace(resharded, statements=tuple(statements))

    def digest() -> str:
        with mf.FusionDefinition() as fd:
            x, y = fd.define_tensor([8, 6]), fd.define_tensor([8, 6])
            for tensor, name in ((x, "sum"), (y, "max")):
                fd.mesh_split(tensor, MESH, ["dp", None])
                reduced = getattr(fd.ops, name)(tensor, [0])
                fd.mesh_split(reduced, MESH, [None])
                fd.add_output(reduced)
        return fd.compile().digest

    plain = digest()
    monkeypatch.setattr(compiler, "bucket_collectives", turned)
    assert digest() != plain


if __name__ == "__main__":
    print_all()
