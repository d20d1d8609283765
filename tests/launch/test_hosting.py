"""Launchers of several hosts, each with its part of the workers. The hosts are real ones but for their kernel: network
namespaces with memory of their own. What Slurm does, to start a process on each, the tests do."""

import os
import signal
import subprocess
import sys
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest

from shoal.comm.members import FINISHED, await_members, first_names, members_of
from shoal.comm.store import host_store
from shoal.core.events import EventReader
from shoal.core.run_folder import RunFolder
from shoal.launch.slurm.hosting import exit_code_of, ranks_of
from shoal.spec.on_loss import OnLoss
from shoal.spec.plan import Mesh, Plan
from shoal.training.host import this_host
from shoal.training.jobfile import load_job
from shoal.training.prepare import write_run
from tests.support import hosts as support
from tests.support.files import job_file
from tests.support.hosts import Hosts, hosts
from tests.support.training import reference
from tests.support.waiting import wait_until

# Slow until a worker is lost, so that there is time for that.
BODY = """
import torch.distributed as dist

fields["model"] = lambda: nn.Sequential(nn.Linear(5, 8), nn.Tanh(), nn.Linear(8, 1))
fields["optimizer"] = lambda parameters: torch.optim.AdamW(parameters, lr=0.02)
fields["steps"] = 40
plain_loss = fields["loss"]

def loss(output, batch):
    if dist.is_initialized() and dist.get_world_size() == 4:
        time.sleep(0.2)
    return plain_loss(output, batch)

fields["loss"] = loss
"""

WHY_NOT = support.why_not()
pytestmark = pytest.mark.skipif(WHY_NOT is not None, reason=str(WHY_NOT))


class Launched:
    """A run of 4 workers on two hosts."""

    def __init__(self, cluster: Hosts, folder: Path, plan: Plan, body: str = BODY) -> None:
        self.file = job_file(folder, body)
        self.run = RunFolder.create(folder, "r", "r")
        write_run(self.run, load_job(self.file), plan, this_host(), file=self.file)
        self.store, port = host_store(host=cluster.machine, timeout_s=60)
        if plan.goes_on:
            await_members(members_of(self.store), first_names(range(4)))
        self.launchers = [self._start(cluster, host, port) for host in range(2)]

    def _start(self, cluster: Hosts, host: int, port: int) -> "subprocess.Popen[Any]":
        where = {"MASTER_ADDR": cluster.machine, "MASTER_PORT": str(port), "OMP_NUM_THREADS": "1"}
        srun = {"SLURM_STEP_NUM_TASKS": "2", "SLURM_PROCID": str(host)}
        command = [sys.executable, "-m", "shoal", "host", str(self.run.path)]
        with (self.run.path / f"output-{host}.txt").open("w") as output:
            return cluster.start(host, command, env=os.environ | where | srun, stdout=output, stderr=output)

    def output(self, host: int) -> str:
        return (self.run.path / f"output-{host}.txt").read_text()

    def events(self, kind: str) -> list[dict[str, Any]]:
        logs = [EventReader(self.run.events_of(rank)).poll() for rank in range(4)]
        return [event for log in logs for event in log if event["kind"] == kind]


@pytest.fixture(scope="module")
def cluster() -> Iterator[Hosts]:
    with hosts(count=2, rate="none") as made:
        yield made


def test_a_host_that_is_lost_takes_nothing_with_it_that_another_did_not_keep(cluster: Hosts, tmp_path: Path) -> None:
    """Half of a model that is cut over all workers: what was on the lost host is in the memory of the other."""
    plan = Plan(mesh=Mesh(shard=4), zero=3, on_loss=OnLoss(snapshot="1"), timeout_s=60)
    launched = Launched(cluster, tmp_path, plan)
    wait_until(lambda: len(launched.events("step")) > 4 * 5, seconds=120)
    os.killpg(launched.launchers[1].pid, signal.SIGKILL)  # as when its power is cut: nobody says a word
    assert launched.launchers[0].wait(120) == 0, launched.output(0)
    assert members_of(launched.store).check([FINISHED])
    lost = launched.events("loss")
    assert sorted({number for event in lost for number in event["dead"]}) == [2, 3]
    assert all(event["lost_steps"] <= 1 for event in lost)
    assert not list(launched.run.checkpoints.glob("*"))
    _assert_losses_are_those_of_one_process(launched)


def test_a_worker_that_is_killed_is_replaced_on_its_host(cluster: Hosts, tmp_path: Path) -> None:
    plan = Plan(mesh=Mesh(replicate=4), timeout_s=60)
    launched = Launched(cluster, tmp_path, plan)
    wait_until(lambda: len(launched.events("step")) > 4 * 5, seconds=120)
    pid = next(event["pid"] for event in EventReader(launched.run.events_of(3)).poll() if event["kind"] == "start")
    os.kill(pid, signal.SIGKILL)
    assert [launcher.wait(120) for launcher in launched.launchers] == [0, 0], launched.output(1)
    assert "worker 3" in launched.output(1)
    assert "another is started in its place." in launched.output(1)
    assert "another is started" not in launched.output(0)
    _assert_losses_are_those_of_one_process(launched)


def test_a_worker_that_fails_ends_those_of_every_host(cluster: Hosts, tmp_path: Path) -> None:
    fails = f"{BODY}\nif worker == 3:\n    fields['loss'] = lambda output, batch: 1 / 0\n"
    launched = Launched(cluster, tmp_path, Plan(mesh=Mesh(replicate=4), timeout_s=60), fails)
    assert launched.launchers[1].wait(120) != 0
    assert launched.launchers[0].wait(60) == 0  # its own were ended by it
    assert not members_of(launched.store).check([FINISHED])
    assert any("division by zero" in event["message"] for event in launched.events("error"))


@pytest.mark.parametrize(("node", "ranks"), [(0, range(3)), (1, range(3, 6))])
def test_a_node_has_the_workers_that_follow_those_of_the_node_before(node: int, ranks: range) -> None:
    assert ranks_of(6, {"SLURM_STEP_NUM_TASKS": "2", "SLURM_PROCID": str(node)}) == ranks


def test_no_workers_have_ended_well() -> None:
    assert exit_code_of([]) == 0


def _assert_losses_are_those_of_one_process(launched: Launched) -> None:
    job = load_job(launched.file)
    expected = reference(job, job.total_steps).losses
    found = {event["step"]: event["loss"] for event in launched.events("step")}
    assert [found[step] for step in range(1, 41)] == pytest.approx(expected, rel=1e-5, abs=1e-7)
