"""Plans on disk: a second start plans nothing and decides the same; whatever is wrong with them, planning goes on."""

from __future__ import annotations

import contextlib
import errno
import gc
import itertools
import json
import os
import random
import resource
import shutil
import sys
import unittest.mock
import warnings
from pathlib import Path

import pytest
import torch
from hypothesis import given, settings

sys.path.insert(0, str(Path(__file__).parent / "ranks"))

import forked

import meshfuse as mf
from interrupts import forget, interrupted, places, refused, requests
from meshfuse import compiler, disk_cache
from meshfuse.fusion_definition import FusionDefinition
from meshfuse.plans import plan_cache
from meshfuse.testing import annotations, definitions

SOURCE = Path(__file__).resolve().parents[1]


@pytest.fixture
def cache(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """A cache of its own, in which every plan is worth a file."""
    monkeypatch.setenv("MESHFUSE_CACHE", str(tmp_path / "cache"))
    monkeypatch.setattr(plan_cache, "WORTH", -1e9)
    monkeypatch.setattr(disk_cache, "_warned", set())
    return tmp_path / "cache" / "plans"


@pytest.fixture
def planning(monkeypatch: pytest.MonkeyPatch) -> list[object]:
    """Every call of propagation that the compiler makes."""
    calls: list[object] = []
    real = compiler.apply_distributed_forms
    monkeypatch.setattr(compiler, "apply_distributed_forms", lambda *args: (calls.append(args), real(*args))[1])
    return calls


def scans(
    size: int = 24,
    mesh: mf.DeviceMesh | None = None,
    scan: str = "cumsum",
    rows: str | None = None,
    chunks: int = 0,
) -> FusionDefinition:
    """A definition with a distributed form, a window, an order of blocks and a reduction in it."""
    mesh = mesh or mf.DeviceMesh((2, 2), ("a", "b"))
    with mf.FusionDefinition() as fd:
        x = fd.define_tensor([size, 8])
        w = fd.define_tensor([6, 8])
        s = getattr(fd.ops, scan)(x, 0)
        y = fd.ops.linear(fd.ops.pad(s, [0, 0, 1, 1]), w)
        fd.add_output(fd.ops.reorder_blocks(y, 0, [1, 0]))
        fd.mesh_split(x, mesh, ["a", "b"])
        fd.mesh_split(w, mesh, [rows, None if rows else "b"])
        if chunks:
            fd.overlap(y, chunks)
    return fd


def decided(fd: FusionDefinition) -> tuple[str, ...]:
    compiled = fd.compile()
    return (compiled.digest, str(compiled.graph), *(str(compiled.host_program(rank)) for rank in compiled.ranks))


def ring() -> FusionDefinition:
    """Attention that is written out in rounds after it is planned, forward and backward."""
    with mf.FusionDefinition() as fd:
        q, k, v = (fd.define_tensor([1, 2, 8, 4]) for _ in range(3))
        out, _ = fd.ops.ring_attention(q, k, v, 4, is_causal=True, zigzag=True)
        fd.add_output(out)
        fd.add_output(fd.grad(out, k))
        for tensor in (q, k, v):
            fd.mesh_split(tensor, mf.DeviceMesh((4,), ("cp",)), [None, None, "cp", None])
    return fd


def test_rounds_are_written_from_a_stored_plan_as_from_a_new_one(cache, planning):
    first = decided(ring())
    assert len(planning) >= 1 and len(list(cache.glob("*.plan"))) == 1
    planning.clear()
    assert decided(ring()) == first
    assert planning == []


@pytest.mark.slow
def test_a_second_start_plans_nothing_and_decides_the_same(cache, planning):
    first = decided(scans())
    assert len(planning) >= 1 and len(list(cache.glob("*.plan"))) == 1
    planning.clear()
    second = scans()
    assert decided(second) == first
    assert planning == []
    x, w = torch.randn(24, 8), torch.randn(6, 8)
    (out,) = second.simulate([x, w])
    reference = torch.nn.functional.linear(torch.nn.functional.pad(x.cumsum(0), [0, 0, 1, 1]), w).roll(13, 0)
    torch.testing.assert_close(out, reference, rtol=1e-5, atol=1e-5)


@pytest.mark.slow
@settings(max_examples=25)
@given(definitions().flatmap(annotations))
def test_every_plan_reads_back_as_it_is(fd):
    """Any definition, any annotations: what is stored gives the same graph, placements, homes and programs."""
    check_that_it_reads_back(fd)


@pytest.mark.parametrize("dims", [[1], [0, 1]])
@pytest.mark.parametrize("name", ["var", "var_mean", "welford"])
def test_a_plan_of_a_form_rewritten_once_more_reads_back(name, dims):
    """Of the tensors of a distributed form those that merging leaves without an op."""
    with FusionDefinition() as fd:
        x = fd.define_tensor([4, 6])
        made = getattr(fd.ops, name)(x, dims)
        for tensor in made if isinstance(made, tuple) else (made,):
            fd.add_output(tensor)
        fd.mesh_split(x, mf.DeviceMesh((2,), ("a",)), [None, "a"])
    check_that_it_reads_back(fd)


@pytest.mark.parametrize("grad", [False, True])
def test_a_plan_of_joined_windows_reads_back(grad):
    """A convolution by hand, whose taps are shifts of rows that lie over ranks."""
    with FusionDefinition() as fd:
        x = fd.define_tensor([16, 4])
        padded = fd.ops.pad(x, [0, 0, 1, 1])
        y = sum(
            (fd.ops.slice(padded, [i, 0], [i + 16, 4]) * (i + 1.0) for i in (1, 2)),
            fd.ops.slice(padded, [0, 0], [16, 4]),
        )
        fd.add_output(fd.grad(y * y, x) if grad else y)
        fd.mesh_split(x, mf.DeviceMesh((4,), ("a",)), ["a", None])
    check_that_it_reads_back(fd)
    assert fd.latest().planned.graph.rewritings


def check_that_it_reads_back(fd):
    pairs = []

    def read_back(graph, world, plan, _how):
        sharded = plan()
        pairs.append((sharded, plan_cache.unpacked(plan_cache.packed(sharded), graph)))
        return pairs[-1][1]

    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(compiler, "planned", read_back)
        found = fd.compile()
        found.verify()
    ((sharded, again),) = pairs
    assert str(again.graph) == str(sharded.graph)
    assert (again.choices, dict(again.shardings)) == (sharded.choices, dict(sharded.shardings))
    fd._programs.compiled.clear()
    assert fd.compile().digest == found.digest


def different() -> dict[str, FusionDefinition]:
    links = {"a": mf.Link(1e9, 1e-5), "b": mf.Link(1e9, 1e-5)}
    return {
        "size": scans(20),
        "op": scans(scan="cumprod"),
        "annotation": scans(rows="b"),
        "stream": scans(chunks=2),
        "mesh": scans(mesh=mf.DeviceMesh([[3, 2], [1, 0]], ("a", "b"))),
        "links": scans(mesh=mf.DeviceMesh((2, 2), ("a", "b"), links=links)),
    }


@pytest.mark.parametrize("what", ["size", "op", "annotation", "stream", "mesh", "links"])
def test_another_program_is_not_taken_for_this_one(cache, planning, what):
    decided(scans())
    planning.clear()
    decided(different()[what])
    assert planning


def test_another_meshfuse_does_not_read_these_plans(cache, planning, monkeypatch):
    decided(scans())
    planning.clear()
    monkeypatch.setattr(plan_cache, "_code_and_versions", lambda: "another")
    decided(scans())
    assert planning


def test_each_module_is_in_what_tells_one_meshfuse_from_another():
    package = Path(mf.__file__).parent
    told = plan_cache._code_and_versions().splitlines()
    modules = [str(path.relative_to(package)) for path in package.rglob("*.py")]
    assert sorted(row.split()[0] for row in told[2:]) == sorted(modules) and len(modules) > 200


def test_ops_of_users_are_not_stored(cache):
    import torch.nn.functional as F

    op = mf.register_op(mf.torch_op("a* -> a*", name="my_silu")(F.silu))
    try:
        with mf.FusionDefinition() as fd:
            x = fd.define_tensor([8, 8])
            fd.add_output(getattr(fd.ops, op.name)(x))
            fd.mesh_split(x, mf.DeviceMesh((2,), ("a",)), ["a", None])
        fd.compile()
    finally:
        mf.unregister_op("my_silu")
    assert not list(cache.glob("*"))


# Whatever is wrong with the folder or a file: one warning, and the same program.


def damage(text: str, path: Path) -> None:
    data = path.read_bytes()
    changed = {
        "truncated": data[: len(data) // 2],
        "empty": b"",
        "one bit": data[:-10] + bytes([data[-10] ^ 1]) + data[-9:],
        "other words": b"meshfuse-cache-1 00\n[]",
        "no text": bytes(range(256)),
    }[text]
    path.write_bytes(changed)


@pytest.mark.parametrize("how", ["truncated", "empty", "one bit", "other words", "no text"])
def test_a_damaged_plan_is_planned_anew(cache, planning, how):
    first = decided(scans())
    (path,) = cache.glob("*.plan")
    damage(how, path)
    planning.clear()
    with pytest.warns(disk_cache.CacheWarning, match="damaged, and is removed") as told:
        assert decided(scans()) == first
    assert planning and len([w for w in told if w.category is disk_cache.CacheWarning]) == 1
    planning.clear()
    assert decided(scans()) == first and not planning


OTHER_KINDS = {
    "folder": Path.mkdir,
    "pipe": os.mkfifo,
    "link to a device": lambda path: path.symlink_to("/dev/zero"),
    "larger than all plans": lambda path: (path.touch(), os.truncate(path, disk_cache.MOST_BYTES + 1)),
}


@pytest.mark.parametrize("kind", OTHER_KINDS)
@pytest.mark.timeout(20)
def test_what_is_no_plan_is_not_read(cache, planning, kind):
    """A pipe that nobody writes, or a device, has no end."""
    first = decided(scans())
    (path,) = cache.glob("*.plan")
    path.unlink()
    OTHER_KINDS[kind](path)
    with pytest.warns(disk_cache.CacheWarning, match="cannot be read"):
        assert decided(scans()) == first


@pytest.mark.parametrize("setting", ["", "~nobody-of-this-name/cache"])
def test_a_user_without_a_home_directory_gets_a_warning(cache, planning, monkeypatch, setting):
    """As in a container with a user of its own number: no entry, and no HOME."""
    unknown = unittest.mock.Mock(side_effect=KeyError("uid not found"))
    monkeypatch.setattr("pwd.getpwuid", unknown)
    for name in ("HOME", "XDG_CACHE_HOME"):
        monkeypatch.delenv(name, raising=False)
    monkeypatch.setenv("MESHFUSE_CACHE", setting)
    with pytest.warns(disk_cache.CacheWarning, match="home directory"):
        decided(scans())
    assert planning


def checksummed(body: str) -> bytes:
    data = body.encode("latin-1")
    return f"{disk_cache._head(data)}\n".encode() + data


@pytest.mark.parametrize(
    "body",
    [
        "[]",
        "{}",
        "null",
        "[1, []]",
        '[["r", 7], []]',
        '[["t", ["t"], ["t"], ["t"]], []]',
        '[0, [["os.system", "x"]]]',
        "\xff",
    ],
)
def test_a_plan_of_another_form_is_planned_anew(cache, planning, body):
    """With the right checksum: a bug of ours, or someone else's file."""
    first = decided(scans())
    (path,) = cache.glob("*.plan")
    path.write_bytes(checksummed(body))
    planning.clear()
    with pytest.warns(disk_cache.CacheWarning, match="a stored plan cannot be used"):
        assert decided(scans()) == first
    assert planning


OTHER_VALUES = [0, -1, 1, 3, 10**6, None, True, "x", "a", 2.5, ["t"], ["r", 0], ["r", 2], ["t", ["r", 1]]]


def values_in(tree, path=()):
    """The ways to all entries of lists in lists, and to the lists themselves."""
    for place, entry in enumerate(tree):
        yield (*path, place)
        if isinstance(entry, list):
            yield from values_in(entry, (*path, place))


def changed(text, path, value):
    tree = json.loads(text)
    at = tree
    for place in path[:-1]:
        at = at[place]
    at[path[-1]] = value
    return json.dumps(tree)


@pytest.mark.slow
@pytest.mark.parametrize("make", [scans, ring])
def test_a_plan_of_other_values_is_planned_anew_or_the_same(cache, planning, monkeypatch, make):
    """With the right checksum: each value replaced by many others."""
    graphs, real = [], plan_cache._recalled
    monkeypatch.setattr(plan_cache, "_recalled", lambda *args: (graphs.append(args[2]), real(*args))[1])
    make().compile()
    (path,) = cache.glob("*.plan")
    text, refused = disk_cache.read(cache, path.name), 0
    wanted = str(plan_cache.unpacked(text, graphs[0]))
    ways = list(values_in(json.loads(text)))
    monkeypatch.setattr(disk_cache, "warn", lambda _: None)
    for way, value in random.Random(1).sample(list(itertools.product(ways, OTHER_VALUES)), 1500):
        other = changed(text, way, value)
        monkeypatch.setattr(disk_cache, "read", lambda *_, other=other: other)
        found = real(cache, path.name, graphs[0])
        refused += found is None
        assert found is None or str(found) == wanted, (way, value)
    assert refused > 1000


def test_a_stored_plan_with_wrong_values_gives_a_warning(cache, planning):
    first = decided(scans())
    (path,) = cache.glob("*.plan")
    text = disk_cache.read(cache, path.name)
    rows = json.loads(text)[1]
    choice = next(place for place, row in enumerate(rows) if row[0] == "Choice")
    path.write_bytes(checksummed(changed(text, (1, choice, 1), None)))
    planning.clear()
    with pytest.warns(disk_cache.CacheWarning, match="a stored plan cannot be used"):
        assert decided(scans()) == first
    assert planning


def test_a_folder_that_others_can_write_to_is_not_believed(cache, planning):
    cache.mkdir(parents=True)
    cache.chmod(0o777)
    with pytest.warns(disk_cache.CacheWarning, match="is not a folder that only this user can write to"):
        decided(scans())
    assert planning and not list(cache.iterdir())


def test_a_link_in_the_place_of_the_folder_is_not_followed(cache, planning, tmp_path):
    (tmp_path / "elsewhere").mkdir()
    cache.parent.mkdir(parents=True)
    cache.symlink_to(tmp_path / "elsewhere")
    with pytest.warns(disk_cache.CacheWarning, match="only this user"):
        decided(scans())
    assert not list((tmp_path / "elsewhere").iterdir())


def test_a_file_in_the_place_of_the_folder_gives_a_warning(cache, planning):
    cache.parent.parent.mkdir(parents=True, exist_ok=True)
    cache.parent.write_text("")
    with pytest.warns(disk_cache.CacheWarning, match="Not a directory"):
        decided(scans())
    assert planning


def test_a_full_disk_gives_a_warning(cache, planning):
    """No file may grow beyond 100 bytes, as on a disk without room."""
    before = resource.getrlimit(resource.RLIMIT_FSIZE)
    resource.setrlimit(resource.RLIMIT_FSIZE, (100, before[1]))
    try:
        with pytest.warns(disk_cache.CacheWarning, match=f"cannot be written: {os.strerror(errno.EFBIG)}"):
            decided(scans())
    finally:
        resource.setrlimit(resource.RLIMIT_FSIZE, before)
    assert planning and not list(cache.iterdir())


@pytest.mark.slow
@pytest.mark.parametrize("stored", [False, True])
def test_whatever_the_system_refuses_planning_goes_on(cache, monkeypatch, stored):
    """At any moment: the plan is the same, nothing half written stays, and the next start uses the cache again."""
    files = ("/plans/plan_", "/plans/process_lock.py", "/disk_cache.py")
    warnings.simplefilter("ignore")
    right = decided(product())
    if not stored:
        shutil.rmtree(cache)
    forget()
    counts = requests(product().compile, *files)
    assert len(counts) > 15
    for count in counts:
        if not stored:
            shutil.rmtree(cache)
        forget()
        disk_cache._warned.clear()
        with refused(count, OSError(errno.EMFILE, os.strerror(errno.EMFILE)), *files):
            assert decided(product()) == right, count
        assert not [*cache.glob("*.part")], count
        disk_cache._warned.clear()
        assert decided(product()) == right and len([*cache.glob("*.plan")]) == 1, count


def test_a_meshfuse_without_files_keeps_no_plans(cache, planning, monkeypatch):
    """In a zip archive, another's plans would differ from its own by the version alone."""
    forget()
    monkeypatch.setattr(plan_cache, "__file__", "/no/such.zip/meshfuse/plans/plan_cache.py")
    with pytest.warns(disk_cache.CacheWarning, match="own files cannot be read: .* as in a zip archive"):
        decided(scans())
    decided(scans())
    assert len(planning) == 2 and not [*cache.glob("*.plan")]
    forget()


def test_it_can_be_switched_off(cache, planning, monkeypatch):
    monkeypatch.setenv("MESHFUSE_CACHE", "off")
    with warnings.catch_warnings():
        warnings.simplefilter("error")
        decided(scans())
    assert planning and not cache.exists()


@pytest.mark.slow
def test_what_was_used_last_stays(cache, planning, monkeypatch):
    sizes = (16, 20, 24)
    for number, size in enumerate(sizes):
        decided(scans(size))
        for path in cache.glob("*.plan"):
            os.utime(path, (1000 + path.stat().st_mtime % 1, 1000 + number)) if path.stat().st_mtime > 2000 else None
    decided(scans(16))  # Used again, so the one of size 20 is now the oldest.
    monkeypatch.setattr(disk_cache, "MOST_BYTES", int(2.5 * max(p.stat().st_size for p in cache.glob("*.plan"))))
    disk_cache._evict(cache)
    planning.clear()
    decided(scans(16)), decided(scans(24))
    assert not planning and len(list(cache.glob("*.plan"))) == 2
    decided(scans(20))
    assert planning


def test_a_folder_that_goes_away_under_a_writer_is_no_error(cache, monkeypatch):
    folder, replace = disk_cache.folder(), os.replace
    assert folder is not None

    def remove(source: str, target: str) -> None:
        replace(source, target)
        shutil.rmtree(folder)

    monkeypatch.setattr(disk_cache.os, "replace", remove)
    disk_cache.write(folder, "a.plan", "text")
    assert not folder.exists() and disk_cache.read(folder, "a.plan") is None


def test_a_killed_writer_leaves_nothing_that_is_read(cache, planning):
    decided(scans())
    (path,) = cache.glob("*.plan")
    path.rename(path.with_name(path.name + ".1234.part"))
    planning.clear()
    decided(scans())
    assert planning


KEPT = (
    "/dual_ascent.py",
    "/disk_cache.py",
    "/whole_files.py",
    "/file_locks.py",
    "/compiler.py",
    "/plan_cache.py",
    "/plan_codec.py",
    "/shape_reuse.py",
    "/process_lock.py",
    "/programs.py",
)


def product() -> FusionDefinition:
    with mf.FusionDefinition() as fd:
        x, w = fd.define_tensor([8, 4]), fd.define_tensor([6, 4])
        fd.add_output(fd.ops.linear(fd.ops.relu(x), w))
        fd.mesh_split(x, mf.DeviceMesh((2,), ("a",)), [None, "a"])
    return fd


@pytest.mark.slow
def test_planning_that_ends_at_any_moment_leaves_nothing_half_done(cache):
    """The same definition plans and runs right afterwards, and so does another; nothing stays on the disk but plans."""
    forget()
    first = decided(product())
    shutil.rmtree(cache)
    forget()
    counts = places(product().compile, *KEPT)
    assert len(counts) > 50
    for count in counts:
        forget()
        shutil.rmtree(cache)
        fd = product()
        with contextlib.suppress(KeyboardInterrupt), interrupted(count, *KEPT):
            fd.compile()
        assert gc.isenabled() and not [*cache.glob("*.part")], count
        assert decided(fd) == first == decided(product()), count


SCRIPT = """
import meshfuse as mf
from meshfuse import compiler
from meshfuse.plans import plan_cache
plan_cache.WORTH = -1e9
calls = []
real = compiler.apply_distributed_forms
compiler.apply_distributed_forms = lambda *args: (calls.append(args), real(*args))[1]
mesh = mf.DeviceMesh((2,), ("a",))
with mf.FusionDefinition() as fd:
    x = fd.define_tensor([8, 8])
    fd.add_output(fd.ops.softmax(fd.ops.relu(x), 0) if hasattr(fd.ops, "softmax") else fd.ops.relu(x))
    fd.mesh_split(x, mesh, ["a", None])
print(fd.compile().digest, bool(calls))
"""


@pytest.mark.slow
def test_a_second_process_reads_what_the_first_wrote(tmp_path):
    path = tmp_path / "script.py"
    path.write_text(SCRIPT)
    environment = os.environ | {"PYTHONPATH": str(SOURCE), "XDG_CACHE_HOME": str(tmp_path / "xdg")}
    environment.pop("MESHFUSE_CACHE")
    answers = [forked.finished([str(path)], environment, tmp_path, 120).stdout.split() for _ in range(2)]
    assert answers[0][0] == answers[1][0]
    assert [planned for _, planned in answers] == ["True", "False"]
    folder = tmp_path / "xdg" / "meshfuse" / "plans"
    assert folder.stat().st_mode & 0o777 == 0o700
