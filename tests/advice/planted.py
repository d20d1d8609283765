"""Runs with a planted bottleneck: each a real training of a few seconds, and the same again with the advice followed.

What is planted is slow by sleeping, as a device, a storage or a disk is to a processor that waits for it: that takes as
long on a busy machine. The link is really slow (hosts.py). Tiny micro-batches are planted twice: on a device whose
operations take long to start, as the planner is told; and computed, which is timed by what the processor computes.
"""

import os
import statistics
import subprocess
import sys
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path

from shoal.comm.store import host_store
from shoal.core.run_folder import RunFolder
from shoal.core.toml import write_toml
from shoal.fault.inject import Fault, environment, slow
from shoal.report.advice import Advice, advise, follow
from shoal.report.summary import Summary, summarize
from shoal.spec.cluster import Cluster
from shoal.spec.device import Device
from shoal.spec.plan import Batch, Checkpoints, Mesh, Plan
from shoal.spec.sync import Sync
from shoal.training.host import this_host
from tests.support.hosts import hosts, why_not

JOBS = Path(__file__).with_name("jobs")
TIMEOUT_S = 300.0
TOLERANCE = 0.25


@dataclass(frozen=True, kw_only=True)
class Planted:
    """A bottleneck, and the run that has it."""

    bottleneck: str
    """As `Advice` names it."""
    job: str
    plan: Plan
    faults: tuple[Fault, ...] = ()
    operation_s: float | None = None
    """What starting an operation takes on the device that is told to the planner; None: it is measured."""
    cores: int | None = None
    """How many it has; None: all."""
    link: str = ""
    """The rate of the link between workers, each on a host of its own; empty: all are on this one."""

    @property
    def why_not(self) -> str | None:
        """Why this machine cannot run it, or None."""
        return why_not() if self.link else None


def _plan(**fields: object) -> Plan:
    return Plan(timeout_s=120, **fields)  # type: ignore[arg-type]


PLANTED = {
    "slow data": Planted(bottleneck="data", job="slow_data.py", plan=_plan()),
    "slow link": Planted(
        bottleneck="link",
        job="slow_link.py",
        plan=_plan(mesh=Mesh(replicate=2), sync=Sync(way="ring"), batch=Batch(live=False)),
        link="50mbit",
    ),
    "straggler": Planted(
        bottleneck="straggler", job="straggler.py", plan=_plan(mesh=Mesh(replicate=2), batch=Batch(live=False))
    ),
    "tiny micro-batch": Planted(
        bottleneck="micro-batch",
        job="tiny_micro_batch.py",
        plan=_plan(batch=Batch(micro_batch=1)),
        operation_s=0.002,
    ),
    "tiny micro-batch, computed": Planted(
        bottleneck="micro-batch", job="tiny_computed.py", plan=_plan(batch=Batch(micro_batch=1)), cores=1
    ),
    "pipeline bubble": Planted(
        bottleneck="bubble",
        job="pipeline.py",
        plan=_plan(mesh=Mesh(pipeline=4), batch=Batch(micro_batch=8)),
        operation_s=2e-5,  # measured on a busy machine, it can be a thousand times as much
    ),
    "checkpoint stall": Planted(
        bottleneck="checkpoint",
        job="checkpoints.py",
        plan=_plan(checkpoint=Checkpoints(every_steps=1)),
        faults=(slow(0, 0, seconds=0.6, steps=10_000, point="checkpoint: writing"),),
    ),
}


@dataclass(frozen=True, kw_only=True)
class Outcome:
    """What the verdict of a planted run was, and what came of following it."""

    advice: Advice
    named: tuple[str, ...]
    """The bottleneck that the verdict named, in each round."""
    predicted: float
    measured: float

    @property
    def off(self) -> float:
        """How far the measured gain is from the predicted one, relatively; what was promised at least may be more."""
        less = (self.predicted - self.measured) / self.predicted
        return max(0.0, less) if self.advice.is_bound else abs(less)


def try_advice(planted: Planted, folder: Path, *, rounds: int = 1) -> Outcome:
    """Train, take the verdict, follow it, train again; `rounds` times in turns, of which the medians count.

    Only the first round decides what is changed.
    """
    befores, afters, predictions, named = [], [], [], []
    advice: Advice | None = None
    for number in range(rounds):
        before = train(planted, planted.plan, folder, f"before-{number}")
        found = advise(before)
        assert found, "the verdict names no bottleneck"
        named.append(found[0].bottleneck)
        advice = advice or found[0]
        assert advice.change is not None, advice.sentence
        predictions += [each.predicted_gain for each in found if each.change == advice.change]
        after = train(planted, follow(planted.plan, advice.change), folder, f"after-{number}")
        befores.append(before.samples_per_s or 0.0)
        afters.append(after.samples_per_s or 0.0)
    assert advice is not None
    measured = statistics.median(afters) / statistics.median(befores)
    return Outcome(advice=advice, named=tuple(named), predicted=statistics.median(predictions), measured=measured)


def train(planted: Planted, plan: Plan, folder: Path, name: str) -> Summary:
    """Train the planted job under `plan` as `shoal train` does, and return what the run folder says."""
    plan_file = folder / f"{name}.toml"
    write_toml(plan_file, plan)
    words = [str(JOBS / planted.job), "--plan", str(plan_file), "--runs", str(folder), "--name", name]
    if planted.operation_s is not None:
        words += ["--cluster", str(_told(planted.operation_s, folder))]
    command = [sys.executable, "-m", "shoal", "train", *words]
    # One thread each: a second one waits for a core that another process has, and then all is waiting.
    env = {**os.environ, "OMP_NUM_THREADS": "1", **(environment(planted.faults) if planted.faults else {})}
    if planted.link:
        _on_hosts(command, env, workers=plan.workers, rate=planted.link)
    else:
        _here(command, env, cores=planted.cores)
    return summarize(RunFolder.open(folder / name))


def _told(operation_s: float, folder: Path) -> Path:
    """Write the cluster of one node, whose device takes so long to start an operation."""
    device = Device(
        source="told",
        matmul_flops_per_s=1e11,
        bf16_matmul_flops_per_s=1e11,
        memory_bytes_per_s=1e10,
        operation_s=operation_s,
    )
    node = this_host().nodes[0]
    path = folder / "cluster.toml"
    write_toml(path, Cluster(nodes=(node,), devices={node.device: device}))
    return path


def _here(command: Sequence[str], env: dict[str, str], *, cores: int | None) -> None:
    all_cores = sorted(os.sched_getaffinity(0))
    os.sched_setaffinity(0, all_cores[:cores])  # what is started has no others
    try:
        done = subprocess.run(command, env=env, capture_output=True, text=True, check=False, timeout=TIMEOUT_S)
    finally:
        os.sched_setaffinity(0, all_cores)
    assert done.returncode == 0, done.stderr[-2000:]


def _on_hosts(command: Sequence[str], env: dict[str, str], *, workers: int, rate: str) -> None:
    """Run a worker on each of as many hosts, as torchrun would start them."""
    with hosts(count=workers, rate=rate) as cluster:
        store, port = host_store(host=cluster.machine, timeout_s=TIMEOUT_S)
        common = {
            "WORLD_SIZE": str(workers),
            "LOCAL_WORLD_SIZE": "1",
            "LOCAL_RANK": "0",
            "MASTER_ADDR": cluster.machine,
            "MASTER_PORT": str(port),
            "TORCHELASTIC_USE_AGENT_STORE": "True",
        }
        processes = [
            cluster.start(
                index,
                command,
                env=env | common | {"RANK": str(index)},
                stdout=subprocess.DEVNULL,
                stderr=subprocess.PIPE,
                text=True,
            )
            for index in range(workers)
        ]
        said = [process.communicate(timeout=TIMEOUT_S)[1] for process in processes]
        del store
    assert not any(process.returncode for process in processes), "\n".join(text[-1000:] for text in said)
