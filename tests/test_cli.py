"""The command line, run in this process; `meshfuse run` has its tests among those of the ranks."""

from __future__ import annotations

import contextlib
import errno
import json
import os
import re
import shlex
import subprocess
import sys
from pathlib import Path

import pytest

import meshfuse
from commands import SOURCE, forked
from interrupts import interrupted, places, refused, requests
from meshfuse.cli import main
from meshfuse.executor.record import recorder

SCRIPT = """
import argparse
import meshfuse as mf

parser = argparse.ArgumentParser()
parser.add_argument("--mesh", default="tp=2")
parser.add_argument("--width", type=int, default=256)
args = parser.parse_args()
sizes = dict(part.split("=") for part in args.mesh.split(","))
mesh = mf.DeviceMesh(tuple(map(int, sizes.values())), tuple(sizes))
with mf.FusionDefinition() as fd:
    x = fd.define_tensor([8, args.width])
    w = fd.define_tensor([32, args.width])
    y = fd.ops.linear(x, w)
    fd.add_output(y)
    fd.mesh_split(x, mesh, [None, "tp"])
    fd.mesh_split(w, mesh, [None, "tp"])
    fd.mesh_split(y, mesh, [None, None])
print("the script's own words")
"""


@pytest.fixture
def script(tmp_path: Path) -> str:
    path = tmp_path / "script.py"
    path.write_text(SCRIPT)
    return str(path)


def write(tmp_path: Path, text: str) -> str:
    path = tmp_path / "other.py"
    path.write_text(text)
    return str(path)


def test_bill_of_a_script_that_only_defines(script: str, capsys: pytest.CaptureFixture[str]) -> None:
    assert main(["bill", script, "--mesh", "tp=4"]) == 0
    out, err = capsys.readouterr()
    assert f"{2 * 3 / 4 * 8 * 32 * 4:,.0f}" in out and "all-reduce" in out and "script.py:18" in out
    assert "the script's own words" in err and "own words" not in out


def test_bill_as_json_with_arguments_for_the_script(script: str, capsys: pytest.CaptureFixture[str]) -> None:
    assert main(["bill", "--json", "-", script, "--", "--width", "64", "--mesh", "tp=8"]) == 0
    (bill,) = json.loads(capsys.readouterr().out)
    assert bill["total"] == 2 * 7 / 8 * 8 * 32 * 4


@pytest.mark.parametrize("command", ["explain", "bill", "trace"])
def test_arguments_for_the_script_without_dashes_are_an_error(
    command: str, script: str, capsys: pytest.CaptureFixture[str]
) -> None:
    with pytest.raises(SystemExit) as end:
        main([command, script, "--width", "64"])
    assert end.value.code == 2
    assert "unrecognized arguments: --width 64; the script's own come after --" in capsys.readouterr().err


def test_bill_with_memory(script: str, capsys: pytest.CaptureFixture[str]) -> None:
    assert main(["bill", script, "--memory", "--mesh", "tp=4"]) == 0
    out = capsys.readouterr().out
    assert "all-reduce" in out and "bytes per rank, " in out and "argument" in out


def test_bill_written_to_files(script: str, tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    files = tmp_path / "bill.json", tmp_path / "bill.html"
    assert main(["bill", script, "--why", "--json", str(files[0]), "--html", str(files[1])]) == 0
    out = capsys.readouterr().out
    assert "all-reduce over tp of y (t2)" in out and "runner-up: " in out
    assert out.endswith(f"\npage: {files[1]}\n")
    (bill,) = json.loads(files[0].read_text())
    (entry,) = bill["entries"]
    assert entry["instead"]["total_wire"] >= 0 and entry["held_by"][0].endswith('fd.mesh_split(x, mesh, [None, "tp"])')
    assert entry["needed_by"][0].endswith("fd.mesh_split(y, mesh, [None, None])")
    assert "<title>script.py</title>" in files[1].read_text()


ON_RANKS = """
import torch, meshfuse as mf
with mf.FusionDefinition() as fd:
    x, w = fd.define_tensor([4, 8]), fd.define_tensor([8, 8])
    fd.add_output(fd.ops.linear(x, w))
    fd.mesh_split(x, mf.DeviceMesh((2,), ("tp",)), [None, "tp"])
fd(torch.ones(4, 8), torch.ones(8, 8))
print(fd.bill()) if mf.World.current().size > 1 else None
"""
WRITERS = ("/cli.py", "/whole_files.py", "/spans.py", "/report/trace.py")


@pytest.mark.slow
@pytest.mark.parametrize("command", ["bill", "trace"])
def test_files_are_whole_or_as_before_wherever_ctrl_c_comes(command: str, script: str, tmp_path: Path) -> None:
    folder = tmp_path / "out"
    folder.mkdir()
    words = [command, script, "--out", str(folder)]
    if command == "bill":
        words = [command, script, "--json", str(folder / "bill.json"), "--html", str(folder / "bill.html")]
    assert main(words) == 0
    whole = {path.name: path.read_text() for path in folder.iterdir()}
    seen = set[str]()
    for count in places(lambda: main(words), *WRITERS):
        for name in whole if command == "bill" else ():
            (folder / name).write_text("of before")
        with contextlib.suppress(KeyboardInterrupt), interrupted(count, *WRITERS):
            main(words)
        found = {path.name: path.read_text() for path in folder.iterdir()}
        assert found.keys() <= whole.keys(), count
        assert all(text in (whole[name], "of before") for name, text in found.items()), count
        seen.update(found.values())
    assert seen == {*whole.values(), "of before"} if command == "bill" else seen == {*whole.values()}


@pytest.mark.parametrize("command", ["bill", "trace"])
def test_what_the_system_refuses_is_one_line(
    command: str, script: str, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    """At any moment of what is written; and no half file stays."""
    words = [command, script, *(["--html", str(tmp_path / "p")] if command == "bill" else ["--out", str(tmp_path)])]
    seen = set[int]()
    counts = requests(lambda: main(words), "/report/", "/whole_files.py", "/spans.py")
    capsys.readouterr()
    for count in counts:
        with refused(count, OSError(errno.EMFILE, "refused"), "/report/", "/whole_files.py", "/spans.py"):
            code = main(words)
        text = capsys.readouterr().err
        printed = (text.count("\n"), ": found " in text and ", needed " in text)  # Beside the script's own line.
        assert (code, printed) in ((1, (2, True)), (0, (1, False))), (count, text)
        assert not [*tmp_path.glob("*.part")], count
        seen.add(code)
    assert seen == {0, 1}


@pytest.mark.slow
def test_names_that_a_terminal_cannot_show(tmp_path: Path) -> None:
    path = tmp_path / "größe.py"
    path.write_text(SCRIPT.replace("y = ", "größe = ").replace("(y", "(größe"), encoding="utf-8")
    words = [["bill", str(path), "--why"], ["explain", str(path)], ["trace", str(path)]]
    found = forked([("file", w) for w in words], tmp_path, PYTHONIOENCODING="ascii")
    for (command, *_), done in zip(words, found, strict=True):
        assert done.code == 0 and done.errors == b"the script's own words\n", done
        assert b"gr\\xf6\\xdfe" in done.out or command == "trace"


UNPRINTABLE = [["bill"], ["explain"], ["trace"], ["bill", "--html", "page"], ["ops"], ["doctor"]]
FULL = "meshfuse: what the command says cannot be written: found No space left on device, needed room and a file to"


@pytest.mark.slow
def test_where_nothing_can_be_printed(script: str, tmp_path: Path) -> None:
    """What is printed to no file at all is lost, as with Python's own print; what a file refuses is one line."""
    pairs = [("/dev/full", command) for command in UNPRINTABLE]
    pairs += [(("closed", "all closed")[place % 2], command) for place, command in enumerate(UNPRINTABLE)]
    words = [(to, [c[0], *([] if c[0] in ("ops", "doctor") else [script]), *c[1:]]) for to, c in pairs]
    for (to, command), done in zip(pairs, forked(words, tmp_path), strict=True):
        printed = done.errors.decode().replace("the script's own words\n", "")
        assert (done.code, printed) == ((1, f"{FULL} write to.\n") if to == "/dev/full" else (0, "")), (command, done)
    assert (tmp_path / "page").exists()


@pytest.mark.slow
@pytest.mark.parametrize("where", ["> /dev/full", ">&-", "<&- >&- 2> errors"])
def test_a_shell_that_lets_nothing_be_printed(where: str, script: str, tmp_path: Path) -> None:
    environment = os.environ | {"PYTHONPATH": SOURCE}
    line = f"{shlex.join([sys.executable, '-m', 'meshfuse', 'bill', script, '--html', 'page'])} {where}"
    done = subprocess.run(line, shell=True, env=environment, capture_output=True, text=True, timeout=120, cwd=tmp_path)
    printed = done.stderr.replace("the script's own words\n", "")
    assert (done.returncode, printed) == ((1, f"{FULL} write to.\n") if "full" in where else (0, "")), done
    assert "full" in where or (tmp_path / "page").exists()


@pytest.mark.slow
def test_a_script_whose_name_is_of_no_letters(tmp_path: Path) -> None:
    """Linux lets a file's name be any bytes; its lines are compared by ranks, and written to files."""
    name = os.fsdecode(b"sc\xffript.py")
    (tmp_path / name).write_text(ON_RANKS)
    lines = ["run --ranks 2", "bill --html p --json j --why", "explain", "trace", "trace --ranks 2 --out measured"]
    for line, done in zip(lines, forked([("file", [*line.split(), name]) for line in lines], tmp_path), strict=True):
        assert done.code == 0 and not done.errors, done
        assert line.startswith("trace") or b"sc\\udcffript.py:5" in done.out, done


@pytest.mark.parametrize("option", [["bill", "--html"], ["bill", "--json"], ["trace", "--out"]])
def test_a_working_directory_that_is_gone(
    option: list[str], script: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.chdir(tmp_path)
    (tmp_path / "gone").mkdir()
    os.chdir("gone")
    (tmp_path / "gone").rmdir()
    assert main([option[0], script, option[1], "there"]) == 1
    assert re.search(r"cannot write .*there: found No such file or directory, needed", capsys.readouterr().err)


@pytest.mark.parametrize("to", ["pipe", "link"])
def test_a_page_goes_where_a_file_leads(to: str, script: str, tmp_path: Path) -> None:
    """What is no file, such as a shell's pipe, is written to, not replaced; nor is a link."""
    path = tmp_path / "there"
    (os.mkfifo if to == "pipe" else lambda path: path.symlink_to("page"))(path)
    reader = subprocess.Popen(["cat", str(path)], stdout=subprocess.PIPE) if to == "pipe" else None
    assert main(["bill", script, "--html", str(path)]) == 0
    page = reader.communicate()[0].decode() if reader else (tmp_path / "page").read_text()
    assert "<title>script.py</title>" in page and (path.is_fifo() or path.is_symlink())


@pytest.mark.parametrize("option", ["--json", "--html"])
def test_a_file_that_cannot_be_written(script: str, option: str, capsys: pytest.CaptureFixture[str]) -> None:
    assert main(["bill", script, option, "/nowhere/file"]) == 1
    assert "cannot write /nowhere/file: found No such file or directory" in capsys.readouterr().err


def test_explain_prints_a_table_and_one_tensor(script: str, capsys: pytest.CaptureFixture[str]) -> None:
    assert main(["explain", script]) == 0
    table = capsys.readouterr().out
    assert "annotated at script.py:16" in table and "y (t2)" in table
    assert main(["explain", script, "--tensor", "y"]) == 0
    text = capsys.readouterr().out
    assert "unreduced over tp: a dim summed over is split in" in text and "annotated at script.py:1" in text


def test_a_tensor_that_is_not_there(script: str, capsys: pytest.CaptureFixture[str]) -> None:
    assert main(["explain", script, "--tensor", "z"]) == 1
    assert "no such tensor: found 'z', needed one of x (t0), w (t1), y (t2)" in capsys.readouterr().err


def test_what_the_script_ran_is_what_is_billed(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    text = """
import torch, meshfuse as mf
fd = mf.FusionDefinition()
x = fd.define_tensor([-1, 4])
y = fd.ops.sum(x, [0])
fd.add_output(y)
fd.mesh_split(x, mf.DeviceMesh((2,), ("tp",)), ["tp", None])
fd.simulate([torch.zeros(6, 4)])
"""
    assert main(["bill", write(tmp_path, text)]) == 0
    assert "reduce-scatter" in capsys.readouterr().out


def test_a_definition_with_open_shapes_that_never_ran(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    text = "import meshfuse as mf\nfd = mf.FusionDefinition()\n"
    text += "fd.add_output(fd.ops.relu(fd.define_tensor([-1])))\n"
    assert main(["bill", write(tmp_path, text)]) == 1
    err = capsys.readouterr().err
    assert "left out: compile needs the size of every dim: found t0: Float[?], needed a size for each '?'. Pass" in err
    assert "has made no FusionDefinition that is compiled" in err


def test_an_error_of_the_script_is_shown_as_its_own(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    path = write(tmp_path, "def f():\n    return 1 / 0\n\n\nf()\n")
    assert main(["bill", path]) == 1
    err = capsys.readouterr().err
    assert err.startswith(f'Traceback (most recent call last):\n  File "{path}", line 5, in <module>')
    assert err.rstrip().endswith("ZeroDivisionError: division by zero")
    assert "cli.py" not in err and "runpy" not in err


@pytest.mark.parametrize(("end", "code"), [("3", 3), ("'words'", 1), ("0", 1), ("None", 1)])
def test_a_script_that_exits(tmp_path: Path, capsys: pytest.CaptureFixture[str], end: str, code: int) -> None:
    """Its own code where it says that it failed; else there is nothing to report, which is 1."""
    assert main(["bill", write(tmp_path, f"import sys\nsys.exit({end})\n")]) == code
    assert ("words" in capsys.readouterr().err) == (end == "'words'")


@pytest.mark.parametrize("command", [["explain"], ["bill"], ["trace"], ["trace", "-n", "2"], ["run", "-n", "2"]])
def test_a_missing_script_is_an_error(command: list[str], capsys: pytest.CaptureFixture[str]) -> None:
    assert main([*command, "/nowhere/script.py"]) == 2
    assert "no such script: /nowhere/script.py" in capsys.readouterr().err


@pytest.mark.parametrize("wrong", [[], ["bake"], ["bill"], ["run", "script.py"], ["bill", "a.py", "--nope"],
    *[["run", "-n", "1", "--timeout", v, "a.py"] for v in ("-1", "0", "nan", "inf", "x")],
    *[["doctor", "--links", "--limit", v] for v in ("-1", "0", "nan", "x")]])  # fmt: skip
def test_wrong_usage_shows_how_it_is_used(wrong: list[str], capsys: pytest.CaptureFixture[str]) -> None:
    with pytest.raises(SystemExit) as caught:
        main(wrong)
    assert caught.value.code == 2
    assert "usage: meshfuse" in capsys.readouterr().err


@pytest.mark.parametrize("command", [["run"], ["trace"], ["doctor", "--links"]])
@pytest.mark.parametrize("ranks", ["0", "-2"])
def test_no_ranks_are_an_error(
    command: list[str], ranks: str, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    script = [] if "--links" in command else [write(tmp_path, "print(1)\n")]
    own = ["--out", str(tmp_path / "traces")] if command == ["trace"] else []
    assert main([*command, "--ranks", ranks, *own, *script]) == 1
    assert f"meshfuse: wrong number of ranks: found {ranks}, needed 1 or more." in capsys.readouterr().err


def test_doctor_prints_a_report(capsys: pytest.CaptureFixture[str]) -> None:
    assert main(["doctor"]) == 0
    assert "Python" in capsys.readouterr().out


@pytest.mark.slow
def test_run_hands_its_arguments_to_the_launcher(tmp_path: Path) -> None:
    path = write(tmp_path, "import sys, os\nprint(sys.argv[1:], os.environ['WORLD_SIZE'])\nsys.exit(7)\n")
    command = [sys.executable, "-m", "meshfuse", "run", "--ranks", "1", path, "--mesh", "x"]
    done = subprocess.run(command, capture_output=True, text=True, timeout=60, env={"PYTHONPATH": SOURCE}, check=False)
    assert done.returncode == 7, done.stderr
    assert done.stdout == "['--mesh', 'x'] 1\n"


@pytest.mark.slow
@pytest.mark.parametrize("words", [["ops"], ["explain", "SCRIPT"]])
def test_who_stops_reading_gets_no_traceback(words: list[str], tmp_path: Path) -> None:
    """As of `meshfuse ops | head`."""
    lines = "for _ in range(3000): y = fd.ops.neg(y)"
    path = write(tmp_path, f"import meshfuse as mf\nfd = mf.FusionDefinition()\ny = fd.define_tensor([2])\n{lines}\n"
                           "fd.add_output(y)\nfd.compile()\n")  # fmt: skip
    command = [sys.executable, "-m", "meshfuse", *[path if word == "SCRIPT" else word for word in words]]
    with subprocess.Popen(
        command,
        stdout=subprocess.PIPE,
        stderr=subprocess.PIPE,
        text=True,
        env={"PYTHONPATH": SOURCE, "MESHFUSE_QUIET": "1"},
    ) as done:
        assert done.stdout is not None and done.stderr is not None
        done.stdout.close()
        assert (done.stderr.read(), done.wait(60)) == ("", 141)


def test_a_broken_pipe_of_the_script_is_shown_as_its_error(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    assert main(["explain", write(tmp_path, "raise BrokenPipeError('mine')\n")]) == 1
    assert "BrokenPipeError: mine" in capsys.readouterr().err


@pytest.mark.slow
def test_the_help_loads_no_torch() -> None:
    code = "import sys, meshfuse.cli as c\ntry:\n    c.main(['--help'])\n"
    code += "finally:\n    print('torch' in sys.modules)"
    done = subprocess.run(
        [sys.executable, "-c", code],
        capture_output=True,
        text=True,
        timeout=60,
        env={"PYTHONPATH": SOURCE},
        check=False,
    )
    assert done.stdout.rstrip().endswith("False"), done.stdout + done.stderr


def test_a_mesh_that_the_script_does_not_read_is_noted(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    """The bill is of the script's own mesh then, whatever was asked for."""
    deaf = write(tmp_path, SCRIPT.replace("parser.parse_args()", "parser.parse_args([])"))
    assert main(["bill", deaf, "--mesh", "tp=4"]) == 0
    assert "is on a mesh tp=4: --mesh is passed on to the script, which has DeviceMesh((2,)" in capsys.readouterr().err
    for heard in (["--mesh", "tp=2"], []):
        assert main(["bill", deaf, *heard]) == 0
        assert "is passed on" not in capsys.readouterr().err


MESHES = ["=,=", "", ",", "x", "x=", "=2", "x=a", "x=0", "x=-1", "x=2=3", "x=2,x=2", "x=2,", "x=1.5", "stream=2",
          "a:b=2", "x=" + "9" * 20, "x=" + "9" * 5000]  # fmt: skip


@pytest.mark.parametrize("mesh", MESHES)
@pytest.mark.parametrize("command", [["explain"], ["bill"], ["trace"], ["trace", "-n", "2"], ["doctor", "--links"]])
def test_a_malformed_mesh_is_an_error_before_anything_runs(
    command: list[str], mesh: str, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    script = [] if command[0] == "doctor" else [write(tmp_path, "print('it ran')\n")]
    with pytest.raises(SystemExit) as caught:
        main([*command, *script, f"--mesh={mesh}"])
    assert caught.value.code == 2
    printed = capsys.readouterr()
    assert "it ran" not in printed.out + printed.err
    assert re.search(r"argument --mesh: .*found .*, needed ", printed.err), printed.err
    assert "usage: meshfuse" in printed.err and len(printed.err) < 3000


@pytest.mark.parametrize("text", ["print(1", "x = ]", "\0"])
def test_a_script_that_is_no_python_is_shown_as_python_does(
    text: str, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    with pytest.raises((SyntaxError, ValueError)) as caught:  # Python 3.10 calls a NUL the latter
        compile(text, "script.py", "exec")
    assert main(["bill", write(tmp_path, text)]) == 1
    printed = capsys.readouterr().err
    assert caught.typename in printed and "cli.py" not in printed and "runpy" not in printed


def test_a_skipped_definition_is_reported_at_its_own_line(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    path = write(tmp_path, "import meshfuse as mf\nfd = mf.FusionDefinition()\nx = fd.define_tensor([-1])\n"
                 "fd.add_output(fd.ops.relu(x))\n")  # fmt: skip
    assert main(["bill", path]) == 1
    assert "(at other.py:3)" in capsys.readouterr().err


@pytest.mark.parametrize("words", [["--ranks", "3"], ["--mesh", "dp=2"]])
def test_what_the_doctor_would_not_look_at(words: list[str], capsys: pytest.CaptureFixture[str]) -> None:
    assert main(["doctor", *words]) == 2
    assert "add --links" in capsys.readouterr().err


@pytest.mark.parametrize("command", [["run"], ["trace"], ["doctor", "--links"]])
def test_more_ranks_than_a_machine_has_room_for(
    command: list[str], tmp_path: Path, capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.chdir(tmp_path)
    script = [] if command[0] == "doctor" else [write(tmp_path, "")]
    assert main([*command, "--ranks", str(10**11), *script]) == 1
    assert "wrong number of ranks: found 100000000000, needed at most 4096 on one machine" in capsys.readouterr().err


def test_words_that_no_process_can_be_given(tmp_path: Path, capfd: pytest.CaptureFixture[str]) -> None:
    assert main(["run", "--ranks", "2", write(tmp_path, ""), "x" * 10_000_000]) == 1
    assert "meshfuse: rank 0 of 2 cannot be started: found Argument list too long" in capfd.readouterr().err


@pytest.mark.parametrize("folder", ["/dev/null/traces", __file__, "/proc/self"])
def test_a_folder_that_no_trace_can_be_written_to(
    folder: str, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    assert main(["trace", "--ranks", "2", "--out", folder, write(tmp_path, "")]) == 1
    assert f"meshfuse: cannot write traces to {folder}: found" in capsys.readouterr().err


@pytest.mark.parametrize("folder", ["/dev/null/traces", __file__, "/proc/self"])
def test_traces_that_cannot_be_written_are_an_error_at_once(folder: str, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("MESHFUSE_TRACE", folder)
    recorder.cache_clear()
    with pytest.raises(meshfuse.ArgumentError, match=r"MESHFUSE_TRACE: found .*needed a folder.*\(at test_cli\.py:"):
        recorder(0)
