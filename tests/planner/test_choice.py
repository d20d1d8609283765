"""Which way gradients take, and whether a codec pays: by the links."""

import re

import pytest

from shoal.planner.collectives.buckets import LEAST_BUCKET_BYTES, MOST_BUCKET_BYTES, bucket_bytes
from shoal.planner.collectives.choice import CodecRate, choose_codec, choose_way
from shoal.planner.collectives.compression import Setting
from shoal.spec.device import Link

FAST = Link(source="made up", bytes_per_s=125e6, latency_s=200e-6)
SLOW = Link(source="made up", bytes_per_s=12.5e6, latency_s=200e-6)
QUICK = Link(source="made up", bytes_per_s=50e9, latency_s=5e-6)
INSIDE = Link(source="made up", bytes_per_s=4e9, latency_s=20e-6)
RATES = {
    "bf16": CodecRate(encode_bytes_per_s=4e9, decode_bytes_per_s=4e9, iterations=1.0),
    "int8": CodecRate(encode_bytes_per_s=1e9, decode_bytes_per_s=2e9, iterations=1.0),
    "powersgd": CodecRate(encode_bytes_per_s=2e9, decode_bytes_per_s=2e9, iterations=1.1),
}


def setting(link: Link, *, compute_s: float = 0.5) -> Setting:
    return Setting(
        num_bytes=40e6, workers=4, link_bytes_per_s=link.bytes_per_s, latency_s=link.latency_s, compute_s=compute_s
    )


def test_a_bucket_is_as_large_as_latency_and_rate_ask_for_within_bounds() -> None:
    assert bucket_bytes(SLOW, 4, ratio=0.01) == pytest.approx(19 * 200e-6 * 12.5e6 * 4 / 0.01, rel=1e-3)
    assert bucket_bytes(SLOW, 4) == LEAST_BUCKET_BYTES
    assert bucket_bytes(FAST, 4) == pytest.approx(19 * 200e-6 * 125e6 * 4, rel=1e-3)
    assert bucket_bytes(Link(source="made up", bytes_per_s=1e12, latency_s=1e-3), 64) == MOST_BUCKET_BYTES


def test_small_messages_go_in_few_steps_and_large_ones_in_few_bytes() -> None:
    small = choose_way(workers=8, per_host=1, inside=None, between=FAST, bucket=4096)
    large = choose_way(workers=8, per_host=1, inside=None, between=FAST, bucket=64 << 20)
    assert (small.name, large.name) == ("recursive-doubling", "halving-doubling")
    assert small.seconds[small.name] == min(small.seconds.values())
    assert "halving-doubling: 64 MiB in" in large.reason()


def test_hosts_with_several_workers_meet_inside_first() -> None:
    assert choose_way(workers=8, per_host=4, inside=INSIDE, between=SLOW, bucket=16 << 20).name == "two-level"
    assert "two-level" not in choose_way(workers=8, per_host=1, inside=INSIDE, between=SLOW).seconds
    assert "two-level" not in choose_way(workers=8, per_host=8, inside=INSIDE, between=INSIDE).seconds


def test_a_codec_is_taken_where_it_beats_16_bits_and_none_otherwise_each_with_what_it_was_compared_with() -> None:
    slow = choose_codec(setting(SLOW), RATES)
    assert slow.name == "powersgd"
    # 0.5 s of computing, and 2 * 3/4 of 40 MB at 12.5 MB/s: whole, and half of it in bf16, with 0.03 s for coding.
    assert re.fullmatch(
        r"powersgd pays: [\d.]+ ms a step and loss, 2\.93e\+03 ms with 16 bits, 5\.3e\+03 ms uncompressed", slow.why
    )
    quick = choose_codec(setting(QUICK), RATES)
    assert quick.name == "none"
    assert re.fullmatch(r"no codec pays here: bf16 5\d\d ms a step and loss, 501 ms uncompressed", quick.why)


def test_an_exchange_that_is_known_to_be_short_leaves_a_codec_nothing_to_gain() -> None:
    taken = choose_codec(setting(SLOW), RATES, exchange_s=0.05)
    assert taken.name == "none"
    assert taken.why.endswith("ms a step and loss, 550 ms uncompressed")


def test_steps_that_a_codec_costs_count_against_it() -> None:
    costly = {**RATES, "powersgd": CodecRate(encode_bytes_per_s=2e9, decode_bytes_per_s=2e9, iterations=20.0)}
    assert choose_codec(setting(SLOW), costly).name == "int8"
    only = {"bf16": RATES["bf16"], "powersgd": costly["powersgd"]}
    halved = choose_codec(setting(SLOW), only)
    assert halved.name == "bf16", "16 bits are a codec like others: they cost no loss, and nearly halve the step"
    assert halved.why.startswith("bf16 pays: ")
    assert "16 bits" not in halved.why
