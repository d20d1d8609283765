"""Staging at the start of a job: the same training wherever the pack is read, and the space given back at the end."""

import tempfile
from collections.abc import Iterator
from contextlib import ExitStack, contextmanager, nullcontext
from dataclasses import replace
from pathlib import Path
from typing import Any
from unittest import mock

import numpy as np
import pytest
import torch
from torch.distributed import HashStore

from shoal.cli.main import main
from shoal.comm.calls import CALLS
from shoal.comm.rank import ALONE, Rank
from shoal.comm.store import host_store
from shoal.core.errors import ConfigError, PeerLost, PlanError
from shoal.core.events import EventReader
from shoal.core.run_folder import RunFolder
from shoal.data.order import Order
from shoal.data.pack.reader import Pack
from shoal.data.stage.agent import ask_agent
from shoal.data.stage.copies import Desk, read_plan
from shoal.data.stage.fetch import Fetcher
from shoal.data.stage.staging import stage
from shoal.data.view import View
from shoal.spec.job import Job
from shoal.spec.plan import Mesh, Plan
from shoal.training.staging import staged_job
from tests.data.packs import tokens_pack
from tests.data.stage.late import early_parts, late_parts, until
from tests.support.files import job_file
from tests.support.ranks import RankPool
from tests.support.training import Trace, bare_folder, reference, train_part
from tests.training.test_pack_job import NUM_ROWS, STEPS, regression

TIMEOUT_S = 60.0
WAYS = ("off", "finished", "in progress")
pytestmark = pytest.mark.usefixtures("own_desk")


def train_staged(rank: Rank, *, way: str, waited: Path, **arguments: Any) -> Trace:
    """Be one worker of a training while staging goes in this `way`. Runs in the pool."""
    tempfile.tempdir = str(waited.parent)
    holding: Any = {"off": nullcontext, "finished": early_parts, "in progress": lambda: late_parts(waited)}[way]
    try:
        with holding():
            return train_part(rank, **arguments)
    finally:
        tempfile.tempdir = None


@pytest.mark.parametrize("workers", [1, 2, 3])
def test_samples_and_weights_are_the_same_without_staging_after_it_and_during_it(
    workers: int, rows: Path, ranks: RankPool, tmp_path: Path
) -> None:
    fast = tmp_path / "fast"
    found: dict[str, list[Trace]] = {}
    for way in WAYS:
        plan = Plan(mesh=Mesh(replicate=workers), staging="off" if way == "off" else str(fast))
        folder = bare_folder(tmp_path / way.replace(" ", "-"), plan)
        found[way] = ranks.run(
            train_staged,
            workers=workers,
            way=way,
            waited=tmp_path / "waited",
            builder=f"{regression.__module__}:regression",
            arguments={"path": str(rows), "block_rows": 4},
            plan=plan,
            folder=folder,
        )
        events = EventReader(RunFolder(folder).events_of(0)).poll()
        said = [event for event in events if event["kind"] == "staging"]
        assert [event["is_staged"] for event in said] == ([] if way == "off" else [True, True])
        assert not fast.exists() or list(fast.iterdir()) == []
    waited = list((tmp_path / "waited").iterdir())
    assert len(waited) > 2  # parts that a batch had to wait for
    for way in WAYS[1:]:
        for ours, theirs in zip(found[way], found["off"], strict=True):
            assert ours.samples == theirs.samples
            assert ours.losses == theirs.losses
            assert all(torch.equal(a, b) for a, b in zip(ours.parameters, theirs.parameters, strict=True))


def test_samples_of_each_global_batch_do_not_depend_on_the_workers_while_parts_are_coming(
    rows: Path, ranks: RankPool, tmp_path: Path
) -> None:
    together = []
    for workers in (1, 2, 3):
        plan = Plan(mesh=Mesh(replicate=workers), staging=str(tmp_path / f"fast{workers}"))
        traces = ranks.run(
            train_staged,
            workers=workers,
            way="in progress",
            waited=tmp_path / f"waited{workers}",
            builder=f"{regression.__module__}:regression",
            arguments={"path": str(rows)},
            plan=plan,
            folder=bare_folder(tmp_path / f"run{workers}", plan),
        )
        steps = range(STEPS)
        together.append([[sample for trace in traces for sample in trace.samples[step]] for step in steps])
    assert together[0] == together[1] == together[2]
    assert together[0] == reference(regression(path=str(rows)), STEPS).samples


def alone(job: Job, plan: Plan) -> Any:
    return staged_job(job, plan, rank=ALONE, store=None)


def test_the_first_batch_does_not_wait_for_parts_that_it_does_not_read(rows: Path, tmp_path: Path) -> None:
    job = replace(regression(path=str(rows)), shuffle=False)
    with late_parts(tmp_path / "waited"), alone(job, Plan(staging=str(tmp_path / "fast"))) as staged:
        assert isinstance(staged.job.data, View)
        np.testing.assert_array_equal(staged.job.data[0]["x"], job.data[0]["x"])
        copy = Path(staged.decisions[0].path)
        assert [path.name for path in (copy / "parts").iterdir()] == ["00000.arrow"]
        assert staged.job.data.pack.path == copy
        assert staged.decisions[1].path == str(copy)  # eval_data is the same pack: there is one copy
    assert not copy.exists()


@contextmanager
def nothing_comes() -> Iterator[None]:
    """Have no part fetched, as where the source hangs."""

    def hang(fetcher: Fetcher, part: int) -> None:
        fetcher.ended.wait(60)

    with mock.patch.object(Fetcher, "_fetch_part", hang):
        yield


def test_a_job_whose_staging_stands_still_for_the_plans_timeout_reads_in_place(rows: Path, tmp_path: Path) -> None:
    job = replace(regression(path=str(rows)), shuffle=False)
    plan = Plan(staging=str(tmp_path / "fast"), timeout_s=0.1)
    with nothing_comes(), alone(job, plan) as staged:
        with pytest.warns(RuntimeWarning, match=r"no byte has arrived for 0.1 s. What is missing is read in place"):
            found = staged.job.data[0]
        assert found["x"].tolist() == job.data[0]["x"].tolist()


def test_parts_come_in_the_order_in_which_the_first_epoch_reads_them(rows: Path, tmp_path: Path) -> None:
    job = regression(path=str(rows), block_rows=4)
    parts, _ = Pack(rows).part_of(Order(NUM_ROWS, seed=job.seed, block_rows=4).samples(np.arange(NUM_ROWS), epoch=0))
    wanted = list(dict.fromkeys(parts.tolist()))
    with late_parts(tmp_path / "waited"), alone(job, Plan(staging=str(tmp_path / "fast"))) as staged:
        plan = read_plan(Path(staged.decisions[0].path))
        assert plan is not None
        assert plan["parts"] == wanted
        assert wanted != sorted(wanted)


@pytest.mark.parametrize("options", [{"window": 9}, {"window": 16, "pack_documents": True}], ids=str)
def test_views_of_tokens_give_the_same_from_a_copy_whose_parts_are_coming(
    options: dict[str, Any], tmp_path: Path
) -> None:
    view = View(tokens_pack(tmp_path / "tokens.pack", 40), **options)
    job = replace(regression_of(view), steps=3)
    with late_parts(tmp_path / "waited"), alone(job, Plan(staging=str(tmp_path / "fast"))) as staged:
        copy = Path(staged.decisions[0].path)
        assert list((copy / "parts").iterdir()) == []
        moved = staged.job.data
        assert len(moved) == len(view)
        for sample in (0, len(view) - 1):
            assert torch.equal(moved[sample]["tokens"], view[sample]["tokens"])
        assert list((copy / "parts").iterdir()) != []


def regression_of(data: Any) -> Job:
    return Job(
        model=lambda: torch.nn.Linear(5, 1),
        loss=lambda output, batch: output.mean(),
        optimizer=lambda parameters: torch.optim.SGD(parameters, lr=0.1),
        data=data,
        batch_size=8,
        steps=14,
    )


def test_of_itself_a_pack_on_storage_of_this_node_stays_where_it_is(rows: Path, tmp_path: Path) -> None:
    job = regression(path=str(rows))
    with alone(job, Plan()) as staged:
        assert staged.job is job
        assert "read in place: it is on storage of this node (" in str(staged.decisions[0])
    assert Desk().copies() == []


def test_of_itself_a_pack_on_shared_storage_is_staged_unless_it_is_in_memory_or_hardly_read(
    rows: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("shoal.data.stage.worth.is_shared", lambda _: True)
    job = regression(path=str(rows))
    with alone(job, Plan()) as staged:
        assert "read in place: it is in this node's memory already." in str(staged.decisions[0])
    with alone(job.with_steps(1), Plan()) as staged:
        assert "read in place: the job reads 16.0% of its samples." in str(staged.decisions[0])
    monkeypatch.setattr("shoal.data.stage.worth.resident_fraction", lambda *_: 0.1)
    asked = []

    def measured(source: Path, **options: Any) -> Any:
        asked.append(options["to"])
        return stage(source, **{**options, "to": str(tmp_path / "fast")})

    monkeypatch.setattr("shoal.training.staging.stage", measured)
    with alone(job, Plan()) as staged:
        assert asked == ["auto"]
        assert str(staged.decisions[0]).startswith(f"Job.data: {rows} is being staged to {tmp_path / 'fast'}")


def test_a_copy_that_the_job_staged_by_itself_is_not_copied_again(rows: Path, tmp_path: Path) -> None:
    with stage(rows, to=tmp_path / "fast") as own:
        job = regression_of(View(own))
        with alone(job, Plan(staging=str(tmp_path / "other"))) as staged:
            assert staged.job is job
    assert not (tmp_path / "other").exists()


def test_nodes_of_a_run_read_the_source_once_and_each_has_its_own_parts_first(rows: Path, tmp_path: Path) -> None:
    """Two nodes of one worker each, in this process: each has a host name of its own."""
    store, port = host_store(host="127.0.0.1", timeout_s=TIMEOUT_S)
    job = replace(regression(path=str(rows), block_rows=4), eval_data=None)
    plan = Plan(mesh=Mesh(replicate=2), staging=str(tmp_path / "fast"))
    with ExitStack() as opened:
        monkey = opened.enter_context(pytest.MonkeyPatch.context())
        copies = []
        for index in range(2):
            monkey.setattr("platform.node", lambda index=index: f"node{index}")
            rank = Rank(index, 2, 0, 1, "127.0.0.1", port, store_is_hosted=True)
            staged = opened.enter_context(staged_job(job, plan, rank=rank, store=store))
            copies.append(Path(staged.decisions[0].path))
            assert copies[index].parent.name.endswith(f"node{index}")
            for sample in range(NUM_ROWS):
                np.testing.assert_array_equal(staged.job.data[sample]["x"], job.data[sample]["x"])
        orders = [(read_plan(copy) or {})["parts"] for copy in copies]
        assert orders[0] != orders[1]
        assert sorted(orders[0]) == sorted(orders[1]) == list(range(len(Pack(rows).manifest.parts)))
        until(lambda: [len(node["has"]) for node in ask_agent(copies[1]) or []] == 2 * [len(orders[0])])
        read = [node["read_bytes"] for node in ask_agent(copies[0]) or []]
        assert read == [Pack(rows).manifest.num_bytes, 0]
    assert list((tmp_path / "fast").iterdir()) == []


def test_who_waits_for_the_first_worker_of_its_node_hears_that_somebody_is_lost(
    rows: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    rank = Rank(1, 2, 1, 2, "127.0.0.1", 0, store_is_hosted=True)
    monkeypatch.setattr(CALLS, "lost", "worker 0 (n1) has been silent for 15.0 s.")
    staging = staged_job(regression(path=str(rows)), Plan(mesh=Mesh(replicate=2)), rank=rank, store=HashStore())
    with pytest.raises(PeerLost, match=r"worker 0 \(n1\)"), staging:
        pass


@pytest.mark.parametrize(
    ("where", "words"),
    [
        ("outo", "staging='outo' is none. Did you mean 'auto'"),
        ("/proc/nowhere", "--stage /proc/nowhere: no folder can be made there"),
        ("project", "--stage project: this node has no such storage"),
    ],
)
def test_a_mistake_is_one_sentence(where: str, words: str, rows: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.delenv("PROJECT", raising=False)
    with pytest.raises((ConfigError, PlanError), match=words), alone(regression(path=str(rows)), Plan(staging=where)):
        pass


def test_a_flag_that_names_no_storage_is_refused_before_anything_starts(
    tmp_path: Path, capfd: pytest.CaptureFixture[str]
) -> None:
    assert main(["train", str(job_file(tmp_path)), "--stage", "fast", "--runs", str(tmp_path / "runs")]) == 2
    assert "A folder has a slash: './fast'." in capfd.readouterr().err.replace("\n", " ")
    assert not (tmp_path / "runs").exists()
