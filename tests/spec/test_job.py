import re
from typing import Any

import pytest

from shoal.core.errors import ConfigError
from shoal.spec.call import call_model
from shoal.spec.job import Job

GOOD: dict[str, Any] = {
    "model": object,
    "loss": lambda output, batch: 0,
    "optimizer": lambda parameters: None,
    "data": [1, 2, 3, 4, 5],
    "batch_size": 2,
    "steps": 10,
}


@pytest.mark.parametrize(
    ("change", "sentence"),
    [
        ({"bath_size": 3}, "Job has no field 'bath_size'. Did you mean 'batch_size'?"),
        ({"model": 3}, "Job.model must be a function, not 3."),
        ({"weight": 3}, "Job.weight must be a function or None, not 3."),
        ({"data": iter([1])}, "Job.data is a list_iterator, which can be read only once."),
        ({"data": "nowhere.pack"}, "Job.data: there is no pack nowhere.pack. Make one with: shoal pack"),
        ({"block_rows": 0}, "Job.block_rows must be a whole number of at least 1, not 0."),
        ({"data": []}, "Job.data is empty: there is nothing to train on."),
        ({"batch_size": 0}, "Job.batch_size must be a whole number of at least 1, not 0."),
        ({"batch_size": 2.5}, "Job.batch_size must be a whole number of at least 1, not 2.5."),
        ({"steps": -1}, "Job.steps must be a whole number of at least 1, not -1."),
        ({"epochs": 1}, "a Job has either steps or epochs: give one of the two."),
        ({"steps": None}, "a Job has either steps or epochs: give one of the two."),
        ({"clip_norm": 0.0}, "Job.clip_norm must be more than 0, not 0.0."),
        ({"seed": 1.5}, "Job.seed must be a whole number, not 1.5."),
    ],
)
def test_a_wrong_field_gets_one_clear_sentence(change: dict[str, Any], sentence: str) -> None:
    with pytest.raises(ConfigError, match=re.escape(sentence)):
        Job(**(GOOD | change))


def test_epochs_count_the_last_partial_batch() -> None:
    job = Job(**(GOOD | {"steps": None, "epochs": 3}))
    assert (job.steps_per_epoch, job.total_steps) == (3, 9)
    assert job.with_steps(4).total_steps == 4
    assert job.with_steps(None) is job


def test_inputs_are_passed_by_position_by_name_or_as_they_are() -> None:
    def echo(*args: Any, **kwargs: Any) -> Any:
        return args, kwargs

    def called(batch: Any, **fields: Any) -> Any:
        return call_model(echo, Job(**(GOOD | fields)), batch)

    assert called((1, 2)) == ((1,), {})
    assert called([1, 2]) == ((1,), {})
    assert called({"x": 1}) == ((), {"x": 1})
    assert called(7) == ((7,), {})
    assert called({"x": 1, "y": 2}, inputs=lambda batch: batch["x"]) == ((1,), {})
    assert called({"x": 1, "y": 2}, inputs=lambda batch: (batch["x"], batch["y"])) == ((1, 2), {})
    assert called({"x": 1, "y": 2}, inputs=lambda batch: {"a": batch["y"]}) == ((), {"a": 2})
