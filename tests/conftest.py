"""Hypothesis profiles of the suite (`ci` repeats the same examples every time, `fuzz` draws new ones), and what runs
beside what.
"""

from __future__ import annotations

import gc
import os
import signal
import sys
from collections.abc import Iterator
from typing import Any

import pytest
from hypothesis import HealthCheck, settings

_SLOW = [HealthCheck.too_slow, HealthCheck.data_too_large, HealthCheck.large_base_example]
settings.register_profile(
    "ci", derandomize=True, database=None, print_blob=True, deadline=None, suppress_health_check=_SLOW
)
settings.register_profile("fuzz", max_examples=2000, print_blob=True, deadline=None, suppress_health_check=_SLOW)
settings.load_profile(os.environ.get("HYPOTHESIS_PROFILE", "ci"))

# At least as many tests run at a time as there are cores, on small tensors: more threads of torch's only wait for each
# other. (It is read when torch is loaded, which is later, and by processes that tests start.)
os.environ.setdefault("OMP_NUM_THREADS", "1")

# Each process that tests start would compile all of meshfuse anew, which takes a second.
os.environ.pop("PYTHONDONTWRITEBYTECODE", None)
sys.dont_write_bytecode = False

# What nohup, or a shell in the background, has this process ignore, the jobs that tests start would ignore, too.
_DEFAULTS = {signal.SIGINT: signal.default_int_handler, signal.SIGHUP: signal.SIG_DFL, signal.SIGQUIT: signal.SIG_DFL}
for _signal, _handler in _DEFAULTS.items():
    if signal.getsignal(_signal) is signal.SIG_IGN:
        signal.signal(_signal, _handler)

# Tests are of planning, not of what an earlier run has left on the disk; test_plan_cache.py has folders of its own.
os.environ["MESHFUSE_CACHE"] = "off"

# Tests compare what is written to stderr; test_long_work.py is about what long work says there.
os.environ["MESHFUSE_QUIET"] = "1"

# Most tests of plans say what is sent at least: bytes decide there. test_default_links.py has the default machine.
os.environ.setdefault("MESHFUSE_LINKS", "bytes")


def pytest_addoption(parser: pytest.Parser) -> None:
    parser.addoption("--quick", action="store_true", help="a few cases of each test that is not slow")
    parser.addoption("--all-cases", action="store_true", help="every case of tests of which a sample is run otherwise")


def pytest_collection_modifyitems(config: pytest.Config, items: list[pytest.Item]) -> None:
    """A test that draws new examples until one fails has no time limit."""
    if config.getoption("--hypothesis-profile") == "fuzz":
        for item in items:
            item.own_markers = [marker for marker in item.own_markers if marker.name != "timeout"]
    if not config.getoption("--all-cases") and not any("::" in arg for arg in config.args):  # those have been named
        _keep(config, items, {item for item in items if _in_sample(item)})
    if config.getoption("--quick"):
        _keep(config, items, set(_quick(items)))


def _keep(config: pytest.Config, items: list[pytest.Item], kept: set[pytest.Item]) -> None:
    config.hook.pytest_deselected(items=[item for item in items if item not in kept])
    items[:] = [item for item in items if item in kept]


def _in_sample(item: pytest.Item) -> bool:
    """Whether a case of a `sampled(n, more)` test is in its sample: where the places of its values, one of each list of
    parameters, and `more` add up to a multiple of n. So every value is there beside every n-th one of any other list. A
    case that is marked itself, without n, is in none.
    """
    sampled = item.get_closest_marker("sampled")
    if sampled is None or not sampled.args:
        return sampled is None
    n, more = (*sampled.args, 0)[:2]
    return (more + sum(_place(item, marker) for marker in item.iter_markers("parametrize"))) % n == 0


def _place(item: Any, marker: pytest.Mark) -> int:
    """Which of a list of parameters a case has."""
    names, values = marker.args[:2]
    names = names.split(",") if isinstance(names, str) else names
    given = tuple(item.callspec.params[name.strip()] for name in names)
    return [_as_tuple(value, len(names)) for value in values].index(given)


def _as_tuple(value: Any, names: int) -> tuple[Any, ...]:
    if hasattr(value, "marks"):  # of pytest.param
        return tuple(value.values)
    return tuple(value) if names > 1 else (value,)


# So many cases of a test with parameters are run with `--quick`: the first, the last, and one between.
_CASES = 3
# Left out of it: tests of real ranks, and those that search for plans and compare them, which takes minutes.
_LONG = (
    "/ranks/", "/test_disagreements.py", "/test_exact_planner.py", "/test_exhaustive.py", "/test_equal_layers.py",
    "/test_free_outputs.py", "/test_gathered_weights.py", "/test_grids.py", "/test_growth.py", "/test_halos.py",
    "/test_nearby.py", "/test_parts.py", "/test_picked.py", "/test_pinned.py", "/test_pins.py", "/test_places.py",
    "/test_random_gradients.py", "/test_random_programs.py", "/test_rolls.py", "/test_searches.py",
    "/test_shardy_agreement.py", "/test_shardy_classes.py", "/test_shifts.py", "/test_slices_of_sums.py",
    "/test_sums.py",
)  # fmt: skip


def _quick(items: list[pytest.Item]) -> Iterator[pytest.Item]:
    """A few cases of each test that is neither slow nor long."""
    tests: dict[str, list[pytest.Item]] = {}
    for item in items:
        if not any(part in item.nodeid for part in _LONG) and not any(item.iter_markers("slow")):
            tests.setdefault(item.nodeid.partition("[")[0], []).append(item)
    for cases in tests.values():
        last, steps = len(cases) - 1, _CASES - 1
        yield from {cases[place * last // steps] for place in range(_CASES)}


def pytest_collection_finish() -> None:
    """What is loaded stays to the end: to look through it again and again for cycles takes a sixth of the time."""
    gc.collect()
    gc.freeze()
    gc.set_threshold(20_000, 50, 100)


@pytest.fixture
def forms_forced(monkeypatch: pytest.MonkeyPatch) -> None:
    """Every form that there is gets taken, whatever it costs."""
    seconds = property(lambda done: -float(len(done.graph.nodes)))
    monkeypatch.setattr("meshfuse.propagation.ShardedDefinition.seconds", seconds)
    monkeypatch.setattr("meshfuse.compiler.cheaper", lambda found, other: found)


@pytest.fixture
def over_whole_axes(monkeypatch: pytest.MonkeyPatch) -> None:
    """Ops are written in all the forms that there are, and each form is planned over whole axes alone."""
    monkeypatch.setattr("meshfuse.planner.effort.Effort.in_parts", lambda *_: False)


# Tests of whole jobs, most of which wait for what befalls these: a limit, a signal, the end of a rank.
_JOBS = (
    "collective_order", "device_watchdog", "ending", "failures", "faults", "launcher_faults", "launching", "link_probe",
    "notices", "plans_of_ranks", "restarts",
)  # fmt: skip
# Tests that run one after another, in one process: those of real ranks, of jobs and of others, which share pools of
# ranks and use all cores, and those that share what takes long to make. All others go wherever there is room.
_TOGETHER = {
    **{f"/ranks/test_{name}.py": "jobs" for name in _JOBS}, "/ranks/": "ranks", "/session/": "session",
    "/test_backends.py": "Inductor", "compiled_segments": "Inductor", "/test_example_training.py": "training",
    "/thunder/test_ranks.py": "Thunder on ranks", "/thunder/test_example.py": "Thunder on ranks",
    "/thunder/test_collectives.py": "Thunder on ranks", "/thunder/test_models.py": "models of Thunder",
    "/nvfuser/test_propagation.py": "plans of nvFuser",
}  # fmt: skip


@pytest.hookimpl(optionalhook=True)
def pytest_xdist_make_scheduler(config: pytest.Config, log: Any) -> Any:
    """Test by test, but for those of `_TOGETHER`."""
    from xdist.scheduler import LoadScopeScheduling

    class Scheduling(LoadScopeScheduling):
        def _split_scope(self, nodeid: str) -> str:
            return next((scope for part, scope in _TOGETHER.items() if part in nodeid), nodeid)

        def _pending_of(self, workload: dict[str, dict[str, bool]]) -> int:
            """Without what has ended: it would be counted again after each test, which costs a worker's half minute."""
            for scope in [scope for scope, tests in workload.items() if all(tests.values())]:
                del workload[scope]
            return super()._pending_of(workload)

    return Scheduling(config, log)
