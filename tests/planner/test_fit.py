"""Whether it fits, and what would make it fit: pure arithmetic on a model of known size."""

import dataclasses
from typing import Any

import pytest

from shoal.planner.calibration.megatron import gpt_profile
from shoal.planner.memory.fit import Estimate, estimate_fit
from shoal.spec.device import Device
from shoal.spec.profile import Profile

GB = 10**9
MODEL = dataclasses.replace(gpt_profile(width=2048, heads=16, layers=24, sequence=1024), precision="fp32")


def half(profile: Profile) -> Profile:
    """The same with activations of half the size."""
    layers = [
        dataclasses.replace(
            layer,
            saved_bytes=layer.saved_bytes // 2,
            forward=dataclasses.replace(layer.forward, peak_bytes=layer.forward.peak_bytes // 2),
            backward=dataclasses.replace(layer.backward, peak_bytes=layer.backward.peak_bytes // 2),
        )
        for layer in profile.layers
    ]
    return dataclasses.replace(profile, layers=tuple(layers), precision="bf16")


PROFILES = {"fp32": MODEL, "bf16": half(MODEL)}


def estimate(memory_bytes: float, *, micro_batch: int = 8, **fields: Any) -> Estimate:
    device = Device(
        source="test",
        title="card",
        memory_bytes=int(memory_bytes),
        reserved_bytes=GB // 2,
        link="nvlink-3",
        matmul_flops_per_s=20e12,
        bf16_matmul_flops_per_s=300e12,
        memory_bytes_per_s=1.5e12,
        operation_s=1e-5,
    )
    options = {"title": "card", "precision": "fp32", "batch_size": micro_batch, "gpu": True, **fields}
    return estimate_fit(PROFILES.__getitem__, device, micro_batch=micro_batch, **options)


def test_the_parts_add_up_to_the_peak_and_the_margin_to_the_device() -> None:
    found = estimate(1000 * GB)
    assert found.fits
    assert sum(found.parts.values()) == found.peak_bytes
    assert found.needed_bytes == pytest.approx(1.05 * found.peak_bytes + GB // 2, abs=2)
    assert found.margin_bytes == 1000 * GB - found.needed_bytes
    assert found.as_json()["margin_bytes"] == found.margin_bytes


def test_what_fits_by_its_peak_but_not_by_its_error_does_not_fit() -> None:
    peak_bytes = estimate(1000 * GB).peak_bytes
    assert not estimate(peak_bytes * 1.04).fits
    assert estimate(peak_bytes * 1.06 + GB).fits


def test_the_largest_micro_batch_fits_and_one_more_does_not() -> None:
    memory_bytes = 200 * GB
    largest = estimate(memory_bytes, micro_batch=1).largest_micro_batch
    assert largest > 1
    assert estimate(memory_bytes, micro_batch=largest).fits
    assert not estimate(memory_bytes, micro_batch=largest + 1).fits


def test_every_kind_of_change_is_there_and_each_says_what_is_true() -> None:
    too_small = estimate(1000 * GB).needed_bytes * 0.7
    found = estimate(too_small)
    assert not found.fits
    titles = " ".join(change.title for change in found.changes)
    for kind in (
        "micro-batch",
        "recompute selective",
        "recompute full",
        "bf16",
        "ZeRO-1",
        "ZeRO-2",
        "ZeRO-3",
        "tensor",
    ):
        assert kind in titles
    assert "pipeline" in titles
    for change in found.changes:
        assert change.peak_bytes < found.peak_bytes
        assert change.fits == (change.peak_bytes * 1.05 + GB // 2 <= too_small)


def test_changes_that_make_it_fit_come_first_and_the_cheapest_of_them_in_front() -> None:
    found = estimate(estimate(1000 * GB).needed_bytes * 0.7)
    helping = [change for change in found.changes if change.fits]
    assert helping == list(found.changes[: len(helping)])
    assert [change.time for change in helping] == sorted(change.time for change in helping)
    recompute = next(change for change in found.changes if change.title == "recompute full")
    assert 1.2 < recompute.time < 1.4  # one forward more to one forward and two of backward


def test_where_no_single_change_does_several_are_tried_together() -> None:
    states_bytes = MODEL.parameter_bytes + MODEL.gradient_bytes + MODEL.optimizer_bytes
    found = estimate(states_bytes / 40 + GB, micro_batch=64)
    assert not any("," not in change.title and change.fits for change in found.changes)
    assert any(change.title.startswith("bf16, recompute full, micro-batch 1") for change in found.changes)


def test_accumulation_keeps_all_gradients() -> None:
    at_once = estimate(1000 * GB, micro_batch=8)
    accumulated = estimate(1000 * GB, micro_batch=8, batch_size=64)
    assert accumulated.parts["gradients"] == MODEL.gradient_bytes
    assert accumulated.peak_bytes > at_once.peak_bytes


def test_a_model_built_in_bfloat16_computes_at_that_rate_and_is_not_told_to_use_it() -> None:
    whole = PROFILES["fp32"]
    PROFILES["fp32"] = dataclasses.replace(whole, dtype="bfloat16")
    try:
        found = estimate(estimate(1000 * GB).needed_bytes * 0.7)
    finally:
        PROFILES["fp32"] = whole
    assert not any("bf16" in change.title for change in found.changes)
    selective, plain = (
        next(change.time for change in each.changes if change.title == "recompute selective")
        for each in (found, estimate(estimate(1000 * GB).needed_bytes * 0.7))
    )
    assert selective > plain  # what is computed again is memory-bound: it weighs more where products are faster
