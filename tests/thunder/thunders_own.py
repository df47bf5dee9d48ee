"""Thunder's own distributed tests on two gloo ranks, without meshfuse's executor and with it: `python thunders_own.py`.

They are written for NCCL and GPUs. This copies them from the installed package into a folder, changes what says so, and
runs them with pytest twice. It prints a table of what passed where; arguments go to pytest (`-k ddp`).
"""

from __future__ import annotations

import os
import re
import subprocess
import sys
import tempfile
from collections import defaultdict
from pathlib import Path

FILES = ("test_ddp", "test_fsdp", "test_tensor_parallel", "test_dtensor", "test_checkpoint", "test_ops")
CHANGES = (
    (r"@unittest\.skipUnless\((?:[^()]|\([^()]*\))*\)\n", ""),
    (r" *@pytest\.mark\.skipif\(torch\.cuda\.device_count\(\) < 2.*\n", ""),
    (r'torch\.device\(f?"cuda(?::\{self\.rank\})?"(?:, self\.rank)?\)', 'torch.device("cpu")'),
    (r'f"cuda:\{self\.rank\}"', '"cpu"'),
    (r'"cuda"', '"cpu"'),
    (r'"nccl"', '"gloo"'),
    (r"\.to\(self\.rank\)", '.to("cpu")'),
    (r", device_ids=\[self\.rank\]", ""),
    (r"torch\.cuda\.get_device_capability\(\)", "(0, 0)"),
    (r"min\(torch\.cuda\.device_count\(\), 2\)", "2"),
    (r"local_rank = self\.rank % torch\.cuda\.device_count\(\)", "local_rank = self.rank"),
    (r" *torch\.cuda\.set_device\(.*\)\n", ""),
    # A job of meshfuse's ranks has a port: without one, tests of one process would be one job after the other.
    (r'( +)(os\.environ\["RANK"\] = .*\n)', r'\1\2\1os.environ["MASTER_ADDR"] = "127.0.0.1"\n'
     r'\1os.environ["MASTER_PORT"] = str(20000 + __import__("zlib").crc32(self.file_name.encode()) % 20000)\n'),
    (r"thunder\.tests\.distributed\.helper", "helper"),
    (r"thunder\.tests\.distributed\.modules", "modules"),
)  # fmt: skip
# Where the package itself says that a device is a GPU, and the executor in front of the default ones.
PATCHES = """
import os
import torch
import thunder
import thunder.distributed as _dist
import thunder.distributed.tensor_parallel.common as _common
import thunder.distributed.checkpoint as _checkpoint
import thunder.distributed.transforms.fsdp_v2 as _fsdp
import thunder.transforms.materialization as _materialization
_common.TransformForTensorParallel.__post_init__ = lambda self: setattr(self, "device", torch.device("cpu"))
def _on_cpu(init):
    def changed(self, *args, **named):
        init(self, *args, **named)
        self.device = torch.device("cpu")
    return changed
for _kind in (_fsdp.FSDPTransform, _materialization.MaterializationTransform):
    _kind.__init__ = _on_cpu(_kind.__init__)
if hasattr(_checkpoint, "init_device_mesh"):
    _mesh = _checkpoint.init_device_mesh
    _checkpoint.init_device_mesh = lambda device, *args, **named: _mesh("cpu", *args, **named)
if os.environ.get("WITH_MESHFUSE"):
    import meshfuse.thunder
    _ours = meshfuse.thunder.executor()
    thunder.extend.add_default_executor(_ours)
"""
# In the place of the names of Thunder's executors in tests with a list of these.
EXECUTORS = """
if os.environ.get("WITH_MESHFUSE"):
    for _executor in executors_map.values():
        _list = _executor.executors_list()
        _executor.executors_list = lambda found=_list: [_ours, *found]
"""
CONFTEST = """
import pytest
import torch

@pytest.fixture
def turn_off_tf32_and_set_seed():
    torch.manual_seed(42)
"""
EXPECTTEST = "import unittest\nclass TestCase(unittest.TestCase):\n    pass\n"


def write_ported(folder: Path) -> None:
    """The ported files, a fixture of theirs, and a stand-in for a package that they import and do not use."""
    import thunder.tests.distributed as package

    source = Path(package.__file__).parent
    (folder / "expecttest.py").write_text(EXPECTTEST)
    (folder / "conftest.py").write_text(CONFTEST)
    for name in ("helper", "modules", *FILES):
        text = (source / f"{name}.py").read_text()
        for pattern, new in CHANGES:
            text = re.sub(pattern, new, text)
        if name == "helper":
            text = text.replace("import torch\n", f"import torch\n{PATCHES}", 1)
            text = text.replace("\n\ndef new_gelu", f"\n{EXECUTORS}\n\ndef new_gelu", 1)
        (folder / f"{name}.py").write_text(text)


def outcomes(folder: Path, with_meshfuse: bool, words: list[str]) -> dict[str, str]:
    """By test what came of it."""
    env = {**os.environ, "PYTHONPATH": os.pathsep.join([str(folder), str(Path(__file__).parents[2])]),
           "OMP_NUM_THREADS": "1", "GLOO_SOCKET_IFNAME": "lo"}  # fmt: skip
    env |= {"WITH_MESHFUSE": "1"} if with_meshfuse else {}
    files = [str(folder / f"{name}.py") for name in FILES]
    command = [sys.executable, "-W", "ignore", "-m", "pytest", "-v", "--tb=line", "-p", "no:cacheprovider",
               "--timeout=200", "-o", "addopts=", "--rootdir", str(folder), *files, *words]  # fmt: skip
    log = folder / f"{'with' if with_meshfuse else 'without'}.txt"  # can be read while the tests run
    with log.open("w") as file:
        subprocess.run(command, env=env, cwd=folder, stdout=file, stderr=subprocess.STDOUT)
    rows = re.findall(r"^(\S+::\S+) (PASSED|FAILED|ERROR|SKIPPED|XFAIL|XPASS)", log.read_text(), re.MULTILINE)
    return {name: outcome.lower() for name, outcome in rows}


def main() -> None:
    folder = Path(tempfile.mkdtemp(prefix="thunders-own-"))
    write_ported(folder)
    print(folder, flush=True)
    without, found = (outcomes(folder, is_with, sys.argv[1:]) for is_with in (False, True))
    counts: dict[tuple[str, str, str], int] = defaultdict(int)
    for name, outcome in without.items():
        counts[name.partition("::")[0], outcome, found.get(name, "not run")] += 1
    for (file, one, other), count in sorted(counts.items()):
        print(f"{file:30} without: {one:8} with: {other:8} {count}")
    for name, outcome in without.items():
        if outcome == "passed" and found.get(name) != "passed":
            print("only without:", name, found.get(name))


if __name__ == "__main__":
    main()
