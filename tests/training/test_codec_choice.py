"""Which codec `auto` is, by the plan and by what joins the workers; the codecs are as fast here as none ever was."""

from collections.abc import Sequence
from typing import Any

import pytest
import torch

from shoal.comm.pairs import Links
from shoal.comm.rank import ALONE
from shoal.compress.codecs import CODECS
from shoal.planner.collectives.choice import CodecRate, choose_codec
from shoal.spec.device import Link
from shoal.spec.plan import Mesh, Plan, Predicted
from shoal.spec.sync import Sync
from shoal.training import codec_choice
from shoal.training.codec_choice import choose, kept_codec
from shoal.training.links import Place

SHAPES = [torch.Size((1024, 1024))] * 10
"""42 MB of gradients: 5 s over SLOW with 4 workers, 0.05 s over FAST."""
SLOW = Link(source="made up", bytes_per_s=12.5e6, latency_s=1e-4)
FAST = Link(source="made up", bytes_per_s=1.25e9, latency_s=1e-5)
STEPS = {"bf16": 1.0, "int8": 1.0, "int4": 1.05, "sign": 1.6, "topk": 10.0, "threshold": 10.0, "powersgd": 1.05}
"""To the same loss, over those without the codec."""
SECOND = Predicted(step_s=1.2, comm_s=0.2, samples_per_s=1.0, peak_bytes=(1,))


@pytest.fixture(autouse=True)
def rated(monkeypatch: pytest.MonkeyPatch) -> list[str]:
    """Return the codecs that were asked about."""
    asked: list[str] = []

    def rates(names: Sequence[str], *_: Any) -> dict[str, CodecRate]:
        asked.extend(names)
        speed = {"encode_bytes_per_s": 1e12, "decode_bytes_per_s": 1e12}
        return {name: CodecRate(**speed, iterations=STEPS[name]) for name in names}

    monkeypatch.setattr(codec_choice, "measured_rates", rates)
    return asked


def chosen(
    link: Link,
    *,
    hosts: str = "abcd",
    in_memory: bool = False,
    bucket_s: float | None = None,
    predicted: Predicted | None = SECOND,
    sync: Sync | None = None,
    **fields: Any,
) -> tuple[str, str]:
    plan = Plan(**{"mesh": Mesh(replicate=4), **fields}, sync=sync or Sync(codec="auto"), predicted=predicted)
    place = Place(
        rank=ALONE, store=None, device=torch.device("cpu"), hosts=tuple(hosts), links=Links(inside=FAST, between=link)
    )
    return choose(plan, place, shapes=SHAPES, in_memory=in_memory, bucket_bytes=1 << 20, bucket_s=bucket_s)


def test_a_slow_link_makes_the_smallest_pay_and_a_fast_one_none() -> None:
    assert chosen(SLOW)[0] == "powersgd"
    name, why = chosen(Link(source="made up", bytes_per_s=1e12, latency_s=1e-6), predicted=SECOND)
    assert name == "none"
    assert why.startswith("no codec pays here")


@pytest.mark.parametrize("zero", [1, 2, 3])
def test_shards_are_not_offered_what_needs_whole_gradients(rated: list[str], zero: int) -> None:
    name, why = chosen(SLOW, mesh=Mesh(shard=4), zero=zero)
    assert sorted(rated) == sorted(name for name, codec in CODECS.items() if codec.serves_shards)
    assert name in rated
    assert why.startswith(f"{name} pays")


@pytest.mark.parametrize(
    ("fields", "words"),
    [
        ({"mesh": Mesh(shard=2, replicate=2), "zero": 2}, "beside shards, FSDP2 sums over the copies by itself"),
        ({"mesh": Mesh(replicate=2, tensor=2)}, "a codec takes whole models, or the shards of ZeRO"),
        ({"mesh": Mesh(replicate=2, pipeline=2)}, "a codec takes whole models, or the shards of ZeRO"),
        ({"sync": Sync(mode="server", codec="auto")}, "sync.mode='server' sends gradients as they are"),
        ({"sync": Sync(mode="deadline", codec="auto")}, "sync.mode='deadline' sends gradients as they are"),
        ({"engine": "deepspeed", "zero": 2, "mesh": Mesh(shard=4)}, "DeepSpeed sends gradients as they are"),
    ],
)
def test_a_plan_with_which_no_codec_goes_has_none_and_is_told_why(fields: dict[str, Any], words: str) -> None:
    assert chosen(SLOW, **fields) == ("none", f"no codec goes with this plan: {words}" + _rest(words))


def _rest(words: str) -> str:
    return ", without an entry for a codec" if "FSDP2" in words else ""


def test_what_meets_in_memory_needs_no_codec() -> None:
    name, why = chosen(SLOW, in_memory=True)
    assert name == "none"
    assert "in the memory of one host" in why


def test_without_a_prediction_nothing_is_taken_that_may_cost_loss() -> None:
    name, why = chosen(SLOW, predicted=None)
    assert name == "none"
    assert why.startswith("without a prediction of what a step computes")
    assert "sync.codec = 'int8'" in why


def test_computing_behind_which_the_exchange_hides_leaves_nothing_to_gain() -> None:
    long = Predicted(step_s=100.0, comm_s=0.0, samples_per_s=1.0, peak_bytes=(1,))
    assert chosen(SLOW, predicted=long)[0] == "none"


def test_the_way_that_was_chosen_is_what_a_codec_has_to_beat() -> None:
    # Two hosts of four: by two levels 42 MB go through an adapter once, and a codec's messages come from all eight.
    link, mesh = Link(source="made up", bytes_per_s=125e6, latency_s=1e-5), Mesh(replicate=8)
    quick = Predicted(step_s=0.1, comm_s=0.0, samples_per_s=1.0, peak_bytes=(1,))
    assert chosen(link, hosts="aaaabbbb", mesh=mesh, predicted=quick)[0] != "none"
    assert chosen(link, hosts="aaaabbbb", mesh=mesh, predicted=quick, bucket_s=1e-4)[0] == "none"


def test_workers_of_a_host_share_its_adapter(monkeypatch: pytest.MonkeyPatch) -> None:
    asked: list[int] = []

    def noted(setting: Any, *arguments: Any, **options: Any) -> Any:
        asked.append(setting.per_host)
        return choose_codec(setting, *arguments, **options)

    monkeypatch.setattr(codec_choice, "choose_codec", noted)
    chosen(SLOW, hosts="abcd")
    chosen(SLOW, hosts="aabb")
    chosen(SLOW, hosts="aaaabbbb", mesh=Mesh(shard=4, tensor=2), zero=2)
    assert asked == [1, 2, 2]


@pytest.mark.parametrize(
    ("mesh", "zero", "state", "kept"),
    [
        (Mesh(replicate=4), 0, "powersgd", "powersgd"),
        (Mesh(replicate=4), 0, "", ""),
        (Mesh(shard=4), 2, "int8", "int8"),
        (Mesh(shard=4), 2, "powersgd", ""),
        (Mesh(replicate=2, shard=2), 2, "int8", ""),
    ],
)
def test_the_codec_of_the_state_is_kept_where_it_goes_with_the_plan(
    mesh: Mesh, zero: int, state: str, kept: str
) -> None:
    plan = Plan(mesh=mesh, zero=zero, sync=Sync(codec="auto"))
    place = Place(rank=ALONE, store=None, device=torch.device("cpu"), codec=state)
    assert kept_codec(plan, place)[0] == kept


def test_a_meeting_after_many_steps_is_not_worth_a_single_step_more() -> None:
    assert chosen(SLOW, sync=Sync(mode="local", local_steps=1, codec="auto"))[0] == "powersgd"
    assert chosen(SLOW, sync=Sync(mode="local", local_steps=1000, codec="auto"))[0] == "int8", "what costs no steps"
