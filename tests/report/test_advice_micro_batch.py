"""Advice on tiny micro-batches, by hand: sizes whose gain can be foreseen, and how little is said where it cannot."""

import dataclasses
from typing import Any

import pytest

from shoal.report.advice import advise_on
from shoal.report.advice.evidence import Evidence
from shoal.spec.plan import Batch, Plan
from tests.support.evidence import busy, evidence, only, predicted


def tiny(scale: float = 1.0, **fields: Any) -> Evidence:
    """32 micro-batches of 1 sample, 7 ms of each fixed and 3 for the sample, on a machine `scale` times as slow."""
    plan = Plan(batch=Batch(micro_batch=1), predicted=predicted(fixed_s=0.007, sample_s=0.003))
    worker = dataclasses.replace(busy(samples=32, passes_s=0.32 * scale), peak_bytes=100)
    return evidence(worker, plan=plan, **fields)


@pytest.mark.parametrize("scale", [0.9, 1.0, 2.0])
def test_tiny_micro_batches_become_as_large_as_can_be_foreseen(scale: float) -> None:
    advice = only(advise_on(tiny(scale)))
    assert advice.change == {"batch.micro_batch": 4}  # of 8: 2.6 times, or 1.9 if starts cost half as much
    assert advice.predicted_gain == pytest.approx(320 / 152)
    assert advice.share == pytest.approx(0.7)
    assert not advice.is_bound


def test_where_starts_are_nearly_all_there_is_one_micro_batch_is_foreseen_as_well() -> None:
    plan = Plan(batch=Batch(micro_batch=1), predicted=predicted(fixed_s=0.01, sample_s=1e-6))
    advice = only(advise_on(evidence(busy(samples=32, passes_s=0.32, other=0.02), plan=plan)))
    assert advice.change == {"batch.micro_batch": 32}
    assert advice.predicted_gain == pytest.approx(340 / 30, rel=0.01)


def test_what_the_planner_does_not_know_of_is_not_taken_for_starts() -> None:
    advice = only(advise_on(tiny(scale=6.0)))
    assert advice.share == pytest.approx(32 * 3 * 7 / (6 * 320))


@pytest.mark.parametrize(
    ("fixed_s", "sample_s", "gain"),
    [
        (7.0, 0.003, 320 / (16 * 7 + 32 * 3)),  # all that samples do not take are starts: 7 ms
        (0.007, 3.0, None),  # all may be samples, so that nothing would be gained
        (0.007, 0.030, None),
        (0.014, 0.004, 320 / (16 * 6 + 32 * 4)),  # what samples of 4 ms leave
    ],
)
def test_a_run_faster_than_predicted_is_promised_only_what_is_sure(
    fixed_s: float, sample_s: float, gain: float | None
) -> None:
    plan = Plan(batch=Batch(micro_batch=1), predicted=predicted(fixed_s=fixed_s, sample_s=sample_s))
    found = advise_on(evidence(busy(samples=32, passes_s=0.32), plan=plan))
    if gain is None:
        assert found == []
        return
    advice = only(found)
    assert (advice.change, advice.is_bound) == ({"batch.micro_batch": 2}, True)
    assert advice.predicted_gain == pytest.approx(gain)
    assert advice.sentence.endswith(f"micro-batches of 2 are predicted to bring {gain:.2g}x at least.")


def test_steps_that_something_else_has_disturbed_say_nothing_of_micro_batches() -> None:
    calm, plan = tiny(), tiny().plan
    disturbed = dataclasses.replace(busy(samples=32, passes_s=0.9), median_passes_s=0.32, peak_bytes=100)
    one, other = (only(advise_on(run)) for run in (calm, evidence(disturbed, plan=plan)))
    assert one.change == other.change
    assert one.predicted_gain == pytest.approx(other.predicted_gain)


def test_micro_batches_stay_within_memory() -> None:
    assert only(advise_on(tiny(memory_bytes=500))).change == {"batch.micro_batch": 4}
    assert advise_on(tiny(memory_bytes=150)) == []
