"""The launchers' variables, as a plain function of a mapping. No process is started."""

from __future__ import annotations

import pytest

from meshfuse.errors import ArgumentError
from meshfuse.runtime.environment import first_host, read_environment, time_limit


def test_without_a_launcher_there_is_one_rank():
    place = read_environment({})
    assert (place.source, place.rank, place.size, place.local_rank, place.local_size) == ("none", 0, 1, 0, 1)


def test_the_variables_of_torchrun_are_read():
    variables = {
        "RANK": "5", "WORLD_SIZE": "8", "LOCAL_RANK": "1", "LOCAL_WORLD_SIZE": "4", "MASTER_ADDR": "node1",
        "MASTER_PORT": "4711", "TORCHELASTIC_RUN_ID": "job7", "TORCHELASTIC_RESTART_COUNT": "2",
        "TORCHELASTIC_USE_AGENT_STORE": "True",
    }  # fmt: skip
    place = read_environment(variables)
    assert (place.source, place.rank, place.size, place.local_rank, place.local_size) == (
        "torchrun",
        5,
        8,
        1,
        4,
    )
    assert (place.address, place.port, place.attempt, place.agent_store) == ("node1", 4711, "job7/2", True)
    assert not place.one_host


def test_torchrun_in_a_rank_of_meshfuse_run():
    """Its ranks inherit the store of the outer job, which is not theirs."""
    outer = {
        "RANK": "0",
        "WORLD_SIZE": "2",
        "MASTER_PORT": "4000",
        "MESHFUSE_STORE_PORT": "4001",
        "MESHFUSE_STORE_FD": "5",
    }
    place = read_environment(outer)
    assert (place.source, place.port, place.listen_fd, place.agent_store) == ("meshfuse run", 4001, 5, False)
    inner = {"MASTER_PORT": "4711", "TORCHELASTIC_RUN_ID": "job", "TORCHELASTIC_USE_AGENT_STORE": "True"}
    place = read_environment(outer | inner)
    assert (place.source, place.port, place.listen_fd, place.agent_store) == ("torchrun", 4711, None, True)


def test_bare_variables_are_one_host():
    place = read_environment({"RANK": "1", "WORLD_SIZE": "2", "MASTER_PORT": "4711"})
    assert (place.local_rank, place.local_size, place.address, place.one_host) == (1, 2, "127.0.0.1", True)
    assert not place.agent_store


def test_open_mpi():
    variables = {
        "OMPI_COMM_WORLD_RANK": "3", "OMPI_COMM_WORLD_SIZE": "4",
        "OMPI_COMM_WORLD_LOCAL_RANK": "1", "OMPI_COMM_WORLD_LOCAL_SIZE": "2", "MASTER_ADDR": "10.0.0.1",
    }  # fmt: skip
    place = read_environment(variables)
    assert (place.source, place.rank, place.size, place.local_rank, place.local_size) == (
        "Open MPI",
        3,
        4,
        1,
        2,
    )
    assert place.address == "10.0.0.1"


def test_open_mpi_over_hosts_needs_an_address():
    variables = {"OMPI_COMM_WORLD_RANK": "0", "OMPI_COMM_WORLD_SIZE": "4", "OMPI_COMM_WORLD_LOCAL_SIZE": "2"}
    with pytest.raises(ArgumentError, match="found no MASTER_ADDR, needed its name or IP address"):
        read_environment(variables)


def test_the_variables_of_a_slurm_step_are_read():
    variables = {
        "SLURM_PROCID": "2", "SLURM_NTASKS": "6", "SLURM_LOCALID": "0", "SLURM_JOB_ID": "99",
        "SLURM_STEP_ID": "0", "SLURM_STEP_TASKS_PER_NODE": "2(x3)", "SLURM_STEP_NODELIST": "gpu[03-05]",
    }  # fmt: skip
    place = read_environment(variables)
    assert (place.source, place.rank, place.size, place.local_rank, place.local_size) == ("Slurm", 2, 6, 0, 2)
    assert place.address == "gpu03"


def test_slurm_jobs_have_different_ports():
    step = {"SLURM_PROCID": "0", "SLURM_NTASKS": "2", "SLURM_LOCALID": "0", "SLURM_STEP_ID": "0"}
    ports = [read_environment(step | {"SLURM_JOB_ID": str(job)}).port for job in (1, 2, 1)]
    assert ports[0] == ports[2] != ports[1]


def test_slurm_batch_shell_is_one_rank():
    variables = {"SLURM_PROCID": "0", "SLURM_NTASKS": "8", "SLURM_LOCALID": "0", "SLURM_JOB_ID": "99"}
    assert read_environment(variables).size == 1


@pytest.mark.parametrize(
    ("hosts", "first"), [("node[03-07,9],login", "node03"), ("a,b", "a"), ("gpu7", "gpu7"), ("n[1,4]", "n1")]
)
def test_the_first_host_of_a_list_is_found(hosts, first):
    assert first_host(hosts) == first


@pytest.mark.parametrize(
    ("variables", "text"),
    [
        ({"RANK": "0"}, "the environment variable WORLD_SIZE is no number: found nothing, needed a number"),
        ({"RANK": "x", "WORLD_SIZE": "2", "MASTER_PORT": "1"}, "RANK is no number: found 'x'"),
        (
            {"RANK": "2", "WORLD_SIZE": "2", "MASTER_PORT": "1"},
            "found rank 2 of 2, needed a rank from 0 to 1",
        ),
        ({"RANK": "0", "WORLD_SIZE": "0"}, "the size of the world by RANK/WORLD_SIZE: found 0, needed 1 to 1048576"),
        ({"RANK": "0", "WORLD_SIZE": "999999999999"}, "found 999999999999, needed 1 to 1048576"),
        ({"RANK": "0", "WORLD_SIZE": "2", "MASTER_PORT": "65536"}, "store is none: found 65536, needed 1 to 65535"),
        ({"RANK": "0", "WORLD_SIZE": "2", "MASTER_PORT": "-1"}, "store is none: found -1, needed 1 to 65535"),
        ({"RANK": "0", "WORLD_SIZE": "2", "MASTER_PORT": "0"}, "store is none: found 0, needed 1 to 65535"),
        (
            {"RANK": "0", "WORLD_SIZE": "2", "MESHFUSE_STORE_PORT": "5", "MESHFUSE_STORE_FD": "x"},
            "MESHFUSE_STORE_FD is no number: found 'x'",
        ),
    ],
)
def test_wrong_variables_are_errors(variables, text):
    with pytest.raises(ArgumentError, match=text):
        read_environment(variables)


def test_the_time_limit_is_read_and_checked():
    assert time_limit({}) == 60
    assert time_limit({"MESHFUSE_TIMEOUT": "2.5"}) == 2.5
    for wrong in ("0", "-1", "soon", "inf", "nan", "1e12", "1e300"):
        with pytest.raises(ArgumentError, match="MESHFUSE_TIMEOUT is no time: found"):
            time_limit({"MESHFUSE_TIMEOUT": wrong})
