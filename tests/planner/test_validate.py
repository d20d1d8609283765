"""A plan that cannot run is refused in one sentence that says what to write instead."""

import dataclasses

import pytest

from shoal.core.errors import PlanError
from shoal.planner.calibration.megatron import gpt_profile
from shoal.planner.catalog import read_device, read_link
from shoal.planner.machine import Machine
from shoal.planner.search import validate as validate_module
from shoal.planner.search.validate import check_batch, check_model, check_sync, divisors, validate
from shoal.spec.plan import Batch, Mesh, Plan
from shoal.spec.profile import Layer, Profile
from shoal.spec.sync import Sync

GPT = gpt_profile(width=1024, heads=32, layers=6, sequence=512)
A100 = Machine(
    device=read_device("a100-80"), nodes=2, per_node=8, inside=read_link("nvlink-3"), between=read_link("ib-hdr")
)
SMALL = dataclasses.replace(A100, device=dataclasses.replace(A100.device, memory_bytes=10**9))


def sentence(plan: Plan, *, machine: Machine = A100, profile: Profile = GPT, num_samples: int = 1000) -> str:
    with pytest.raises(PlanError) as raised:
        validate(plan, profile, machine, batch_size=16, num_samples=num_samples)
    return str(raised.value)


def plan(batch: int | None = None, **fields: object) -> Plan:
    return Plan(**{"precision": "bf16", "batch": Batch(micro_batch=batch), **fields})  # type: ignore[arg-type]


@pytest.mark.parametrize(
    ("asked", "expected"),
    [
        (
            plan(mesh=Mesh(pipeline=4, replicate=8)),
            "the mesh pipeline=4 x replicate=8 has 32 workers, and there are 16 devices. "
            "Use a mesh of at most 16, or more nodes.",
        ),
        (plan(mesh=Mesh(tensor=3)), "tensor=3 does not divide num_heads=32. Use tensor=1, 2, 4 or 8."),
        (
            plan(1, mesh=Mesh(pipeline=7)),
            "pipeline=7 cuts the model into 7 pieces, and it has 6 layers to cut. Use pipeline=6 or less.",
        ),
        (
            plan(1, mesh=Mesh(pipeline=4), schedule="interleaved", chunks=2),
            "pipeline=4 with chunks=2 cuts the model into 8 pieces, and it has 6 layers to cut. "
            "Use pipeline=3 or less.",
        ),
        (
            plan(9, mesh=Mesh(replicate=2)),
            "micro_batch=9 is more than the 8 samples that a replica takes of a global batch. "
            "Use micro_batch=8 or less.",
        ),
        (
            plan(3, mesh=Mesh(replicate=2, pipeline=2)),
            "micro_batch=3 does not divide the 8 samples that a replica takes; a pipeline takes whole micro-batches. "
            "Use micro_batch=1, 2 or 4.",
        ),
        (
            plan(4, mesh=Mesh(replicate=2, pipeline=3)),
            "2 micro-batches for pipeline=3 with schedule='1f1b'. Use micro_batch=1 or 2.",
        ),
        (
            plan(None, mesh=Mesh(replicate=2, pipeline=2)),
            "1 micro-batch for pipeline=2 with schedule='1f1b'. Use micro_batch=1, 2 or 4.",
        ),
        (
            plan(1, mesh=Mesh(replicate=8, pipeline=2), sync=Sync(mode="server")),
            "sync.mode='server' with the mesh pipeline=2 x replicate=8: servers serve whole models. "
            "Use only mesh.replicate.",
        ),
        (
            plan(1, mesh=Mesh(replicate=4), sync=Sync(mode="server", servers=5)),
            "sync.servers=5 for 4 workers: the servers live on the workers. Use at most 4, or sync.place='processes'.",
        ),
        (
            plan(1, mesh=Mesh(shard=4), zero=2, sync=Sync(codec="powersgd")),
            "sync.codec='powersgd' with zero=2: it needs whole gradients, and a worker has a slice of the sum. "
            "Use zero=0, or one of bf16, int8, int4, sign, topk, threshold.",
        ),
        (
            plan(1, mesh=Mesh(replicate=3, pipeline=2)),
            "3 replicas with parts of 5 to 6 samples: all replicas of a pipeline take equally many. "
            "Use a number of replicas that divides the global batch of 16.",
        ),
        (
            plan(1, mesh=Mesh(pipeline=4), schedule="interleaved", chunks=4),
            "pipeline=4 with chunks=4 cuts the model into 16 pieces, and it has 6 layers to cut. "
            "Use fewer chunks: pipeline=2 takes 3 or less.",
        ),
        (
            plan(1, mesh=Mesh(replicate=2, pipeline=2), sync=Sync(codec="bf16")),
            "sync.codec='bf16' with the mesh pipeline=2 x replicate=2: it takes whole models. Use only mesh.replicate.",
        ),
        (
            plan(1, mesh=Mesh(replicate=2, tensor=2), sync=Sync(mode="local", local_steps=4)),
            "sync.mode='local' with the mesh replicate=2 x tensor=2: it takes whole models. Use only mesh.replicate.",
        ),
        (plan(1, sequence=True), "sequence=true needs mesh.tensor of 2 or more."),
        (
            Plan(
                precision="bf16",
                mesh=Mesh(replicate=2, pipeline=2),
                batch=Batch(micro_batch=1, shares=(0.75, 0.25)),
            ),
            "shares with pipeline=2 give parts of 4 to 12 samples: all replicas of a pipeline take equally many. "
            "Leave the shares out.",
        ),
        (
            plan(1, mesh=Mesh(pipeline=2), stages=("blocks.9",)),
            "stages names 'blocks.9', which is no layer to cut at. Did you mean 'blocks.5'?",
        ),
        (
            plan(1, mesh=Mesh(pipeline=3), schedule="interleaved", chunks=2),
            "16 micro-batches for pipeline=3 with schedule='interleaved'. Use micro_batch=2 or 4.",
        ),
    ],
)
def test_what_cannot_run_is_refused_with_what_to_write_instead(asked: Plan, expected: str) -> None:
    assert sentence(asked) == expected


def test_more_replicas_than_samples() -> None:
    many = plan(mesh=Mesh(replicate=16))
    assert sentence(many, num_samples=8) == "16 workers for 8 samples. Use at most 8."
    with pytest.raises(PlanError, match=r"^16 workers for a global batch of 4 samples\. Use at most 4, or a larger"):
        validate(many, GPT, A100, batch_size=4, num_samples=1000)


def test_a_share_of_less_than_a_sample() -> None:
    uneven = plan(mesh=Mesh(replicate=2))
    uneven = dataclasses.replace(uneven, batch=Batch(shares=(0.99, 0.01)))
    assert sentence(uneven).startswith("the share 0.01 of replica 1 is less than one sample of a global batch of 16.")


def test_a_plan_that_does_not_fit_says_how_much_it_needs_and_when() -> None:
    found = sentence(plan(16), machine=SMALL)
    assert found.startswith("a worker needs ")
    assert "and its device has 1 GB. Use a smaller micro_batch, recompute='full', or more shards" in found


def test_a_model_that_cannot_be_divided() -> None:
    profile = Profile(micro_batch=1, precision="bf16", layers=(Layer(name="0", parameters=4),))
    assert sentence(plan(mesh=Mesh(tensor=2)), profile=profile).startswith(
        "tensor=2, and the model has no layer that can be divided"
    )


def test_heads_of_keys_and_values_must_divide_as_well() -> None:
    grouped = dataclasses.replace(GPT.layers[1], key_value_heads=4)
    profile = dataclasses.replace(GPT, layers=(GPT.layers[0], grouped, GPT.layers[2]))
    assert sentence(plan(mesh=Mesh(tensor=8)), profile=profile) == (
        "tensor=8 does not divide num_key_value_heads=4. Use tensor=1, 2 or 4."
    )


def test_a_batch_norm_takes_its_whole_part_of_a_batch_at_once() -> None:
    layers = tuple(dataclasses.replace(each, batch_norms=("norm",)) if each.block else each for each in GPT.layers)
    profile = dataclasses.replace(GPT, layers=layers)
    assert sentence(plan(4), profile=profile) == (
        "'blocks.0.norm' is a batch norm: with micro_batch=4 it would take its statistics from a part of the batch, "
        "and train another model. Use GroupNorm or LayerNorm, or train without micro_batch."
    )
    piped = sentence(plan(1, mesh=Mesh(pipeline=2)), profile=profile)
    assert piped.endswith("or train with pipeline=1 and without micro_batch.")
    validate(plan(16), profile, A100, batch_size=16, num_samples=1000)
    validate(plan(8, mesh=Mesh(replicate=2)), profile, A100, batch_size=16, num_samples=1000)
    check_batch(plan(4), 16)  # nobody said which model it is


def test_what_the_engines_cannot_do_together_is_refused(monkeypatch: pytest.MonkeyPatch) -> None:
    def no_zero_bubble(asked: Plan) -> str | None:
        return "no zero-bubble today. Use schedule='1f1b'." if asked.schedule == "zero-bubble" else None

    asked = plan(1, mesh=Mesh(pipeline=2), schedule="zero-bubble")
    check_model(asked, GPT)
    monkeypatch.setattr(validate_module, "ENGINE_LIMITS", (no_zero_bubble,))
    assert sentence(asked) == "no zero-bubble today. Use schedule='1f1b'."
    check_model(plan(1, mesh=Mesh(pipeline=2)), GPT)


def test_the_parts_that_need_no_machine_refuse_on_their_own() -> None:
    with pytest.raises(PlanError, match="does not divide num_heads"):
        check_model(plan(mesh=Mesh(tensor=3)), GPT)
    with pytest.raises(PlanError, match="does not divide the 8 samples"):
        check_batch(plan(3, mesh=Mesh(replicate=2, pipeline=2)), 16)
    with pytest.raises(PlanError, match="needs whole gradients"):
        check_sync(plan(1, mesh=Mesh(shard=4), zero=2, sync=Sync(codec="powersgd")))


@pytest.mark.parametrize(
    "good",
    [
        plan(),
        plan(5, mesh=Mesh(replicate=3)),
        plan(1, mesh=Mesh(tensor=4, pipeline=3)),
        plan(1, mesh=Mesh(pipeline=3, replicate=4), schedule="gpipe"),
        plan(4, mesh=Mesh(replicate=2, pipeline=3), schedule="gpipe"),
        plan(2, mesh=Mesh(shard=8), zero=3),
        plan(1, mesh=Mesh(replicate=16), sync=Sync(mode="server", servers=16)),
        plan(1, mesh=Mesh(tensor=4), sequence=True),
        plan(1, mesh=Mesh(pipeline=2), stages=("blocks.5",)),
        dataclasses.replace(plan(mesh=Mesh(replicate=2, pipeline=2)), batch=Batch(micro_batch=1, shares=(0.5, 0.5))),
    ],
)
def test_what_can_run_is_not_refused(good: Plan) -> None:
    validate(good, GPT, A100, batch_size=16, num_samples=1000)


def test_divisors_are_all_and_in_order() -> None:
    for number in range(1, 200):
        assert divisors(number) == [candidate for candidate in range(1, number + 1) if number % candidate == 0]
