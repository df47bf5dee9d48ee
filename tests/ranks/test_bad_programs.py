"""What goes wrong with a definition on real ranks: each ends with one message that says what and where."""

from __future__ import annotations

import os
import re
import signal
from collections.abc import Callable
from types import SimpleNamespace
from typing import Any

import pytest
import torch
from rank_pool import START, alive, run_bare, wait_until

import meshfuse as mf
from meshfuse.errors import SourceLine
from meshfuse.executor.spmd import RankProgram
from meshfuse.runtime import diagnosis, exit_hooks
from meshfuse.runtime.call_order import Calls
from meshfuse.runtime.roll_call import Failure

pytestmark = pytest.mark.ranks

PLACE = "all-reduce of y (t3) over tp (its annotation) in step 2: all_reduce #2 of group tp"


def replicated_product(mesh: mf.DeviceMesh) -> tuple[mf.FusionDefinition, list[torch.Tensor]]:
    with mf.FusionDefinition() as fd:
        x = fd.define_tensor([4])
        y = fd.ops.mul(x, 2.0)
        fd.add_output(y)
        fd.mesh_split(x, mesh, [None])
    return fd, [torch.ones(4)]


def error_of(call: Callable[[], object]) -> str:
    """The class and text of the error that a call raises."""
    try:
        call()
    except Exception as error:
        return f"{type(error).__name__}: {error}"
    return "no error"


# Every rank runs; the mesh does not fit.


def on_rank_of_mesh(size: int, idle_ranks: bool) -> tuple[str, list[torch.Tensor | None]]:
    fd, inputs = replicated_product(mf.DeviceMesh((size,), ("tp",)))
    found: list[torch.Tensor | None] = []
    return error_of(lambda: found.extend(fd.execute(inputs, idle_ranks=idle_ranks))), found


def test_a_mesh_larger_than_the_world_is_an_error(ranks2):
    text = (
        "DefinitionError: the mesh is larger than the world: DeviceMesh((4,), ('tp',)): found 2 ranks, "
        "needed 4 ranks. Start them with 'meshfuse run --ranks 4 script.py', or use fd.simulate. "
        "(at test_bad_programs.py:"
    )
    for error, _ in ranks2.run(on_rank_of_mesh, 4, False):
        assert error.startswith(text)


def test_a_mesh_larger_than_one_process_is_an_error():
    fd, inputs = replicated_product(mf.DeviceMesh((2,), ("tp",)))
    with pytest.raises(mf.DefinitionError, match="found 1 rank, needed 2 ranks"):
        fd.execute(inputs)


def on_rank_without_numbers(whole: bool) -> tuple[str, list[torch.Tensor]]:
    """Meta tensors at first; then some with numbers."""
    fd, inputs = replicated_product(mf.DeviceMesh((2,), ("tp",)))
    run: Any = (lambda given: fd(*given)) if whole else fd.execute
    return error_of(lambda: run([t.to("meta") for t in inputs])), run(inputs)


@pytest.mark.parametrize("whole", [False, True])
def test_meta_tensors_are_an_error(ranks2, whole):
    for error, (found,) in ranks2.run(on_rank_without_numbers, whole):
        assert error.startswith("ArgumentError: on several ranks: arguments without numbers: found x (t0) on meta")
        assert "(at test_bad_programs.py:" in error
        assert torch.equal(found, torch.full((4,), 2.0))


def on_rank_without_memory() -> tuple[str, bool, list[torch.Tensor]]:
    """A gather of more than any memory; then a call that fits."""
    mesh, size = mf.DeviceMesh((2,), ("tp",)), 1 << 60
    with mf.FusionDefinition(max_wire=1e30) as large:
        x = large.define_tensor([size])
        whole = large.ops.set(x)
        large.mesh_split(x, mesh, ["tp"])
        large.mesh_split(whole, mesh, [None])
        large.add_output(whole)
    fd, inputs = replicated_product(mesh)
    try:
        large.execute([torch.ones(1).expand(size // 2)])
        message, is_known = "no error", False
    except torch.OutOfMemoryError as error:
        message, is_known = str(error), isinstance(error, mf.OutOfMemoryError)
    return message, is_known, fd.execute(inputs)


def test_a_communication_without_memory_names_tensor_and_rank(ranks2):
    for error, is_known, (found,) in ranks2.run(on_rank_without_memory):
        assert re.match(
            r"no memory for [-a-z]+ of (x|whole) \(t\d\) over tp \(.*\) on rank \d: found RuntimeError: .*allocat",
            error,
        )
        assert is_known and "print(fd.memory()) tells what a rank holds" in error
        assert "max_memory=...). (at test_bad_programs.py:" in error
        assert torch.equal(found, torch.full((4,), 2.0))


def test_a_world_larger_than_the_mesh_is_an_error(ranks4):
    text = (
        "DefinitionError: the world is larger than the mesh: found 4 ranks, of which the meshes use [0, 1], "
        "needed a mesh of all ranks. Start 2 ranks, or pass idle_ranks=True to execute. "
        "(at test_bad_programs.py:"
    )
    for error, _ in ranks4.run(on_rank_of_mesh, 2, False):
        assert error.startswith(text)


def test_idle_ranks_are_an_option(ranks4):
    found = ranks4.run(on_rank_of_mesh, 2, True)
    assert [error for error, _ in found] == ["no error"] * 4
    assert [outputs == [None] for _, outputs in found] == [False, False, True, True]
    assert all(torch.equal(outputs[0], torch.full((4,), 2.0)) for _, outputs in found[:2])


# Ranks that were given different things.


def definition_of(odd: str) -> tuple[mf.FusionDefinition, list[torch.Tensor]]:
    """A definition, or one that differs from it in what `odd` names."""
    mesh = mf.DeviceMesh((4,), ("tp",))
    rows = 16 if odd == "shape" else 8
    with mf.FusionDefinition(seed=5 if odd == "seed" else None) as fd:
        x = fd.define_tensor([-1, 8])
        y = fd.ops.mul(x, 3.0 if odd == "constant" else 2.0)
        y = fd.ops.exp(y) if odd == "op" else fd.ops.relu(y)
        fd.add_output(y)
        if odd == "output":
            fd.add_output(x)
        fd.mesh_split(x, mesh, [None, "tp"] if odd == "annotation" else ["tp", None])
    return fd, [mf.shard_tensor(torch.ones(rows, 8), x)]


def on_rank_different(odd: str, rank: int) -> str:
    fd, inputs = definition_of(odd if mf.World.current().rank == rank else "")
    return error_of(lambda: fd.execute(inputs))


DIFFERENCES = {
    "constant": ("t1 = fd.ops.mul(t0, 2.0)", "t1 = fd.ops.mul(t0, 3.0)"),
    "op": ("t2 = fd.ops.relu(t1)", "t2 = fd.ops.exp(t1)"),
    "annotation": ("fd.mesh_split(t0, mesh0, ['tp', None])", "fd.mesh_split(t0, mesh0, [None, 'tp'])"),
    "output": ("fd.mesh_split(t0, mesh0, ['tp', None])", "fd.add_output(t0)"),
    "seed": ("with mf.FusionDefinition() as fd:", "with mf.FusionDefinition(seed=5) as fd:"),
    "shape": ("x (t0): global shape [8, 8]", "x (t0): global shape [16, 8]"),
}


@pytest.mark.parametrize("odd", DIFFERENCES)
def test_different_programs_are_an_error(ranks4, odd):
    most, other = map(repr, DIFFERENCES[odd])
    text = (
        f"RankError: ranks disagree on the program: found ranks 0, 1, 3 {most}; rank 2 {other}, needed one "
        "value on all of them. Make every rank run the same definition with the same shapes; let nothing in "
        "it depend on the rank."
    )
    for message in ranks4.run(on_rank_different, odd, 2):
        assert re.fullmatch(re.escape(text) + r" \(at test_bad_programs\.py:\d+\)", message), message


def test_the_same_program_is_no_difference(ranks4):
    assert ranks4.run(on_rank_different, "", 2) == ["no error"] * 4


def on_rank_with_arguments(odd: str, rank: int) -> str:
    with mf.FusionDefinition() as fd:
        x = fd.define_tensor([-1, 8])
        n = fd.define_scalar(dtype=mf.DataType.Int)
        fd.add_output(fd.ops.mul(x, n))
        fd.mesh_split(x, mf.DeviceMesh((4,), ("tp",)), ["tp", None])
    mine = odd if mf.World.current().rank == rank else ""
    whole = torch.arange(64.0).reshape(8, 8)
    whole[5, 5] += mine == "tensor"
    whole = whole[torch.arange(8).roll(1)] if mine == "order" else whole
    return error_of(lambda: fd(whole[: 4 if mine == "shape" else 8], 3 if mine == "scalar" else 2))


@pytest.mark.parametrize("odd", ["tensor", "order", "scalar", "shape"])
def test_different_global_arguments_are_an_error(ranks4, odd):
    """Each would cut its shard out of another tensor, and the result would be of none of them."""
    found = ranks4.run(on_rank_with_arguments, odd, 2)
    message = {
        "order": r"the global arguments: found ranks 0, 1, 3 'x \(t0\): a sum of bits of -?\d+'; rank 2 'x \(t0\): a",
        "tensor": r"the global arguments: found ranks 0, 1, 3 'x \(t0\): a sum of bits of -?\d+'; rank 2 'x \(t0\): a",
        "scalar": r"the global arguments: found ranks 0, 1, 3 'scalar s0: 2'; rank 2 'scalar s0: 3'",
        "shape": r"the program: found ranks 0, 1, 3 'x \(t0\): global shape \[8, 8\]'; rank 2 'x \(t0\): global",
    }
    assert all(re.match(f"RankError: ranks disagree on {message[odd]}", text) for text in found), found
    assert odd == "shape" or all("seed torch alike (torch.manual_seed(0)), or pass each rank" in t for t in found)


def on_rank_with_numbers(odd: int | None, rank: int) -> tuple[str, int]:
    """Calls of a definition with a number, of which `rank` passes another one at call `odd`: the error, and when."""
    world, mesh = mf.World.current(), mf.DeviceMesh((4,), ("tp",))
    with mf.FusionDefinition() as fd:
        x = fd.define_tensor([8])
        n = fd.define_scalar(dtype=mf.DataType.Float)
        fd.add_output(fd.ops.mul(fd.ops.sum(x, [0]), n))
        fd.mesh_split(x, mesh, ["tp"])
    world.calls = Calls(world.rank, world.size)  # as at the start of a job
    for call in range(1, 10):
        number = float(call) + (call == odd and world.rank == rank)
        message = error_of(lambda number=number: fd.execute([torch.ones(2), number]))
        if message != "no error":
            return message, call
    return "no error", 10


@pytest.mark.parametrize(("odd", "noticed"), [(1, 1), (2, 4), (3, 4), (5, 8)])
def test_ranks_that_pass_other_numbers(ranks4, odd, noticed):
    """Replicas would differ from there on: known before the first call, and when ranks compare their calls."""
    number = rf"{odd}\.0"
    other = rf"{odd + 1}\.0"
    message = {
        1: rf"RankError: ranks disagree on the program: found ranks 0, 1, 3 'scalar s0: {number}'; rank 2 'scalar s0: "
        rf"{other}', needed one value on all of them",
    }.get(odd, rf"RankError: .* ranks disagree on the order of calls: found ranks 0, 1, 3 'call {odd}: with s0 = "
          rf"{number}: the definition of .*'; rank 2 'call {odd}: with s0 = {other}: the")  # fmt: skip
    for text, call in ranks4.run(on_rank_with_numbers, odd, 2):
        assert call == noticed and re.match(message, text), (call, text)


def test_ranks_that_pass_the_same_numbers(ranks4):
    assert ranks4.run(on_rank_with_numbers, None, 2) == [("no error", 10)] * 4


def test_equal_global_arguments_are_no_error(ranks4):
    assert ranks4.run(on_rank_with_arguments, "", 2) == ["no error"] * 4


# A rank that fails while others wait. Nobody ends these ranks but themselves.


def check_followers(results: list[tuple[int | None, str]], failing: int, cause: str) -> None:
    """All ranks end with code 1, and all but the failing one say what they were in and why it ended."""
    assert [code for code, _ in results] == [1] * len(results)
    for rank, (_, text) in enumerate(results):
        assert cause in text
        if rank != failing:
            ranks = ", ".join(map(str, range(len(results))))
            assert f"RankError: {PLACE} (ranks {ranks}) cannot finish on rank {rank}" in text
            assert f"found rank {failing} failed, needed all ranks running" in text
            assert "(at script.py:14)" in text


def test_a_rank_that_raises_between_steps(tmp_path):
    script = """
if world.rank == 1:
    raise KeyError("the user's mistake")
fd.execute(shards)
"""
    check_followers(run_bare(START + script, tmp_path, 2), 1, 'KeyError: "the user\'s mistake"')


def test_a_rank_that_passes_a_wrong_shard(tmp_path):
    script = """
if world.rank == 1:
    shards[1] = shards[1][:1]
fd.execute(shards)
"""
    cause = (
        "ArgumentError: tensor w (t1) (defined at script.py:9) has the wrong local shape: found [1, 3], "
        "needed [2, 3], rank 1's shard of [2, 6] in [-, tp]."
    )
    check_followers(run_bare(START + script, tmp_path, 2), 1, cause)


def test_another_size_on_a_rank_at_a_later_step_is_an_error(tmp_path):
    """It waits for the others to compare the new plan, and they wait for it in the old one."""
    script = """
world.limit = 1.5
if world.rank == 1:
    shards[0] = shards[0][:30]
fd.execute(shards)
"""
    results = run_bare(START + script, tmp_path, 2)
    assert [code for code, _ in results] == [1, 1]
    assert any(
        f"RankTimeout: {PLACE} (ranks 0, 1) timed out on rank 0" in text
        or f"waits in {PLACE.partition(': ')[2]} (ranks 0, 1)" in text
        for _, text in results
    )
    assert all("comparing the program" in text for _, text in results)


def test_a_rank_that_is_killed_in_a_collective(tmp_path):
    """It waits for rank 0, which waits for its end: for that of the pipe that only rank 2 writes. What rank 2 has sent
    before would do for rank 1, if it had not noticed when rank 0 comes: it looks every half second.
    """
    os.mkfifo(tmp_path / "held")
    script = f"""
def end():
    while not world.waiting:
        time.sleep(0.01)
    os.kill(os.getpid(), signal.SIGKILL)
if world.rank == 2:
    held = open("{tmp_path}/held", "w")
    threading.Thread(target=end).start()
if world.rank == 0:
    open("{tmp_path}/held").read()
    time.sleep(2)
fd.execute(shards)
"""
    results = run_bare(START + script, tmp_path)
    assert [code for code, _ in results] == [1, 1, -signal.SIGKILL]
    for rank in (0, 1):
        text = results[rank][1]
        assert f"RankError: {PLACE} (ranks 0, 1, 2) failed on rank {rank}" in text
        assert "found a lost connection" in text and re.search(r"rank 2 does not answer: .* has ended", text)
        assert "(at script.py:14)" in text and text.count("RankError") == 1


def test_a_rank_that_stops_answering(tmp_path):
    script = """
world.limit = 4  # From here on only: ranks that start late would time out before.
if world.rank == 2:
    os.kill(os.getpid(), signal.SIGSTOP)
fd.execute(shards)
"""
    results = run_bare(START + script, tmp_path, stopped=2)
    assert [code for code, _ in results] == [1, 1, -signal.SIGKILL]
    for rank in (0, 1):
        text = results[rank][1]
        # The one whose limit comes first breaks its connections: the other may tell what that one said.
        own = f"RankTimeout: {PLACE} (ranks 0, 1, 2) timed out on rank {rank}" in text
        assert own or f"{PLACE} (ranks 0, 1, 2) cannot finish on rank {rank}: found rank {1 - rank} failed" in text
        assert f"timed out on rank {rank if own else 1 - rank}" in text
        assert "needed all ranks to arrive within 4 s" in text and "(at script.py:14)" in text
        assert re.search(r"rank 2 does not answer: its process \d+ is stopped", text)
        assert text.count("RankTimeout") == 1


# The same under the launcher, which leaves no process behind.


FAILURES = {
    "raise KeyError('the mistake')": (1, "rank 2 exited with code 1; stopped the other ranks"),
    "os.kill(os.getpid(), signal.SIGKILL)": (137, "rank 2 was killed by SIGKILL; stopped the other ranks"),
}


@pytest.mark.parametrize("failure", FAILURES)
def test_the_launcher_leaves_nothing_behind(job, tmp_path, failure):
    script = f"""
with open(f"{tmp_path}/pid{{world.rank}}", "w") as file:
    file.write(str(os.getpid()))
world.barrier()
if world.rank == 2:
    {failure}
fd.execute(shards)
"""
    done = job(START + script, "-m", "meshfuse.runtime.launcher", "--ranks", "3")
    code, message = FAILURES[failure]
    assert done.returncode == code and f"meshfuse run: {message}" in done.stderr
    pids = [int((tmp_path / f"pid{rank}").read_text()) for rank in range(3)]
    assert os.getpid() not in pids
    assert wait_until(lambda: not any(map(alive, pids)), 10)
    if code == 1:
        assert done.stderr.count("KeyError: 'the mistake'") == 1


def test_ranks_that_follow_say_where_they_were(capsys):
    """One line each; the launcher may end them before they get to it."""
    scene: Any = SimpleNamespace(rank=0)
    line = SourceLine("/a/script.py", 11)
    program: Any = SimpleNamespace(active=False, step=2, name="the definition of y", line=line)
    failure = Failure(1, "Traceback ...\nKeyError: '1 cannot finish on 2'", True)
    error = diagnosis.peer_failed(scene, "a check that 0 cannot finish on 1 (ranks 0, 1)", failure)
    RankProgram._locate(program, error)
    exit_hooks._print_short(0, error)
    place = "the definition of y in step 2: a check that 0 cannot finish on 1 (ranks 0, 1) at script.py:11"
    assert capsys.readouterr().err == f"rank 0: stopped in {place}, because rank 1 failed\n"
