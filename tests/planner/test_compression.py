"""Whether compression pays: both sides against the sum written out, and the break-evens against the sides."""

import dataclasses
import math

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from shoal.compress.codecs import codec_named
from shoal.compress.threshold import Threshold
from shoal.planner.collectives import allreduce
from shoal.planner.collectives.codecs import CODECS, Codec, low_rank, sparse
from shoal.planner.collectives.compression import Setting, decoded_bytes, exchange, weigh
from shoal.spec import sync
from tests.planner import collective_programs as programs
from tests.planner.message_simulation import Link, simulate

TOPK_BYTES = 400e6 * (0.01 + 1 / 65536)
SETTING = Setting(num_bytes=400e6, workers=16, link_bytes_per_s=1.25e9, latency_s=0.0, compute_s=0.3)
SHAPES = ((384, 1536), (1152, 384), (384,), (7, 3), (), (24, 5, 3, 9), (2, 0))


def test_every_codec_of_a_plan_has_its_costs() -> None:
    assert set(CODECS) == set(sync.CODECS) - {"auto"}


def test_the_example_of_the_module() -> None:
    verdict = weigh(CODECS["topk"], SETTING, encode_bytes_per_s=2e9, decode_bytes_per_s=2e9, iterations=1.1)
    assert verdict.original.step_s == pytest.approx(0.3 + 2 * 15 / 16 * 400e6 / 1.25e9)
    assert verdict.compressed.exchange_s == pytest.approx(15 * TOPK_BYTES / 1.25e9)
    assert verdict.compressed.encode_s == pytest.approx(0.2)
    assert verdict.compressed.decode_s == pytest.approx(16 * TOPK_BYTES / 2e9)
    assert verdict.compressed.step_s == pytest.approx(0.58, abs=1e-3)
    assert verdict.compressed.total_s == pytest.approx(0.58 * 1.1, abs=1e-3)
    assert verdict.pays
    assert verdict.break_even_iterations == pytest.approx(0.9 / 0.58, rel=1e-3)


def test_gathering_what_is_encoded_costs_what_its_messages_cost() -> None:
    """Each worker has its own 4 MB, one piece of 64 MB, and all must end with all of them."""
    workers, link = SETTING.workers, Link(SETTING.link_bytes_per_s, 1e-4)
    held = [[1 << index if piece == index else 0 for piece in range(workers)] for index in range(workers)]
    everyone = [programs.doubling_all_gather(index, workers) for index in range(workers)]
    outcome = simulate(everyone, held, workers * TOPK_BYTES, lambda _a, _b: link)
    side = exchange(CODECS["topk"], dataclasses.replace(SETTING, latency_s=1e-4))
    assert side.exchange_s == pytest.approx(outcome.seconds)
    assert side.bytes_per_worker == pytest.approx(outcome.bytes_per_worker)


def test_what_can_be_added_goes_through_an_all_reduce_in_the_codecs_number_of_rounds() -> None:
    setting = dataclasses.replace(SETTING, latency_s=1e-4, algorithms={"ring": allreduce.ring})
    powersgd = exchange(CODECS["powersgd"], setting)
    assert powersgd.exchange_s == pytest.approx(2 * allreduce.ring(400e6 / 256, 16, 1.25e9, 1e-4).seconds)
    assert powersgd.bytes_per_worker == pytest.approx(2 * 15 / 16 * 400e6 / 128)
    assert powersgd.exchange == "ring"


def test_what_says_something_of_every_element_goes_in_slices() -> None:
    setting = dataclasses.replace(SETTING, latency_s=1e-4)
    for name, part in (("bf16", 1 / 2), ("int8", 1 / 4), ("int4", 1 / 8), ("sign", 1 / 32)):
        side = exchange(CODECS[name], setting)
        assert side.exchange == "slices"
        assert side.bytes_per_worker == pytest.approx(2 * 15 / 16 * 400e6 * (part + 2 / 1024 * (name != "bf16")))
        assert side.exchange_s == pytest.approx(30 * 1e-4 + side.bytes_per_worker / 1.25e9)


@pytest.mark.parametrize("workers", [2, 4, 16])
@pytest.mark.parametrize("name", [name for name in CODECS if name != "none"])
def test_a_worker_sends_what_its_codec_sends(name: str, workers: int) -> None:
    """Within 1%: blocks are padded, and the last 65,536 elements may be fewer."""
    numel = sum(math.prod(shape) for shape in SHAPES)
    setting = dataclasses.replace(SETTING, num_bytes=4 * numel, workers=workers, latency_s=1e-3)
    said = exchange(low_rank(SHAPES) if name == "powersgd" else CODECS[name], setting)
    assert said.bytes_per_worker == pytest.approx(codec_named(name).sent_bytes(numel, workers, SHAPES), rel=0.01)


@pytest.mark.parametrize("density", [0.001, 0.04, 0.4])
def test_a_worker_sends_what_threshold_sends_of_that_many_elements(density: float) -> None:
    numel, workers = 1 << 20, 4
    kept = [round(density * numel)] * workers
    said = exchange(sparse(density), dataclasses.replace(SETTING, num_bytes=4 * numel, workers=workers))
    assert said.bytes_per_worker == pytest.approx(Threshold.sum_bytes(numel, kept), rel=1e-3)


def test_the_engine_sums_what_is_encoded_whatever_is_the_fastest() -> None:
    """Gloo's all-reduce is a ring; where messages are small and late, recursive doubling would be faster."""
    setting = dataclasses.replace(SETTING, num_bytes=8e6, workers=4, link_bytes_per_s=125e6, latency_s=1e-3)
    assert exchange(CODECS["none"], dataclasses.replace(setting, num_bytes=1e5)).exchange == "recursive-doubling"
    side = exchange(CODECS["powersgd"], setting)
    assert side.exchange == "ring"
    assert side.bytes_per_worker == pytest.approx(2 * 3 / 4 * 8e6 / 128)
    told = exchange(CODECS["powersgd"], dataclasses.replace(setting, algorithms={"tree": allreduce.tree}))
    assert told.exchange == "tree"


def test_workers_of_a_host_share_its_adapter_for_what_all_send_to_all_and_a_ring_goes_through_it_once() -> None:
    alone, four = (exchange(CODECS["int8"], dataclasses.replace(SETTING, per_host=each)) for each in (1, 4))
    message_s = SETTING.num_bytes * CODECS["int8"].ratio / SETTING.link_bytes_per_s
    assert alone.exchange_s == pytest.approx(2 * 15 / 16 * message_s)
    # Each of 4 sends 12 of 16 slices to other hosts, all by one adapter; then a ring gathers the sums.
    assert four.exchange_s == pytest.approx((4 * 12 / 16 + 15 / 16) * message_s)
    assert alone.bytes_per_worker == four.bytes_per_worker
    by_ring = [exchange(CODECS["powersgd"], dataclasses.replace(SETTING, per_host=each)) for each in (1, 4)]
    assert by_ring[0] == by_ring[1]
    one_host = exchange(CODECS["int8"], dataclasses.replace(SETTING, per_host=16))
    assert one_host == alone, "nothing goes to another host: the link is that inside"


@pytest.mark.parametrize("name", [name for name in CODECS if name != "powersgd"])
def test_under_zero_only_slices_travel_and_are_decoded(name: str) -> None:
    setting = dataclasses.replace(SETTING, scatters=True)
    side = exchange(CODECS[name], setting)
    assert side.bytes_per_worker == pytest.approx(15 / 16 * SETTING.num_bytes * CODECS[name].ratio)
    assert side.exchange_s == pytest.approx(side.bytes_per_worker / SETTING.link_bytes_per_s)
    coded = weigh(CODECS[name], setting, decode_bytes_per_s=1e9).compressed
    assert coded.decode_s == pytest.approx(15 / 16 * SETTING.num_bytes / 1e9)


@pytest.mark.parametrize(("workers", "gathers"), [(90, True), (110, False)])
def test_with_too_many_workers_to_gather_sparse_gradients_go_in_slices(workers: int, gathers: bool) -> None:
    side = exchange(CODECS["topk"], dataclasses.replace(SETTING, workers=workers))
    assert (side.exchange == "all-gather") == gathers


def test_what_is_decoded() -> None:
    assert decoded_bytes(CODECS["powersgd"], 100.0, 8) == 100, "the sum"
    assert decoded_bytes(CODECS["int8"], 100.0, 8) == 187.5, "its slice of seven others, and the sums"
    assert decoded_bytes(CODECS["topk"], 100.0, 8) == pytest.approx(8, rel=2e-3), "only what was sent"


def test_nothing_to_gain_never_pays() -> None:
    assert weigh(CODECS["none"], SETTING).paying_links == ()
    assert not weigh(CODECS["none"], SETTING).pays
    hidden = dataclasses.replace(SETTING, overlap_s=10.0)
    assert not weigh(CODECS["bf16"], hidden, encode_bytes_per_s=1e12).pays
    assert not weigh(CODECS["bf16"], dataclasses.replace(SETTING, workers=1), encode_bytes_per_s=1e12).pays


def test_free_encoding_without_more_iterations_pays_on_any_link() -> None:
    assert weigh(CODECS["bf16"], SETTING).paying_links == ((0.0, math.inf),)


def test_only_what_is_exposed_counts() -> None:
    side = exchange(CODECS["none"], dataclasses.replace(SETTING, overlap_s=0.25))
    assert side.exposed_s == pytest.approx(side.exchange_s - 0.25)
    assert side.step_s == pytest.approx(0.3 + 0.6 - 0.25)


@settings(max_examples=80, deadline=None)
@given(
    codec=st.builds(
        Codec, ratio=st.floats(0.001, 1), travels=st.sampled_from(["summed", "sliced", "gathered", "sparse"])
    ),
    workers=st.integers(1, 100),
    latency_s=st.floats(0, 1e-3),
    iterations=st.floats(0.9, 2),
    encode_rate=st.floats(1e8, 1e12),
)
def test_at_a_break_even_the_sides_are_equal(
    codec: Codec, workers: int, latency_s: float, iterations: float, encode_rate: float
) -> None:
    setting = dataclasses.replace(SETTING, workers=workers, latency_s=latency_s)
    rates = {"encode_bytes_per_s": encode_rate, "decode_bytes_per_s": encode_rate}
    verdict = weigh(codec, setting, iterations=iterations, **rates)
    again = weigh(codec, setting, iterations=verdict.break_even_iterations, **rates)
    assert again.compressed.total_s == pytest.approx(again.original.total_s)
    assert verdict.pays == (iterations < verdict.break_even_iterations)
    assert verdict.pays == any(low <= setting.link_bytes_per_s < high for low, high in verdict.paying_links)
    for edge in {edge for ends in verdict.paying_links for edge in ends} - {0.0, math.inf}:
        there = weigh(codec, dataclasses.replace(setting, link_bytes_per_s=edge), iterations=iterations, **rates)
        assert there.compressed.total_s == pytest.approx(there.original.total_s, rel=1e-5)
