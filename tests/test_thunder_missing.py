"""Without Lightning Thunder `mf.thunder` says what to install; with newer versions of torch Thunder finds its names."""

from __future__ import annotations

import importlib.util

import pytest
import torch

import meshfuse as mf

NEEDS = (
    "mf.thunder: found no package thunder, needed Lightning Thunder 0.2.6. Run `pip install lightning-thunder==0.2.6`, "
    "or install meshfuse with the extra `thunder`. (at test_thunder_missing.py:"
)


def test_the_error_says_what_to_install() -> None:
    """In the environment of the main suite, which has no Thunder."""
    found = importlib.util.find_spec("thunder")  # the folder tests/thunder, which is no package
    assert found is None or found.origin is None
    with pytest.raises(ImportError) as error:
        importlib.import_module("meshfuse.thunder")
    assert isinstance(error.value, mf.MeshfuseError) and str(error.value).startswith(NEEDS)
    with pytest.raises(ImportError, match=r"pip install lightning-thunder==0\.2\.6"):
        _ = mf.thunder
    assert "thunder" not in dir(mf)


def test_names_that_torch_no_longer_has_are_there_while_thunder_is_imported() -> None:
    spec = importlib.util.spec_from_file_location("meshfuse_installed", f"{mf.__path__[0]}/thunder/installed.py")
    assert spec is not None and spec.loader is not None
    installed = importlib.util.module_from_spec(spec)
    installed.__package__ = "meshfuse.thunder"
    source = (spec.loader.get_source("meshfuse_installed") or "").replace("from ..errors", "from meshfuse.errors")
    exec(compile(source, "installed.py", "exec"), vars(installed))
    before = [name for name in installed.GONE if hasattr(torch.Tensor, name)]
    with installed.with_missing_names():
        for name in installed.GONE:
            assert getattr(torch.Tensor, name).__name__ == name
        if "rename" not in before:
            with pytest.raises(NotImplementedError, match=r"torch\.Tensor\.rename: named tensors are no part of"):
                torch.ones(2).rename("a")
    assert [name for name in installed.GONE if hasattr(torch.Tensor, name)] == before
