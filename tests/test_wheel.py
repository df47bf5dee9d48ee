"""The wheel and the archive of sources, installed into an empty environment of each Python that this machine has."""

from __future__ import annotations

import os
import re
import shutil
import subprocess
import sys
import tarfile
import zipfile
from pathlib import Path
from typing import Any

import pytest

ROOT = Path(__file__).parent.parent
SUPPORTED = re.findall(r"Python :: (3\.\d+)", (ROOT / "pyproject.toml").read_text())
TRACKED = subprocess.run(["git", "ls-files"], cwd=ROOT, capture_output=True, text=True, check=True).stdout.splitlines()
FILES = [name for name in TRACKED if name.startswith("meshfuse/")]


def python_of(version: str) -> str | None:
    """An interpreter of this version: this one, one of pyenv's, or one on PATH."""
    if version == f"{sys.version_info[0]}.{sys.version_info[1]}":
        return sys.executable
    pyenv = Path(os.environ.get("PYENV_ROOT") or Path.home() / ".pyenv")
    found = [*sorted(pyenv.glob(f"versions/{version}.*/bin/python{version}")), shutil.which(f"python{version}")]
    works = (str(p) for p in found if p and subprocess.run([p, "-c", ""], capture_output=True).returncode == 0)
    return next(works, None)


def said(*command: Any, cwd: Path | None = None) -> str:
    done = subprocess.run([*map(str, command)], cwd=cwd, capture_output=True, text=True, timeout=240)
    assert done.returncode == 0, done.stdout + done.stderr
    return done.stdout


@pytest.fixture(scope="module")
def built(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """The folder with the archive of sources of a copy of the tracked files, and the wheel that is built of it."""
    folder = tmp_path_factory.mktemp("dist")
    copy = folder / "copy"
    for name in TRACKED:
        if (ROOT / name).exists():
            (copy / name).parent.mkdir(parents=True, exist_ok=True)
            shutil.copy(ROOT / name, copy / name)
    backend = "import sys, setuptools.build_meta as b; b.build_sdist(sys.argv[1])"
    said(sys.executable, "-c", backend, folder, cwd=copy)
    (source,) = folder.glob("*.tar.gz")
    said(sys.executable, "-m", "pip", "wheel", "--no-deps", "--no-build-isolation", "--no-index", "-w", folder, source)
    return folder


def test_archive_and_wheel_have_every_file_of_the_package(built: Path) -> None:
    with tarfile.open(next(built.glob("*.tar.gz"))) as source:
        inside = {name.partition("/")[2] for name in source.getnames()}
    assert {*FILES, "README.md", "LICENSE", "pyproject.toml"} <= inside
    with zipfile.ZipFile(next(built.glob("*.whl"))) as wheel:
        packed = [name for name in wheel.namelist() if ".dist-info/" not in name]
    assert sorted(packed) == sorted(FILES)


# The oldest and the newest; `make test-all` has those between.
@pytest.mark.parametrize("version", [pytest.param(version, marks=() if version in (SUPPORTED[0], SUPPORTED[-1])
                                                  else pytest.mark.sampled) for version in SUPPORTED])  # fmt: skip
def test_the_wheel_alone_says_what_is_missing(built: Path, tmp_path: Path, version: str) -> None:
    """No torch, no numpy: the command answers, and the package imports."""
    python = python_of(version)
    if python is None:
        pytest.skip(f"no Python {version} on this machine; the public workflow has it")
    said(python, "-m", "venv", tmp_path / "empty")
    inside = tmp_path / "empty" / "bin"
    said(inside / "pip", "install", "--no-deps", "--no-index", next(built.glob("*.whl")))
    said(inside / "python", "-m", "compileall", "-q", next(tmp_path.glob("empty/lib/python*/site-packages/meshfuse")))
    assert said(inside / "meshfuse", "--version").startswith("meshfuse ")
    rows = said(inside / "meshfuse", "doctor")
    assert re.search(rf"Python +{re.escape(version)}\.\d+ +fine", rows)
    assert re.search(r"torch +none +programs can be planned but not run: install it", rows)
    assert said(inside / "python", "-c", "import meshfuse; print(meshfuse.__version__)", cwd=tmp_path).strip()
