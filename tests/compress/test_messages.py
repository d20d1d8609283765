"""One worker's messages: what they say and what is left make the gradient, whatever its numbers are."""

import math

import pytest
import torch
from torch import Tensor

from shoal.compress import places
from shoal.compress.blocks import Blocked
from shoal.compress.bucket import BLOCK, Bucket, bucket_of, padded
from shoal.compress.codec import Coded, Turn
from shoal.compress.codecs import CODECS, codec_named
from shoal.compress.dense import Dense
from shoal.compress.feedback import ErrorFeedback
from shoal.compress.rounding import CHUNK, Noise
from shoal.compress.threshold import Threshold
from shoal.compress.topk import TopK
from shoal.core.errors import PlanError
from tests.compress.counted import SETTINGS, Alone, feedback, made, numbers

CODED = [name for name, codec in CODECS.items() if issubclass(codec, Coded)]
ROUNDED_AT_RANDOM = ("int8", "int4")


def coded(name: str) -> Coded:
    codec = made(name)
    assert isinstance(codec, Coded)
    return codec


def turn_of(gradient: Tensor, *, number: int = 0, worker: int = 0, seed: int = 0) -> Turn:
    return Turn(bucket_of("g", gradient), seed, number, worker, {})


def encoded(codec: Coded, values: Tensor, **turn: int) -> tuple[Tensor, Tensor]:
    """Return the message about `values`, and what it says."""
    turns = turn_of(values, **turn)
    codec.observe(values, turns)
    message = codec.encode(values, turns)
    codec.add(message, said := torch.zeros(values.numel()))
    return message, said


def test_every_codec_is_tested() -> None:
    assert set(SETTINGS) == set(CODECS)


@pytest.mark.parametrize("name", CODED)
@pytest.mark.parametrize("numel", [BLOCK, 5 * BLOCK, CHUNK - BLOCK, 2 * CHUNK + 3 * BLOCK])
@pytest.mark.parametrize("scale", [1e-33, 1e-6, 1.0, 1e20])
def test_what_a_message_says_and_what_is_left_make_the_gradient(name: str, numel: int, scale: float) -> None:
    gradient = scale * numbers(numel)
    left = gradient.clone()
    _, said = encoded(coded(name), left)
    # Each is rounded once, to the 24 bits of the larger of the two, which is at most three times the largest element.
    assert (said + left - gradient).abs().max() <= 3 * 2**-24 * gradient.abs().max()
    assert said.any() or name == "threshold"


@pytest.mark.parametrize("name", CODED)
def test_zeros_travel_as_zeros(name: str) -> None:
    _, said = encoded(coded(name), left := torch.zeros(3 * BLOCK))
    assert not said.any()
    assert not left.any()


@pytest.mark.parametrize("name", CODECS)
@pytest.mark.parametrize("bad", [math.nan, math.inf, -math.inf])
@pytest.mark.parametrize("numel", [700, 100_000])
def test_what_is_not_finite_is_seen_by_all(name: str, bad: float, numel: int) -> None:
    gradient = numbers(numel // 20, 20)
    gradient[7, 3] = bad
    flat = gradient.flatten().clone()
    feedback(name).sum(bucket_of("g", gradient), flat, Alone())
    assert not torch.isfinite(flat[7 * 20 + 3])


@pytest.mark.parametrize("name", CODECS)
@pytest.mark.parametrize("numel", [0, 1, 7, 2 * BLOCK + 1])
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
def test_any_number_of_elements_in_float32_or_bf16(name: str, numel: int, dtype: torch.dtype) -> None:
    gradient = numbers(numel).to(dtype)
    total, codec = torch.zeros(numel), feedback(name)
    for _ in range(40):
        out = gradient.clone()
        codec.sum(bucket_of("g", gradient), out, Alone())
        assert out.dtype == dtype
        total += out
    pending = codec.state_dict()["pending"]["g"].flatten()
    # What has arrived and what is pending are what was given; bf16 rounds each sum, by 2^-9 of it.
    limit = 1e-4 if dtype == torch.float32 else 40 * 2**-9 * 4
    assert not ((total + pending - 40 * gradient.float()).abs() > limit).any()


@pytest.mark.parametrize("name", ROUNDED_AT_RANDOM)
def test_rounding_is_right_on_average(name: str) -> None:
    """The mean of 1000 encodings of a block is the block, within 4 standard deviations of a mean of 1000."""
    gradient, codec = numbers(BLOCK), coded(name)
    assert isinstance(codec, Blocked)
    said = torch.stack([encoded(codec, gradient.clone(), number=number)[1] for number in range(1000)])
    error = (said.mean(0) - gradient).abs()
    # 256 elements, and a chance of 6e-5 for each to be beyond 4: one may be.
    assert int((error > 4 * said.std(0) / 1000**0.5 + 1e-6).sum()) <= 1
    step = 1.01 * gradient.abs().max() / (127 if name == "int8" else 7)
    assert (said - gradient).abs().max() <= step


@pytest.mark.parametrize("name", ROUNDED_AT_RANDOM)
def test_the_same_seed_exchange_and_worker_give_the_same_bytes(name: str) -> None:
    gradient, codec = numbers(2 * CHUNK), coded(name)

    def message(**turn: int) -> Tensor:
        return encoded(codec, gradient.clone(), **turn)[0]

    first = message(seed=1, number=2, worker=3)
    assert torch.equal(first, message(seed=1, number=2, worker=3))
    for other in ({"seed": 2}, {"number": 3}, {"worker": 4}):
        assert not torch.equal(first, message(**({"seed": 1, "number": 2, "worker": 3} | other)))


def test_noise_is_uniform_and_that_of_one_chunk_tells_nothing_of_the_next() -> None:
    noise = Noise(12345, torch.device("cpu"))
    first, second = (noise.chunk(number, (CHUNK // BLOCK, BLOCK)).flatten() for number in (0, 1))
    assert 0 < float(first.min()) < float(first.max()) < 1
    assert float(first.mean()) == pytest.approx(0.5, abs=5 * 12**-0.5 / CHUNK**0.5)
    assert abs(float(torch.corrcoef(torch.stack([first, second]))[0, 1])) < 5 / CHUNK**0.5


@pytest.mark.parametrize(("numel", "threshold"), [(8, 0.5), (100_003, 2.0), (70_000, 0.0), (70_000, 9.0), (5, 0.1)])
def test_the_places_above_a_magnitude_are_found(numel: int, threshold: float) -> None:
    values = numbers(numel)
    assert places.above(values, threshold).tolist() == torch.nonzero(values.abs() >= threshold).flatten().tolist()


@pytest.mark.parametrize("fraction", [0.001, 0.01, 0.25])
def test_top_k_are_the_largest(fraction: float) -> None:
    values = numbers(300_001) ** 3
    selected = TopK(fraction).select(values, turn_of(values))
    assert len(selected) == math.ceil(fraction * len(values))
    assert torch.equal(selected, torch.topk(values.abs(), len(selected)).indices.sort().values)


def test_top_k_with_a_sample_that_misleads_is_still_exact() -> None:
    values = numbers(300_000)
    values[::256] *= 100
    selected = TopK(0.01).select(values, turn_of(values))
    assert torch.equal(selected, torch.topk(values.abs(), len(selected)).indices.sort().values)


@pytest.mark.parametrize("name", [name for name in CODED if issubclass(CODECS[name], Dense)])
def test_a_message_has_the_bytes_that_were_said(name: str) -> None:
    codec = coded(name)
    assert isinstance(codec, Dense)
    message, _ = encoded(codec, numbers(8 * BLOCK))
    assert len(message) == codec.message_bytes(8 * BLOCK)


def test_ratios_to_float32() -> None:
    numel = 2**24
    ratios = {name: CODECS[name]().sent_bytes(numel, 2, [(4096, 4096)]) / (4 * numel) for name in CODECS}
    assert ratios == pytest.approx(
        {
            "bf16": 1 / 2,
            "int8": 258 / 1024,
            "int4": 130 / 1024,
            "sign": 34 / 1024,
            "powersgd": 4 * 8192 / numel,
            "topk": 0.01,
            "threshold": math.pi / 2 / 8**2,
        },
        rel=0.02,
    )


def test_a_threshold_that_is_never_passed_at_once_is_passed_in_the_end() -> None:
    gradient, codec = torch.ones(1000), ErrorFeedback(codec_named("threshold", multiple=4.0))
    sums = []
    for _ in range(8):
        codec.sum(bucket_of("g", gradient), out := gradient.clone(), Alone())
        sums.append(float(out.mean()))
    assert sums == [0, 0, 0, 4, 0, 0, 0, 4]


def test_a_threshold_is_passed_about_as_often_as_expected() -> None:
    """By independent gradients. A walk overshoots by 0.6 of a step, 0.6 of 6.4 here, which makes that a sixth rarer."""
    codec = codec_named("threshold")
    assert isinstance(codec, Threshold)
    feedback, kept = ErrorFeedback(codec), []
    for step in range(200):
        feedback.sum(Bucket(("g",), ((20_000,),)), numbers(20_000, seed=step), Alone())
        kept.append(codec.kept)
    assert sum(kept[100:]) / 100 == pytest.approx(codec.expected(20_000), rel=0.25)


def test_padding_is_whole_blocks_for_each_worker() -> None:
    assert [padded(numel, 3) for numel in (0, 1, 768, 769)] == [0, 768, 768, 1536]


@pytest.mark.parametrize(
    ("name", "settings"), [("topk", {"fraction": 0.0}), ("threshold", {"multiple": 0}), ("powersgd", {"rank": 0})]
)
def test_settings_that_make_no_sense_are_refused(name: str, settings: dict[str, float]) -> None:
    with pytest.raises(PlanError, match=r"Use "):
        codec_named(name, **settings)


def test_an_unknown_codec_is_named() -> None:
    with pytest.raises(PlanError, match="Did you mean 'topk'"):
        codec_named("topkk")
