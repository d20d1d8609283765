"""Data as it comes: whatever its form, the number of workers and a resume change nothing."""

import dataclasses
import shutil
from collections.abc import Iterator
from pathlib import Path

import pytest
import torch

from shoal.comm.rank import ALONE
from shoal.core.events import EventLog
from shoal.core.run_folder import RunFolder
from shoal.core.toml import read_toml
from shoal.fault.checkpoint.manifest import committed
from shoal.report.page.write import write_page
from shoal.report.summary import summarize
from shoal.report.verdict import remarks
from shoal.spec.job import Job
from shoal.spec.plan import Batch, Checkpoints, Mesh, Plan
from shoal.spec.record import JobRecord
from shoal.training.host import Say, this_host
from shoal.training.loop import train_all
from shoal.training.opening import open_run
from shoal.training.prepare import Asked, notes_of, prepare_run
from tests.support.given import FORMS, job
from tests.support.ranks import RankPool
from tests.support.training import Trace, bare_folder, largest_difference, train_part

STEPS = 13  # into the third epoch
TWO = Plan(mesh=Mesh(replicate=2), batch=Batch(shares=(0.6, 0.4)))
SAVED = Checkpoints(every_steps=1, keep=100)


def alone(form: str, plan: Plan, folder: Path) -> Trace:
    return train_part(
        ALONE, builder="tests.support.given:job", arguments={"form": form, "steps": STEPS}, plan=plan, folder=folder
    )


def prepared(of: Job, runs: Path, *, say: Say) -> RunFolder:
    return prepare_run(of, Plan(), Asked(file=None, runs=runs, elsewhere=this_host()), say=say)


@pytest.mark.parametrize("form", FORMS)
def test_two_workers_and_a_resume_train_on_the_same_samples_with_the_same_losses(
    form: str, ranks: RankPool, tmp_path: Path
) -> None:
    plan = Plan(checkpoint=SAVED)
    folder = bare_folder(tmp_path / "one", plan)
    one = alone(form, plan, folder)
    two = ranks.run(
        train_part,
        workers=2,
        builder="tests.support.given:job",
        arguments={"form": form, "steps": STEPS},
        plan=TWO,
        folder=bare_folder(tmp_path / "two", TWO),
    )
    together = [a + b for a, b in zip(two[0].samples, two[1].samples, strict=True)]
    assert together == one.samples
    assert largest_difference(two[0].losses, one.losses) < 1e-5  # sums of other parts, in float32
    for checkpoint in committed(RunFolder(folder).checkpoints)[2::4]:  # in every epoch
        again = bare_folder(tmp_path / checkpoint.name, dataclasses.replace(plan, checkpoint=Checkpoints()))
        shutil.copytree(checkpoint, RunFolder(again).checkpoints / checkpoint.name)
        resumed = alone(form, Plan(), again)
        assert resumed.samples == one.samples[-len(resumed.samples) :]
        assert resumed.losses == one.losses[-len(resumed.losses) :]
        assert 0 < len(resumed.losses) < STEPS


@pytest.mark.parametrize(
    ("form", "sentence"),
    [
        ("stream", "Job.data is a stream: without random access, every worker reads all of it"),
        ("shuffled loader", "global batches of 4 samples in shoal's own shuffled order, a function of Job.seed"),
        (
            "loader with a collate_fn",
            "its num_workers=2 is not used: threads load, or 2 processes by --loader-workers 2",
        ),
        ("weighted loader", "in the order of its WeightedRandomSampler, drawn for each epoch"),
    ],
)
def test_what_is_lost_is_said_at_the_start_and_stands_in_the_run(form: str, sentence: str, tmp_path: Path) -> None:
    said: list[str] = []
    folder = prepared(job(form=form, steps=2), tmp_path, say=said.append)
    assert sentence in "\n".join(said)
    assert sentence in "\n".join(read_toml(JobRecord, folder.job_toml).notes)
    assert sentence in "\n".join(remarks(summarize(folder)))


def test_a_stream_that_is_never_the_same_is_said_to_be_inexact(tmp_path: Path) -> None:
    class Random:
        def __iter__(self) -> Iterator[tuple[torch.Tensor, torch.Tensor]]:
            while True:
                yield torch.rand(5), torch.rand(())

    made = dataclasses.replace(job(form="dataset", steps=2), data=Random())
    assert "some are trained on twice and some not at all" in notes_of(made)[-1]


def test_a_stream_is_evaluated_and_reported_as_one(tmp_path: Path) -> None:
    made = job(form="stream", steps=3, eval_data=FORMS["mixed stream"]())
    whole = dataclasses.replace(made, eval_data=FORMS["dataset"]())
    found = []
    for each in (made, whole):
        folder = prepared(each, tmp_path, say=lambda _: None)
        log = EventLog(folder.events_of(0))
        with open_run(each, folder, rank=ALONE, store=None, log=log) as run:
            train_all(run)
            found.append(run.evaluated[1]["loss"])
        log.close()
        folder.write_result("done", "")
    assert found[0] == pytest.approx(found[1])
    assert "a stream, 4 in a global batch" in write_page(folder).read_text()
