"""Predicted beside measured: a row for whatever was predicted and the run has measured."""

import dataclasses
import json
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest

from shoal.core.run_folder import RunFolder
from shoal.core.toml import write_toml
from shoal.report.compare import compare
from shoal.report.sent import BETWEEN, INSIDE, sent_bytes
from shoal.report.summary import Summary, summarize
from shoal.spec.cluster import Cluster, Node
from shoal.spec.plan import Batch, Mesh, Plan
from shoal.spec.sync import Sync
from tests.support.runs import PREDICTED

MakeRun = Callable[..., RunFolder]
MB = 1_000_000
ALL_REDUCE, ALL_GATHER, REDUCE_SCATTER = "all-reduce", "all-gather", "reduce-scatter"


@pytest.fixture
def called(tmp_path: Path, make_run: MakeRun) -> Callable[..., Summary]:
    """Makes runs whose workers called collectives in each of 12 steps: `called(plan, (op, bytes), ...)`."""

    def make(plan: Plan, *calls: tuple[str, int], link: str = "host", nodes: int = 1) -> Summary:
        run = make_run(tmp_path, name=f"run-{len(list(tmp_path.iterdir()))}", workers=plan.workers)
        write_toml(run.plan_toml, plan)
        node = Node(host="tide", cores=8, memory_bytes=32_000_000_000, device="a processor", count=nodes)
        write_toml(run.cluster_toml, Cluster(nodes=(node,)))
        listed = [
            {"op": op, "algorithm": "engine", "link": link, "bytes": num_bytes, "count": 12, "seconds": 1.0}
            for op, num_bytes in calls
        ]
        for rank in range(plan.workers):
            write(run, rank, {"kind": "comm", "step": 12, "steps": 12, "calls": listed})
        return summarize(run)

    return make


def write(run: RunFolder, rank: int, event: dict[str, Any]) -> None:
    with run.events_of(rank).open("a") as file:
        file.write(json.dumps({"time": 1013.0, **event}) + "\n")


def rows(summary: Summary) -> dict[str, tuple[str, str, str]]:
    return {row.name: (row.predicted, row.measured, row.ratio) for row in compare(summary)}


ZERO = Plan(mesh=Mesh(shard=4), zero=3)
GATHERED = ((ALL_GATHER, 100 * MB), (ALL_GATHER, 100 * MB), (REDUCE_SCATTER, 100 * MB))


@pytest.mark.parametrize(
    ("plan", "calls", "sent_mb"),
    [
        (Plan(mesh=Mesh(replicate=4)), [(ALL_REDUCE, 100 * MB)], 150),
        (Plan(mesh=Mesh(replicate=4), sync=Sync(codec="bf16")), [(ALL_REDUCE, 50 * MB)], 75),
        (ZERO, GATHERED, 225),
        (Plan(mesh=Mesh(shard=2, replicate=2), zero=3), [*GATHERED, (ALL_REDUCE, 50 * MB)], 150 + 50),
        (Plan(mesh=Mesh(tensor=4)), [(ALL_REDUCE, 8 * MB), (ALL_GATHER, 4 * MB)], 12 + 3),
        (Plan(mesh=Mesh(tensor=2, replicate=2)), [(ALL_REDUCE, 8 * MB)], None),
        (Plan(mesh=Mesh(pipeline=2)), [(ALL_REDUCE, 8 * MB)], None),
        (Plan(mesh=Mesh(replicate=2)), [("all-to-all", 8 * MB)], None),
        (Plan(mesh=Mesh(shard=2), zero=3, sync=Sync(codec="int8")), [(ALL_GATHER, 8 * MB)], None),
        (Plan(mesh=Mesh(replicate=2), sync=Sync(mode="local", local_steps=4)), [(ALL_REDUCE, 8 * MB)], None),
    ],
    ids=lambda value: (
        "-".join(f"{axis}={size}" for axis, size in vars(value.mesh).items() if size > 1)
        if isinstance(value, Plan)
        else None
    ),
)
def test_bytes_are_those_that_each_collective_sends(
    called: Callable[..., Summary], plan: Plan, calls: list[tuple[str, int]], sent_mb: float | None
) -> None:
    summary = called(plan, *calls)
    sent = sent_bytes(summary, INSIDE)
    assert sent == (None if sent_mb is None else pytest.approx(sent_mb * MB))
    assert sent_bytes(summary, BETWEEN) == (None if sent_mb is None else 0)


@pytest.mark.parametrize(
    ("link", "nodes", "inside", "between"),
    [
        ("shm", 1, 225, 0),
        ("gpu", 1, 225, 0),
        ("network", 4, 0, 225),
        ("network", 2, None, None),
        ("gpu", 2, None, None),
    ],
)
def test_bytes_stay_inside_a_node_or_leave_it_by_the_link(
    called: Callable[..., Summary], link: str, nodes: int, inside: float | None, between: float | None
) -> None:
    summary = called(ZERO, *GATHERED, link=link, nodes=nodes)
    expected = [None if sent is None else sent * MB for sent in (inside, between)]
    assert [sent_bytes(summary, where) for where in (INSIDE, BETWEEN)] == expected


def test_predicted_bytes_of_zero_stand_beside_measured_ones(called: Callable[..., Summary]) -> None:
    predicted = dataclasses.replace(PREDICTED, inside_bytes=250 * MB)
    found = rows(called(dataclasses.replace(ZERO, predicted=predicted), *GATHERED))
    assert found["bytes a worker sends inside its node, a step"] == ("250 MB", "225 MB", "0.90")
    assert "bytes a worker sends to other nodes, a step" not in found


def test_a_micro_batch_stands_beside_its_prediction_however_it_divides(tmp_path: Path, make_run: MakeRun) -> None:
    run = make_run(tmp_path, workers=1)  # 4 samples a step, 30 ms forward and 30 backward
    predicted = dataclasses.replace(PREDICTED, fixed_s=0.02, sample_s=0.002)
    write_toml(run.plan_toml, Plan(batch=Batch(micro_batch=2), predicted=predicted))
    assert rows(summarize(run))["forward and backward of 2 samples"] == ("24 ms", "30 ms", "1.25")
    write_toml(run.plan_toml, Plan(batch=Batch(micro_batch=1), predicted=PREDICTED))
    assert rows(summarize(run))["forward and backward of 1 sample"] == ("-", "15 ms", "-")


def test_a_checkpoints_stall_stands_beside_its_prediction(tmp_path: Path, make_run: MakeRun) -> None:
    run = make_run(tmp_path, predicted=dataclasses.replace(PREDICTED, stall_s=0.1))
    name = "a checkpoint holds training up"
    assert name not in rows(summarize(run))
    for step, stall_s in ((4, 0.1), (8, 0.14)):
        write(run, 0, {"kind": "checkpoint", "step": step, "stall_s": stall_s, "write_s": 0.5, "bytes": 10 * MB})
    write(run, 0, {"kind": "checkpoint", "step": 9, "stall_s": 9.0, "write_s": 0.0, "bytes": 0, "error": "disk full"})
    assert rows(summarize(run))[name] == ("100 ms", "120 ms", "1.20")
