"""The nvFuser backend without nvFuser: nothing imports it unasked, and an error names the wheel that fits."""

from __future__ import annotations

import importlib
import platform
import subprocess
import sys

import pytest

from meshfuse.backends.nvfuser import NvfuserMissing

loading = importlib.import_module("meshfuse.backends.nvfuser.load")
IMPORTS = """
import sys, {module}
assert not [name for name in sys.modules if name.partition(".")[0] in {unwanted!r}]
"""


@pytest.mark.slow
@pytest.mark.parametrize(
    ("module", "unwanted"),
    [("meshfuse", ("torch", "nvfuser_direct")), ("meshfuse.backends.nvfuser", ("nvfuser_direct",))],
)
def test_nothing_is_imported_unasked(module: str, unwanted: tuple[str, ...]) -> None:
    script = IMPORTS.format(module=module, unwanted=unwanted)
    subprocess.run([sys.executable, "-c", script], check=True, timeout=120)


@pytest.fixture
def fitting(monkeypatch: pytest.MonkeyPatch) -> pytest.MonkeyPatch:
    """A machine, Python and torch that nvFuser has wheels for."""
    monkeypatch.setattr(loading.sys, "platform", "linux")
    monkeypatch.setattr(loading.sys, "version_info", (3, 12, 1))
    monkeypatch.setattr(platform, "machine", lambda: "x86_64")
    monkeypatch.setattr(loading, "_torch_version", lambda: "2.10.0+cu128")
    monkeypatch.setattr(loading, "_torch_cuda", lambda: "12.8")
    loading.load_nvfuser.cache_clear()
    return monkeypatch


def _refusal() -> str:
    with pytest.raises(NvfuserMissing) as caught:
        loading.load_nvfuser()
    return str(caught.value)


def test_a_python_without_wheels_is_refused(fitting: pytest.MonkeyPatch) -> None:
    fitting.setattr(loading.sys, "version_info", (3, 11, 4))
    assert "needed Python 3.10 or 3.12. Install torch 2.10 with nvfuser-cu128-torch210" in _refusal()


def test_another_torch_is_refused(fitting: pytest.MonkeyPatch) -> None:
    fitting.setattr(loading, "_torch_version", lambda: "2.13.0+cpu")
    fitting.setattr(loading, "_torch_cuda", lambda: "")
    assert "found torch 2.13.0+cpu, needed torch 2.10" in _refusal()
    assert "nvfuser-cu128-torch210 or nvfuser-cu130-torch210" in _refusal()


@pytest.mark.parametrize(
    "given, launcher, then",
    [
        ("", "", ""), ("", "RANK", "multidevice"), ("kernel_reuse", "OMPI_COMM_WORLD_RANK", "kernel_reuse,multidevice"),
        ("multidevice", "SLURM_PROCID", "multidevice"), ("kernel_reuse", "", "kernel_reuse"),
    ],
)  # fmt: skip
def test_nvfusers_own_communicator_is_off_in_ranks(
    fitting: pytest.MonkeyPatch, given: str, launcher: str, then: str
) -> None:
    for name in ("RANK", "OMPI_COMM_WORLD_RANK", "SLURM_PROCID"):
        fitting.delenv(name, raising=False)
    fitting.setenv("NVFUSER_DISABLE", given)
    if launcher:
        fitting.setenv(launcher, "0")
    fitting.delitem(sys.modules, "nvfuser_direct", raising=False)
    fitting.setattr(loading.importlib, "import_module", lambda name: type(sys)(name))
    _refusal()
    assert loading.os.environ["NVFUSER_DISABLE"] == then


@pytest.mark.parametrize("cuda, refused", [("13.0", "cannot be imported"), ("12.8", "fits another torch")])
def test_the_next_torch_with_the_wheel_before_its_own(fitting: pytest.MonkeyPatch, cuda: str, refused: str) -> None:
    """With CUDA 13 it is tried, and the error says what is to be preloaded."""
    fitting.setattr(loading, "_torch_version", lambda: "2.11.0+cu130")
    fitting.setattr(loading, "_torch_cuda", lambda: cuda)
    fitting.setitem(sys.modules, "nvfuser_direct", None)
    message = _refusal()
    assert refused in message and ("LD_PRELOAD" in message) == ("cannot" in refused)
    fitting.setitem(sys.modules, "nvfuser_direct", module := type(sys)("nvfuser_direct"))
    module.__version__ = "0.2.36+git7e04d26"  # type: ignore[attr-defined]
    if cuda == "13.0":
        assert loading.load_nvfuser() is module
    else:
        assert refused in _refusal()


def test_another_machine_is_refused(fitting: pytest.MonkeyPatch) -> None:
    fitting.setattr(platform, "machine", lambda: "aarch64")
    assert "found linux aarch64, needed Linux x86_64" in _refusal()


def test_a_missing_nvfuser_is_refused(fitting: pytest.MonkeyPatch) -> None:
    fitting.setitem(sys.modules, "nvfuser_direct", None)
    fitting.setattr(loading, "_torch_cuda", lambda: "13.0")
    assert "cannot be imported" in _refusal()
    assert "nvfuser-cu130-torch210" in _refusal()


def test_another_version_of_nvfuser_is_refused(fitting: pytest.MonkeyPatch) -> None:
    other = type(sys)("nvfuser_direct")
    other.__version__ = "0.2.20+git0"  # type: ignore[attr-defined]
    fitting.setitem(sys.modules, "nvfuser_direct", other)
    assert "is of another version: found 0.2.20+git0, needed 0.2.36" in _refusal()
