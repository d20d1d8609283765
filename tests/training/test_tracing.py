"""Which steps are traced, and what real workers write of them."""

import json
from pathlib import Path
from typing import Any

import pytest
import torch

from shoal.comm.rank import Rank
from shoal.comm.store import connect
from shoal.core.errors import ConfigError
from shoal.core.events import STEP_PARTS, EventLog, EventReader
from shoal.core.run_folder import RunFolder
from shoal.spec.plan import Batch, Checkpoints, Mesh, Plan
from shoal.spec.record import MOST_TRACED, traced_steps
from shoal.spec.sync import Sync
from shoal.training.clock import StepClock, Taken
from shoal.training.host import this_host
from shoal.training.loop import train_all
from shoal.training.memory import PeakMemory
from shoal.training.opening import open_run
from shoal.training.prepare import write_run
from shoal.training.resolve import resolve_plan
from shoal.training.tracing import MOST_OUTLIERS, Tracing
from tests.support.ranks import RankPool
from tests.support.training import build

CASE = "benchmarks.parallel_cases:gpt"


def _tracing(folder: RunFolder, log: EventLog) -> Tracing:
    device = torch.device("cpu")
    memory = PeakMemory(device, divided=False)
    return Tracing(folder, index=0, log=log, clock=StepClock(device), memory=memory, loading=lambda: None)


def _step_of(seconds: float) -> Taken:
    return Taken([("", 0.0), ("forward_s", seconds)], [], [], began_s=0.0)


def _traces(folder: RunFolder) -> list[tuple[int, str]]:
    events = EventReader(folder.events_of(0)).poll()
    return [(event["step"], event["why"]) for event in events if event["kind"] == "trace"]


@pytest.fixture
def folder(tmp_path: Path) -> RunFolder:
    return RunFolder.create(tmp_path, "traced", "run")


def test_only_a_step_of_three_times_the_median_is_written_and_none_in_warm_up(folder: RunFolder) -> None:
    log = EventLog(folder.events_of(0))
    tracing = _tracing(folder, log)
    lengths = {3: 9.0, 30: 0.299, 40: 0.31, 41: 9.0, 50: 0.305, 60: 0.5}  # 41 pays for the trace of 40
    for step in range(1, 100):
        seconds = lengths.get(step, 0.1)
        tracing.note(step, _step_of(seconds), seconds)
    tracing.close()
    assert sorted(_traces(folder)) == [(40, "outlier: 3.1x the median"), (60, "outlier: 5.0x the median")]
    assert sorted(path.name for path in folder.traces.iterdir()) == ["rank-0-step-40.json", "rank-0-step-60.json"]


def test_a_run_of_many_outliers_writes_few_of_them(folder: RunFolder) -> None:
    log = EventLog(folder.events_of(0))
    tracing = _tracing(folder, log)
    for step in range(1, 2000):
        seconds = 1.0 + step / 1000 if step % 10 == 0 else 0.1
        tracing.note(step, _step_of(seconds), seconds)
    tracing.close()
    assert len(_traces(folder)) == MOST_OUTLIERS


@pytest.mark.parametrize(("text", "steps"), [("", range(0)), ("7", range(7, 8)), ("100:103", range(100, 104))])
def test_steps_are_asked_for_by_the_first_and_the_last(text: str, steps: range) -> None:
    assert traced_steps(text) == steps


@pytest.mark.parametrize("text", ["0:3", "9:3", "a:b", ":", "3:", "-1:2", "1:2:3", f"1:{MOST_TRACED + 1}", "\u0661"])
def test_other_words_for_steps_are_refused(text: str) -> None:
    with pytest.raises(ConfigError, match="100:103"):
        traced_steps(text)


def traced_part(rank: Rank, *, folder: Path, steps: int) -> None:
    """Be one worker of a traced run. Runs in the pool."""
    log = EventLog(RunFolder(folder).events_of(rank.index))
    store = connect(rank, timeout_s=60) if rank.workers > 1 else None
    try:
        with open_run(build(CASE, steps=steps, layers=4), RunFolder(folder), rank=rank, store=store, log=log) as run:
            train_all(run)
    finally:
        log.close()


def _run(ranks: RankPool, plan: Plan, tmp_path: Path, trace: str) -> RunFolder:
    job = build(CASE, steps=5, layers=4)
    plan, _ = resolve_plan(job, plan)
    folder = RunFolder.create(tmp_path, None, stem="run")
    write_run(folder, job, plan, this_host(), file=None, trace=trace)
    ranks.run(traced_part, workers=plan.workers, folder=folder.path, steps=5)
    return folder


def _events(folder: RunFolder, rank: int, kind: str) -> list[dict[str, Any]]:
    return [event for event in EventReader(folder.events_of(rank)).poll() if event["kind"] == kind]


def _spans(folder: RunFolder, rank: int, step: int) -> list[dict[str, Any]]:
    trace = json.loads(folder.trace_of(rank, step).read_text())
    return [event for event in trace["traceEvents"] if event["ph"] == "X"]


_PLANS = {
    "shared memory": (Plan(mesh=Mesh(replicate=2)), {("all-reduce", "shared-memory", "shm")}),
    "ring": (Plan(mesh=Mesh(replicate=2), sync=Sync(way="ring")), {("all-reduce", "ring", "host")}),
    "engine": (Plan(mesh=Mesh(replicate=2), sync=Sync(way="engine")), {("all-reduce", "engine", "host")}),
    "codec": (Plan(mesh=Mesh(replicate=2), sync=Sync(codec="bf16")), {("all-reduce", "engine", "host")}),
    "zero-3": (
        Plan(mesh=Mesh(shard=2), zero=3),
        {("all-gather", "shared-memory", "shm"), ("reduce-scatter", "shared-memory", "shm")},
    ),
    "zero-3, engine": (
        Plan(mesh=Mesh(shard=2), zero=3, sync=Sync(way="engine")),
        {("all-gather", "engine", "host"), ("reduce-scatter", "engine", "host")},
    ),
    "tensor": (Plan(mesh=Mesh(tensor=2)), {("all-reduce", "engine", "host")}),
}


@pytest.mark.parametrize(("plan", "kinds"), _PLANS.values(), ids=list(_PLANS))
def test_workers_write_what_travelled_and_traces_that_add_up_to_their_steps(
    plan: Plan, kinds: set[tuple[str, str, str]], ranks: RankPool, tmp_path: Path
) -> None:
    folder = _run(ranks, plan, tmp_path, "3:4")
    assert sorted(path.name for path in folder.traces.iterdir()) == [
        f"rank-{rank}-step-{step}.json" for rank in range(2) for step in (3, 4)
    ]
    for rank in range(2):
        (comm,) = _events(folder, rank, "comm")
        assert (comm["step"], comm["steps"]) == (5, 5)
        found = {(call["op"], call["algorithm"], call["link"]) for call in comm["calls"]}
        assert kinds <= found
        assert all(call["count"] > 0 and call["bytes"] > 0 and call["seconds"] > 0 for call in comm["calls"])
        steps = {event["step"]: event for event in _events(folder, rank, "step")}
        for step in (3, 4):
            sums: dict[str, float] = {}
            for span in _spans(folder, rank, step):
                if span["tid"] == 0:
                    sums[span["cat"]] = sums.get(span["cat"], 0.0) + span["dur"] / 1e6
            # Each span is rounded to a microsecond, at both ends.
            assert sum(sums.values()) == pytest.approx(steps[step]["step_s"], abs=1e-4)
            assert sums["data"] == pytest.approx(steps[step]["data_s"], abs=1e-4)
            assert sums.get("communication", 0.0) == pytest.approx(steps[step]["comm_s"], abs=1e-4)


def test_the_micro_batches_of_a_pipeline_are_one_span_each(ranks: RankPool, tmp_path: Path) -> None:
    plan = Plan(mesh=Mesh(pipeline=2), batch=Batch(micro_batch=2))
    folder = _run(ranks, plan, tmp_path, "2")
    for rank in range(2):
        spans = _spans(folder, rank, 2)
        for name in ("forward", "backward"):
            numbers = [span["args"]["micro_batch"] for span in spans if span["name"] == name]
            assert sorted(set(numbers)) == list(range(max(numbers) + 1))
            assert len(set(numbers)) > 1
        assert any(span["cat"] == "bubble" for span in spans)


def test_loading_and_memory_are_written_with_what_they_are_of(ranks: RankPool, tmp_path: Path) -> None:
    folder = _run(ranks, Plan(), tmp_path, "2:3")
    (data,) = _events(folder, 0, "data")
    steps = _events(folder, 0, "step")
    assert (data["step"], data["steps"], data["storage"]) == (5, 5, "dataset")
    assert data["samples"] == sum(step["samples"] for step in steps)
    assert data["bytes"] > 0
    assert data["wait_s"] == pytest.approx(sum(step["data_s"] for step in steps), abs=1e-4)
    assert 0 < data["fill_cpu_s"] <= data["fill_s"] * 1.5  # two clocks, each with its own steps
    assert data["threads"] == 1
    for step, memory in zip((2, 3), _events(folder, 0, "memory"), strict=True):
        assert memory["step"] == step
        assert len(memory["at_s"]) == len(memory["bytes"]) == len(memory["labels"])
        assert memory["at_s"] == sorted(memory["at_s"])
        assert [label for label in memory["labels"] if label] == ["data", "forward", "backward", "optimizer"]
        assert all(num_bytes >= 0 for num_bytes in memory["bytes"])
    assert _events(folder, 0, "comm") == []


def test_what_saving_takes_is_counted_as_that(ranks: RankPool, tmp_path: Path) -> None:
    folder = _run(ranks, Plan(checkpoint=Checkpoints(every_steps=2)), tmp_path, "")
    steps = {event["step"]: event for event in _events(folder, 0, "step")}
    stalls = {event["step"]: event["stall_s"] for event in _events(folder, 0, "checkpoint")}
    assert {2, 4} <= set(stalls)
    for step in (2, 4):  # the loop is held up between this step and the next, whose time it is
        assert steps[step + 1]["checkpoint_s"] >= 0.9 * stalls[step] > 0
        assert sum(steps[step + 1][name] for name in STEP_PARTS) <= steps[step + 1]["step_s"] + 1e-5
