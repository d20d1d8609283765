"""Megatron's GPT, made by counting: its size and operations, and steps that were measured."""

import pytest

from shoal.planner.calibration.megatron import fuses_softmax, gpt_plan, gpt_profile
from shoal.planner.calibration.report import a100_nodes
from shoal.planner.time.steptime import step_time

# vTrain's measurements (MIT licence, VIA Research Group, KAIST; MICRO 2024): 8 A100s a node, 4 x 200 Gb/s between.
MEASURED = [  # width, heads, layers, tensor, data, pipeline, micro-batch, global batch, seconds
    (3072, 32, 30, 2, 32, 1, 16, 512, 3.9375),
    (3072, 32, 30, 16, 4, 1, 16, 512, 10.7193),
    (6144, 48, 40, 8, 32, 1, 8, 1024, 9.6036),
    (8192, 64, 48, 8, 4, 16, 24, 1536, 24.1699),
    (12288, 96, 96, 4, 8, 16, 2, 1536, 54.2559),
]


@pytest.mark.parametrize(
    ("width", "heads", "layers", "tensor", "data", "pipeline", "micro", "batch", "step_s"), MEASURED
)
def test_the_catalog_alone_is_near_what_megatron_took(
    width: int, heads: int, layers: int, tensor: int, data: int, pipeline: int, micro: int, batch: int, step_s: float
) -> None:
    profile = gpt_profile(width=width, heads=heads, layers=layers, sequence=2048, cut_by_count=True)
    plan = gpt_plan(tensor=tensor, data=data, pipeline=pipeline, micro_batch=micro)
    time = step_time(profile, plan, a100_nodes(), batch_size=batch, overlap=False)
    assert time.step_s == pytest.approx(step_s, rel=0.15)  # 8.8% is the mean over all of that set


def test_a_gpt_has_the_parameters_and_operations_of_the_textbook() -> None:
    profile = gpt_profile(width=12288, heads=96, layers=96, sequence=2048)
    assert profile.parameters == pytest.approx(174.6e9, rel=0.001)
    tokens = 2048
    per_layer = 24 * tokens * 12288**2 * (1 + 2048 / (6 * 12288))
    logits = 2 * tokens * 12288 * 51200
    assert profile.flops == pytest.approx(3 * (96 * per_layer + logits))  # Narayanan et al., 2021, without recompute
    assert fuses_softmax(heads=16, tensor=8, micro_batch=2)
    assert not fuses_softmax(heads=16, tensor=8, micro_batch=1)
