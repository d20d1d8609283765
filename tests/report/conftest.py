"""Run folders made by hand, through the same classes that real runs write theirs with."""

from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest

from shoal.core.events import EventLog
from shoal.core.run_folder import RunFolder
from shoal.core.toml import write_toml
from shoal.spec.cluster import Cluster, Node
from shoal.spec.plan import Mesh, Plan, Predicted
from shoal.spec.record import JobRecord, RunRecord

PREDICTED = Predicted(step_s=0.08, comm_s=0.01, samples_per_s=100.0, peak_bytes=(50_000_000, 50_000_000))


def _step_fields(step: int, rank: int) -> dict[str, Any]:
    """Return one step: worker 0 is busy 90 of 100 ms, worker 1 only 60; steps 1 and 2 take ten times as long."""
    slow = 10 if step <= 2 else 1
    forward_s, comm_s = (0.03, 0.01) if rank == 0 else (0.0, 0.04)
    parts = {"data_s": 0.02, "forward_s": forward_s, "backward_s": 0.03, "comm_s": comm_s, "bubble_s": 0.0}
    parts["optimizer_s"] = 0.01
    parts = {name: seconds * slow for name, seconds in parts.items()}
    numbers = {"step": step, "epoch": 0, "loss": 4 / step, "part_loss": 4 / step + rank, "samples": 4, "weight": 40}
    return numbers | {"step_s": 0.1 * slow} | parts


def _make_run(
    runs: Path,
    *,
    name: str = "gpt-1",
    workers: int = 2,
    steps: int = 12,
    status: str | None = "done",
    message: str = "",
    predicted: Predicted | None = PREDICTED,
    unit: str = "tokens",
    command: str = "shoal train train.py",
    metric: str = "loss",
    step_of: Callable[[int, int], dict[str, Any]] = _step_fields,
) -> RunFolder:
    """Write a run; `status` None leaves it unfinished."""
    run = RunFolder.create(runs, name, "run")
    versions = {"python": "3.12.1", "shoal": "0.1.0", "torch": "2.11.0"}
    record = RunRecord(name=name, started="2025-01-31 12:00:00", command=command, host="tide-3", versions=versions)
    write_toml(run.run_toml, record)
    job = JobRecord(file="train.py", num_samples=800, batch_size=4 * workers, steps=steps, seed=7, unit=unit)
    write_toml(run.job_toml, job)
    write_toml(run.plan_toml, Plan(mesh=Mesh(replicate=workers), predicted=predicted))
    node = Node(host="tide-3", cores=8, memory_bytes=32_000_000_000, device="a processor")
    write_toml(run.cluster_toml, Cluster(nodes=(node,)))
    for rank in range(workers):
        _write_log(run, rank, steps, finished=status is not None, metric=metric, step_of=step_of)
    if status is not None:
        run.write_result(status, message)
    return run


def _write_log(
    run: RunFolder,
    rank: int,
    steps: int,
    *,
    finished: bool,
    metric: str,
    step_of: Callable[[int, int], dict[str, Any]],
) -> None:
    log = EventLog(run.events_of(rank))
    log.write("start", time=1000.0 + rank, pid=1, host="tide-3")
    for step in range(1, steps + 1):
        log.write("step", time=1000.0 + step, **step_of(step, rank))
        if rank == 0 and step % 6 == 0:
            log.write("eval", time=1000.0 + step, step=step, metrics={metric: 5 / step, "accuracy": step / 20})
    if finished:
        log.write("end", time=1001.0 + steps, step=steps, peak_bytes=60_000_000 + rank)
    log.close()


@pytest.fixture
def run(tmp_path: Path) -> RunFolder:
    """A whole run of 12 steps on 2 workers."""
    return _make_run(tmp_path)


@pytest.fixture
def make_run() -> Callable[..., RunFolder]:
    """Makes runs: `make_run(folder, steps=3, ...)`."""
    return _make_run


@pytest.fixture
def step_fields() -> Callable[[int, int], dict[str, Any]]:
    """Makes the fields of a step event: `step_fields(step, rank)`."""
    return _step_fields
