"""Checkpoints of one process and of simulated teams: what is saved in one sharding is loaded in any other."""

from __future__ import annotations

import contextlib
import dataclasses
import errno
import itertools
import json
import os
import re
import resource
import shutil
import signal
import sys
import threading
import warnings
from pathlib import Path

import pytest
import torch
import torch.distributed.checkpoint as dcp
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st

import meshfuse as mf
from interrupts import interrupted, refused
from meshfuse.checkpoint import api, folder
from meshfuse.checkpoint.hyperslabs import boxes
from meshfuse.errors import CheckpointError
from meshfuse.runtime.environment import Environment
from meshfuse.runtime.rendezvous import Rendezvous
from meshfuse.runtime.world import World
from meshfuse.sharding.data import shard
from meshfuse.testing import meshes, shardings


class Team:
    """Ranks as threads of this process: what `api` needs of a world. Real ranks: ranks/test_saving.py."""

    def __init__(self, size: int):
        self.size, self.barrier, self.slots = size, threading.Barrier(size, timeout=60), [b""] * size

    def run(self, action):
        """`action(world)` on every rank; the results, or the first error."""
        results: list[object] = [None] * self.size
        worlds = [Member(self, rank) for rank in range(self.size)]

        def one(rank):
            try:
                results[rank] = action(worlds[rank])
            except Exception as error:
                results[rank] = error

        threads = [threading.Thread(target=one, args=(rank,)) for rank in range(self.size)]
        for thread in threads:
            thread.start()
        for thread in threads:
            thread.join()
        for result in results:
            if isinstance(result, Exception):
                raise result
        return results


class Member(World):
    def __init__(self, team: Team, rank: int):
        super().__init__(Environment(), 60.0)
        self.rank, self.size = rank, team.size
        self.rendezvous = RendezvousOfThreads(self, team)


class RendezvousOfThreads(Rendezvous):
    def __init__(self, world: World, team: Team):
        super().__init__(world)
        self.team = team

    def exchange(self, value, what, limit=None):
        self.team.slots[self.world.rank] = value
        self.team.barrier.wait()
        found = list(self.team.slots)
        self.team.barrier.wait()
        return found


@pytest.fixture(autouse=True)
def worlds(monkeypatch):
    """Each thread's own world."""
    local = threading.local()
    plain = World(Environment(), 60.0)
    monkeypatch.setattr(World, "current", classmethod(lambda cls: getattr(local, "world", plain)))

    def on(team: Team, action):
        def with_world(world):
            local.world = world
            return action(world.rank)

        return team.run(with_world)

    return on


def numbered(shape, dtype=torch.float32) -> torch.Tensor:
    return torch.arange(torch.Size(shape).numel()).reshape(shape).to(dtype)


@settings(max_examples=30)
@given(st.data())
def test_boxes_are_the_shard(data):
    """Any sharding: the boxes of a rank tell where each element of its shard stands in the global tensor."""
    shape = tuple(data.draw(st.lists(st.integers(0, 13), max_size=3)))
    sharding = data.draw(shardings(shape, data.draw(meshes(max_ranks=8))))
    whole = numbered(shape)
    for rank in sharding.mesh.ranks:
        local, found = shard(whole, sharding, rank), torch.full(sharding.local_shape(shape, rank), -1.0)
        for box in boxes(sharding, shape, rank):
            place = tuple(slice(a, a + n) for a, n in zip(box.local, box.sizes, strict=True))
            source = tuple(slice(a, a + n) for a, n in zip(box.offsets, box.sizes, strict=True))
            found[place] = whole[source]
        assert torch.equal(found, local)


@settings(max_examples=10, suppress_health_check=list(HealthCheck))
@given(data=st.data())
def test_any_sharding_is_loaded_in_any_other(tmp_path_factory, worlds, data):
    """Uneven, empty, inner-split and sub-axis shards, from up to 4 ranks to up to 4 others and to one process."""
    path = tmp_path_factory.mktemp("checkpoint")
    shape = tuple(data.draw(st.lists(st.integers(0, 11), max_size=3)))
    first, second = (data.draw(shardings(shape, data.draw(meshes(max_ranks=4)))) for _ in range(2))
    whole = numbered(shape, data.draw(st.sampled_from((torch.float32, torch.bfloat16, torch.int64, torch.bool))))
    known = data.draw(st.booleans())

    def save(rank):
        local = shard(whole, first, rank) if rank in first.mesh else None
        mf.save(path, {"t": (local, first, shape) if known else (local, first), "same": whole, "n": 3})

    def load(rank):
        return mf.load(path, {"t": second, "same": None, "n": None})

    worlds(Team(max(first.mesh.ranks) + 1), save)
    for rank, got in enumerate(worlds(Team(max(second.mesh.ranks) + 1), load)):
        wanted = shard(whole, second, rank) if rank in second.mesh else None
        assert got["t"] is None if wanted is None else torch.equal(got["t"], wanted)
        assert torch.equal(got["same"], whole) and got["n"] == 3
    alone = mf.load(path)
    assert torch.equal(alone["t"], whole) and alone["t"].dtype == whole.dtype


def test_replicas_are_stored_once(tmp_path, worlds):
    whole = torch.randn(1000, 100)
    mesh = mf.DeviceMesh((2, 2), ("a", "b"))
    halves = mf.Sharding(mesh, ((mf.Split(2, "a"),), ()))
    worlds(Team(4), lambda rank: mf.save(tmp_path, {"whole": whole, "half": (shard(whole, halves, rank), halves)}))
    size = sum(file.stat().st_size for file in tmp_path.rglob("*.distcp"))
    assert 2 * whole.nbytes <= size < 2.2 * whole.nbytes


def test_tensors_are_filled_in_place(tmp_path):
    mf.save(tmp_path, {"t": torch.ones(3), "s": "text"})
    target = torch.zeros(3)
    found = mf.load(tmp_path, {"t": target, "s": ""})
    assert found["t"] is target and target.tolist() == [1, 1, 1] and found["s"] == "text"


def test_the_new_checkpoint_replaces_the_old_one(tmp_path):
    for number in range(3):
        mf.save(tmp_path, {"t": torch.full((3,), number)})
        assert mf.load(tmp_path)["t"].tolist() == [number] * 3
    assert len(list(tmp_path.iterdir())) == 2


# What goes wrong.


MISTAKES = {
    "a missing name": (
        {"t": None, "u": None},
        "the checkpoint lacks 'u': found t, needed all names that are asked for",
    ),
    "another shape": ({"t": torch.zeros(4)}, r"'t': found shape \[3\] in the checkpoint, needed \[4\]"),
    "another dtype": ({"t": torch.zeros(3).int()}, "'t': found torch.float32 in the checkpoint, needed torch.int32"),
    "another form": ({"t": 4.5j}, "'t': found complex, needed a tensor, a DTensor"),
    **{  # which can be saved, but not asked for
        f"the {type(v).__name__} {v!r}": (
            {"t": v},
            rf"'t': found {type(v).__name__}, needed .* to load to, .* or None for the whole tensor\. Ask",
        )
        for v in (3, 0.5, True, "cpu")
    },
    "other dims": (
        {"t": mf.Sharding.replicated(mf.DeviceMesh((1,), ("a",)), 2)},
        "'t': found a sharding of 2 dims, needed 1, as the tensor has",
    ),
}


@pytest.mark.parametrize("what", MISTAKES)
def test_loading_what_is_not_there_is_an_error(tmp_path, what):
    mf.save(tmp_path, {"t": torch.ones(3)})
    wanted, text = MISTAKES[what]
    with pytest.raises(mf.ArgumentError, match=text):
        mf.load(tmp_path, wanted)


def test_a_tensor_of_another_size_than_the_view_has(tmp_path):
    """A whole tensor passed for a shard makes a larger one than the view, whose sharding would be of that."""
    with mf.FusionDefinition() as fd:
        w, rows = fd.define_tensor([12, 16]), fd.define_tensor([-1, 16])
        fd.add_output(w + 0.0)
        fd.add_output(rows + 0.0)
        for t in (w, rows):
            fd.mesh_split(t, mf.DeviceMesh((1,), ("tp",)), ["tp", None])
    text = r"found a tensor of global shape \[24, 16\], needed \[12, 16\], as t0 has\..*shard_tensor"
    with pytest.raises(mf.ArgumentError, match=text):
        mf.save(tmp_path, {"w": (torch.zeros(24, 16), w)})
    moment = torch.ones(12, 16, dtype=torch.float64)  # An optimizer's state lies as its weight does, in its own dtype.
    mf.save(tmp_path, {"w": torch.zeros(24, 16), "moment": (moment, w), "rows": (torch.zeros(5, 16), rows)})
    with pytest.raises(mf.ArgumentError, match=text):
        mf.load(tmp_path, {"w": w})
    found = mf.load(tmp_path, {"moment": w, "rows": rows})
    assert torch.equal(found["moment"], moment) and found["rows"].shape == (5, 16)


def test_a_shard_that_does_not_fit_is_an_error(tmp_path):
    sharding = mf.Sharding(mf.DeviceMesh((2,), ("a",)), ((mf.Split(2, "a"),),))
    with pytest.raises(
        mf.ArgumentError, match=r"'t': found a shard of shape \[3\] on rank 0, needed \[2\]: \[a\] of \[4\]"
    ):
        mf.save(tmp_path, {"t": (torch.ones(3), sharding, (4,))})
    partial = mf.Sharding(mf.DeviceMesh((2,), ("a",)), ((),), (mf.Split(2, "a"),), "sum")
    with pytest.raises(mf.ArgumentError, match="found unreduced sums"):
        mf.save(tmp_path, {"t": (torch.ones(3), partial, (3,))})


SPARSE, META = torch.ones(3).to_sparse(), torch.empty(3, device="meta")


def freed() -> torch.Tensor:
    """A tensor whose memory its owner has put away, as FSDP does with weights."""
    made = torch.ones(4)
    made.untyped_storage().resize_(0)
    return made


QUANTIZED = torch.quantize_per_tensor(torch.ones(3), 1.0, 0, torch.quint8)
ONE = mf.Sharding.replicated(mf.DeviceMesh((1,), ("a",)), 1)
CALLS = {
    "the folder: found None": lambda path: mf.save(None, {}),
    "the folder: found 3": lambda path: mf.load(3),
    "the folder: found ''": lambda path: mf.save("", {}),
    "what to save: found None": lambda path: mf.save(path, None),
    "what is wanted: found 'w'": lambda path: mf.load(path, "w"),
    "what is wanted: found ['w']": lambda path: mf.load(path, ["w"]),
    "'w': found torch.sparse_coo": lambda path: mf.save(path, {"w": SPARSE}),
    "'w': found a meta tensor": lambda path: mf.save(path, {"w": META}),
    "'w': found a quantized tensor, torch.quint8": lambda path: mf.save(path, {"w": QUANTIZED}),
    "'w': found a tensor of torch.bits8, needed a dtype with numbers": lambda path: mf.save(
        path, {"v": torch.ones(2), "w": torch.zeros(4, dtype=torch.uint8).view(torch.bits8)}
    ),
    "'w': found an int of 16610 bits, needed one of 14000 at most": lambda path: mf.save(path, {"w": 10**5000}),
    "'w': found a storage of 0 bytes, freed by its owner, needed": lambda path: mf.save(path, {"w": freed()}),
    "the folder: found '\\ud800'": lambda path: mf.save("\ud800", {"w": ONE}),
    "the folder: found 'a\\ud800'": lambda path: mf.load("a\ud800"),
    "a text as the name, of whole letters": lambda path: mf.save(path, {"\ud800": torch.ones(2)}),
    "'w': found 1 as the global shape": lambda path: mf.save(path, {"w": (torch.ones(2), ONE, 1)}),
}


@pytest.mark.parametrize("text", CALLS)
def test_calls_of_the_wrong_kind(tmp_path, text):
    """Found before anything is written: the checkpoint of before stays."""
    mf.save(tmp_path, {"step": 7})
    with pytest.raises(mf.ArgumentError, match=re.escape(text)) as caught:
        CALLS[text](tmp_path)
    assert "(at test_checkpoints.py:" in str(caught.value)
    assert mf.load(tmp_path) == {"step": 7}


def test_a_class_of_tensors_is_stored_as_the_tensor_that_it_is(tmp_path):
    """Even one that cannot be pickled; what is filled stays of its class."""

    class Own(torch.Tensor):
        pass

    mf.save(tmp_path, {"w": torch.arange(6.0).as_subclass(Own)})
    found = mf.load(tmp_path)["w"]
    assert type(found) is torch.Tensor and torch.equal(found, torch.arange(6.0))
    filled = torch.zeros(6).as_subclass(Own)
    assert mf.load(tmp_path, {"w": filled})["w"] is filled and filled.tolist() == found.tolist()


SHARED = {
    "expanded": lambda: torch.zeros(1, 3).expand(4, 3),
    "of one number": lambda: torch.zeros(()).expand(4, 3),
    "a window of rows": lambda: torch.zeros(6).as_strided((4, 3), (1, 1)),
    "rows that meet": lambda: torch.zeros(99).as_strided((4, 3), (2, 1)),
}
APART = {
    "transposed": lambda: torch.zeros(3, 4).t(),
    "columns of more": lambda: torch.zeros(4, 9)[:, ::4],
    "every second row": lambda: torch.zeros(8, 3)[::2],
}


@pytest.mark.parametrize("target", [*SHARED, *APART])
@pytest.mark.parametrize("sharded", [False, True])
def test_only_what_has_memory_for_each_element_is_loaded_to(tmp_path, target, sharded):
    """Elements that share memory would hold what is written last, without an error of torch's for windows."""
    whole, one = torch.arange(12.0).reshape(4, 3), mf.Sharding.replicated(mf.DeviceMesh((1,), ("x",)), 2)
    mf.save(tmp_path, {"t": whole})
    memory = (SHARED | APART)[target]()
    wanted = {"t": (memory, one) if sharded else memory}
    if target in APART:
        assert torch.equal(mf.load(tmp_path, wanted)["t"], whole) and torch.equal(memory, whole)
        return
    with pytest.raises(mf.ArgumentError, match=r"'t': found elements that share memory.*at test_checkpoints\.py"):
        mf.load(tmp_path, wanted)
    assert not memory.any()


def both_in(kind: str) -> tuple[torch.Tensor, torch.Tensor]:
    """Two tensors of [4, 3] in one memory."""
    memory = torch.zeros(5, 6)
    return {
        "one": lambda: (memory[:4, :3], memory[:4, :3]),
        "turned": lambda: (memory.view(-1)[:12].view(4, 3), memory.view(-1)[:12].view(3, 4).t()),
        "next row": lambda: (memory[:4, :3], memory[1:, :3]),
        "beside": lambda: (memory[:4, :3], memory[:4, 3:]),
    }[kind]()


@pytest.mark.parametrize("kind, loads", [("one", True), ("turned", False), ("next row", False), ("beside", True)])
@pytest.mark.parametrize("same", [True, False])
def test_names_in_one_memory_are_loaded_where_each_has_its_values(tmp_path, kind: str, loads: bool, same: bool) -> None:
    """Tied weights have one memory, and columns of one tensor none that both have; else the last one would be there."""
    values = torch.arange(12.0).reshape(4, 3)
    mf.save(tmp_path, {"a": values, "b": values if same else values + 1, "c": values})
    a, b = both_in(kind)
    wanted = {"b": b, "a": a, "c": torch.zeros(4, 3)}
    if loads and (same or kind == "beside"):
        found = mf.load(tmp_path, wanted)
        assert torch.equal(found["a"], values) and torch.equal(found["b"], values if same else values + 1)
        return
    with pytest.raises(mf.ArgumentError, match=r"'[ab]': found memory that other values are loaded to, too, of '[ab]'"):
        mf.load(tmp_path, wanted)


def test_a_missing_checkpoint_is_an_error(tmp_path):
    with pytest.raises(CheckpointError, match=r"no checkpoint to load: found .*nowhere: No such file or directory"):
        mf.load(tmp_path / "nowhere")


def damages() -> dict[str, object]:
    def change(path: Path) -> None:
        data = bytearray(path.read_bytes())
        data[len(data) // 2] ^= 1
        path.write_bytes(data)

    return {
        "changed": change,
        "cut": lambda path: path.write_bytes(path.read_bytes()[:-7]),
        "gone": Path.unlink,
    }


@pytest.mark.parametrize("which", ["*.distcp", ".metadata", "checkpoint.json"])
@pytest.mark.parametrize("how", list(damages()))
def test_damage_is_found(tmp_path, which, how):
    mf.save(tmp_path, {"t": torch.randn(100)})
    (path,) = tmp_path.rglob(which)
    damages()[how](path)  # type: ignore[operator]
    with pytest.raises(CheckpointError, match=r"damaged|no checkpoint to load"):
        mf.load(tmp_path)


def test_a_full_disk_leaves_the_checkpoint_of_before(tmp_path):
    """No file may grow beyond 20 kB, as on a disk without room."""
    mf.save(tmp_path, {"t": torch.ones(3)})
    before = resource.getrlimit(resource.RLIMIT_FSIZE)
    handler = signal.signal(signal.SIGXFSZ, signal.SIG_IGN)
    resource.setrlimit(resource.RLIMIT_FSIZE, (20_000, before[1]))
    try:
        with pytest.raises(CheckpointError, match=r"meshfuse\.save failed while writing: .* rank 0 .* untouched"):
            mf.save(tmp_path, {"t": torch.ones(100_000)})
    finally:
        resource.setrlimit(resource.RLIMIT_FSIZE, before)
        signal.signal(signal.SIGXFSZ, handler)
    assert mf.load(tmp_path)["t"].tolist() == [1, 1, 1]
    assert len(list(tmp_path.iterdir())) == 2


@pytest.mark.parametrize("stage", ["write", "commit", "replace"])
def test_a_killed_save_leaves_the_checkpoint_of_before(tmp_path, stage):
    """Killed before the files, after them, and at the last moment."""
    mf.save(tmp_path, {"t": torch.ones(3)})
    module, name = {"write": (api, "write"), "commit": (folder, "commit"), "replace": (os, "replace")}[stage]
    child = os.fork()
    if not child:
        try:
            setattr(module, name, lambda *_, **__: os.kill(os.getpid(), signal.SIGKILL))
            mf.save(tmp_path, {"t": torch.zeros(5)})
        finally:
            os._exit(1)
    assert os.waitstatus_to_exitcode(os.waitpid(child, 0)[1]) == -signal.SIGKILL
    assert mf.load(tmp_path)["t"].tolist() == [1, 1, 1]
    mf.save(tmp_path, {"t": torch.full((2,), 7)})  # It also clears away what the killed one left.
    assert mf.load(tmp_path)["t"].tolist() == [7, 7] and len(list(tmp_path.iterdir())) == 2


@pytest.mark.slow
@pytest.mark.parametrize("first", [False, True])
def test_a_save_that_ends_at_any_moment_leaves_a_whole_checkpoint(tmp_path, first):
    """That of before or, from where it has replaced it, its own: the data of neither may go."""
    seen = set[int]()
    for count in itertools.count(1):
        path = tmp_path / str(count)
        if not first:
            mf.save(path, {"t": torch.ones(3)})
        ended = False
        # Within torch's writer an interrupt becomes another error.
        with (
            contextlib.suppress(KeyboardInterrupt, CheckpointError),
            interrupted(count, "/checkpoint/", "/file_locks.py"),
        ):
            mf.save(path, {"t": torch.full((3,), 2.0)})
            ended = sys.getprofile() is not None
        if ended:
            break
        if (path / "checkpoint.json").exists():
            seen.add(int(mf.load(path)["t"].sum()))
        mf.save(path, {"t": torch.full((3,), 5.0)})
        assert mf.load(path)["t"].tolist() == [5, 5, 5] and len(list(path.iterdir())) == 2
    assert seen == ({6} if first else {3, 6})


REFUSAL = OSError(errno.EIO, os.strerror(errno.EIO))
HALVES = mf.Sharding(mf.DeviceMesh((2,), ("x",)), ((mf.Split(2, "x"),),))


def outcomes(worlds, victim: int, count: int, action) -> set[str]:
    """What two ranks say of an action of all where the system refuses one of them a call; none waits for the other."""
    team = Team(2)
    team.barrier = threading.Barrier(2, timeout=10)
    errors = set()

    def one(rank):
        try:
            with refused(count, REFUSAL, "/checkpoint/") if rank == victim else contextlib.nullcontext():
                action()
                errors.add("" if rank != victim or sys.getprofile() else "unnoticed")
        except mf.MeshfuseError as error:
            errors.add(str(error))

    worlds(team, one)
    return errors


def failure(errors: set[str], victim: int) -> str:
    """What the ranks say that is wrong, which has come to both or to none."""
    failed = errors - {"", "unnoticed"}
    assert not failed or failed == errors, errors
    assert all(f"found on rank {victim} " in text or REFUSAL.strerror in text for text in failed), errors
    return "".join(failed)


@pytest.mark.slow
@pytest.mark.parametrize("victim", [0, 1])
def test_what_a_disk_refuses_a_save_at_any_moment_fails_it_on_all_ranks_or_on_none(tmp_path, worlds, victim):
    """And the checkpoint is the one that they tell of."""

    def save(number: float) -> None:
        mf.save(path, {"t": (torch.full((2,), number), HALVES), "w": torch.full((2,), number)})

    for count in itertools.count(1):
        path = tmp_path / str(count)
        worlds(Team(2), lambda rank: save(1.0))
        with warnings.catch_warnings(record=True):
            errors = outcomes(worlds, victim, count, lambda: save(2.0))
        if errors == {""}:
            break
        failed = failure(errors, victim)
        found = mf.load(path)
        assert found["t"].tolist() == [*found["w"].tolist()] * 2 == ([1.0] * 4 if failed else [2.0] * 4), (
            count,
            errors,
        )
        assert not [*path.glob("*.part")], count
        worlds(Team(2), lambda rank: save(5.0))
        assert mf.load(path)["t"].tolist() == [5.0] * 4 and len(list(path.iterdir())) == 2
    assert count > 30


@pytest.mark.slow
@pytest.mark.parametrize("victim", [0, 1])
def test_what_a_disk_refuses_a_load_at_any_moment_fails_it_on_all_ranks_or_on_none(tmp_path, worlds, victim):
    mf.save(tmp_path, {"t": torch.arange(4.0), "n": 7})

    def load() -> None:
        found = mf.load(tmp_path, {"t": HALVES, "n": None})
        start = 2.0 * World.current().rank
        assert found["t"].tolist() == [start, start + 1] and found["n"] == 7

    for count in itertools.count(1):
        errors = outcomes(worlds, victim, count, load)
        if errors == {""}:
            break
        failure(errors, victim)
    assert count > 30


def test_one_rank_that_fails_fails_all(tmp_path, worlds, monkeypatch):
    real = api.write

    def write(path, shards, rank, together):
        def failing(doing, action):
            return together(doing, (lambda: (_ for _ in ()).throw(OSError(28, "No space"))) if rank == 1 else action)

        return real(path, shards, rank, failing)

    monkeypatch.setattr(api, "write", write)
    failures = []

    def save(rank):
        try:
            mf.save(tmp_path, {"t": torch.ones(3)})
        except CheckpointError as error:
            failures.append(str(error))

    worlds(Team(3), save)
    assert len(failures) == 3 and all("on rank 1 OSError: [Errno 28] No space" in text for text in failures)
    assert not (tmp_path / "checkpoint.json").exists()


def test_saving_to_different_folders_is_an_error(tmp_path, worlds):
    """As with the time in the folder's name. The checkpoint would lack the parts of all but the first rank."""
    sharding = mf.Sharding(mf.DeviceMesh((3,), ("a",)), ((mf.Split(3, "a"),),))
    failures = []

    def save(rank):
        try:
            mf.save(tmp_path / f"run{min(rank, 1)}", {"t": (numbered((2,)), sharding, (6,))})
        except CheckpointError as error:
            failures.append(str(error))

    mf.save(tmp_path / "run0", {"step": 7})
    worlds(Team(3), save)
    assert len(failures) == 3, failures
    assert all("the ranks save to different folders: found no file __1_0.distcp in" in text for text in failures)
    assert all("needed the files of all ranks in one folder. Pass the same path" in text for text in failures)
    assert not any(".," in text for text in failures), failures
    assert mf.load(tmp_path / "run0") == {"step": 7}


@pytest.mark.parametrize("what", ["finish", "write_data", "set_up_storage_writer"])
def test_a_disk_that_is_full_at_any_file_is_an_error_on_all_ranks(tmp_path, worlds, monkeypatch, what):
    """torch's own index is the first rank's alone."""
    mf.save(tmp_path, {"t": torch.ones(3)})

    def full(*_, **__):
        raise OSError(28, "No space")

    failures = []

    def save(rank):
        try:
            mf.save(tmp_path, {"t": torch.zeros(5)}, timeout=5)
        except CheckpointError as error:
            failures.append(str(error))

    monkeypatch.setattr(dcp.FileSystemWriter, what, full)
    worlds(Team(3), save)
    assert len(failures) == 3 and all("OSError: [Errno 28] No space, needed room" in text for text in failures)
    assert mf.load(tmp_path)["t"].tolist() == [1, 1, 1] and len(list(tmp_path.iterdir())) == 2


def test_the_index_says_what_there_is(tmp_path):
    mf.save(tmp_path, {"t": torch.ones(3, 0), "s": 1.5})
    body = json.loads((tmp_path / "checkpoint.json").read_text().partition("\n")[2])
    assert body["tensors"] == {"t": ["float32", [3, 0]]} and body["values"] == {"s": 1.5}
    assert folder.read_index(tmp_path).tensors == {"t": ("float32", (3, 0))}
    assert mf.load(tmp_path)["t"].shape == (3, 0)


FORGED = [None, 1, -1, True, "x", "../other", "/etc", [], [[]], ["w"], {}, {"t": None}, {"t": 1}, {"t": []},
          {"t": [1, 2]}, {"t": ["nope", [3]]}, {"t": ["float32", [-1]]}, {"t": ["float32", 3]},
          {"t": ["save", [3]]}, {"../t": [1, 2]}, {"t": [1.5, 2]}]  # fmt: skip


@pytest.mark.parametrize("part", ["data", "tensors", "values", "files", "format"])
def test_an_index_that_no_save_wrote(tmp_path, part):
    """Whatever it says, with the right checksum: an error of checkpoints, or what is there."""
    mf.save(tmp_path, {"t": torch.ones(3), "s": 1.5})
    index = folder.read_index(tmp_path)
    data, kept = tmp_path / index.data, tmp_path / "kept"
    data.rename(kept)
    for forged in FORGED:
        shutil.copytree(kept, data, dirs_exist_ok=True)
        folder.write_index(tmp_path, dataclasses.replace(index, **{part: forged}))
        shutil.copytree(kept, data, dirs_exist_ok=True)
        try:
            found = mf.load(tmp_path)
        except (CheckpointError, mf.ArgumentError) as error:
            assert re.search(r"\(at test_checkpoints\.py:\d+\)", str(error)), forged
        else:
            assert part in ("values", "tensors") or torch.equal(found["t"], torch.ones(3)), forged


@pytest.mark.parametrize("which", ["*.distcp", ".metadata", "checkpoint.json"])
def test_what_is_there_and_no_file_is_not_waited_for(tmp_path, which):
    """A pipe that nobody writes to has no end."""
    mf.save(tmp_path, {"t": torch.ones(3)})
    (path,) = tmp_path.rglob(which)
    path.unlink()
    os.mkfifo(path)
    with pytest.raises(CheckpointError, match=r"damaged|no checkpoint to load"):
        mf.load(tmp_path)


@pytest.mark.parametrize("other", [0, 2, None, "1"])
def test_a_checkpoint_of_another_format_is_refused(tmp_path, other):
    mf.save(tmp_path, {"t": torch.ones(3)})
    folder.commit(tmp_path, dataclasses.replace(folder.read_index(tmp_path), format=other))
    with pytest.raises(
        CheckpointError, match=f"checkpoint.json is of another format: found {other}, needed 1. Load it"
    ):
        mf.load(tmp_path)
