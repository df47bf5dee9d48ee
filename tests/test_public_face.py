"""What `meshfuse` shows to whoever looks at it: its names, its version, and nothing by accident."""

from __future__ import annotations

import importlib.metadata
import subprocess
import sys
import types

import pytest

import meshfuse as mf
from meshfuse import cli


@pytest.mark.slow
def test_dir_shows_the_public_names_and_no_module_by_accident() -> None:
    shown = [name for name in dir(mf) if not name.startswith("_")]
    assert {*mf.__all__} <= {*shown} and 25 <= len(shown) <= 48
    modules = {name for name in shown if isinstance(getattr(mf, name), types.ModuleType)}
    assert modules == {"costs", "host_programs", "nvfuser_direct", "session", "testing"}
    script = "import meshfuse; print(*[n for n in dir(meshfuse) if n[0] != '_'])"
    fresh = subprocess.run([sys.executable, "-c", script], capture_output=True, text=True, check=True, timeout=120)
    assert fresh.stdout.split() == shown


def test_the_version_is_one_everywhere(capsys: pytest.CaptureFixture[str]) -> None:
    with pytest.raises(SystemExit) as ended:
        cli.main(["--version"])
    assert ended.value.code == 0 and capsys.readouterr().out == f"meshfuse {mf.__version__}\n"
    found = importlib.metadata.metadata("meshfuse")
    assert found["Version"] == mf.__version__
    assert found["Keywords"] and any("Typed" in text for text in found.get_all("Classifier") or ())


# What users call, and `recording`, in which tools read what a script has written.
CALLS = [
    "add_output", "auto", "backends", "bill", "call", "compile", "define_scalar", "define_tensor", "define_vector",
    "execute", "explain", "from_pytorch", "fusion", "grad", "host_program", "latest", "latest_backward",
    "max_memory", "max_wire", "memory", "mesh_split", "ops", "output_shardings", "overlap", "pipeline", "prepared",
    "recording", "shard", "show", "simulate", "size", "stationary", "stop_gradient", "units",
]  # fmt: skip


def test_a_definition_shows_what_users_call() -> None:
    assert [name for name in dir(mf.FusionDefinition()) if not name.startswith("_")] == CALLS


def test_nvfusers_definition_shows_its_calls_beside_meshfuses() -> None:
    more = {
        "fec", "ke", "last_repro_script", "manual_execute", "manual_validate", "repro_script_for", "sched", "validate",
        "validate_definition",
    }  # fmt: skip
    shown = {name for name in dir(mf.nvfuser_direct.FusionDefinition) if not name.startswith("_")}
    assert shown | {"ops", "recording", "sched"} == {*CALLS, *more}
