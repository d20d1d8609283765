"""When checkpoints are written, which of them stay, and settings that cannot be."""

from pathlib import Path

import pytest

from shoal.core.errors import PlanError
from shoal.spec.plan import Checkpoints, Plan
from tests.fault.test_checkpoint import steps_in, train
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
