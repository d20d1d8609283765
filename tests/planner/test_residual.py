"""What the planner says that a codec keeps, against what the codecs really keep."""

import dataclasses
from typing import Any

import pytest
import torch
from torch import Tensor, nn

from benchmarks.parallel_cases import gpt
from shoal.compress.bucket import BLOCK, Bucket, ShardedBucket
from shoal.compress.codecs import CODECS
from shoal.compress.feedback import ErrorFeedback
from shoal.compress.powersgd import PowerSGD
from shoal.planner.memory.peak import peak
from shoal.planner.memory.residual import RANK
from shoal.profile.trace import trace
from shoal.spec.job import Job
from shoal.spec.plan import Mesh, Plan
from shoal.spec.profile import Profile
from shoal.spec.sync import Sync
from shoal.training.codec_rates import Alone

WORKERS = 2
AUTO = Sync(codec="auto")
SHARDING = [name for name, codec in CODECS.items() if codec.serves_shards]


@pytest.fixture(scope="module")
def job() -> Job:
    return gpt(steps=1, layers=2)


@pytest.fixture(scope="module")
def profile(job: Job) -> Profile:
    return trace(job, micro_batch=2, precision="fp32")


def kept(name: str, model: nn.Module, *, zero: int = 0) -> ErrorFeedback:
    """Return the feedback of one of two workers that have summed the gradients of `model` once."""
    parameters = dict(model.named_parameters())
    shapes = tuple(tuple(parameter.shape) for parameter in parameters.values())
    feedback = ErrorFeedback(CODECS[name]())
    generator = torch.Generator().manual_seed(0)
    if zero:
        bucket: Bucket = ShardedBucket(tuple(parameters), shapes, WORKERS)
        gradient = torch.randn(WORKERS * bucket.width, generator=generator)
        feedback.reduce_scatter(bucket, torch.empty(bucket.width), gradient, Alone())
    else:
        bucket = Bucket(tuple(parameters), shapes)
        feedback.sum(bucket, torch.randn(bucket.width, generator=generator), Alone())
    return feedback


def predicted(profile: Profile, codec: str, **fields: Any) -> int:
    plan = Plan(sync=Sync(codec=codec), **fields)
    return peak(profile, plan, samples=2).parts["residuals"]


def num_bytes(tensors: dict[str, Tensor]) -> int:
    return sum(tensor.nbytes for tensor in tensors.values())


@pytest.mark.parametrize("name", CODECS)
def test_replicas_keep_what_the_planner_says(job: Job, profile: Profile, name: str) -> None:
    state = kept(name, job.model()).state_dict()
    said = predicted(profile, name, mesh=Mesh(replicate=WORKERS))
    if name == "threshold":  # its running means, a number for each parameter, are not counted
        assert num_bytes(state["memory"]) == 4 * len(state["pending"])
        state["memory"] = {}
    assert said == num_bytes(state["pending"]) + num_bytes(state["memory"])
    assert (num_bytes(state["memory"]) > 0) == (name == "powersgd")


@pytest.mark.parametrize("name", SHARDING)
@pytest.mark.parametrize("zero", [1, 3])
def test_shards_keep_as_much_as_replicas(job: Job, profile: Profile, name: str, zero: int) -> None:
    state = kept(name, job.model(), zero=zero).state_dict()
    said = predicted(profile, name, zero=zero, mesh=Mesh(shard=WORKERS))
    assert said == num_bytes(state["pending"]) == 4 * profile.parameters


@pytest.mark.parametrize("zero", [0, 2])
def test_in_memory_it_is_that_and_less_than_a_block_a_worker(job: Job, profile: Profile, zero: int) -> None:
    mesh = Mesh(shard=WORKERS) if zero else Mesh(replicate=WORKERS)
    said = predicted(profile, "int8", zero=zero, mesh=mesh)
    there = sum(flat.nbytes for flat in kept("int8", job.model(), zero=zero)._pending.values())
    assert said <= there < said + WORKERS * BLOCK * 4


def test_residuals_are_on_top_of_all_else_and_only_with_a_codec_and_others(profile: Profile) -> None:
    replicas = Plan(mesh=Mesh(replicate=2))
    without, alone = (peak(profile, plan, samples=2) for plan in (replicas, Plan(sync=Sync(codec="int8"))))
    assert "residuals" not in without.parts
    assert "residuals" not in alone.parts
    worst = peak(profile, dataclasses.replace(replicas, sync=Sync(codec="int8")), samples=2)
    assert worst.peak_bytes == without.peak_bytes + 4 * profile.parameters
    assert predicted(profile, "auto", mesh=Mesh(replicate=2)) == worst.parts["residuals"]
    assert "residuals" not in peak(profile, Plan(mesh=Mesh(shard=2, replicate=2), zero=2, sync=AUTO), samples=2).parts


def test_residuals_of_16_bit_gradients_have_32(profile: Profile) -> None:
    layers = [dataclasses.replace(layer, gradient_bytes=layer.gradient_bytes // 2) for layer in profile.layers]
    half = dataclasses.replace(profile, dtype="bfloat16", layers=tuple(layers))
    assert predicted(half, "int8", mesh=Mesh(replicate=2)) == 4 * profile.parameters


def test_the_rank_is_powersgds_usual_one() -> None:
    assert PowerSGD().rank == RANK
