"""When checkpoints are written, which of them stay, and settings that cannot be."""

import dataclasses
from pathlib import Path

import pytest

from shoal.core.errors import PlanError
from shoal.core.toml import read_toml
from shoal.spec.plan import Checkpoints, Plan
from shoal.spec.record import JobRecord
from shoal.training.host import this_host
from shoal.training.prepare import Asked, best_notes, prepare_run
from tests.fault.test_checkpoint import steps_in, train
from tests.support.jobs import linear
from tests.support.training import bare_folder


@pytest.mark.parametrize("best_is", ["lowest", "highest"])
def test_the_last_ones_stay_and_the_best(best_is: str, tmp_path: Path) -> None:
    settings = Checkpoints(every_steps=1, keep=2, best="loss", best_is=best_is)
    folder = bare_folder(tmp_path, Plan(checkpoint=settings))
    found = list(train(folder, steps=12).values())
    best = 1 + found.index(min(found) if best_is == "lowest" else max(found))
    assert steps_in(folder) == sorted({best, 11, 12})


@pytest.mark.parametrize(
    "settings", [{"every_steps": -1}, {"keep": 0}, {"best_is": "most"}, {"on_error": "ignore"}], ids=str
)
def test_settings_that_make_no_sense_are_refused(settings: dict[str, object]) -> None:
    with pytest.raises(PlanError, match="checkpoint"):
        Checkpoints(**settings)  # type: ignore[arg-type]


def test_a_best_by_a_metric_that_the_job_has_not_is_refused(tmp_path: Path) -> None:
    folder = bare_folder(tmp_path, Plan(checkpoint=Checkpoints(every_steps=1, best="acuracy")))
    with pytest.raises(PlanError, match="'acuracy' is no metric of the job's evaluation"):
        train(folder, steps=1)


def test_seconds_between_checkpoints_become_steps(tmp_path: Path) -> None:
    folder = bare_folder(tmp_path, Plan(checkpoint_s=1e-6, checkpoint=Checkpoints(keep=100)))
    train(folder, steps=14)
    assert steps_in(folder) == [11, 12, 13, 14]  # what a step takes is known after the tenth


@pytest.mark.parametrize(
    ("every_steps", "evaluated", "sentence"),
    [
        (500, 300, "only those of every 1,500 steps, and the last, can be the best"),
        (500, 700, "only the last can be the best"),
        (500, None, "To have all of them judged: Job.eval_every_steps"),
        (0, 300, "only those that fall on one of every 300 steps, and the last, can be the best"),
        (300, 300, ""),
        (600, 300, ""),
    ],
)
def test_it_is_said_at_the_start_which_checkpoints_can_never_be_the_best(
    every_steps: int, evaluated: int | None, sentence: str, tmp_path: Path
) -> None:
    job = linear(steps=3000)
    job = dataclasses.replace(job, eval_data=job.data, eval_every_steps=evaluated)
    plan = Plan(checkpoint=Checkpoints(every_steps=every_steps, best="loss"), checkpoint_s=None if every_steps else 60)
    said: list[str] = []
    folder = prepare_run(job, plan, Asked(file=None, runs=tmp_path, elsewhere=this_host()), say=said.append)
    found = [line for line in said if "checkpoint.best" in line]
    assert len(found) == bool(sentence)
    assert sentence in "".join(found)
    assert list(read_toml(JobRecord, folder.job_toml).notes) == found, "the report says it, too"


def test_without_an_evaluation_every_checkpoint_is_judged_by_its_own_loss() -> None:
    assert best_notes(linear(), Plan(checkpoint=Checkpoints(every_steps=5, best="loss"))) == ()
