"""The `meshfuse` command: run a script on ranks, ask what a script decides, or look at the machine.

`explain`, `bill` and `trace` run the script in this process, on simulated ranks, with the script's own output on
stderr, and then print what was decided for every definition that it made. torch is loaded only where a script loads it.
"""

from __future__ import annotations

import argparse
import contextlib
import importlib
import io
import json
import os
import runpy
import signal
import sys
import traceback
from collections.abc import Callable, Sequence
from types import TracebackType
from typing import TYPE_CHECKING, Any

from .errors import DefinitionError, MeshfuseError, file_name, user_error
from .mesh import DeviceMesh, mesh_of_text
from .runtime import doctor, launcher
from .runtime.output import complete_standard_files
from .version import __version__
from .whole_files import write_whole

if TYPE_CHECKING:
    from .compiler import CompiledProgram
    from .fusion_definition import FusionDefinition

# Seconds that ranks which measure may need besides measuring: to start, connect and end.
_STARTING = 60.0
_OWN_FRAMES = (os.path.abspath(__file__), runpy.__file__, "<frozen runpy>")


def main(argv: Sequence[str] | None = None) -> int:
    """Run a command line (by default sys.argv's); returns the exit code. Wrong usage raises SystemExit."""
    own, script_args = _parts(list(sys.argv[1:] if argv is None else argv))
    if own and own[0].endswith(".json"):
        own = ["serve", *own]
    parser = _parser()
    args, unknown = parser.parse_known_args(own)
    if unknown:
        hint = "; the script's own come after --" if "script" in args else ""
        parser.error(f"unrecognized arguments: {' '.join(unknown)}{hint}")
    if script_args is not None:
        args.script_args = script_args
    complete_standard_files()
    if isinstance(sys.stdout, io.TextIOWrapper):
        sys.stdout.reconfigure(errors="backslashreplace")  # A terminal may lack the letters of the user's names.
    try:
        code = args.command(args)
        print(end="", flush=True)  # does nothing where there is no stdout
        return code
    except MeshfuseError as error:
        print(f"meshfuse: {error}", file=sys.stderr)
        return 1
    except OSError as error:  # A script's own errors do not come here.
        return _unwritten(error)


def _unwritten(error: OSError) -> int:
    """The exit code where the output of a command cannot be written."""
    with contextlib.suppress(OSError, AttributeError):
        os.dup2(
            os.open(os.devnull, os.O_WRONLY), sys.stdout.fileno()
        )  # Python writes what is left in the buffer there when it ends
    if isinstance(error, BrokenPipeError):  # Nobody reads our output any more, as of `head`.
        return 128 + signal.SIGPIPE
    found = f"found {error.strerror or error}, needed room and a file to write to"
    print(f"meshfuse: what the command says cannot be written: {found}.", file=sys.stderr)
    return 1


def _parts(argv: list[str]) -> tuple[list[str], list[str] | None]:
    """The command's own arguments; for commands that report on a script, also those of the script, after `--`."""
    if not argv or argv[0] not in ("explain", "bill", "trace") or "--" not in argv:
        return argv, None
    cut = argv.index("--")
    return argv[:cut], argv[cut + 1 :]


def _parser() -> argparse.ArgumentParser:
    parser = argparse.ArgumentParser(prog="meshfuse", description="Sharded programs from annotated definitions.")
    parser.add_argument("--version", action="version", version=f"meshfuse {__version__}")
    commands = parser.add_subparsers(title="commands", required=True, metavar="COMMAND")
    run = commands.add_parser("run", help="run a script as several ranks on this machine")
    launcher.add_arguments(run)
    run.set_defaults(command=launcher.main)
    explain = _script_command(commands, "explain", "why a script's tensors are sharded as they are")
    explain.add_argument("--tensor", metavar="NAME", help="one tensor, by its variable or number (x, t3); else a table")
    explain.set_defaults(command=_explain)
    bill = _script_command(commands, "bill", "the bytes that a script's ranks put on the wire")
    bill.add_argument("--why", action="store_true", help="what is behind every collective, and its runner-up (slow)")
    bill.add_argument("--json", metavar="FILE", help="write JSON, one bill per definition (- prints it)")
    bill.add_argument("--memory", action="store_true", help="the most bytes that a rank holds at once, too")
    bill.add_argument("--html", metavar="FILE", help="write one page of graph, timeline and bill, for a browser")
    bill.set_defaults(command=_bill)
    trace = _script_command(commands, "trace", "when a script's ranks compute, communicate and wait")
    trace.add_argument("--ranks", "-n", type=int, help="measure on so many processes of this machine; else modelled")
    trace.add_argument("--out", metavar="DIR", default="traces", help="a Perfetto file per rank goes here (traces)")
    trace.set_defaults(command=_trace)
    ops = commands.add_parser("ops", help="the ops that fd.ops has, and what sharding their dims does")
    ops.add_argument("name", metavar="NAME", nargs="?", help="one op; a line for each without")
    ops.set_defaults(command=_ops)
    _doctor_command(commands)
    serve = commands.add_parser("serve", help="serve programs of clients on a cluster's workers")
    serve.add_argument("cluster", metavar="CLUSTER.json", help="the machines, as mf.Cluster.load reads them")
    serve.add_argument("--node", type=int, help="which of its machines this is (0: the controller's); by its address")
    serve.add_argument("--timeout", type=launcher.seconds, default=60.0, help="seconds that a call may take (60)")
    serve.set_defaults(command=_serve)
    return parser


def _script_command(commands: Any, name: str, text: str) -> argparse.ArgumentParser:
    command = commands.add_parser(name, help=text, description=f"Print {text}.")
    command.add_argument("script", metavar="SCRIPT", help="a Python script that makes FusionDefinitions")
    command.add_argument(
        "--mesh", type=_mesh, metavar="dp=2,tp=4", help="passed on to the script, which must read a --mesh"
    )
    command.set_defaults(script_args=[])
    command.epilog = "The script's own arguments come after --."
    return command


def _mesh(text: str) -> str:
    """An argument that must be the text of a mesh."""
    try:
        mesh_of_text(text)
    except MeshfuseError as error:
        error.where = None  # no line of a script asked for it
        raise argparse.ArgumentTypeError(str(error)) from None
    return text


def _doctor_command(commands: Any) -> None:
    look = commands.add_parser(
        "doctor", help="what of torch, CUDA, gloo, NCCL and nvFuser is there, and what that means"
    )
    look.add_argument("--links", action="store_true", help="measure how fast the axes of a mesh are, on real ranks")
    look.add_argument("--ranks", type=int, help="with --links: how many to start here; a launcher's else (4)")
    look.add_argument(
        "--mesh", type=_mesh, metavar="dp=2,tp=4", help="with --links: the axes; one of all ranks without"
    )
    look.add_argument(
        "--limit", type=launcher.seconds, default=20.0, help="with --links: begin nothing after so many seconds (20)"
    )
    look.set_defaults(command=_doctor)


def _doctor(args: argparse.Namespace) -> int:
    if not args.links and (args.ranks is not None or args.mesh is not None):
        print("meshfuse doctor: --ranks and --mesh say what --links measures: add --links", file=sys.stderr)
        return 2
    if not args.links:
        print(doctor.report())
        return 0
    words = ["--limit", str(args.limit), *([f"--mesh={args.mesh}"] if args.mesh else [])]
    if doctor.read_environment().size > 1:
        return importlib.import_module("meshfuse.runtime.link_probe").main(words)
    ranks = 4 if args.ranks is None else args.ranks
    return launcher.run(ranks, ["-m", "meshfuse.runtime.link_probe", *words], timeout=args.limit + _STARTING)


def _serve(args: argparse.Namespace) -> int:
    return importlib.import_module("meshfuse.session.server").main(args.cluster, args.node, args.timeout)


def _ops(args: argparse.Namespace) -> int:
    namespaces = importlib.import_module("meshfuse.definition.namespaces")
    try:
        print(namespaces.listing() if args.name is None else namespaces.help_of(args.name))
    except DefinitionError as error:
        error.where = None  # no line of a script asked for it
        raise
    return 0


def _explain(args: argparse.Namespace) -> int:
    explain = importlib.import_module("meshfuse.report.explain")

    def one(compiled: CompiledProgram) -> str:
        if args.tensor is None:
            return explain.explain_all(compiled)
        return explain.explain_tensor(compiled, explain.tensor_named(compiled, args.tensor))

    return _report(args, lambda programs: "\n\n".join(map(one, programs)))


def _bill(args: argparse.Namespace) -> int:
    bill = importlib.import_module("meshfuse.report.bill")

    def text(programs: list[CompiledProgram]) -> str:
        bills = [bill.bill_of(compiled, args.why) for compiled in programs]
        written = json.dumps([b.to_dict() for b in bills], indent=1)
        if args.html is not None:
            page = importlib.import_module("meshfuse.report.page")
            _write(args.html, page.page(programs, file_name(args.script), args.why))
        if args.json == "-":
            return written
        if args.json is not None:
            _write(args.json, written + "\n")
        parts = [f"{b}\n\n{b.details()}" if args.why and b.entries else str(b) for b in bills]
        if args.memory:
            memory = importlib.import_module("meshfuse.report.memory")
            parts = [f"{p}\n\n{memory.modelled_memory(compiled)}" for p, compiled in zip(parts, programs, strict=True)]
        if args.html is not None:
            parts.append(f"page: {os.path.abspath(args.html)}")
        return "\n\n".join(parts)

    return _report(args, text)


def _trace(args: argparse.Namespace) -> int:
    trace = importlib.import_module("meshfuse.report.trace")
    if args.ranks is None:
        return _report(args, lambda programs: trace.modelled(programs, args.out))
    if not os.path.isfile(args.script):
        print(f"meshfuse: no such script: {args.script}", file=sys.stderr)
        return 2
    mesh = ["--mesh", args.mesh] if args.mesh is not None else []
    folder = trace.empty_folder(args.out)
    os.environ[importlib.import_module("meshfuse.executor.record").VARIABLE] = folder
    code = launcher.run(args.ranks, [args.script, *mesh, *args.script_args])
    if not code:
        print(trace.measured(folder))
    return code


def _write(path: str, text: str) -> None:
    """Write a file. Raises DefinitionError where that cannot be done."""
    try:
        if os.path.isfile(path) or not os.path.exists(path):
            write_whole(os.path.realpath(path), text.encode())
        else:  # A pipe, or a terminal.
            with open(path, "w", encoding="utf-8") as file:
                file.write(text)
    except OSError as error:
        raise user_error(f"cannot write {path}", error.strerror or str(error), "a path that can be written") from None


def _report(args: argparse.Namespace, text: Callable[[list[CompiledProgram]], str]) -> int:
    """Run the script, then print the `text` of its programs."""
    if not os.path.isfile(args.script):
        print(f"meshfuse: no such script: {args.script}", file=sys.stderr)
        return 2
    definitions: list[FusionDefinition] = []
    code = _run_script(args, definitions)
    if code:
        return code
    programs = [program for fd in definitions if (program := _program(fd)) is not None]
    if not programs:
        print(f"meshfuse: {args.script} has made no FusionDefinition that is compiled", file=sys.stderr)
        return 1
    _note_other_mesh(args, programs)
    print(text(programs))
    return 0


def _note_other_mesh(args: argparse.Namespace, programs: list[CompiledProgram]) -> None:
    """Print a note if no program is on the mesh that was asked for: the script decides, and may not read `--mesh`."""
    wanted = None if args.mesh is None else mesh_of_text(args.mesh)
    meshes = {s.mesh for program in programs for s in program.graph.annotations.values()}
    if wanted and _axes(wanted) not in map(_axes, meshes):
        print(f"meshfuse: nothing in {args.script} is on a mesh {args.mesh}: --mesh is passed on to the script, which "
              f"has {', '.join(sorted(map(str, meshes))) or 'no mesh'}", file=sys.stderr)  # fmt: skip


def _axes(mesh: DeviceMesh) -> dict[str, int]:
    return dict(zip(mesh.names, mesh.shape, strict=True))


def _program(fd: FusionDefinition) -> CompiledProgram | None:
    """The definition's latest program. A definition that never ran is compiled here, if its sizes are fixed."""
    if not fd.recording.outputs:
        return None
    try:
        return fd.latest()
    except DefinitionError as error:
        lines = [tensor.line for tensor in fd.recording.tensors]
        if error.where is None or error.where.file not in {line.file for line in lines}:
            error.where = lines[0]  # of the script, which did not ask for this
        print(f"meshfuse: a definition that the script did not run is left out: {error}", file=sys.stderr)
        return None


def _run_script(args: argparse.Namespace, definitions: list[FusionDefinition]) -> int:
    """Run the script as `python SCRIPT ARGS` would; its exit code.

    An error is shown with the script's own frames.
    """
    mesh = ["--mesh", args.mesh] if args.mesh is not None else []
    sys.argv = [args.script, *mesh, *args.script_args]
    sys.path.insert(0, os.path.dirname(os.path.abspath(args.script)))
    observers = importlib.import_module("meshfuse.fusion_definition").observers
    try:
        observers.append(definitions.append)
        with contextlib.redirect_stdout(sys.stderr):
            runpy.run_path(args.script, run_name="__main__")
    except SystemExit as end:
        return _exit_code(end.code)
    except Exception as error:
        traceback.print_exception(error.with_traceback(_own_part(error.__traceback__)))
        return 1
    finally:
        if definitions.append in observers:  # else Ctrl-C came first
            observers.remove(definitions.append)
        sys.path.pop(0)
    return 0


def _exit_code(code: Any) -> int:
    """The exit code by which Python would end: 0 for None, 1 for a text, which it prints."""
    if code is None or isinstance(code, int):
        return code or 0
    print(code, file=sys.stderr)
    return 1


def _own_part(trace: TracebackType | None) -> TracebackType | None:
    """The part of a traceback from the script's first frame on; None where the script did not begin."""
    here = trace
    while here is not None and here.tb_frame.f_code.co_filename in _OWN_FRAMES:
        here = here.tb_next
    return here
