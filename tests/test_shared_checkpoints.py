"""Several jobs at one checkpoint's folder: at every moment of one's save or load another comes with a whole save."""

from __future__ import annotations

import fcntl
import multiprocessing
import threading

import pytest
import torch

import meshfuse as mf
from meshfuse.checkpoint import api, folder, transfer
from meshfuse.errors import CheckpointError
from test_checkpoints import Team, worlds  # noqa: F401 - a fixture


def once(monkeypatch, module, name, action):
    """Have `action` come in before the first call of a function."""
    real, first = getattr(module, name), threading.Lock()

    def call(*args, **kwargs):
        if first.acquire(blocking=False):
            action()
        return real(*args, **kwargs)

    monkeypatch.setattr(module, name, call)


def by_another(action) -> None:
    """What another process does, whose world is its own."""
    thread = threading.Thread(target=action)
    thread.start()
    thread.join()


def save(path, number: int) -> None:
    mf.save(path, {"t": torch.full((3,), float(number)), "n": number})


@pytest.mark.parametrize("moment", [(folder, "new_name"), (api, "write"), (transfer, "sum_of"), (folder, "commit")])
def test_a_second_save_is_refused_and_the_first_one_whole(tmp_path, monkeypatch, moment):
    save(tmp_path, 1)
    refused = []

    def other():
        with pytest.raises(CheckpointError) as error:
            save(tmp_path, 3)
        refused.append(str(error.value))

    once(monkeypatch, *moment, lambda: by_another(other))
    save(tmp_path, 2)
    (text,) = refused
    assert "another save into" in text and "needed one at a time. Wait for its end, or save into another folder" in text
    assert mf.load(tmp_path)["t"].tolist() == [2, 2, 2] and len(list(tmp_path.iterdir())) == 2
    save(tmp_path, 4)
    assert mf.load(tmp_path)["n"] == 4


def test_what_a_save_forked_does_not_go_on_with_it(tmp_path, monkeypatch):
    workers = []

    def fork():
        workers.append(multiprocessing.get_context("fork").Process(target=threading.Event().wait, daemon=True))
        workers[0].start()

    once(monkeypatch, folder, "commit", fork)
    save(tmp_path, 1)
    save(tmp_path, 2)
    assert workers[0].is_alive() and mf.load(tmp_path)["n"] == 2
    workers[0].kill()


def test_where_folders_cannot_be_locked_no_save_names_what_is_gone(tmp_path, monkeypatch):
    def none(*_):
        raise OSError(95, "Operation not supported")

    monkeypatch.setattr(fcntl, "flock", none)
    save(tmp_path, 1)
    once(monkeypatch, folder, "commit", lambda: by_another(lambda: save(tmp_path, 3)))
    with pytest.raises(CheckpointError, match=r"failed while completing: found on rank 0 FileNotFoundError.*untouched"):
        save(tmp_path, 2)
    assert mf.load(tmp_path)["t"].tolist() == [3, 3, 3]


MOMENTS = [(folder, "read_index"), (api, "_targets"), (folder, "check_file"), (api, "read_apart")]


@pytest.mark.parametrize("moment", MOMENTS)
@pytest.mark.parametrize("size", [1, 3])
def test_a_load_beside_a_save_is_of_one_of_them(tmp_path, monkeypatch, worlds, moment, size):  # noqa: F811
    save(tmp_path, 1)
    once(monkeypatch, *moment, lambda: by_another(lambda: save(tmp_path, 2)))
    found = worlds(Team(size), lambda rank: mf.load(tmp_path))
    assert [(f["t"].tolist(), f["n"]) for f in found] == [([2, 2, 2], 2)] * size


def test_a_load_that_saves_always_overtake_ends(tmp_path, monkeypatch):
    save(tmp_path, 1)
    real = api.read_apart

    def read(*args):
        by_another(lambda: save(tmp_path, 2))
        real(*args)

    monkeypatch.setattr(api, "read_apart", read)
    with pytest.raises(CheckpointError, match=r"load failed while reading: found on rank 0 FileNotFoundError"):
        mf.load(tmp_path)
