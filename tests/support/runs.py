"""Run folders made by hand, through the same classes that real runs write theirs with."""

import json
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

from shoal.core.events import EventLog
from shoal.core.run_folder import RunFolder
from shoal.core.toml import write_toml
from shoal.spec.cluster import Cluster, Node
from shoal.spec.communication import Communication
from shoal.spec.device import Link
from shoal.spec.plan import Mesh, Plan, Predicted
from shoal.spec.record import JobRecord, RunRecord

PREDICTED = Predicted(step_s=0.08, comm_s=0.01, samples_per_s=100.0, peak_bytes=(50_000_000, 50_000_000))


def step_fields(step: int, rank: int) -> dict[str, Any]:
    """Return one step: worker 0 is busy 90 of 100 ms, worker 1 only 60; steps 1 and 2 take ten times as long."""
    slow = 10 if step <= 2 else 1
    forward_s, comm_s = (0.03, 0.01) if rank == 0 else (0.0, 0.04)
    parts = {"data_s": 0.02, "forward_s": forward_s, "backward_s": 0.03, "comm_s": comm_s, "bubble_s": 0.0}
    parts["optimizer_s"] = 0.01
    parts = {name: seconds * slow for name, seconds in parts.items()}
    numbers = {"step": step, "epoch": 0, "loss": 4 / step, "part_loss": 4 / step + rank, "samples": 4, "weight": 40}
    return numbers | {"step_s": 0.1 * slow} | parts


def make_run(
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
    step_of: Callable[[int, int], dict[str, Any]] = step_fields,
) -> RunFolder:
    """Write a run; `status` None leaves it unfinished."""

    def batch_weighed(step: int, rank: int) -> dict[str, Any]:
        return {"batch_weight": sum(step_of(step, each)["weight"] for each in range(workers))} | step_of(step, rank)

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
        _write_log(run, rank, steps, finished=status is not None, metric=metric, step_of=batch_weighed)
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


def make_rich_run(runs: Path, *, name: str = "rich-1", workers: int = 2, steps: int = 12) -> RunFolder:
    """Write a run that has everything a report shows: communication, loading, memory, traces, saves and faults."""
    run = make_run(runs, name=name, workers=workers, steps=steps)
    link = Link(source="measured", bytes_per_s=1e9, latency_s=1e-5)
    why = "2 workers on processors of one host"
    write_toml(run.communication_toml, Communication(way="ring", why=why, bucket_bytes=4 << 20, inside=link))
    run.traces.mkdir()
    for rank in range(workers):
        log = EventLog(run.events_of(rank))
        for event in _rich_events(rank, steps):
            log.write(**{"time": 1013.0, **event})
        log.close()
        for step in (6, 9):
            run.trace_of(rank, step).write_text(json.dumps(_trace(rank, step)))
    return run


def _rich_events(rank: int, steps: int) -> Iterator[dict[str, Any]]:
    calls = [("ring", "host", 4 << 20, 0.03), ("ring", "host", 1 << 20, 0.01), ("engine", "shm", 64, 0.0001)]
    listed = [
        {"op": "all-reduce", "algorithm": name, "link": link, "bytes": size, "count": steps, "seconds": steps * seconds}
        for name, link, size, seconds in calls
    ]
    yield {"kind": "comm", "step": steps, "steps": steps, "calls": listed}
    loading = {"samples": 4 * steps, "bytes": 4000 * steps, "wait_s": 0.02 * steps, "fill_s": 0.05 * steps}
    yield {"kind": "data", "step": steps, "steps": steps, **loading, "threads": 2, "depth": 3, "storage": "ext4"}
    marks = {"at_s": [0.0, 0.05, 0.1], "labels": ["data", "forward", "backward"]}
    yield {"kind": "memory", "step": 6, "bytes": [1e7, 5.5e7 + rank, 2e7], **marks}
    yield {"kind": "checkpoint", "step": 5, "stall_s": 0.2, "write_s": 0.5, "bytes": 10_000_000}
    for step, reason in ((6, "asked"), (9, "outlier: 3.1x the median")):
        yield {"kind": "trace", "step": step, "file": f"traces/rank-{rank}-step-{step}.json", "why": reason}
    if rank == 0:
        spent = {"detected_s": 1.0, "agreed_s": 0.25, "rebuilt_s": 0.5, "recovery_s": 2.5, "lost_steps": 3}
        yield {"kind": "loss", "dead": [1], "workers": 1, "generation": 1, "step": 7, **spent}
        yield {"kind": "hang", "sentence": "Worker 1 has been silent for 30 s.", "blamed": [1], "still_s": 30.0}
        yield {"kind": "shares", "step": 8, "samples": [5, 3], "shares": [0.625, 0.375], "predicted_gain": 1.2}
    state = {"parameters": 1e7, "gradients": 1e7}
    yield {"kind": "end", "step": steps, "peak_bytes": 60_000_000 + rank, "state_bytes": state}


def _trace(rank: int, step: int) -> dict[str, Any]:
    """Return a step of two micro-batches in which communication runs beside backward, in a lane of its own."""
    named = {"ph": "M", "pid": rank, "name": "thread_name"}
    events: list[dict[str, Any]] = [{**named, "tid": 0, "args": {"name": "compute"}}]
    events.append({**named, "tid": 1, "args": {"name": "links"}})
    spans = [
        ("load", "data", 0, 0, 20),
        ("forward 0", "compute", 0, 20, 30),
        ("backward 0", "compute", 0, 50, 30),
        ("bucket 0", "communication", 1, 60, 30),
        ("optimizer", "compute", 0, 90, 10),
    ]
    for name, kind, lane, start_ms, length_ms in spans:
        at = {"ts": 1e15 + 1000 * (start_ms + 200 * step), "dur": 1000 * length_ms}
        events.append({"ph": "X", "pid": rank, "tid": lane, "name": name, "cat": kind, "args": {}, **at})
    return {"traceEvents": events}
