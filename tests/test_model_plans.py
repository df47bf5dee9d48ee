"""`mf.plan`: which parallelism comes out for a model, and that the model trains with it as eager torch does."""

from __future__ import annotations

import gc
import itertools
import json
from collections.abc import Callable
from pathlib import Path
from typing import Any
from unittest import mock

import pytest
import torch
from torch import nn

import meshfuse as mf
from frontend_models import gradients_differ_by, pair
from meshfuse.frontends.automatic.few_layers import FewLayers
from meshfuse.frontends.patterns import longest_list

ONE = mf.DeviceMesh((8,), ("x",), links="dgx-h100")
TWO = mf.DeviceMesh((2, 4), ("dp", "tp"), links="dgx-h100")


class Mlp(nn.Module):
    def __init__(self, width: int, hidden: int, layers: int = 2) -> None:
        super().__init__()
        self.layers = nn.ModuleList(
            [nn.Sequential(nn.Linear(width, hidden, bias=False), nn.GELU(), nn.Linear(hidden, width, bias=False))
             for _ in range(layers)]
        )  # fmt: skip

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        for layer in self.layers:
            x = x + layer(x)
        return x


def loss_of(result: torch.Tensor, target: torch.Tensor) -> torch.Tensor:
    return (result - target).square().mean()


def planned(mesh: mf.DeviceMesh, rows: int, width: int, hidden: int, layers: int = 2, **more: Any) -> Any:
    with torch.device("meta"):
        model, x = Mlp(width, hidden, layers), torch.empty(rows, width)
    return mf.plan(model, mesh, x, x, loss=loss_of, **more)


def test_a_small_model_on_many_rows_is_data_parallel() -> None:
    found = planned(ONE, 65536, 256, 1024)
    assert found.family == "x: data" and found.spec("x") == ("x", None) == found.spec("target")
    assert set(found.parameters.values()) == {(None, None)}


def test_a_wide_model_on_few_rows_is_tensor_parallel() -> None:
    found = planned(ONE, 64, 8192, 32768)
    assert found.family == "x: tensor"
    assert found.spec("layers.1.0.weight") == ("x", None) and found.spec("layers.1.2.weight") == (None, "x")


def test_two_axes_and_what_does_not_fit() -> None:
    free = planned(TWO, 8192, 2048, 8192)
    assert free.family.startswith("dp: data, tp: ") and free.family.endswith("tensor")
    bounded = planned(TWO, 8192, 2048, 8192, max_memory=free.memory * 0.9)
    assert bounded.family.startswith("dp: fully sharded") and bounded.memory <= free.memory * 0.9
    with pytest.raises(mf.DefinitionError, match="the least that was found"):
        planned(TWO, 8192, 2048, 8192, max_memory=1e6)


def test_a_plan_is_kept_printed_and_read_back(tmp_path: Path) -> None:
    found = planned(TWO, 8192, 2048, 8192, keep={"layers.0.0": ["dp", None]}, inputs={"x": [None, None]})
    assert found.spec("layers.0.0.weight") == ("dp", None) and found.spec("x") == (None, None)
    found.save(tmp_path / "plan.json")
    again = mf.Plan.load(tmp_path / "plan.json")
    assert again == found and again.alternatives
    with pytest.raises(mf.DefinitionError, match="a plan that was read from a file: found no model"):
        again.priced({"dp": "data"})
    text = str(planned(ONE, 64, 8192, 32768))
    assert "'layers.*.0.weight': ['x', None]," in text and "inputs={'x': [None, None]" in text


BROKEN: dict[str, Callable[[dict[str, Any]], object]] = {
    "another format": lambda read: {**read, "format": 99},
    "no format": lambda read: {name: value for name, value in read.items() if name != "format"},
    "what is not known": lambda read: {**read, "offload": True},
    "what is missing": lambda read: {name: value for name, value in read.items() if name != "microbatches"},
    "a number that is none": lambda read: {**read, "seconds": "x"},
    "a list that is none": lambda read: {**read, "cut": "layers.1"},
    "a spec that is none": lambda read: {**read, "inputs": {"x": 3}},
    "no dict": lambda read: [read],
}


@pytest.fixture(scope="module")
def written(tmp_path_factory: pytest.TempPathFactory) -> str:
    """The text of a plan's file."""
    path = tmp_path_factory.mktemp("plan") / "plan.json"
    planned(ONE, 64, 64, 64).save(path)
    return path.read_text()


@pytest.mark.parametrize("broken", BROKEN)
def test_a_file_that_is_no_plan_of_this_version(written: str, tmp_path: Path, broken: str) -> None:
    """It may have been written by another version, whose words would be lost without a word."""
    path = tmp_path / "plan.json"
    path.write_text(json.dumps(BROKEN[broken](json.loads(written))))
    with pytest.raises(mf.DefinitionError, match=r"plan: .*needed what this version's Plan\.save has written"):
        mf.Plan.load(path)


def test_a_plan_that_was_cut_off(written: str, tmp_path: Path) -> None:
    path = tmp_path / "plan.json"
    for length in (0, 1, len(written) // 2, len(written) - 1):
        path.write_text(written[:length])
        with pytest.raises(mf.DefinitionError, match=r"what this version's Plan\.save has written"):
            mf.Plan.load(path)


# arrangements ---------------------------------------------------------------------------------------------------------

HOSTS = mf.DeviceMesh(
    (4, 8), ("host", "gpu"), links={"host": mf.Link(3e9, 2e-5), "gpu": mf.Link(300e9, 5e-6)}, flops=4e14, memory=3e12
)
# On a slow machine of two hosts, so that small models have something to gain.
SLOW = mf.DeviceMesh(
    (2, 2), ("host", "gpu"), links={"host": mf.Link(3e8, 1e-6), "gpu": mf.Link(3e11, 1e-7)}, flops=1e10, memory=1e10
)


def test_hosts_on_slow_links_are_stages() -> None:
    with torch.device("meta"):
        model, x = Mlp(4096, 16384, 16), torch.empty(1024, 4096)
    found = mf.plan(model, HOSTS, x, x, loss=loss_of)
    assert found.family.startswith("host: pipeline of ") and found.stages in (4, 8) and found.microbatches >= 4
    assert {"layers.4", "layers.8", "layers.12"} <= {*found.cut}
    said = str(found)
    assert "pipeline=mf.Pipeline('host', '" in said and "no stages: " in said and "gpu: fully sharded: " in said
    flat = found.priced({"host": "data"})
    assert flat.stages == 1 and flat.seconds > 1.1 * found.seconds


def test_no_plan_by_hand_is_cheaper() -> None:
    """Of all roles that two axes can have; of which those that hold too much do not count, where there is a limit."""
    model, x = Mlp(64, 256, 4), torch.empty(32, 64)
    found = mf.plan(model, SLOW, x, x, loss=loss_of)
    by_hand = []
    for first, second in itertools.product(("data", "fully sharded", "tensor", "sequence", "pipeline"), repeat=2):
        if (first, second).count("pipeline") < 2:
            by_hand += [found.priced({"host": first, "gpu": second}, parts) for parts in (None, 4)]
    assert found.seconds <= min(plan.seconds for plan in by_hand) * (1 + 1e-9)
    limit = 0.9 * found.memory
    fitting = [plan.seconds for plan in by_hand if plan.memory <= limit]
    bounded = mf.plan(model, SLOW, x, x, loss=loss_of, max_memory=limit)
    assert 5 < len(fitting) < len(by_hand) and bounded.memory <= limit < found.memory
    assert bounded.seconds <= min(fitting) * (1 + 1e-9)


def test_what_a_plan_says_costs_the_same_where_it_is_kept() -> None:
    more: dict[str, Any] = {"roles": {"host": "pipeline"}, "microbatches": 8}
    found = planned(SLOW, 64, 64, 256, 4, **more)
    kept = planned(
        SLOW, 64, 64, 256, 4, keep=found.parameters, inputs={n: found.spec(n) for n in ("x", "target")}, **more
    )
    assert kept.parameters == found.parameters
    assert kept.seconds == pytest.approx(found.seconds, rel=1e-9) and kept.memory == found.memory


@pytest.mark.parametrize(
    ("ranks", "roles"),
    [
        ((2, 2, 4), {}),
        pytest.param((4, 1, 4), {}, marks=pytest.mark.sampled),
        ((2, 8, 2), {"tp": "sequence"}),
        pytest.param((2, 8, 1), {}, marks=pytest.mark.sampled),
        ((2, 2, 2), {"dp": "sequence"}),
    ],
)
def test_a_step_that_is_played_takes_what_its_plan_says(ranks: tuple[int, int, int], roles: dict[str, str]) -> None:
    """In time and in memory: stages are planned as the whole is, gradients summed once over all axes.

    A plan counts no communication as hidden behind computation.
    """
    mesh = mf.DeviceMesh(ranks, ("pp", "dp", "tp"), links="dgx-h100")
    with torch.device("meta"):
        model, x = Mlp(8192, 32768, 8), torch.empty(32, 1024, 8192)
    found = mf.plan(model, mesh, x, x, loss=loss_of, roles={"pp": "pipeline", **roles}, microbatches=8)
    played = mf.parallelize(model, mesh, found, loss=loss_of).play(x, x)
    assert 0.8 * found.seconds < played.seconds < 1.1 * found.seconds
    assert played.memory == pytest.approx(found.memory, rel=0.15)
    del model
    gc.collect()  # 17 GB of addresses, too many for a process that forks


def test_states_of_the_optimiser_that_do_not_fit_are_fully_sharded() -> None:
    free = planned(ONE, 65536, 1024, 4096, states=2)
    assert free.family == "x: data"
    weights = 2 * 2 * 1024 * 4096 * 4
    found = planned(ONE, 65536, 1024, 4096, states=2, max_memory=free.memory - 2 * weights)
    assert found.family.startswith("x: fully sharded") and found.memory <= free.memory - 2 * weights
    assert planned(ONE, 65536, 1024, 4096, states=0).memory == pytest.approx(free.memory - 2 * weights)


def test_activations_that_do_not_fit_are_computed_again() -> None:
    free = planned(ONE, 65536, 256, 1024, 6)
    found = planned(ONE, 65536, 256, 1024, 6, max_memory=free.memory / 3)
    assert found.memory <= free.memory / 3 and (found.recomputes or found.microbatches > 1)
    assert found.recomputes is (found.checkpoint == "layers.*")
    whole = planned(ONE, 65536, 256, 1024, 6, max_memory=0.7 * free.memory, microbatches=1)
    assert whole.recomputes and whole.microbatches == 1 and whole.memory <= 0.7 * free.memory


@pytest.mark.parametrize(("layers", "kinds"), [(3, 1), (12, 2), (2, 1)])
def test_few_layers_stand_for_all(layers: int, kinds: int) -> None:
    """The plan of a few layers of each kind costs what that of all layers costs."""
    with torch.device("meta"):
        model, x = Mlp(512, 2048, layers), torch.empty(4096, 512)
        for i in range(0, layers, kinds) if kinds > 1 else ():
            model.layers[i][1] = nn.ReLU()
    few = FewLayers.of(model)
    assert len(few.kept) == min(layers, 3 * kinds)
    if len(few.kept) == layers:
        return  # It is the plan of all layers.
    short = mf.plan(model, TWO, x, x, loss=loss_of)
    with mock.patch.object(FewLayers, "of", lambda _: few.all()):
        whole = mf.plan(model, TWO, x, x, loss=loss_of)
    assert short.seconds == pytest.approx(whole.seconds, rel=1e-6)
    assert short.memory == pytest.approx(whole.memory, rel=0.03)  # What is at work may be most at another place.
    assert short.cut == whole.cut
    assert list(short.parameters) == [name for name, _ in model.named_parameters()]


def test_a_model_whose_layers_cannot_be_left_out_is_planned_whole() -> None:
    class Odd(Mlp):
        def forward(self, x: torch.Tensor) -> torch.Tensor:
            for i in range(6):
                x = x + self.layers[i](x)
            return x

    with torch.device("meta"):
        model, x = Odd(64, 256, 6), torch.empty(512, 64)
    assert len(mf.plan(model, ONE, x, x, loss=loss_of).parameters) == 12


def test_equal_layers_are_found_by_what_they_are() -> None:
    assert longest_list(Mlp(8, 16, 2)) == ["layers.0", "layers.1"]  # and not the three modules of one of them
    assert longest_list(nn.Sequential(Mlp(8, 16, 4), nn.Linear(8, 8))) == [f"0.layers.{i}" for i in range(4)]


# training with a plan -------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("mesh", [mf.DeviceMesh((4,), ("x",), links="bytes"), mf.DeviceMesh((2, 2), ("a", "b"))])
def test_a_model_trains_with_its_plan(mesh: mf.DeviceMesh) -> None:
    trains(mesh)


@pytest.mark.parametrize(
    "more",
    [
        {"roles": {"host": "pipeline"}},
        {"roles": {"host": "data", "gpu": "tensor"}, "microbatches": 4},
        {
            "mode": "rule",
            "inputs": {"x": ["host", None], "target": ["host", None]},
            "keep": {"layers.*.0": ["gpu", None]},
        },
        {"mode": "config", "roles": {"host": "fully sharded", "gpu": "pipeline"}},
        {"max_memory": 6e5},
    ],
    ids=str,
)
def test_a_model_trains_with_the_plan_of_an_arrangement(more: dict[str, Any]) -> None:
    found = trains(SLOW, **more)
    assert more.get("mode") != "rule" or found.family == "host: data, gpu: tensor"
    assert "pipeline" not in str(more) or "pipeline" in found.family
    assert found.memory <= more.get("max_memory", found.memory)


def test_a_plan_is_made_for_an_example() -> None:
    model, eager = pair(lambda: Mlp(16, 32))
    x, y = torch.randn(32, 16), torch.randn(32, 16)
    mf.parallelize(model, SLOW, "auto", example={"x": x, "target": y}, loss=loss_of, max_memory=1e6)
    loss, wanted = model.step(**model.shard_inputs(x=x, target=y)), loss_of(eager(x), y)
    wanted.backward()
    assert abs(loss - wanted) < 1e-5 and gradients_differ_by(model, eager) < 1e-5
    with pytest.raises(mf.DefinitionError, match=r"no argument is called 'q': needed one of \['x', 'target'\]"):
        model.shard_inputs(q=x)


@pytest.mark.parametrize("more", [{}, {"inputs": {"target": [None, None]}}, {"inputs": {"x": ["host", None]}}])
def test_arguments_of_micro_batches_have_the_same_rows(more: Any) -> None:
    """Each rank cuts its own rows into micro-batches, so that these must be the same of all arguments."""
    x = torch.randn(32, 64)
    found = mf.plan(Mlp(64, 256, 4), SLOW, x, x, loss=loss_of, microbatches=4, **more)
    assert found.microbatches == 4 and found.spec("x")[0] == found.spec("target")[0]


def trains(mesh: mf.DeviceMesh, **more: Any) -> Any:
    model, eager = pair(lambda: Mlp(16, 32, 4))
    x, y = torch.randn(32, 16), torch.randn(32, 16)
    found = mf.plan(model, mesh, x, y, loss=loss_of, **more)
    mf.parallelize(model, mesh, found, loss=loss_of)
    loss, wanted = model.step(x, y), loss_of(eager(x), y)
    wanted.backward()
    assert abs(loss - wanted) < 1e-5 and gradients_differ_by(model, eager) < 1e-5
    return found


@pytest.mark.parametrize(
    ("call", "said"),
    [
        (lambda: mf.plan(3, ONE), "plan: module: found 3"),
        (lambda: planned(ONE, 64, 16, 32).spec("q"), "no parameter or argument of this name: found 'q'"),
        (lambda: planned(ONE, 64, 16, 32, keep={"q": ["x"]}), "plan: 'q' matches nothing"),
        (lambda: planned(ONE, 64, 16, 32, inputs={"q": ["x"]}), "no argument is called 'q'"),
        (lambda: mf.plan(Mlp(16, 32), ONE, torch.empty(4, 16)), "loss of the model: found a result of shape [4, 16]"),
        (lambda: mf.parallelize(Mlp(16, 32), TWO, planned(ONE, 64, 16, 32)), "made for another mesh"),
        (lambda: mf.parallelize(Mlp(16, 32), TWO, "auto"), "Pass plan=mf.plan(model, mesh, *arguments)"),
    ],
)  # fmt: skip
def test_what_is_said_of_mistakes(call: Any, said: str) -> None:
    with pytest.raises(mf.DefinitionError) as found:
        call()
    assert said in str(found.value)


@pytest.mark.parametrize(
    ("more", "said"),
    [
        ({"roles": {"q": "data"}}, "plan: roles: found axis 'q', needed one of ['dp', 'tp']"),
        ({"roles": {"dp": "q"}}, "plan: the role of axis dp: found 'q', needed one of ['data', "),
        ({"roles": 3}, "plan: roles: found 3, needed a dict of roles by axis"),
        ({"roles": {"dp": "pipeline", "tp": "pipeline"}}, "found several axes for pipelines, needed one"),
        (
            {"roles": {"tp": "pipeline"}},
            "plan: a pipeline over axis tp: found 2 layers, needed one of each of its 4 ranks",
        ),
        ({"roles": {"dp": "data"}, "mode": "config"}, "found no role of axis 'tp'"),
        ({"roles": {"dp": "data"}, "mode": "rule"}, "found roles {'dp': 'data'}, needed none"),
        ({"mode": "best"}, "plan: mode: found 'best', needed one of ['explore', "),
        ({"states": -1}, "plan: states: found -1, needed a number from 0 on"),
        ({"microbatches": 7}, "plan: 7 micro-batches of a batch: found 64 rows"),
    ],
    ids=str,
)
def test_what_is_said_of_arrangements_that_there_are_not(more: dict[str, Any], said: str) -> None:
    with pytest.raises(mf.DefinitionError) as found:
        planned(TWO, 64, 16, 32, **more)
    assert said in str(found.value)
