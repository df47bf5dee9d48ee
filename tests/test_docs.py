"""README, tutorial and the GPT example do what they say."""

from __future__ import annotations

import json
import os
import re
import subprocess
import sys
from pathlib import Path

import pytest

sys.path.insert(0, str(Path(__file__).parent / "ranks"))

import forked
from rank_pool import base_environment

import meshfuse as mf

ROOT = Path(__file__).parent.parent
GPT = ROOT / "examples/gpt/run.py"
BLOCK = re.compile(r"^```(\w*)\n(.*?)^```$", re.MULTILINE | re.DOTALL)


def run(*command: str, cwd: Path = ROOT) -> str:
    """What a command prints; its failure is the test's."""
    environment = {**os.environ, "MESHFUSE_LINKS": ""}
    done = subprocess.run(
        [sys.executable, *command], cwd=cwd, env=environment, capture_output=True, text=True, timeout=280
    )
    assert done.returncode == 0, f"{done.stdout[-2000:]}\n{done.stderr[-4000:]}"
    return done.stdout


def run_forked(folder: Path, script: Path, *words: str) -> str:
    """What a script prints whose process has imported torch before it begins: the one of README has not."""
    done = forked.finished([str(script), *words], base_environment(MESHFUSE_LINKS=""), folder, 280)
    assert done.returncode == 0, f"{done.stdout[-2000:]}\n{done.stderr[-4000:]}"
    return done.stdout


# Thunder's is run where Thunder is (tests/thunder), what checks an op beside the checks.
ELSEWHERE = ("thunder.md", "testing-an-op.md")
PAGES = [ROOT / "README.md", *sorted((ROOT / "docs").glob("*.md"))]
# Examples that import what they use; the others go on from something that their page has before.
EXAMPLES = [
    (page, place) for page in PAGES if page.name not in ELSEWHERE
    for place, (kind, text) in enumerate(BLOCK.findall(page.read_text()))
    if kind == "python" and text.startswith("import ")
]  # fmt: skip


@pytest.mark.slow
@pytest.mark.parametrize(("page", "place"), [pytest.param(*row, id=f"{row[0].name}-{row[1]}") for row in EXAMPLES])
def test_the_example_of_a_page_prints_what_the_page_shows(page: Path, place: int, tmp_path: Path) -> None:
    blocks = BLOCK.findall(page.read_text())
    kind, shown = blocks[place + 1]
    named = re.search(r"(\w+\.py):", shown)  # what the page calls it
    script = tmp_path / (named[1] if named else "example.py")
    script.write_text(blocks[place][1])
    printed = run(str(script), cwd=tmp_path) if page.name == "README.md" else run_forked(tmp_path, script)
    assert not kind and printed == shown


def test_the_readme_s_links_lead_somewhere() -> None:
    for page in [ROOT / "README.md", ROOT / "CONTRIBUTING.md", *(ROOT / "docs").glob("*.md")]:
        for target in re.findall(r"\]\(([^)#]+)\)", page.read_text()):
            assert (page.parent / target).exists() or target.startswith("http"), f"{page.name}: {target}"


NAMED = re.compile(r"\b(?:meshfuse|mf)((?:\.[A-Za-z_]\w*)+)")
NAMES = """
import functools, sys
import meshfuse
for path in sys.argv[1:]:
    functools.reduce(getattr, path.split("."), meshfuse)
"""


@pytest.mark.slow
def test_what_pages_and_docstrings_name_is_there_after_a_plain_import_of_meshfuse() -> None:
    """Modules come first, before a class loads them by the way."""
    pages = [ROOT / "README.md", ROOT / "CONTRIBUTING.md", *(ROOT / "docs").glob("*.md")]
    found = {name[1:] for page in pages for name in NAMED.findall(page.read_text())}
    quoted = re.compile(r"`(?:meshfuse|mf)((?:\.[A-Za-z_]\w*)+)")
    found |= {name[1:] for path in (ROOT / "meshfuse").rglob("*.py") for name in quoted.findall(path.read_text())}
    found -= {name for name in found if name.split(".")[0] == "thunder"}  # not installed; tests/thunder has them
    assert {"FusionDefinition", "nvfuser_direct", "testing.check_op", "costs.MACHINES"} <= found
    run("-c", NAMES, *sorted(found, key=str.swapcase))


def test_files_and_folders_that_pages_name_are_there() -> None:
    found = [path for path in ROOT.rglob("*") if path.suffix == ".py" or path.is_dir()]
    there = [f"/{path.relative_to(ROOT).as_posix()}{'/' * path.is_dir()}" for path in found]
    for page in [ROOT / "CONTRIBUTING.md", *(ROOT / "docs").glob("*.md")]:
        for target in re.findall(r"`(\w[\w/]*(?:\.py|/))`", page.read_text()):
            assert any(path.endswith(f"/{target}") for path in there), f"{page.name}: {target}"


def test_public_names_and_variables_are_on_a_page() -> None:
    pages = "\n".join(page.read_text() for page in [ROOT / "README.md", *(ROOT / "docs").glob("*.md")])
    assert not [name for name in mf.__all__ if not re.search(rf"\b{name}\b", pages)]
    source = "\n".join(path.read_text() for path in (ROOT / "meshfuse").rglob("*.py"))
    # The launcher gives these to the ranks that it starts.
    passed_on = {f"MESHFUSE_{name}" for name in ("FOLLOWER_CODE", "NEWS_FD", "STORE_FD", "STORE_PORT")}
    table = re.findall(r"^\| `(MESHFUSE_\w+)`", (ROOT / "docs/running.md").read_text(), re.MULTILINE)
    assert set(table) == set(re.findall(r"MESHFUSE_[A-Z_]+", source)) - passed_on


@pytest.mark.slow
def test_the_tutorial_runs(tmp_path: Path) -> None:
    printed = run_forked(tmp_path, ROOT / "examples/tutorial.py")
    assert printed.count("same as torch: True") == 2
    (title, bills) = re.findall(r"^--- 3\. ([^\n]*) ---\n(.*?)(?=^---)", printed, re.MULTILINE | re.DOTALL)[0]
    promised = re.findall(r"all-reduce|reduce-scatter", title)
    assert promised == re.findall(r"^all-reduce|^reduce-scatter", bills, re.MULTILINE)
    assert "argument 1" in printed.rsplit("---", 1)[1]


# Transformers takes seconds to be imported.
EACH_IN_A_PROCESS = """
import json, os, runpy, sys
import transformers.models.llama.modeling_llama
for words in json.loads(sys.argv[1]):
    child = os.fork()
    if not child:
        sys.argv, sys.path[0] = words, os.path.dirname(words[0])
        runpy.run_path(words[0], run_name="__main__")
        sys.exit()
    assert os.waitpid(child, 0)[1] == 0, words
    print("---", flush=True)
"""


@pytest.mark.slow
def test_the_llama_trains_and_writes_text(tmp_path: Path) -> None:
    folder = ROOT / "examples/llama"
    train = str(folder / "train.py"), "--steps", "2", "--batch", "4", "--checkpoint", str(tmp_path / "saved")
    commands = [
        [*train, "--mesh", "dp=2,tp=2", "--fsdp"], [*train, "--mesh", "tp=2"],
        [str(folder / "generate.py"), "--mesh", "tp=2", "--count", "4"],
    ]  # fmt: skip
    script = tmp_path / "each_in_a_process.py"
    script.write_text(EACH_IN_A_PROCESS)
    first, again, generated = run_forked(tmp_path, script, json.dumps(commands)).split("---\n")[:-1]
    losses = [float(found) for found in re.findall(r"step [13]: loss ([\d.]+)", first + again)]
    assert "resumed" not in first and "resumed at step 2" in again
    assert len(losses) == 2 and max(losses) < 3  # of 5.5 before any training
    assert "The mesh" in generated


@pytest.mark.models
@pytest.mark.parametrize(("name", "family"), [
    ("gpt2", "host: pipeline of 2 stages"), ("moe", "host: pipeline of 2 stages"), ("wide_resnet", "host: data"),
])  # fmt: skip
def test_models_are_planned_for_a_cluster_file_and_train(name: str, family: str, tmp_path: Path) -> None:
    printed = run_forked(tmp_path, ROOT / f"examples/auto/{name}.py", "--steps", "2")
    losses = [float(found) for found in re.findall(r"step [01]: loss ([\d.]+)", printed)]
    assert printed.startswith(family) and len(losses) == 2 and losses[1] < losses[0]


@pytest.mark.slow
@pytest.mark.parametrize("mesh", ["tp=4", "dp=2,tp=2", "sp=4", "tp=3"])
def test_the_gpt_reads_as_unsharded_torch_does(mesh: str, tmp_path: Path) -> None:
    printed = run_forked(tmp_path, GPT, "--mesh", mesh, "--steps", "2", "--generate", "4")
    difference = re.search(r"largest difference from unsharded torch: (\S+) relative", printed)
    assert difference is not None
    assert float(difference.group(1)) <= 1e-5
    assert "In the beginning of t" in printed


@pytest.mark.slow
def test_the_gpt_compiles_for_256_ranks(tmp_path: Path) -> None:
    printed = run_forked(tmp_path, GPT, "--mesh", "dp=32,tp=8", "--batch", "64", "--compile-only")
    assert "256 programs" in printed
    assert "verified together" in printed


@pytest.mark.slow
def test_importing_meshfuse_loads_neither_torch_nor_nvfuser() -> None:
    check = "import sys, meshfuse; print([m for m in ('torch', 'nvfuser_direct', 'numpy') if m in sys.modules])"
    assert run("-c", check).strip() == "[]"


def test_the_example_of_a_session_serves_and_survives(tmp_path: Path) -> None:
    printed = run_forked(tmp_path, ROOT / "examples/session/serve.py")
    assert printed.startswith("<ProcessSession of 4 workers>\nworker 1 holds (64, 64) of (256, 64)\n")
    assert "worker 2 raised ValueError: a bug on worker 2" in printed and printed.endswith("still serving\n")
