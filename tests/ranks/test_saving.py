"""mf.save and mf.load on real ranks: other ranks and meshes load what some saved, also after kills and restarts."""

from __future__ import annotations

import resource
import signal
from pathlib import Path
from typing import Any

import pytest
import torch
from rank_pool import START, run_bare

import meshfuse as mf
from meshfuse.sharding.data import shard

pytestmark = pytest.mark.ranks

SHAPES = {"even": (8, 12), "uneven": (7, 5), "thin": (3,), "half": (6, 4)}
# Per mesh what it is, and how each tensor lies on it: chunks, several axes on a dim, the minor part of a dim, replicas.
MESHES = {
    "tp": ((2,), ("tp",), {"even": [None, "tp"], "uneven": ["tp", None], "thin": ["tp"], "half": ["tp", None]}),
    "inner": (
        (2,), ("tp",),
        {"even": [[mf.Split(4), mf.Split(2, "tp")], None], "uneven": [None, "tp"], "thin": [None], "half": [[], None]},
    ),
    "four": ((4,), ("x",), {"even": ["x", None], "uneven": ["x", None], "thin": ["x"], "half": [None, "x"]}),
    "square": (
        (2, 2), ("a", "b"),
        {"even": [["b", "a"], None], "uneven": ["a", "b"], "thin": ["b"], "half": [["a", "b"], None]},
    ),
}  # fmt: skip


def whole(step: int = 0) -> dict[str, torch.Tensor]:
    """The global tensors: every element is another number, which shows the step."""
    found = {n: torch.arange(torch.Size(s).numel()).reshape(s).double() + 100 * step for n, s in SHAPES.items()}
    return found | {"half": found["half"].bfloat16()}


def views(mesh: str) -> dict[str, mf.TensorView]:
    """The tensors, annotated on a mesh as a user's definition has them."""
    shape, names, specs = MESHES[mesh]
    made, fd = mf.DeviceMesh(shape, names), mf.FusionDefinition()
    found = {}
    for name, spec in specs.items():
        found[name] = fd.define_tensor(list(SHAPES[name]))
        fd.mesh_split(found[name], made, spec)
    return found


def local(name: str, view: mf.TensorView, step: int = 0) -> torch.Tensor:
    """This rank's shard."""
    shape = SHAPES[name]
    sharding = view.fd.recording.annotations[view.id].sharding(name, shape).placement(shape)
    return shard(whole(step)[name], sharding, mf.World.current().rank)


def save(path: str, mesh: str) -> None:
    state = {name: (local(name, view), view) for name, view in views(mesh).items()}
    mf.save(path, state | {"same": torch.ones(3), "step": 7, "note": "text"})


def load(path: str, mesh: str) -> list[str]:
    """The names that are not loaded right: on this rank's mesh, whole, and into tensors that are there."""
    placed = views(mesh)
    found = mf.load(path, {**placed, "same": None, "step": None, "note": None})
    wrong = [name for name, view in placed.items() if not torch.equal(found[name], local(name, view))]
    everything = mf.load(path)
    wrong += [f"whole {name}" for name, right in whole().items() if not torch.equal(everything[name], right)]
    into = {name: (torch.zeros_like(local(name, view)), view) for name, view in placed.items()}
    mf.load(path, into)
    wrong += [f"filled {name}" for name, (t, view) in into.items() if not torch.equal(t, local(name, view))]
    plain = found["step"], found["note"], everything["step"], found["same"].tolist()
    return wrong if plain == (7, "text", 7, [1, 1, 1]) else [*wrong, str(plain)]


@pytest.mark.parametrize("source", MESHES)
def test_any_mesh_loads_what_another_saved(ranks2, ranks4, tmp_path, source):
    pools = {name: ranks2 if len(shape) == 1 and shape[0] == 2 else ranks4 for name, (shape, *_) in MESHES.items()}
    pools[source].run(save, str(tmp_path), source)
    for target in MESHES:
        assert not any(pools[target].run(load, str(tmp_path), target)), target
    alone = mf.load(tmp_path)  # A process without ranks.
    assert all(torch.equal(alone[name], right) for name, right in whole().items())


def save_with_little_room(path: str, where: int) -> str:
    """One rank finds the disk full; what every rank raises."""
    tensor = torch.ones(2, 50_000)
    sharding = mf.Sharding(mf.DeviceMesh((2,), ("tp",)), ((mf.Split(2, "tp"),), ()))
    limits, handler = resource.getrlimit(resource.RLIMIT_FSIZE), signal.signal(signal.SIGXFSZ, signal.SIG_IGN)
    rank = mf.World.current().rank
    if rank == where:
        resource.setrlimit(resource.RLIMIT_FSIZE, (20_000, limits[1]))
    try:
        mf.save(path, {"t": (tensor[rank : rank + 1], sharding)})
    except mf.CheckpointError as error:
        return str(error)
    finally:
        resource.setrlimit(resource.RLIMIT_FSIZE, limits)
        signal.signal(signal.SIGXFSZ, handler)
    return "saved"


def save_whole(path: str, *different: str) -> str:
    """What a rank raises that saves other whole tensors than the others under these names."""
    rank = mf.World.current().rank
    same = {"w": torch.arange(6.0), "flag": torch.tensor(True), "z": torch.zeros(2, dtype=torch.complex128)}
    own = {name: same[name].roll(1) if name == "w" else same[name] + rank for name in different if rank}
    try:
        mf.save(path, same | own)
    except mf.RankError as error:
        return str(error)
    return "saved"


@pytest.mark.parametrize("name", ["w", "flag", "z"])
def test_whole_tensors_that_differ_are_not_saved_as_one(ranks2, tmp_path, name):
    """Such as a shard that is passed without its sharding: one rank's would be stored, and the others' lost."""
    assert ranks2.run(save_whole, str(tmp_path)) == ["saved", "saved"]
    before = sorted(tmp_path.rglob("*"))
    for message in ranks2.run(save_whole, str(tmp_path), name):
        assert f"ranks disagree on what they save: found rank 0 '{name}: whole" in message, message
        assert "what is another part on each with its sharding: (shard, sharding). (at test_saving.py:" in message
    assert sorted(tmp_path.rglob("*")) == before


THREADS = """
path = {path!r}

def work(name):
    try:
        mf.save(path + name, {{"w": (shards[0], x)}})
    except (mf.ArgumentError, mf.RankError) as error:
        print(type(error).__name__, error, flush=True)
        world.checkpoint_lock.check()

"""


def test_a_save_in_a_thread_beside_executions(tmp_path):
    script = """
threads = [threading.Thread(target=work, args=("a",)) for _ in range(3)]
for thread in threads:
    thread.start()
    for _ in range(70):
        (found,) = fd.execute(shards)
        assert int(found[0, 0]) == 6
    thread.join()
assert torch.equal(mf.load(path + "a")["w"], torch.ones(40, 6))
"""
    results = run_bare(START + THREADS.format(path=str(tmp_path / "c")) + script, tmp_path, 2, limit=10.0)
    assert [code for code, _ in results] == [0, 0], results


def test_two_saves_at_once_are_an_error(tmp_path):
    """Their order differs between ranks: a checkpoint would be of both. Rank 1 comes when rank 0 has its error."""
    script = """
if world.rank == 1:
    while not os.path.exists(path): time.sleep(0.01)
threads = [threading.Thread(target=work, args=(name,)) for name in "ab"[:2 - world.rank]]
for thread in threads:
    thread.start()
time.sleep(0.3)
open(path, "w").close()
for thread in threads:
    thread.join()
mf.save(path + "c", {"a": 1})
"""
    (code, text), (other, _) = run_bare(
        START + THREADS.format(path=str(tmp_path / "c")) + script, tmp_path, 2, limit=10.0
    )  # fmt: skip
    assert code == 1 and other == 1
    assert "ArgumentError two threads save or load at once: found thread 'Thread-" in text, text
    says = "RankError: a call to save or load follows one that failed: found two threads save or load at once"
    assert says in text, text


def save_or_load(path: str) -> str:
    try:
        if mf.World.current().rank:
            mf.save(path, {"step": 8})
        else:
            mf.load(path)
    except mf.RankError as error:
        return str(error)
    return "done"


def test_one_rank_saves_and_another_loads(ranks2, tmp_path):
    ranks2.run(save, str(tmp_path), "tp")
    for message in ranks2.run(save_or_load, str(tmp_path)):
        assert "ranks disagree on what comes next: found rank 0 'meshfuse.load, reading the index'; rank 1" in message
    assert ranks2.run(load, str(tmp_path), "inner") == [[], []]


@pytest.mark.parametrize("where", [0, 1])
def test_a_full_disk_under_one_rank_fails_all_and_leaves_what_was(ranks2, tmp_path, where):
    ranks2.run(save, str(tmp_path), "tp")
    for message in ranks2.run(save_with_little_room, str(tmp_path), where):
        assert f"meshfuse.save failed while writing: found on rank {where} " in message and "untouched" in message
    assert ranks2.run(load, str(tmp_path), "inner") == [[], []]
    assert len(list(tmp_path.iterdir())) == 2


HERE = Path(__file__).resolve().parent
# Saves step after step, on another mesh in each attempt, and is killed in most of them at some moment of a save.
RESTARTED = f"""
import os, random, signal, sys, threading, time
sys.path.insert(0, {str(HERE)!r})
import torch
from rank_pool import START, run_bare

import meshfuse as mf
from test_saving import local, views, whole
torch.set_num_threads(1)
world = mf.World.current()
path, attempts = sys.argv[1], int(sys.argv[2])
mesh = views(["four", "square"][world.attempt % 2])
step = 0
try:
    found = mf.load(path, {{**mesh, "step": None}})
    step = found["step"]
    wrong = [name for name, view in mesh.items() if not torch.equal(found[name], local(name, view, step))]
    world.rank or print("resumed", step, wrong, flush=True)
except mf.CheckpointError as error:
    assert "no checkpoint to load" in str(error), error
    world.rank or print("nothing", flush=True)
chance = random.Random(world.attempt)
victim, saves, moment = chance.randrange(4), chance.randrange(1, 3), chance.random()

def last():
    time.sleep(moment * max(0.001, lasted))
    os.kill(os.getpid(), signal.SIGKILL)

lasted, end = 0.05, threading.Thread(target=last, daemon=True)
for number in range(4):
    if world.attempt < attempts and number == saves and world.rank == victim:
        end.start()
    begun = time.monotonic()
    mf.save(path, {{name: (local(name, view, step + 1), view) for name, view in mesh.items()}} | {{"step": step + 1}})
    step, lasted = step + 1, time.monotonic() - begun
    world.rank or print("saved", step, flush=True)
if end.ident is not None:  # Its last saves may take less time than those before, and are done before the moment.
    end.join()
"""


def test_jobs_killed_in_the_middle_of_saves_resume_from_whole_checkpoints(job, tmp_path):
    """Each attempt, on a mesh other than the last, finds the last checkpoint whole: of one step, and none is lost."""
    attempts = 3
    launcher = ("-m", "meshfuse.runtime.launcher", "--ranks", "4", "--max-restarts", str(attempts))
    done = job(RESTARTED, *launcher, args=(str(tmp_path / "kept"), str(attempts)))
    assert done.returncode == 0, done.stderr
    lines = [line.split(maxsplit=2) for line in done.stdout.splitlines()]
    assert [line for line in lines if line[0] == "resumed" and line[2] != "[]"] == []
    assert sum(line[0] in ("resumed", "nothing") for line in lines) == attempts + 1
    known = 0
    for what, *rest in lines:
        if what == "saved":
            known = int(rest[0])
        elif what == "resumed":
            # A save may be whole on the disk before its rank could say so.
            assert int(rest[0]) in (known, known + 1)
    assert mf.load(tmp_path / "kept")["step"] == known
    assert len(list((tmp_path / "kept").iterdir())) == 2


def lazy(t: torch.Tensor) -> torch.Tensor:
    """The same numbers, of memory that has their conjugates or negatives."""
    return torch.conj(t.conj().resolve_conj()) if t.dtype.is_complex else torch._neg_view(-t)


def on_rank_lazy(path: str) -> list[str]:
    """Whole tensors and shards whose memory is not their numbers, on one rank only: which are loaded otherwise, and
    which are filled otherwise.
    """
    rank, wrong = mf.World.current().rank, []
    sharding = mf.Sharding(mf.DeviceMesh((2,), ("tp",)), ((mf.Split(2, "tp"),),))
    for dtype in (torch.float64, torch.complex128):
        whole = torch.arange(1, 5).to(dtype) * (1 + 2j if dtype.is_complex else 1)
        part = whole[2 * rank : 2 * rank + 2]
        form = lazy if rank else torch.clone
        mf.save(path, {"w": form(whole), "s": (form(part), sharding)})
        into = form(torch.zeros_like(part))
        found = mf.load(path, {"w": None, "s": None}) | {"into": mf.load(path, {"s": (into, sharding)}) and into}
        for name, right in {"w": whole, "s": whole, "into": part}.items():
            wrong += [] if torch.equal(found[name], right) else [f"{dtype} {name}: {found[name]}"]
    return wrong


def test_views_whose_memory_is_not_their_numbers(ranks2, tmp_path):
    assert ranks2.run(on_rank_lazy, str(tmp_path)) == [[], []]


class Broken(dict[str, Any]):
    """A state that fails by an error of neither meshfuse's nor the system's."""

    def items(self) -> Any:
        raise KeyError("of the user's own")


def on_rank_broken(path: str) -> str:
    state = {"w": torch.zeros(2)}
    try:
        mf.save(path, Broken(state) if mf.World.current().rank else state)
    except mf.CheckpointError as error:
        return str(error)
    return "saved"


def test_whatever_fails_on_one_rank_fails_on_all_at_once(ranks2, tmp_path):
    for message in ranks2.run(on_rank_broken, str(tmp_path)):
        assert "meshfuse.save failed while reading what to save: found on rank 1 KeyError: " in message, message


DTYPES = (torch.bfloat16, torch.bool, torch.complex128, torch.int8)


def on_rank_elsewhere(path: str) -> list[tuple[torch.dtype, tuple[int, ...]]]:
    """Tensors of no elements and of no dims that rank 1 alone holds: no element has their dtypes."""
    mesh = mf.DeviceMesh((1,), ("x",), ranks=[1])
    made = [torch.empty(shape, dtype=dtype) for dtype in DTYPES for shape in ((2, 0), (0,), ())]
    state = {
        str(n): (t if mf.World.current().rank else None, mf.Sharding.replicated(mesh, t.ndim))
        for n, t in enumerate(made)
    }
    mf.save(path, state)
    found = mf.load(path)
    return [(found[str(n)].dtype, tuple(found[str(n)].shape)) for n in range(len(made))]


def test_tensors_of_nothing_that_the_first_rank_has_no_part_of(ranks2, tmp_path):
    wanted = [(dtype, shape) for dtype in DTYPES for shape in ((2, 0), (0,), ())]
    assert ranks2.run(on_rank_elsewhere, str(tmp_path)) == [wanted] * 2
