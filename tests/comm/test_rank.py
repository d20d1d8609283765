import dataclasses
import re

import pytest
import torch

from shoal.comm.device import set_threads
from shoal.comm.rank import ALONE, Rank, read_rank
from shoal.core import host
from shoal.core.errors import ConfigError
from shoal.launch.starting import worker_environment

TORCHRUN = {
    "RANK": "3",
    "WORLD_SIZE": "8",
    "LOCAL_RANK": "1",
    "LOCAL_WORLD_SIZE": "2",
    "MASTER_ADDR": "10.0.0.5",
    "MASTER_PORT": "29500",
    "TORCHELASTIC_USE_AGENT_STORE": "True",
}
# As seen inside `srun -N2 -n3` of Slurm 22.05, on the second node.
SRUN = {
    "SLURM_PROCID": "2",
    "SLURM_LOCALID": "0",
    "SLURM_NODEID": "1",
    "SLURM_JOB_ID": "17",
    "SLURM_STEP_ID": "0",
    "SLURM_NTASKS": "3",
    "SLURM_STEP_NUM_TASKS": "3",
    "SLURM_STEP_NUM_NODES": "2",
    "SLURM_STEP_TASKS_PER_NODE": "2,1",
    "SLURM_STEP_NODELIST": "node[03-04]",
}


def test_a_process_that_no_launcher_started_has_no_rank() -> None:
    assert read_rank({"HOME": "/root"}) is None


def test_torchruns_variables_are_read() -> None:
    assert read_rank(TORCHRUN) == Rank(3, 8, 1, 2, "10.0.0.5", 29500, store_is_hosted=True)


def test_sruns_variables_are_read() -> None:
    rank = read_rank(SRUN)
    assert rank is not None
    assert (rank.index, rank.workers, rank.local_index, rank.local_workers) == (2, 3, 0, 1)
    assert (rank.store_host, rank.store_is_hosted) == ("node03", False)
    assert 20_000 <= rank.store_port < 32_000
    hosted = read_rank(SRUN | {"TORCHELASTIC_USE_AGENT_STORE": "True"})
    assert hosted is not None
    assert hosted.store_is_hosted


def test_all_workers_of_a_step_agree_where_to_meet_and_two_steps_do_not() -> None:
    first = read_rank(SRUN | {"SLURM_PROCID": "0", "SLURM_NODEID": "0"})
    other = read_rank(SRUN | {"SLURM_STEP_ID": "1"})
    rank = read_rank(SRUN)
    assert first is not None
    assert other is not None
    assert rank is not None
    assert (first.store_host, first.store_port) == (rank.store_host, rank.store_port)
    assert first.local_workers == 2
    assert other.store_port != rank.store_port


def test_srun_on_one_node_meets_on_loopback() -> None:
    rank = read_rank(SRUN | {"SLURM_STEP_NUM_NODES": "1", "SLURM_STEP_TASKS_PER_NODE": "3", "SLURM_NODEID": "0"})
    assert rank is not None
    assert rank.store_host == "127.0.0.1"
    assert rank.local_workers == 3


@pytest.mark.parametrize("step", [None, "4294967291", "4294967290"], ids=["none", "batch script", "interactive"])
def test_a_shell_inside_an_allocation_is_no_worker(step: str | None) -> None:
    env = {name: value for name, value in SRUN.items() if name != "SLURM_STEP_ID"}
    assert read_rank(env | ({"SLURM_STEP_ID": step} if step else {})) is None


@pytest.mark.parametrize(
    ("nodes", "first"),
    [("n1", "n1"), ("n[1-4]", "n1"), ("gpu[03,07-09],cpu1", "gpu03"), ("a,b[1-2]", "a"), ("rack[2-3]n1", "rack2n1")],
)
def test_the_first_host_of_a_node_list_hosts_the_store(nodes: str, first: str) -> None:
    rank = read_rank(SRUN | {"SLURM_STEP_NODELIST": nodes})
    assert rank is not None
    assert rank.store_host == first


@pytest.mark.parametrize(
    ("env", "sentence"),
    [
        ({"RANK": "0", "WORLD_SIZE": "2"}, "MASTER_PORT is not set, but other variables of the same launcher are."),
        (TORCHRUN | {"RANK": "zero"}, "RANK='zero' is not a whole number."),
    ],
)
def test_variables_that_make_no_sense_are_named(env: dict[str, str], sentence: str) -> None:
    with pytest.raises(ConfigError, match=re.escape(sentence)):
        read_rank(env)


def test_workers_share_the_cores_among_as_many_as_there_are_unless_somebody_has_said_how(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    monkeypatch.setattr(host, "usable_cores", lambda: 12)
    given: list[int] = []
    monkeypatch.setattr(torch, "set_num_threads", given.append)
    for own in ({}, {"OMP_NUM_THREADS": "5"}):
        for name, value in worker_environment(own, threads=6, host="h", port=1).items():
            monkeypatch.setenv(name, value)
        for workers in (2, 3, 1):
            set_threads(dataclasses.replace(ALONE, local_workers=workers))
    assert given == [6, 4, 12]
