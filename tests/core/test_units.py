import contextlib
from collections.abc import Callable

import pytest
from hypothesis import given
from hypothesis import strategies as st

from shoal.core.errors import ConfigError
from shoal.core.units import format_bytes, format_count, format_seconds, parse_bytes, parse_rate, parse_seconds


@pytest.mark.parametrize(
    ("count", "text"), [(0, "0 B"), (999, "999 B"), (1_234_567, "1.23 MB"), (999_700_000, "1 GB"), (4e15, "4 PB")]
)
def test_bytes_read_as_people_write_them(count: float, text: str) -> None:
    assert format_bytes(count) == text


def test_counts_have_no_unit() -> None:
    assert format_count(10_823_424) == "10.8 M"
    assert format_count(7) == "7"


@pytest.mark.parametrize(
    ("seconds", "text"),
    [(0.00085, "850 us"), (0.0123, "12.3 ms"), (4.2, "4.2 s"), (185, "3 min 05 s"), (7800, "2 h 10 min")],
)
def test_durations_read_as_people_say_them(seconds: float, text: str) -> None:
    assert format_seconds(seconds) == text


@pytest.mark.parametrize(
    ("text", "count"),
    [
        ("1000", 1000),
        ("5MB", 5e6),
        ("100 MB", 1e8),
        ("1.5kB", 1500),
        ("1KB", 1000),
        ("1GiB", 2**30),
        ("2G", 2e9),
        ("1e6", 1e6),
        ("1e3MB", 1e9),
        ("1_000B", 1000),
        (".5TiB", 2**39),
        ("0", 0),
    ],
)
def test_bytes_are_read_as_people_write_them(text: str, count: float) -> None:
    assert parse_bytes(text) == count


@pytest.mark.parametrize(
    ("text", "bytes_per_s"),
    [
        ("10Gbps", 1.25e9),
        ("10Gb/s", 1.25e9),
        ("800Mbit/s", 1e8),
        ("1MB/s", 1e6),
        ("25GB/s", 25e9),
        ("25 GBps", 25e9),
        ("1GiB/s", 2**30),
        ("8bps", 1),
    ],
)
def test_a_small_b_counts_bits_and_a_capital_b_bytes(text: str, bytes_per_s: float) -> None:
    assert parse_rate(text) == bytes_per_s


@pytest.mark.parametrize(
    ("text", "seconds"),
    [
        ("20us", 20e-6),
        ("20µs", 20e-6),
        ("5ns", 5e-9),
        ("1.5ms", 1.5e-3),
        ("3", 3),
        ("2s", 2),
        ("30min", 1800),
        ("4h", 14400),
        ("2 d", 172800),
    ],
)
def test_times_are_read_as_people_write_them(text: str, seconds: float) -> None:
    assert parse_seconds(text) == pytest.approx(seconds, rel=1e-15)


@pytest.mark.parametrize(
    ("parse", "text", "sentence"),
    [
        (parse_bytes, "100QB", "'100QB' is not a number of bytes. Write it like 100MB, 1GiB or 1000."),
        (parse_bytes, "100Mb", "'100Mb' is not a number of bytes. Write it like 100MB, 1GiB or 1000."),
        (parse_bytes, "", "'' is not a number of bytes. Write it like 100MB, 1GiB or 1000."),
        (parse_bytes, "nan", "'nan' is not a number of bytes. Write it like 100MB, 1GiB or 1000."),
        (parse_bytes, "1.2.3MB", "'1.2.3MB' is not a number of bytes. Write it like 100MB, 1GiB or 1000."),
        (parse_bytes, "1__0", "'1__0' is not a number of bytes. Write it like 100MB, 1GiB or 1000."),
        (parse_bytes, "-5MB", "'-5MB' is not a number of bytes: it must be 0 or more."),
        (parse_bytes, "1e999", "'1e999' is not a number of bytes: it must be 1e21 at most."),
        (parse_rate, "10", "'10' is not a rate. Write it like 10Gbps (bits) or 1.25GB/s (bytes)."),
        (parse_rate, "10Gb", "'10Gb' is not a rate. Write it like 10Gbps (bits) or 1.25GB/s (bytes)."),
        (parse_rate, "0Gbps", "'0Gbps' is not a rate: it must be 1bps or more."),
        (parse_seconds, "4 hours", "'4 hours' is not a time. Write it like 20us, 1.5ms, 3s, 30min or 4h."),
        (parse_seconds, "-1ms", "'-1ms' is not a time: it must be 0 or more."),
    ],
)
def test_what_cannot_be_read_is_refused_in_one_sentence(
    parse: Callable[[str], float], text: str, sentence: str
) -> None:
    with pytest.raises(ConfigError) as raised:
        parse(text)
    assert str(raised.value) == sentence


@given(st.text(max_size=12) | st.from_regex(r"[-+]?[0-9._]{1,4}[eE]?[0-9]?[A-Za-z]{0,3}", fullmatch=True))
def test_any_text_is_read_or_refused_with_a_sentence(text: str) -> None:
    for parse in (parse_bytes, parse_rate, parse_seconds):
        with contextlib.suppress(ConfigError):
            assert parse(text) >= 0


@given(st.floats(min_value=1, max_value=1e14))
def test_what_is_printed_can_be_read_again(count: float) -> None:
    assert parse_bytes(format_bytes(count)) == pytest.approx(count, rel=5e-3)
    assert parse_rate(f"{format_bytes(count)}/s") == pytest.approx(count, rel=5e-3)
