"""torch's own tests of RPC with meshfuse's modules in the place of torch's: `python tests/session/torchs_own.py`.

They are in torch's wheel, without a runner. This writes one into a folder, which puts our modules under torch's names
in each of the processes that a test starts, and runs pytest there. It prints what passed by suite, and names what did
not; arguments go to pytest (`-k DistAutograd`). `--torch` first leaves torch's modules where they are.
"""

from __future__ import annotations

import os
import re
import subprocess
import sys
import tempfile
from collections import defaultdict
from pathlib import Path

SUITES = {
    "rpc.rpc_test": ("RpcTest", "TensorPipeAgentRpcTest"),
    "rpc.dist_autograd_test": ("DistAutogradTest", "TensorPipeAgentDistAutogradTest"),
    "rpc.dist_optimizer_test": ("DistOptimizerTest",),
    "rpc.examples.parameter_server_test": ("ParameterServerTest",),
    "rpc.examples.reinforcement_learning_rpc_test": ("ReinforcementLearningRpcTest",),
    "nn.api.remote_module_test": ("RemoteModuleTest", "ThreeWorkersRemoteModuleTest"),
    "ddp_under_dist_autograd_test": ("DdpUnderDistAutogradTest", "DdpComparisonTest"),
}
RUNNER = """
import importlib
import os
import sys
import types

import torch
import torch.distributed as dist
import torch.distributed.autograd
import torch.distributed.nn.api.remote_module
import torch.distributed.optim
import torch.distributed.rpc
import torch.multiprocessing

def replace(name, ours):
    # Names of torch that ours lacks stay torch's: what needs them fails, or gets what is of no process here.
    theirs = sys.modules[name]
    for key, value in vars(theirs).items():
        if not hasattr(ours, key) and not isinstance(value, types.ModuleType):
            setattr(ours, key, value)
    sys.modules[name] = ours
    parent, _, last = name.rpartition(".")
    setattr(sys.modules[parent], last, ours)

if not os.environ.get("WITH_TORCH"):
    from meshfuse.session import autograd, nn, optim, rpc

    for last in ("constants", "functions", "backend_registry", "api"):
        replace(f"torch.distributed.rpc.{last}", importlib.import_module(f"meshfuse.session.rpc.{last}"))
    rpc.internal = sys.modules["torch.distributed.rpc.internal"]
    torch.distributed.nn.RemoteModule = torch.distributed.nn.api.remote_module.RemoteModule = nn.RemoteModule
    for name, ours in (("rpc", rpc), ("autograd", autograd), ("optim", optim)):
        replace(f"torch.distributed.{name}", ours)

from torch.testing._internal.common_distributed import MultiProcessTestCase
from torch.testing._internal.distributed.rpc.tensorpipe_rpc_agent_test_fixture import TensorPipeRpcAgentTestFixture

class Forked(MultiProcessTestCase):
    def setUp(self):
        super().setUp()
        self._start_processes(torch.multiprocessing.get_context("fork").Process)

for module, names in SUITES.items():
    module = importlib.import_module(f"torch.testing._internal.distributed.{module}")
    for name in names:
        bases = (getattr(module, name), TensorPipeRpcAgentTestFixture, Forked)
        globals()[name] = type(name, bases, {"__module__": __name__})
del name, module, MultiProcessTestCase, Forked
"""
EXPECTTEST = "import unittest\nclass TestCase(unittest.TestCase):\n    pass\n"


def write_runner(folder: Path) -> None:
    """The runner, and a stand-in for a package that torch's tests import and these do not use."""
    (folder / "expecttest.py").write_text(EXPECTTEST)
    (folder / "test_rpc.py").write_text(RUNNER.replace("SUITES", repr(SUITES)))


def outcomes(folder: Path, with_torch: bool, words: list[str]) -> dict[str, str]:
    """By test what came of it."""
    env = {**os.environ, "PYTHONPATH": os.pathsep.join([str(folder), str(Path(__file__).parents[2])]),
           "OMP_NUM_THREADS": "1", "GLOO_SOCKET_IFNAME": "lo"}  # fmt: skip
    env |= {"WITH_TORCH": "1"} if with_torch else {}
    command = [sys.executable, "-m", "pytest", "-v", "--tb=short", "-p", "no:cacheprovider", "-p", "no:logging",
               "-o", "addopts=", "--timeout=40", "--rootdir", str(folder), str(folder), *words]  # fmt: skip
    log = folder / "log.txt"  # can be read while the tests run
    with log.open("w") as file:
        subprocess.run(command, env=env, cwd=folder, stdout=file, stderr=subprocess.STDOUT)
    rows = re.findall(r"^\S+?::(\S+) (?:.*\n)*?.*?(PASSED|FAILED|ERROR|SKIPPED)", log.read_text(), re.MULTILINE)
    return {name: outcome.lower() for name, outcome in rows}


def main() -> None:
    with_torch = sys.argv[1:2] == ["--torch"]
    folder = Path(tempfile.mkdtemp(prefix="torchs-own-"))
    print(folder, flush=True)
    write_runner(folder)
    found = outcomes(folder, with_torch, sys.argv[1 + with_torch :])
    counts: dict[str, dict[str, int]] = defaultdict(lambda: defaultdict(int))
    for name, outcome in found.items():
        counts[name.partition("::")[0]][outcome] += 1
    for suite, by_outcome in counts.items():
        print(suite, dict(by_outcome))
    for name, outcome in found.items():
        if outcome not in ("passed", "skipped"):
            print(outcome, name)


if __name__ == "__main__":
    main()
