"""Cluster files and the meshes of their workers."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest

import meshfuse as mf
from meshfuse.costs import DGX_A100, Link
from meshfuse.errors import ArgumentError

OWN = {"hosts": [{"address": "10.0.0.1", "workers": 4}, {"address": "10.0.0.2", "workers": 4}], "port": 7000}
TEPDIST = {
    "master": {"ip": "10.0.0.1", "port": "2222", "gpu_ids": "0,1"},
    "workers": [{"ip": "10.0.0.2", "port": "2223", "gpu_ids": [2, 3]}],
}


def load(folder: Path, told: Any) -> mf.Cluster:
    path = folder / "cluster.json"
    path.write_text(told if isinstance(told, str) else json.dumps(told))
    return mf.Cluster.load(path)


def test_both_forms(tmp_path: Path) -> None:
    found = load(tmp_path, OWN)
    assert [(h.address, h.workers, h.gpus) for h in found.hosts] == [("10.0.0.1", 4, ()), ("10.0.0.2", 4, ())]
    assert (found.port, found.workers, found.per_host, found.machine) == (7000, 8, 4, None)
    found = load(tmp_path, TEPDIST)
    assert [(h.address, h.workers, h.gpus) for h in found.hosts] == [
        ("10.0.0.1", 2, (0, 1)), ("10.0.0.2", 2, (2, 3))
    ]  # fmt: skip
    assert found.port == 2222
    apart = {"master": {"ip": "10.0.0.2", "port": 1, "gpu_ids": ""}, "workers": TEPDIST["workers"]}
    assert [h.address for h in load(tmp_path, apart).hosts] == ["10.0.0.2"]


def test_meshes_have_the_links_of_host_boundaries(tmp_path: Path) -> None:
    cluster = load(tmp_path, OWN | {"machine": "dgx-a100"})
    mesh = cluster.mesh(("dp", "tp"))
    assert (mesh.shape, mesh.names, mesh.ranks) == ((2, 4), ("dp", "tp"), tuple(range(8)))
    assert mesh.links == (DGX_A100.between, DGX_A100.inside)
    assert cluster.mesh(("pp", "dp", "tp")).shape == (2, 1, 4)
    small = cluster.mesh(("pp", "dp", "tp"), (2, 2, -1))
    assert small.shape == (2, 2, 2) and small.links == (DGX_A100.between, DGX_A100.inside, DGX_A100.inside)
    assert cluster.mesh("x").links == (DGX_A100.between,)
    assert cluster.mesh(("dp", "tp"), (4, 2)).links == (DGX_A100.between, DGX_A100.inside)
    told = {"inside": [1e9, 1e-6], "between": [1e8, 1e-5], "flops": 1e12, "memory": 1e11}
    mesh = load(tmp_path, OWN | {"machine": told}).mesh()
    assert mesh.links == (Link(1e8, 1e-5), Link(1e9, 1e-6)) and (mesh.flops, mesh.memory) == (1e12, 1e11)


@pytest.mark.parametrize(("told", "text"), [
    ("{", "Expecting property name"),
    ([], r'found \[\], needed "hosts" or "master"'),
    ({"hosts": []}, '"hosts" or "master"'),
    ({"hosts": [{"workers": 1}]}, 'needed "address" of each host'),
    ({"hosts": [{"address": "a"}]}, '"workers" from 1 to 4096'),
    ({"hosts": [{"address": "a", "gpus": [0, 0]}]}, r"found GPUs \[0, 0\], needed different numbers"),
    ({"hosts": [{"address": "a", "workers": 3, "gpus": "0,1"}]}, 'or one number in "gpus" for each'),
    ({"hosts": [{"address": "a", "workers": 1}, {"address": "b", "workers": 2}]}, "found hosts of 1 and 2 workers"),
    ({"hosts": [{"address": "a", "workers": 1}], "port": 70000}, "port 70000"),
    ({"hosts": [{"address": "a", "workers": 1}], "machine": "abacus"}, "machine 'abacus'"),
    ({"master": 3}, '"master" with ip, port and gpu_ids'),
    ({"master": {"ip": "a"}, "workers": [{"ip": "b", "gpu_ids": "0"}]}, "a master without gpu_ids"),
])  # fmt: skip
def test_wrong_files(tmp_path: Path, told: Any, text: str) -> None:
    with pytest.raises(ArgumentError, match=text) as error:
        load(tmp_path, told)
    assert "cluster.json" in str(error.value)


def test_wrong_meshes(tmp_path: Path) -> None:
    cluster = load(tmp_path, OWN)
    for names, shape, text in (
        (("a", "b"), (3, 2), r"shape \(3, 2\) with names .* for 8 workers in all"),
        (("a", "b"), (-1, -1), "one of them -1 at most"),
        (("a",), (2, 4), "one size for each name"),
        (("a", "b"), (2, "x"), "sizes above 0"),
    ):
        with pytest.raises(ArgumentError, match=text):
            cluster.mesh(names, shape)  # type: ignore[arg-type]
    with pytest.raises(ArgumentError, match=r"[Nn]o such file"):
        mf.Cluster.load(tmp_path / "nowhere.json")
