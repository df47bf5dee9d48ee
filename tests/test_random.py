"""Random numbers: the generator's published vectors, their distribution, and that no mesh changes them."""

from __future__ import annotations

import itertools
from typing import Any

import pytest
import torch

import meshfuse as mf
from meshfuse import execution
from meshfuse.kernels import random
from meshfuse.kernels.random import RandomStream, fractions, normals, philox, uniform
from meshfuse.ops import OPS
from meshfuse.ops.binding import make_call
from meshfuse.ops.local import LocalCall
from meshfuse.sharding.value import Sharding
from meshfuse.testing import assert_same_as_unsharded
from meshfuse.testing.calls import names_of

MESH = mf.DeviceMesh((1,), ("x",))
# Random123's known answers for philox4x32-10 (kat_vectors): counter, key, result.
KNOWN = [
    ((0, 0, 0, 0), (0, 0), (0x6627E8D5, 0xE169C58D, 0xBC57AC4C, 0x9B00DBD8)),
    ((0xFFFFFFFF,) * 4, (0xFFFFFFFF,) * 2, (0x408F276D, 0x41C83B0E, 0xA20BC7C6, 0x6D5451FD)),
    ((0x243F6A88, 0x85A308D3, 0x13198A2E, 0x03707344), (0xA4093822, 0x299F31D0),
     (0xD16CFE09, 0x94FDCCEB, 0x5001E420, 0x24126EA1)),
]  # fmt: skip


@pytest.mark.parametrize(("counter", "key", "wanted"), KNOWN)
def test_philox_gives_the_published_words(
    counter: tuple[int, ...], key: tuple[int, int], wanted: tuple[int, ...]
) -> None:
    found = philox([torch.tensor([c]) for c in counter], key)
    assert tuple(int(word) for word in found) == wanted


@pytest.mark.parametrize("dtype", [torch.float32, torch.float64])
def test_fractions_are_uniform(dtype: torch.dtype) -> None:
    drawn = fractions(torch.arange(100_000), RandomStream(3, 1, 4), dtype)
    assert drawn.dtype == dtype and float(drawn.min()) >= 0.0 and float(drawn.max()) < 1.0
    counts = torch.histc(drawn.double(), 100, 0.0, 1.0)
    chi_squared = float(((counts - 1000.0) ** 2 / 1000.0).sum())
    assert 50.0 < chi_squared < 160.0  # 99 degrees of freedom: 1e-4 on either side


def test_normals_have_the_moments_of_the_normal_distribution() -> None:
    drawn = normals(torch.arange(200_000), RandomStream(0, 0, 1))
    moments = [float((drawn**k).mean()) for k in (1, 2, 3, 4)]
    assert moments == pytest.approx([0.0, 1.0, 0.0, 3.0], abs=0.06)


def test_seed_offset_and_place_each_give_other_numbers() -> None:
    index = torch.arange(1000)
    streams = [
        RandomStream(0, 0, 0),
        RandomStream(1, 0, 0),
        RandomStream(1 << 32, 0, 0),
        RandomStream(0, 1, 0),
        RandomStream(0, 0, 1),
    ]
    drawn = [fractions(index, stream, torch.float32) for stream in streams]
    for i, a in enumerate(drawn):
        for b in drawn[:i]:
            assert abs(float(torch.corrcoef(torch.stack([a, b]))[0, 1])) < 0.15


@pytest.mark.parametrize("drawn", [0.0, 0.5, 1.0 - 2.0**-24])
@pytest.mark.parametrize(
    ("low", "high"), [(0, 1), (1.0, 2.0), (2.0, 3.3), (-1.0, 0.0), (-3.0, -2.0), (-0.5, 1000.0), (-1.5, 3.7)]
)
@pytest.mark.parametrize("dtype", [torch.float16, torch.bfloat16, torch.float32, torch.float64])
def test_the_upper_bound_is_never_drawn(
    dtype: torch.dtype, low: float, high: float, drawn: float, monkeypatch: pytest.MonkeyPatch
) -> None:
    """The least, a middle and the largest of the fractions, in every type and beside ends of either sign."""
    monkeypatch.setattr(random, "fractions", lambda index, stream, wide: torch.full((1,), drawn, dtype=wide))
    found = uniform(low, high, [((0, 1),)], [1], (0, 0, 0), dtype, "cpu")
    assert found.dtype == dtype and low <= found.item() < high
    assert found < torch.tensor(high, dtype=dtype), "the bound as the type has it"
    assert abs(found.item() - (low + drawn * (high - low))) <= 2 * torch.finfo(dtype).eps * max(abs(low), abs(high))


@pytest.mark.parametrize("dtype", [torch.float16, torch.bfloat16, torch.float32, torch.float64])
@pytest.mark.parametrize("end", [1.0, -1.0, 0.3, -0.3, 3.0, 3.7, 1024.0, -1024.0, 1e-7])
def test_the_last_number_before_a_bound_is_that_of_torch(end: float, dtype: torch.dtype) -> None:
    """Also where the type's nearest number is less than the bound that was given: it is that bound to its readers."""
    near = torch.tensor(end, dtype=dtype)
    wanted = torch.nextafter(near, torch.tensor(-torch.inf, dtype=dtype))
    assert random._last_before(end, dtype) == wanted.item() < end


@pytest.mark.parametrize("dtype", [mf.DataType.BFloat16, mf.DataType.Half])
def test_narrow_types_draw_no_upper_bound_in_a_program(dtype: mf.DataType) -> None:
    fd = mf.FusionDefinition()
    x = fd.define_tensor([50_000], dtype=dtype)
    for made in (fd.ops.rand_like(x), fd.ops.uniform(0.0, 1.0, [50_000], dtype=dtype)):
        fd.add_output(made)
    for found in fd.simulate([torch.zeros(50_000, dtype=getattr(torch, dtype.value))]):
        assert 0.99 < found.max().item() < 1.0 and found.min().item() >= 0.0


@pytest.mark.parametrize("name", ["rand_like", "randn_like"])
def test_numbers_are_the_same_on_every_mesh(name: str) -> None:
    found = []
    for ranks, dims in ((1, [None, None]), (4, ["x", None]), (5, [None, "x"]), (9, ["x", None])):
        fd = mf.FusionDefinition(seed=3)
        x = fd.define_tensor([6, 8])
        fd.add_output(getattr(fd.ops, name)(x))
        fd.mesh_split(x, mf.DeviceMesh((ranks,), ("x",)), dims)
        found.append(fd.simulate([torch.zeros(6, 8)])[0])
    assert all(torch.equal(found[0], other) for other in found[1:])


def drawing(seed: int | None = None, ranks: list[int] | None = None) -> mf.FusionDefinition:
    """Dropout of ones, the same program each time; `ranks` are those of its mesh."""
    with mf.FusionDefinition() if seed is None else mf.FusionDefinition(seed) as fd:
        x = fd.define_tensor([200])
        fd.add_output(fd.ops.dropout(x, 0.5))
        if ranks is not None:
            fd.mesh_split(x, mf.DeviceMesh(ranks, ("x",)), ["x"])
    return fd


def masks(definitions: list[mf.FusionDefinition]) -> list[tuple[float, ...]]:
    return [tuple(fd.simulate([torch.ones(200)])[0].tolist()) for fd in definitions]


def test_no_two_definitions_without_a_seed_draw_alike() -> None:
    """Nor does one as those with a small seed do."""
    found = masks([*(drawing() for _ in range(6)), *(drawing(seed) for seed in range(-2, 8))])
    assert len(set(found)) == len(found)


def test_a_seed_is_all_that_two_definitions_need_to_draw_alike() -> None:
    assert len(set(masks([drawing(0), drawing(0), drawing(0, [0, 1]), drawing(0, [2, 3, 4])]))) == 1
    assert "mf.FusionDefinition(seed=0)" in repr(drawing(0)) and "mf.FusionDefinition()" in repr(drawing())


def test_definitions_that_share_no_rank_draw_apart(monkeypatch: pytest.MonkeyPatch) -> None:
    """Each is the first one in the processes of its ranks, as stages of a pipeline are."""
    made = []
    for ranks in ([0, 1], [2, 3], [4, 5]):
        monkeypatch.setattr(execution, "_numbers", itertools.count(1))
        made.append(drawing(None, ranks))
    assert len(set(masks(made))) == 3


def test_a_definition_draws_what_its_unsharded_copy_does() -> None:
    fd = drawing(None, [3, 4])
    assert_same_as_unsharded(fd, [torch.ones(200)])
    assert_same_as_unsharded(fd, [torch.ones(200)])


def test_two_calls_of_one_op_draw_different_numbers_and_a_given_seed_the_same() -> None:
    fd = mf.FusionDefinition()
    seed, offset = fd.define_scalar(dtype=mf.DataType.Int), fd.define_scalar(dtype=mf.DataType.Int)
    for keywords in (
        {},
        {},
        {"rng_seed": seed, "rng_offset": offset},
        {"rng_seed": seed, "rng_offset": offset},
    ):
        fd.add_output(fd.ops.uniform(0.0, 1.0, [8], **keywords))
    a, b, c, d = fd.simulate([17, 4])
    assert not torch.equal(a, b) and torch.equal(c, d) and not torch.equal(a, c)


@pytest.mark.parametrize(("given", "message"), [
    ({"rng_seed": 3}, "rng_seed and rng_offset: found rng_seed alone, needed both or neither"),
    ({"rng_offset": 0}, "rng_seed and rng_offset: found rng_offset alone, needed both or neither"),
    ({"rng_seed": 1.5, "rng_offset": 0}, "rng_seed: found 1.5, needed an integer"),
    ({"rng_seed": 1, "rng_offset": mf.DataType.Double}, "rng_offset: found Double, needed an integer"),
])  # fmt: skip
@pytest.mark.parametrize("name", ["uniform", "normal"])
def test_a_state_that_numbers_cannot_be_drawn_by(name: str, given: dict[str, Any], message: str) -> None:
    fd = mf.FusionDefinition()
    numbers = {key: fd.define_scalar(dtype=n) if isinstance(n, mf.DataType) else n for key, n in given.items()}
    with pytest.raises(mf.DefinitionError, match=rf"{name}: {message}.*\(at test_random\.py:"):
        getattr(fd.ops, name)(0.0, 1.0, [3], **numbers)


@pytest.mark.parametrize("seed", [-5, -(2**63), 2**64 + 3, -(2**70) - 1])
def test_seeds_of_any_size_draw_and_drop_alike_on_every_mesh(seed: int) -> None:
    """Attention keeps its seed for the backward, in 64 bits."""
    found = []
    for dims in ([None] * 4, [None, "x", None, None], [None, None, "x", None]):
        fd = mf.FusionDefinition(seed=seed)
        x = fd.define_tensor([1, 2, 8, 4], dtype=mf.DataType.Double)
        y = fd.ops.sdpfa_fwd(x, x, x, dropout_p=0.5)[0]
        for t in (y, fd.grad(y, x), fd.ops.dropout(x, 0.5), fd.ops.normal(0.0, 1.0, [8])):
            fd.add_output(t)
        fd.mesh_split(x, mf.DeviceMesh((2,), ("x",)), dims)
        found.append(fd.simulate([torch.linspace(-1.0, 1.0, 64).double().reshape(1, 2, 8, 4)]))
    for other in found[1:]:
        torch.testing.assert_close(other, found[0])


@pytest.mark.parametrize("name", sorted(OPS))
def test_an_op_says_whether_it_draws(name: str) -> None:
    """By what its text takes: ops that draw are counted, and have numbers of their own by their places.

    Attention gives the state that it would have drawn by, where it drops nothing, too.
    """
    for sample in OPS[name].samples():
        call = make_call(OPS[name], sample)
        made = tuple(Sharding.replicated(MESH, ttype.ndim) for ttype in call.results)
        taken = tuple(Sharding.replicated(MESH, ttype.ndim) for ttype in call.types)
        one, other = (LocalCall(call, names_of(call), taken, made, 0, number=n).text() for n in (0, 1))
        draws, takes_state = OPS[name].draws, one != other
        if draws is not None and draws(call):
            assert takes_state
        elif takes_state:
            assert call["dropout_p"] in (None, 0)
