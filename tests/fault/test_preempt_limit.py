"""Time limits as people and Slurm write them, and how processes learn of them."""

import argparse
import time

import pytest

from shoal.cli.preempt_flags import add_preempt_flags, read_preempt
from shoal.core.errors import ConfigError
from shoal.core.notice import NOTICE_S, announce, parse_limit, read_notice_s, read_wall_end


@pytest.mark.parametrize(
    ("text", "seconds"),
    [
        ("3h59m", 3 * 3600 + 59 * 60),
        ("90m", 5400),
        ("90min", 5400),
        ("45s", 45),
        ("45", 45),
        ("1d12h", 36 * 3600),
        ("1h2m3s", 3723),
        ("03:59:00", 3 * 3600 + 59 * 60),
        ("59:30", 59 * 60 + 30),
        ("1-12:00:00", 36 * 3600),
    ],
)
def test_limits_are_read(text: str, seconds: float) -> None:
    assert parse_limit(text) == seconds


@pytest.mark.parametrize("text", ["", "0", "0h", "-3h", "3 hours", "h", "59m3h", "1:2:3:4", "1-30:00"])
def test_what_is_no_limit_is_refused(text: str) -> None:
    with pytest.raises(ConfigError, match="is not a time limit"):
        parse_limit(text)


def test_the_earlier_end_counts() -> None:
    assert read_wall_end({}) is None
    assert read_wall_end({"SLURM_JOB_END_TIME": "1000"}) == 1000
    assert read_wall_end({"SLURM_JOB_END_TIME": "1000", "SHOAL_WALL_END": "900.5"}) == 900.5


def test_what_is_announced_is_read() -> None:
    env: dict[str, str] = {}
    assert read_notice_s(env) == NOTICE_S
    announce(limit_s=3600, notice_s=90, env=env)
    end = read_wall_end(env)
    assert read_notice_s(env) == 90
    assert end is not None
    assert 3500 < end - time.time() <= 3600


def test_a_limit_within_the_notice_is_refused() -> None:
    with pytest.raises(ConfigError, match="leaves no time to train"):
        announce(limit_s=30, notice_s=60, env={})


@pytest.mark.parametrize("value", ["soon", "0", "-1"])
def test_a_notice_that_is_none_is_refused(value: str) -> None:
    with pytest.raises(ConfigError, match="SHOAL_NOTICE_S"):
        read_notice_s({"SHOAL_NOTICE_S": value})


def test_flags_are_announced_and_a_wrong_one_is_named(monkeypatch: pytest.MonkeyPatch) -> None:
    for name in ("SHOAL_NOTICE_S", "SHOAL_WALL_END", "SLURM_JOB_END_TIME"):
        monkeypatch.setenv(name, "")
    parser = argparse.ArgumentParser()
    add_preempt_flags(parser)
    read_preempt(parser.parse_args([]))
    assert (read_notice_s(), read_wall_end()) == (NOTICE_S, None)
    read_preempt(parser.parse_args(["--wall-limit", "1h", "--notice", "2m"]))
    assert read_notice_s() == 120
    assert read_wall_end() == pytest.approx(time.time() + 3600, abs=60)
    with pytest.raises(ConfigError, match="--wall-limit 'soon' is not a time limit"):
        read_preempt(parser.parse_args(["--wall-limit", "soon"]))
