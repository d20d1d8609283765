import pytest

from shoal.core.units import format_bytes, format_count, format_seconds


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
